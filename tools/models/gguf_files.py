"""Tiny GGUF checkpoints of Flux, as the pack ComfyUI-GGUF loads them, and LoRAs for them.

Needs the package gguf. Where it has no quantiser for a type, blocks are random: every pattern of bits is a block, and
its scales are set so that the numbers are of the size of weights.

    python -m tools.models.gguf_files COMFY_DIR OUT_DIR TYPE...
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoints import checkpoint_file
from .families import FAMILIES, Family

if TYPE_CHECKING:
    import torch

TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "BF16")
RANKS = (4, 8)

# Where a block has its scales, 16 bits each: of the first bytes, or of the last.
_SCALES: Mapping[str, tuple[int, ...]] = {
    "Q2_K": (-4, -2),
    "Q3_K": (-2,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (-2,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
_SCALE = 5e-4
_COLUMNS = 256  # the largest blocks have as many numbers


def gguf_file(kind: str) -> str:
    """The file name of the checkpoint whose blocks' matrices are of this type."""
    return f"flux_{kind}.gguf"


def lora_file(rank: int) -> str:
    """The file name of the LoRA of this rank."""
    return checkpoint_file(f"flux_rank_{rank}")


def _family() -> Family:
    flux = FAMILIES["flux"]
    return replace(flux, config={**flux.config, "hidden_size": _COLUMNS, "num_heads": 2})


def _is_quantised(name: str, weight: torch.Tensor) -> bool:
    matrix = weight.ndim == 2 and name.endswith("weight") and weight.shape[1] % _COLUMNS == 0
    return matrix and "_blocks" in name and "mod" not in name.rpartition("_blocks")[2]


def _blocks(weight: torch.Tensor, kind: Any) -> Any:
    """A matrix as rows of bytes."""
    import gguf  # type: ignore[import-not-found]
    import numpy as np

    if kind.name not in _SCALES:
        return gguf.quants.quantize(weight.numpy(), kind)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 256, (weight.numel() // numbers, size), dtype=np.uint8)
    for start in _SCALES[kind.name]:
        data[:, start : start + 2 or None] = np.array([_SCALE], dtype=np.float16).view(np.uint8)
    return data.reshape(weight.shape[0], -1)


def _write(path: Path, kind: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "flux")
    for name, weight in _family().build().items():
        if _is_quantised(name, weight):
            quantised = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, _blocks(weight, quantised), raw_dtype=quantised)
        else:  # as files have them: matrices in float16, what is small in float32
            writer.add_tensor(name, (weight.half() if weight.ndim > 1 else weight).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _lora(rank: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(rank)
    factors = {}
    for name, weight in _family().build().items():
        if weight.ndim == 2 and "_blocks" in name and name.endswith("weight"):
            layer, (rows, columns) = f"diffusion_model.{name.removesuffix('.weight')}", weight.shape
            factors[f"{layer}.lora_up.weight"] = torch.randn(rows, rank, generator=generator) * 0.1
            factors[f"{layer}.lora_down.weight"] = torch.randn(rank, columns, generator=generator) * columns**-0.5
            factors[f"{layer}.alpha"] = torch.tensor(3.0)
    return factors


def main(arguments: Sequence[str]) -> int:
    """Write the checkpoints of the types given, and the LoRAs."""
    comfy_dir, folder, kinds = arguments[0], Path(arguments[1]), arguments[2:]
    sys.path.insert(0, comfy_dir)
    from comfy.cli_args import args

    args.cpu = True
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        _write(folder / gguf_file(kind), kind)
    for rank in RANKS:
        save_file(_lora(rank), folder / lora_file(rank))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
