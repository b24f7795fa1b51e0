"""How the host is told to take back what it brought for a block, as different releases have it.

    python taken_back.py COMFY_DIR

Prints as JSON, by the form of its function: whether blocks can be served from Dynamic VRAM, and what it was given; and
of a block of which the host had brought one layer already, which layers were brought and taken back for ours.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [sys.argv.pop(), str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.model_management  # noqa: E402 - imported before what depends on it, as the host does
import comfy.model_prefetch  # noqa: E402
import comfy.ops  # noqa: E402
import torch  # noqa: E402

from onediff_comfy.host.weights.residency import StreamedModules, can_bring, take_back  # noqa: E402
from onediff_comfy.runtime.launch_bound import Backlog  # noqa: E402

given: list[Any] = []


def of_0_30(comfy_modules: Any) -> None:
    given.append([comfy_modules])


def of_0_31(module: Any, comfy_modules: Any) -> None:
    given.append([module, comfy_modules])


def of_one_to_come(module: Any, comfy_modules: Any, when: Any) -> None:
    given.append([module, comfy_modules, when])


def brought_in_part() -> dict[str, list[str]]:
    """Have a block of two layers in place, of which a queue of the host's brought the first."""
    block = torch.nn.Sequential(*(torch.nn.Linear(2, 2, device="meta") for _ in range(2)))  # on another device
    names = {layer: name for name, layer in block.named_children()}
    found: dict[str, list[str]] = {"brought": [], "taken back": []}

    def bring(layers: Any, *_: Any) -> None:
        found["brought"] += [names[layer] for layer in layers]

    def taken(comfy_modules: Any) -> None:
        found["taken back"] += [names[layer] for layer in comfy_modules]

    for layer in block:
        layer._v = object()
    block[0]._prefetch = {"signature": None}
    comfy.ops.cast_modules_with_vbar = bring
    comfy.ops.resolve_cast_module_with_vbar = lambda layer, *_: (layer.weight, layer.bias)
    comfy.model_prefetch.cleanup_prefetched_modules = taken
    with StreamedModules(block, torch.float32, Backlog()).in_place(block, torch.device("cpu")) as in_place:
        found["in place"] = [name for name, layer in in_place.image.named_children() if layer.weight is not None]
    return found


def main() -> None:
    block = torch.nn.Sequential(torch.nn.Linear(1, 1))
    layers = [block[0]]
    take_back(block, [])  # the host's own
    found: dict[str, Any] = {"its own": {"can": can_bring(), "right": True}}
    for form, expected in ((of_0_30, [layers]), (of_0_31, [block, layers]), (of_one_to_come, None)):
        comfy.model_prefetch.cleanup_prefetched_modules = form
        can_bring.cache_clear()
        given.clear()
        if can_bring():
            take_back(block, layers)
        right = (given == []) if expected is None else all(a is b for a, b in zip(given[0], expected, strict=True))
        found[form.__name__] = {"can": can_bring(), "right": right}
    found["brought in part"] = brought_in_part()
    sys.stdout.write(json.dumps(found) + "\n")


main()
