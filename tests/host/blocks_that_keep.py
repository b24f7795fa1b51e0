"""Blocks that keep something from call to call, in a model that is served block by block.

    python blocks_that_keep.py COMFY_DIR

Prints as JSON for each kind: whether every output was what the same model gives alone, how many calls were served, and
for how many a graph was asked. Last of plain blocks whose graph is on its way in the first run of two.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

import torch
from blocks_of_widths import Model, Net  # which takes the host's path from the command line

from onediff_comfy.host.adapters.blocks import BlockServer
from onediff_comfy.host.adapters.part import DiffusionModel
from onediff_comfy.host.process.process import library
from onediff_comfy.host.process.services import host_services
from onediff_comfy.serving.dispatcher import Dispatcher

STEPS = 4
TABLE: dict[Any, Any] = {}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) * self.kept(x)

    def kept(self, _x: torch.Tensor) -> Any:
        raise NotImplementedError


class Counting(Block):
    calls = 0

    def kept(self, _x: torch.Tensor) -> Any:
        self.calls += 1
        return self.calls


class ByList(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []

    def kept(self, _x: torch.Tensor) -> Any:
        self.calls.append(1.0)
        return len(self.calls)


class ByBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def kept(self, _x: torch.Tensor) -> Any:
        self.calls = self.calls + 1
        return self.calls


class ByWeight(Block):
    def kept(self, _x: torch.Tensor) -> Any:
        self.layer.weight = torch.nn.Parameter(self.layer.weight * 1.01, requires_grad=False)
        return 1


class Previous(Block):
    before: Any = None

    def kept(self, x: torch.Tensor) -> Any:
        before, self.before = self.before, x
        return 1 if before is None else before


class ByItself(Block):
    def kept(self, _x: torch.Tensor) -> Any:
        return TABLE.setdefault(self, self.layer.weight.sum().clone())


class ByNumber(Block):
    def kept(self, _x: torch.Tensor) -> Any:
        return TABLE.setdefault(id(self), self.layer.weight.sum().clone())


class Remembered(Block):
    @functools.lru_cache(maxsize=None)  # noqa: B019, UP033 - as extensions do it
    def scale(self) -> float:
        return float(self.layer.weight.sum())

    def kept(self, _x: torch.Tensor) -> Any:
        return self.scale()


class Making(Block):
    def kept(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "made"):
            self.made = torch.nn.Linear(8, 8, bias=False)
            self.made.weight.data.copy_(x.reshape(-1)[:8].repeat(8, 1))
        return self.made(x)


def _patched(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x + 2 * block.layer(x)


class ByPartial(Block):
    """Has a forward without a name, as extensions give one."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = functools.partial(_patched, self)  # type: ignore[assignment]


class Plain(Block):
    def kept(self, _x: torch.Tensor) -> Any:
        return 1


class Asked(Dispatcher):
    """Counts for how many calls it is asked."""

    asked, waits = 0, False

    def is_held_back(self, invocation: Any) -> bool:
        return self.waits and self.runs == 1

    def attempt(self, invocation: Any, out: Any = None) -> Any:
        self.asked += 1
        return super().attempt(invocation, out)


def kept(kind: type[Block], waits: bool = False) -> dict[str, Any]:
    model, nets = Model(), list[Net]()
    for _each in range(2):
        torch.manual_seed(0)
        nets.append(Net(lambda _heads: kind()))
    net, alone = nets
    dispatcher = Asked("eager", library(), host_services())
    server, right, dispatcher.waits = BlockServer(DiffusionModel(model), dispatcher), [], waits
    with torch.inference_mode():
        for _run in range(2):
            dispatcher.begin_run()
            for x in torch.randn(STEPS, 1, 4, 8):
                given, expected = server(net, net.forward, (x,), {}), alone(x)
                right.append(type(given) is torch.Tensor and torch.allclose(given, expected, rtol=1e-4, atol=1e-5))
    return {"right": all(right), "served": dispatcher.metrics.snapshot()["served"], "asked": dispatcher.asked}


if __name__ == "__main__":
    kinds = (Counting, ByList, ByBuffer, ByWeight, Previous, ByItself, ByNumber, Remembered, Making, ByPartial)
    found = {kind.__name__: kept(kind) for kind in kinds}
    sys.stdout.write(json.dumps({**found, "waiting": kept(Plain, waits=True)}) + "\n")
