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
from comfy.quant_ops import QuantizedTensor  # noqa: E402

from onediff_comfy.capture.call import NotCovered  # noqa: E402
from onediff_comfy.host.weights import residency  # noqa: E402
from onediff_comfy.host.weights.residency import StreamedModules  # noqa: E402
from onediff_comfy.runtime.launch_bound import Backlog  # noqa: E402

CPU = torch.device("cpu")
FP8 = "TensorCoreFP8E4M3Layout"
SIDE = 128  # so that the host would not keep the weight on the device


def foreign() -> torch.Tensor:
    """Return bytes that PyTorch has not allocated, as those of comfy-aimdo are."""
    return torch.frombuffer(bytearray(1 << 20), dtype=torch.uint8)


class Block:
    """A block of one layer, whose weights the host copies to ``buffer``."""

    def __init__(self, buffer: torch.Tensor, computes_in: torch.dtype = torch.float32) -> None:
        self.buffer, self.computes_in = buffer, computes_in
        self.use(torch.nn.Linear(SIDE, SIDE))
        self.streamed, self.run = StreamedModules(self.module, torch.float32, Backlog()), 1
        self.shown()  # the first run begins with the second call

    def use(self, layer: Any) -> None:
        """Have another module with this layer in the place of the one before."""
        self.module, self.layer = torch.nn.Sequential(layer), layer
        pages_of_cpu.off_device(SimpleNamespace(model=self.module))
        layer._v, layer._v_signature, layer.weight_comfy_model_dtype = object(), None, self.computes_in

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
            return weight, torch.equal(plain(weight), plain(self.layer.weight).to(weight.dtype))


def plain(weight: Any) -> torch.Tensor:
    """Return the numbers of a weight that may be quantised."""
    found: torch.Tensor = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.data
    return found


def twice(block: Block, between: Callable[[Block], None]) -> dict[str, bool]:
    """Return what becomes of a second call, before which something happens."""
    first, _ = block.shown()
    between(block)
    second, is_right = block.shown()
    return {"the same": second is first, "right": is_right and block.layer._v_signature is None}


def other_values(block: Block) -> None:
    block.layer.weight.data.mul_(2)


def elsewhere(block: Block) -> None:
    before, block.buffer = block.buffer, foreign()
    assert before.data_ptr() != block.buffer.data_ptr()


def another_weight(block: Block) -> None:
    """Another object, of the same form."""
    weight = block.layer._parameters["weight"]
    block.layer._parameters["weight"] = type(weight)(weight.data + 1, requires_grad=False)


def taken_away(block: Block) -> None:
    """The layer's weights were in pages, which are gone since the call before."""
    block.layer._v_signature = object()


def another_class(block: Block) -> None:
    """Another object, whose class may make something else of the same numbers."""
    weight = block.layer._parameters["weight"]
    block.layer._parameters["weight"] = type("Another", (type(weight),), {})(weight.data, requires_grad=False)


def another_module(block: Block) -> None:
    """A block of the same kind, whose weights follow in the same buffer."""
    block.use(torch.nn.Linear(SIDE, SIDE))


def quantised(dtype: torch.dtype, layout: str) -> torch.nn.Linear:
    """Return a layer whose weight in 8 bits and its scale stand for numbers of ``dtype``."""
    layer = torch.nn.Linear(SIDE, SIDE)
    weight = QuantizedTensor.from_float(torch.randn(SIDE, SIDE, dtype=dtype), layout)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def of_quantised(dtype: torch.dtype, layout: str = FP8) -> dict[str, bool]:
    """Return what becomes of a second call, of a module with such a weight, after one for 32 bits."""
    block = Block(foreign())
    block.use(quantised(torch.float32, FP8))
    return twice(block, lambda block: block.use(quantised(dtype, layout)))


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
            "taken away": twice(Block(foreign()), taken_away),
            "another class": twice(Block(foreign()), another_class),
            "another module": twice(Block(foreign()), another_module),
            "in fewer bits": twice(Block(foreign()), in_fewer_bits),
            "in another run": twice(Block(foreign()), in_another_run),
        }
        found["left of a refused call"] = left_of_a_refused_call()
        residency.is_moved = lambda *_layer: False  # what has scales cannot say that it is on another device
        found |= {"another quantised": of_quantised(torch.float32), "for another dtype": of_quantised(torch.bfloat16)}
        found["in another layout"] = of_quantised(torch.float32, "TensorCoreFP8Layout")
    sys.stdout.write(json.dumps(found) + "\n")


main()
