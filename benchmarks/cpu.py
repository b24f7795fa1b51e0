"""What the CPU does in a sampling step: launching CUDA graphs, and the Python around it.

    COMFYUI_PATH=... python -m benchmarks.cpu --model sd15 --output FILE
    ... python -m benchmarks.cpu --model sdxl --variant onediff-inductor+steps:0.5
    ... python -m benchmarks.cpu --model tiny --variant onediff-eager        on a CPU, to see that it runs

Our store of compiled graphs is where ONEDIFF_CACHE_DIR says. First images are timed as they are, with a clock around
each replay of a CUDA graph, which tells what the driver needs to launch it. Then each graph is replayed alone, one
image is made in which PyTorch says where it waits for the GPU, and one under Python's profiler, which makes it slower:
it ranks functions, and does not time them.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from .host import reported, seconds_of, start_host, waits_of
from .sampling import MODELS, Sampler, environment
from .variants import names, variant

_WARM, _IMAGES, _REPLAYS = 3, 5, 10
_LISTED = 40


def main() -> int:
    """Run the benchmark; write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="sd15")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variant", default="onediff-inductor", help="one of those of benchmarks/variants.py")
    parser.add_argument("--disable-cuda-malloc", action="store_true", help="PyTorch's own allocator")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    names(options.variant)  # refuses others
    start_host(cuda_malloc=not options.disable_cuda_malloc)
    report = reported(lambda: _measured(options), options.output)
    print(f"\n{options.model} {options.variant}; {report['environment']}")
    print(f"{report['step_ms']:.2f} ms a step (all: {', '.join(f'{ms:.2f}' for ms in report['step_ms_all'])})")
    for graph in report["graphs"]:
        print(
            f"CUDA graph: {graph['launches'] / options.steps:.1f} times a step, launch {graph['launch_ms']:.2f} ms "
            f"of CPU; alone {graph['alone_ms']:.2f} ms, of which {graph['alone_gpu_ms']:.2f} on the GPU"
        )
    for place, waits in report["waits"].items():
        print(f"{waits:.2f} waits for the GPU a step in {place}")
    for function in report["functions"]:
        print(f"{function['own_ms']:8.3f} ms a step, {function['calls']:8.1f} calls  {function['name']}")
    return 0


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    import comfy.model_management

    from onediff_comfy.host.process.process import library

    from .models import load

    device = comfy.model_management.get_torch_device()
    sampler = Sampler(options.model, None, batch=1, steps=options.steps)
    model = variant(load(sampler.family, device), options.variant)
    library().background = None  # nothing is to be compiled beside what is timed
    for seed in range(_WARM):
        sampler(model, seed)
    with _replays() as replays:
        steps = [1000 * seconds_of(lambda: sampler(model, _WARM)) / options.steps for _ in range(_IMAGES)]
    waits = waits_of(lambda: sampler(model, _WARM))
    profile = cProfile.Profile()
    profile.runcall(sampler, model, _WARM + 1)
    return {
        "what": {key: value for key, value in vars(options).items() if key != "output"},
        "environment": environment(device),
        "step_ms": statistics.median(steps),
        "step_ms_all": steps,
        "graphs": [
            {"launches": len(seconds) / _IMAGES, "launch_ms": 1000 * statistics.median(seconds), **_alone(graph)}
            for graph, seconds in replays.values()
        ],
        "waits": {place: count / options.steps for place, count in waits.most_common()},
        "functions": _functions(profile, options.steps),
    }


@contextlib.contextmanager
def _replays() -> Iterator[dict[int, tuple[Any, list[float]]]]:
    """By id, the CUDA graphs that are replayed inside, and the seconds that each of their launches took."""
    import torch

    replay, found = torch.cuda.CUDAGraph.replay, dict[int, tuple[Any, list[float]]]()

    def timed(graph: Any) -> None:
        start = time.perf_counter()
        replay(graph)
        seconds = time.perf_counter() - start
        found.setdefault(id(graph), (graph, []))[1].append(seconds)

    torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def _alone(graph: Any) -> dict[str, float]:
    """Milliseconds of one replay with nothing else under way: until it has ended, and on the GPU."""
    import torch

    before, behind = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    clock = statistics.median(seconds_of(graph.replay) for _ in range(_REPLAYS))
    before.record()
    for _ in range(_REPLAYS):
        graph.replay()
    behind.record()
    torch.cuda.synchronize()
    return {"alone_ms": 1000 * clock, "alone_gpu_ms": before.elapsed_time(behind) / _REPLAYS}


def _functions(profile: cProfile.Profile, steps: int) -> list[dict[str, Any]]:
    """Where Python's time goes, per step, the most first."""
    rows = [
        {"name": f"{file}:{line} {name}", "calls": calls / steps, "own_ms": 1000 * own / steps}
        for (file, line, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda row: -row["own_ms"])[:_LISTED]


if __name__ == "__main__":
    sys.exit(main())
