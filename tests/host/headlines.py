"""What a report begins with, by what it is made of.

    python headlines.py COMFY_DIR

Prints the first line for each of some objects as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

(comfyui,) = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
from onediff_comfy.host.report.report import headline  # noqa: E402


def thing(served: int, eager: int, *steps: tuple[float, float]) -> dict[str, Any]:
    """An accelerated object with one graph, whose calls were timed so often: eager's milliseconds, and the graph's."""
    timed = [{"eager_ms": eager_ms, "graph_ms": graph_ms} for eager_ms, graph_ms in steps]
    return {"accelerated": True, "served": served, "eager": eager, "graphs": [{"served": served, "steps": timed}]}


cases = {
    "a model and a VAE": [thing(100, 0, (20.0, 10.0)), thing(2, 0, (5000.0, 2500.0))],
    "of two sizes": [thing(100, 3, (40.0, 20.0), (10.0, 5.0))],
    "slower": [thing(100, 0, (10.0, 20.0))],
    "not timed": [thing(8, 1)],
    "no calls": [thing(0, 0)],
    "not accelerated": [{"accelerated": False, "served": 0, "eager": 0, "graphs": []}],
}
print(json.dumps({name: headline(objects) for name, objects in cases.items()}))  # noqa: T201
