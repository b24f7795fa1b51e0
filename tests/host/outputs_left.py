"""Blocks whose graph leaves outputs in what they were given, as a replay does, beside the host's own pictures.

    python outputs_left.py COMFY_DIR CHECKPOINT

A CPU replays nothing, so the graphs of engine eager do as a replay here. Prints as JSON what ``extended_blocks.py``
prints, and how many outputs were left in place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from extended_blocks import Pictures, memory, off, pages_of_cpu, sampled, twice, with_lora

from onediff_comfy.engines.eager import EagerGraph
from onediff_comfy.host.weights import residency
from onediff_comfy.serving import executor

factors, left = [1.0], list[int]()


def run(graph: EagerGraph, *given: Any) -> list[Any]:
    weights, _addresses, tensors, _when, _confirmed, into = given
    outputs = [output * factors[-1] for output in graph(weights, tensors)]
    for index, tensor in into.items():
        outputs[index] = tensor.copy_(outputs[index])
    left.append(len(into))
    return outputs


def as_they_are(model: Any) -> Pictures:
    return twice(model, 3)


def wrong_graphs(model: Any) -> Pictures:
    """The first call of each shows it, at a size that it was not compared at. The host answers that, and all others."""
    before = sampled(model, 1)
    factors.append(1.5)
    pictures = [before, *(sampled(model, seed, side=32) for seed in (1, 2))]
    factors.pop()
    return pictures


def wrong_weights(model: Any) -> Pictures:
    """Only where there is a LoRA, of graphs that are right: the first call of each block shows it."""
    put = residency.put

    def other(parameters: dict[str, Any], found: Any) -> None:
        put(parameters, tuple(None if weight is None else weight * 1.5 for weight in found))

    before, changed = sampled(model, 1), with_lora(model, 0.5)
    with patch.object(residency, "put", other):
        return [before, *twice(changed)]


def counted(script: Callable[[Any], Pictures]) -> dict[str, Any]:
    left.clear()
    return {**off(script), "left": sum(left), "runs": len(left)}


if __name__ == "__main__":
    pages_of_cpu.begin()
    memory.get_free_memory = lambda _device=None, torch_free_too=False: (1024, 1024) if torch_free_too else 1024
    executor.RecordedGraph = EagerGraph  # type: ignore[misc,assignment]
    EagerGraph.run = run  # type: ignore[attr-defined]
    with torch.inference_mode():
        found = {script.__name__: counted(script) for script in (as_they_are, wrong_weights, wrong_graphs)}
    sys.stdout.write(json.dumps(found) + "\n")
