"""Tiny LoRAs, diffusion models and VAEs in files of their own, put where a test server's loaders find them."""

from __future__ import annotations

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer
from tools.models.checkpoints import checkpoint_file
from tools.models.model_parts import PARTS, ensure_model_parts

LORA, WAN, WAN_VAE = "sd15_min_lora", "wan_min", "wan_min_vae"
_FOLDERS = {LORA: "loras", WAN: "diffusion_models", WAN_VAE: "vae"}


def install_model_parts(server: ComfyServer) -> None:
    """Let the server's loaders find all of ``PARTS``, and every checkpoint as a diffusion model."""
    made = repository() / ".cache" / "model_parts"
    ensure_model_parts(comfyui_path(), made, list(PARTS))
    wanted = {made / checkpoint_file(name): folder for name, folder in _FOLDERS.items()}
    wanted |= dict.fromkeys(server.checkpoints.glob("*.safetensors"), "diffusion_models")
    for file, folder in wanted.items():
        link = server.base_dir / "models" / folder / file.name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file)
