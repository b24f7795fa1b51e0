"""A LoRA on a MODEL of scaled fp8 in Dynamic VRAM that does not fit, beside the host's own pictures of the same.

    python lora_on_fp8.py COMFY_DIR CHECKPOINT

A CPU has no products of 8 bits. So the host multiplies by the sum in full, as on cards that have none, and keeps
the sum rounded. Prints as JSON what ``extended_blocks.py`` prints.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import extended_blocks
import torch
from comfy.ops import QuantizedTensor
from extended_blocks import Pictures, memory, off, pages_of_cpu, sampled, twice, with_lora
from safetensors.torch import load_file, save_file

from tools.models.formats import scaled_fp8

PREFIX, by_the_double = "model.diffusion_model.", pages_of_cpu.off_device


def all_there(model: Any) -> Pictures:
    changed = with_lora(model, 0.5)
    return [sampled(changed, 1, 1), *twice(changed), *twice(model)]


def none_there(model: Any) -> Pictures:
    pages_of_cpu.Pages.room = 0
    try:
        return all_there(model)
    finally:
        pages_of_cpu.Pages.room = 1 << 20


def off_device(model: Any) -> Any:
    """As the double has it of other weights: those of the file say that they are on another device."""
    for layer in by_the_double(model).model.modules():
        for weight in layer._parameters.values():
            if isinstance(weight, QuantizedTensor):
                weight.of_the_file = True
    return model


def main() -> None:
    pages_of_cpu.begin()
    pages_of_cpu.off_device = off_device
    memory.get_free_memory = lambda _device=None, torch_free_too=False: (1024, 1024) if torch_free_too else 1024
    QuantizedTensor.device = property(lambda self: torch.device("cpu:1" if "of_the_file" in vars(self) else "cpu"))
    weights = {name: weight.float() for name, weight in load_file(extended_blocks.checkpoint).items()}
    with tempfile.TemporaryDirectory() as folder:
        extended_blocks.checkpoint = str(Path(folder, "fp8.safetensors"))
        save_file(scaled_fp8(weights, PREFIX), extended_blocks.checkpoint)
        found = {script.__name__: off(script) for script in (all_there, none_there)}
    sys.stdout.write(json.dumps(found) + "\n")


main()
