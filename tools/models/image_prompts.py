"""A tiny image prompt (IP-Adapter) of random weights, and a LoRA, for the tiny checkpoint sd15_deep.

python -m tools.models.image_prompts COMFY_DIR OUT_DIR NAME...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .checkpoints import CHECKPOINTS, ensure_files, make_files, random_weights

if TYPE_CHECKING:  # callers of ensure_image_prompts need neither torch nor ComfyUI
    import torch

    StateDict = dict[str, torch.Tensor]

CLIP_WIDTH = 32
"""Of what the image encoder gives."""
_CONTEXT, _TOKENS, _WIDTH, _RANK = 768, 4, 320, 4
_UNET = "model.diffusion_model."
# The cross-attentions of SD1.5 in the order in which adapters number them.
_BLOCKS = (
    *(f"input_blocks.{number}" for number in (1, 2, 4, 5, 7, 8)),
    *(f"output_blocks.{number}" for number in range(3, 12)),
    "middle_block",
)


def ensure_image_prompts(comfy_dir: Path, folder: Path) -> None:
    """Make what is not in ``folder`` yet; see ``ensure_files``."""
    ensure_files("tools.models.image_prompts", comfy_dir, folder, list(FILES))


# -- below: in the subprocess, with ComfyUI importable ---------------------------------------------


def _adapter() -> StateDict:
    """Layers of the names and shapes that IP-Adapter published for SD1.5; blocks that are not there are as narrow."""
    import torch

    unet = CHECKPOINTS["sd15_deep"]()
    shapes = {"image_proj.proj.weight": (_TOKENS * _CONTEXT, CLIP_WIDTH), "image_proj.proj.bias": (_TOKENS * _CONTEXT,)}
    shapes |= {"image_proj.norm.weight": (_CONTEXT,), "image_proj.norm.bias": (_CONTEXT,)}
    for number, block in enumerate(_BLOCKS):
        query = unet.get(f"{_UNET}{block}.1.transformer_blocks.0.attn2.to_q.weight")
        width = _WIDTH if query is None else query.shape[0]
        shapes |= {f"ip_adapter.{2 * number + 1}.to_{part}_ip.weight": (width, _CONTEXT) for part in ("k", "v")}
    return random_weights({name: torch.empty(shape) for name, shape in shapes.items()}, "", "float32", seed=11)


def _lora() -> StateDict:
    import torch

    unet = CHECKPOINTS["sd15_deep"]()
    shapes = {name: weight.shape for name, weight in _attentions(unet)}
    up = {f"{name}.lora_up.weight": torch.empty(shape[0], _RANK) for name, shape in shapes.items()}
    down = {f"{name}.lora_down.weight": torch.empty(_RANK, shape[1]) for name, shape in shapes.items()}
    return random_weights(up | down, "", "float32", seed=12)


def _attentions(unet: StateDict) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in unet.items():
        if weight.ndim == 2 and ".attn" in name:
            yield f"diffusion_model.{name.removeprefix(_UNET).removesuffix('.weight')}", weight


FILES: Mapping[str, Callable[[], StateDict]] = {"tiny_image_prompt": _adapter, "tiny_sd15_lora": _lora}
"""What can be made, by name."""


if __name__ == "__main__":
    sys.exit(make_files("tools.models.image_prompts", FILES, sys.argv[1:]))
