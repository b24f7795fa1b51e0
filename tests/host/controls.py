"""Tiny ControlNets, put where a test server finds them."""

from __future__ import annotations

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer
from tools.models.checkpoints import checkpoint_file
from tools.models.controls import CONTROLS, ensure_controls

NET, OTHER, LORA = "sd15_min_control", "sd15_min_control_other", "sd15_min_control_lora"
"""For the family sd15: a ControlNet, one of the same architecture, and a Control LoRA."""


def install_controls(server: ComfyServer) -> None:
    """Let the server's ControlNetLoader find all of ``tools.models.controls.CONTROLS``."""
    made = repository() / ".cache" / "controls"
    ensure_controls(comfyui_path(), made, list(CONTROLS))
    folder = server.base_dir / "models" / "controlnet"
    folder.mkdir(parents=True, exist_ok=True)
    for name in CONTROLS:
        link = folder / checkpoint_file(name)
        if not link.exists():
            link.symlink_to(made / checkpoint_file(name))
