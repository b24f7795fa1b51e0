"""Objects that a block may be given, and what becomes of them on their way into a graph.

    python records_of_blocks.py COMFY_DIR

Prints as JSON, by name: whether each counts as a record, and whether what is made again is what it was; and of a block
that writes to one argument and returns it, what a compiler is given of it, and what the caller gets.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [sys.argv.pop(), str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.ldm.chroma.layers as chroma  # noqa: E402
import comfy.ldm.flux.layers as flux  # noqa: E402
import torch  # noqa: E402
import torch.utils._pytree as pytree  # noqa: E402

from onediff_comfy.host.adapters.functional_call import FunctionalCall  # noqa: E402
from onediff_comfy.host.adapters.records import closed, is_record, opened  # noqa: E402


@dataclasses.dataclass
class Foreign:
    """Not the host's."""

    shift: Any
    scale: Any
    gate: Any


class Derived(flux.ModulationOut):
    """Somebody else's, with the host's fields."""

    def doubled(self) -> Any:
        return self.shift * 2


def modulation(kind: type = flux.ModulationOut) -> Any:
    return kind(torch.ones(1), torch.zeros(1), torch.full((1,), 2.0))


def with_more() -> Any:
    value = modulation()
    value.note = "another node's"
    return value


def same(a: Any, b: Any) -> bool:
    """Return True if both are equal in form, and hold the same tensors."""
    if isinstance(a, torch.Tensor):
        return a is b
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else bool(a == b)


def main() -> None:
    values = {
        "the host's": modulation(),
        "with a method of the host's": modulation(chroma.ChromaModulationOut),
        "nested": ((modulation(), [modulation()]), {"a": modulation(), 1: 2.0}, None),
        "somebody else's": modulation(Foreign),
        "derived from the host's": modulation(Derived),
        "with one more attribute": with_more(),
    }
    found = {
        name: {"record": is_record(value), "same": same(closed(opened(value)), value)} for name, value in values.items()
    }
    flux.ModulationOut.scaled = Derived.doubled  # type: ignore[attr-defined]
    found["with a function that somebody put there"] = {"record": is_record(modulation()), "same": True}
    del flux.ModulationOut.scaled  # type: ignore[attr-defined]
    flux.ModulationOut.factor = 2  # type: ignore[attr-defined]
    found["with a value that somebody put there"] = {"record": is_record(modulation()), "same": True}
    del flux.ModulationOut.factor  # type: ignore[attr-defined]
    old, flux.ModulationOut = flux.ModulationOut, Foreign  # type: ignore[misc,assignment]
    found["of a class that was replaced"] = {"record": is_record(modulation(old)), "same": True}
    sys.stdout.write(json.dumps({"records": found, "told": told()}) + "\n")


def told() -> dict[str, Any]:
    def block(img: torch.Tensor, txt: torch.Tensor, pair: Any) -> Any:
        img += 1
        return img, txt * pair.gate

    img, txt = torch.zeros(2), torch.ones(2)
    call = FunctionalCall(block, (img, txt), {"pair": modulation()})
    output, written, left = call.telling(block)(**call.arguments)
    before = img.tolist()
    first, second = call.completed((output, written, left))
    given_back = [first is img, img.tolist(), second.tolist()]
    places = "output", {"0": 4}, {}
    same = [call.out(places).get(4) is img, FunctionalCall(block, (img, img[1:]), {"pair": modulation()}).out(places)]
    gc.collect()
    gc.disable()
    for _ in range(10):
        FunctionalCall(block, (img, txt), {"pair": modulation()}).completed((output, written, left))
    return {
        "cycles": gc.collect(),
        "leaves": [type(leaf).__name__ for leaf in pytree.tree_leaves((output, written, left))],
        "before": before,
        "given back": given_back,
        "out": same,
    }


main()
