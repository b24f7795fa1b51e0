"""Weights that pass through a buffer of the host's, which copies them there anew for each call.

    python through_a_buffer.py COMFY_DIR

Prints as JSON of each case whether a second call was shown the very tensors of the first, and whether what it was shown
is what the layer has by then; and how many weights an image holds after a call that was refused.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [sys.argv.pop(1), str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.model_management  # noqa: E402 - imported before what depends on it, as the host does
import comfy.ops  # noqa: E402
import pages_of_cpu  # noqa: E402
import torch  # noqa: E402
from comfy.memory_management import (  # noqa: E402
    interpret_gathered_like,
    tensors_to_geometries,
    vram_aligned_size,
)

from onediff_comfy.capture.call import NotCovered  # noqa: E402
from onediff_comfy.host.weights.residency import StreamedModules  # noqa: E402
from onediff_comfy.runtime.launch_bound import BusUse  # noqa: E402

CPU = torch.device("cpu")
SIDE = 128  # so that the host would not keep the weight on the device


def foreign() -> torch.Tensor:
    """Return bytes that PyTorch has not allocated, as those of comfy-aimdo are."""
    return torch.frombuffer(bytearray(1 << 20), dtype=torch.uint8)


class Block:
    """A block of one layer, whose weights the host copies to ``buffer``."""

    def __init__(self, buffer: torch.Tensor, computes_in: torch.dtype = torch.float32) -> None:
        self.buffer, self.module = buffer, torch.nn.Sequential(torch.nn.Linear(SIDE, SIDE))
        pages_of_cpu.off_device(SimpleNamespace(model=self.module))
        self.layer: Any = self.module[0]
        self.layer._v, self.layer._v_signature = object(), None
        self.layer.weight_comfy_model_dtype = computes_in
        self.streamed, self.run = StreamedModules(self.module, torch.float32, BusUse()), 1
        self.shown()  # the first run begins with the second call

    def bring(self, layers: list[Any], *_: Any) -> None:
        """Stand for the host's function, which does the same and more."""
        for layer in layers:
            weights = [layer.weight, layer.bias]
            geometry, buffer = tensors_to_geometries(weights), self.buffer[: vram_aligned_size(weights)]
            for copy, weight in zip(interpret_gathered_like(geometry, buffer), weights, strict=True):
                copy.copy_(weight)
            layer._prefetch = {"signature": None, "resident": False, "xfer_dest": buffer, "cast_dest": None}
            layer._prefetch |= {"cast_geometry": geometry, "needs_cast": False}

    def shown(self) -> tuple[torch.Tensor, bool]:
        """Return the weight that an image shows in a call, and whether it is the layer's."""
        comfy.ops.cast_modules_with_vbar = self.bring
        self.streamed.knows(self.module, self.run)
        with self.streamed.in_place(self.module, CPU) as in_place:
            weight: Any = in_place.image.get_submodule("0").weight
            return weight, torch.equal(weight, self.layer.weight.data.to(weight.dtype))


def twice(block: Block, between: Callable[[Block], None]) -> dict[str, bool]:
    """Return what becomes of a second call, before which something happens."""
    first, _ = block.shown()
    between(block)
    second, is_right = block.shown()
    return {"the same": second is first, "right": is_right}


def other_values(block: Block) -> None:
    block.layer.weight.data.mul_(2)


def elsewhere(block: Block) -> None:
    before, block.buffer = block.buffer, foreign()
    assert before.data_ptr() != block.buffer.data_ptr()


def another_weight(block: Block) -> None:
    """Another object, which looks the same: what else there is to it may differ."""
    weight = block.layer._parameters["weight"]
    block.layer._parameters["weight"] = type(weight)(weight.data, requires_grad=False)


def in_fewer_bits(block: Block) -> None:
    """The very weight is of another dtype."""
    block.layer.weight.data = block.layer.weight.data.half()


def in_another_run(block: Block) -> None:
    block.run = 2


def left_of_a_refused_call() -> int:
    """Return how many weights an image holds of a module that another extension has put on the device."""
    block = Block(foreign())
    block.layer._parameters["weight"] = torch.nn.Parameter(torch.empty(SIDE, SIDE), requires_grad=False)
    with contextlib.suppress(NotCovered):
        block.shown()
        raise AssertionError("not refused")
    return sum(len(layer._parameters) for layer in block.streamed.image.modules())


def main() -> None:
    with torch.inference_mode():
        found: dict[str, Any] = {
            "as it is": twice(Block(foreign()), other_values),
            "converted": twice(Block(foreign(), torch.float16), other_values),
            "PyTorch's own memory": twice(Block(torch.empty(1 << 20, dtype=torch.uint8)), other_values),
            "elsewhere": twice(Block(foreign()), elsewhere),
            "another weight": twice(Block(foreign()), another_weight),
            "in fewer bits": twice(Block(foreign()), in_fewer_bits),
            "in another run": twice(Block(foreign()), in_another_run),
        }
        found["left of a refused call"] = left_of_a_refused_call()
    sys.stdout.write(json.dumps(found) + "\n")


main()
