"""ComfyUI inside a benchmark's own process."""

from __future__ import annotations

import sys

from dev.environment import comfyui_path


def start_host() -> None:
    """Make ComfyUI importable, that of COMFYUI_PATH or of ``make setup``; on the CPU if there is no GPU.

    Call it after the command line was read: the host parses it when it is imported, and so finds none.
    """
    sys.argv = sys.argv[:1]
    sys.path.insert(0, str(comfyui_path()))
    import torch

    if not torch.cuda.is_available():
        import comfy.cli_args

        comfy.cli_args.args.cpu = True
