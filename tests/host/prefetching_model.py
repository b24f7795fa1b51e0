"""A model of the host's whose forward asks for its next weights, as text encoders do since ComfyUI 0.31.

    python prefetching_model.py COMFY_DIR

Prints as JSON why such a model cannot be identified; null if it can. Both are written here as if they were the host's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path[:0] = [sys.argv.pop(), str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.ldm.lightricks.av_model as models  # noqa: E402
import comfy.model_prefetch as prefetch  # noqa: E402

from onediff_comfy.capture.target.target import Target  # noqa: E402
from onediff_comfy.host.process.services import host_services  # noqa: E402

_PREFETCH = """
import weakref
GRAPH_MODULES = weakref.WeakSet()
def prefetch_queue_pop(queue, device, module):
    GRAPH_MODULES.discard(module)
"""
_MODEL = """
class Prefetching(torch.nn.Linear):
    def forward(self, x):
        comfy.model_prefetch.prefetch_queue_pop(None, x.device, self)
        return super().forward(x)
"""


def written(code: str, module: ModuleType) -> None:
    """Run code as if it stood in a module's file."""
    exec(compile(code, str(module.__file__), "exec"), vars(module))


def main() -> None:
    written(_PREFETCH, prefetch)
    written(_MODEL, models)
    model: Any = models.Prefetching(2, 2)  # type: ignore[attr-defined]
    prefetch.GRAPH_MODULES.add(model)
    refusal = Target(model, host_services().code).refusal
    sys.stdout.write(json.dumps(None if refusal is None else str(refusal)) + "\n")


main()
