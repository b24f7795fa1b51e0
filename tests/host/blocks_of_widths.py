"""Blocks of one structure whose heads differ, their windows, or how many bits their weights have, in a run of steps.

    python blocks_of_widths.py COMFY_DIR

Prints as JSON how many of their calls were served, and why others were not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

comfyui = sys.argv[1]
sys.argv = sys.argv[:1]
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import torch  # noqa: E402

from onediff_comfy.host.adapters.blocks import BlockServer  # noqa: E402
from onediff_comfy.host.adapters.part import DiffusionModel  # noqa: E402
from onediff_comfy.host.process.process import library  # noqa: E402
from onediff_comfy.host.process.services import host_services  # noqa: E402
from onediff_comfy.serving.dispatcher import Dispatcher  # noqa: E402


class Block(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.layer = heads, torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).view(1, 4, self.heads, -1).softmax(-1).reshape(x.shape)


class Windowed(torch.nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.window, self.layer = (heads, 8 // heads), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x).view(1, 4, *self.window).softmax(-1).reshape(x.shape)


class OfBits(torch.nn.Module):
    """As in files that keep some blocks in more bits than others."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8, dtype=torch.float64 if heads == 2 else torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x.to(self.layer.weight.dtype)).to(x.dtype)


class OfBitsLater(OfBits):
    """As where a LoRA comes onto some of a model's blocks, and weights of 8 bits are brought in 16 from then on."""

    def __init__(self, heads: int) -> None:
        super().__init__(4)


class Net(torch.nn.Module):
    def __init__(self, kind: Callable[[int], torch.nn.Module]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(map(kind, (2, 4, 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Model:
    device = torch.device("cpu")

    def get_dtype_inference(self) -> torch.dtype:
        return torch.float32


def served(kind: Callable[[int], torch.nn.Module]) -> dict[str, Any]:
    model, net = Model(), Net(kind)
    dispatcher = Dispatcher("eager", library(), host_services())
    server = BlockServer(DiffusionModel(model), dispatcher)
    with torch.inference_mode():
        dispatcher.begin_run()
        right = []
        for step, x in enumerate(torch.randn(8, 1, 4, 8)):
            if step == 4 and kind is OfBitsLater:
                net.blocks[1].layer.double()
                dispatcher.begin_run()
            right.append(torch.equal(server(net, net.forward, (x,), {}), net(x)))
    counted = dispatcher.metrics.snapshot()
    return {"right": all(right), "served": counted["served"], "fallbacks": counted["fallbacks"]}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([served(kind) for kind in (Block, Windowed, OfBits, OfBitsLater)]) + "\n")
