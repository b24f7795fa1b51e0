"""What a call that a compiled graph answers costs the CPU in this pack: no GPU, no weights, no arithmetic.

    COMFYUI_PATH=... python -m benchmarks.hot_path --model sdxl --output FILE

The model has its real structure, with memory that is allocated and never touched. Its graph is captured as always, and
then answered by one that computes nothing, so that what is left is our own work: looking at the call, finding the
graph, collecting the weights. Counted are the functions of this pack that a call enters, and the files that they are
in; timed is the thread's CPU time, the least of several rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from .host import reported, start_host
from .models import FAMILIES

_ROUNDS, _CALLS = 7, 40
_PACK = str(Path(__file__).resolve().parents[1] / "onediff_comfy")


def main() -> int:
    """Run the benchmark; write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=FAMILIES, default="sdxl")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    start_host()
    report = reported(lambda: measured(options.model), options.output)
    print(f"{options.model}: {report['cpu_ms']:.3f} ms of CPU a call (all: {report['cpu_ms_all']})")
    print(f"{report['functions']} functions of {report['files']} files entered, {report['entries']} times in all")
    for name, count in report["entered"].items():
        print(f"{count:6d}  {name}")
    return 0


def measured(name: str) -> dict[str, Any]:
    """CPU milliseconds of a hot call of the model ``name``, and what it enters."""
    call = hot_call(name)
    for _ in range(5):
        call()
    rounds = []
    for _ in range(_ROUNDS):
        begun = time.thread_time()
        for _ in range(_CALLS):
            call()
        rounds.append(1000 * (time.thread_time() - begun) / _CALLS)
    entered = entries(call)
    return {
        "what": name,
        "cpu_ms": min(rounds),
        "cpu_ms_median": statistics.median(rounds),
        "cpu_ms_all": [round(ms, 3) for ms in rounds],
        "functions": len(entered),
        "files": len({place.partition(":")[0] for place in entered}),
        "entries": sum(entered.values()),
        "entered": dict(entered.most_common()),
    }


def entries(call: Callable[[], object]) -> Counter[str]:
    """How often ``call`` enters each function of this pack: ``file:function`` by count."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_PACK):
            found[f"{Path(frame.f_code.co_filename).relative_to(_PACK)}:{frame.f_code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def hot_call(name: str) -> Callable[[], object]:
    """A call of the model ``name`` that a graph in memory answers, in the middle of a sampling run."""
    import torch

    from onediff_comfy import engines
    from onediff_comfy.cache.memory import GraphCache
    from onediff_comfy.cache.verdicts import Verdicts
    from onediff_comfy.compilation.library import GraphLibrary
    from onediff_comfy.engines.base import CompiledGraph
    from onediff_comfy.engines.eager import EagerEngine
    from onediff_comfy.host.process.services import host_services
    from onediff_comfy.metrics import Metrics
    from onediff_comfy.serving.dispatcher import Dispatcher

    class Nothing(CompiledGraph):
        def __call__(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return tensors[:1]

    class NothingEngine(EagerEngine):
        def compile(self, capture: Any) -> CompiledGraph:
            return Nothing(capture.binding, capture.shapes)

    class AllProved(Verdicts):
        def is_proved(self, graph_key: str, sizes: Sequence[int]) -> bool:
            return True

    family = FAMILIES[name]
    with torch.device("meta"):
        module = family.build(torch.float32)
    module = module.to(torch.bfloat16).to_empty(device="cpu").eval().requires_grad_(False)
    engines.ENGINES["eager"] = NothingEngine()
    library = GraphLibrary(GraphCache(1 << 30), Metrics())
    library.verdicts = AllProved(library.cache, library.metrics, None)
    dispatcher = Dispatcher("eager", library, host_services())
    tokens, width = family.context
    batch = 2 if family.cfg > 1 else 1
    x = torch.zeros(batch, family.latent_channels, 16, 24, dtype=torch.bfloat16)
    options = {
        "cond_or_uncond": [0, 1][:batch],
        "uuids": [object()] * batch,
        "sigmas": torch.ones(1),
        "sample_sigmas": torch.ones(21),
        "wrappers": {},
        "callbacks": {},
    }
    context = torch.zeros(batch, tokens, width, dtype=torch.bfloat16)
    arguments: dict[str, Any] = {"transformer_options": options, "control": None}
    if name in ("flux", "tiny"):
        arguments |= {"y": torch.zeros(batch, family.pooled).bfloat16(), "guidance": torch.ones(batch).bfloat16()}
    elif family.pooled:
        arguments["y"] = torch.zeros(batch, 2816, dtype=torch.bfloat16)
    dispatcher.begin_run()
    return lambda: dispatcher(module, cast(Any, module)._forward, (x, torch.ones(batch), context), arguments)


if __name__ == "__main__":
    sys.exit(main())
