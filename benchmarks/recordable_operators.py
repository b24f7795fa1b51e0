"""Which of PyTorch's operators end a recording as a CUDA graph: PyTorch's own samples of all, each recorded by itself.

    python -m benchmarks.recordable_operators --output FILE      on a GPU; needs the package expecttest

An operator that waits for the device ends a recording. Under the allocator of ComfyUI's server that ends the process,
so such operators are known by name (``onediff_comfy/capture/tracing/operator_traits.py``, which a test compares with
the file). Here PyTorch's own allocator is used, which survives it. What merely raises loses a recording, and no more.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .files import write
from .processor import processor_facts

_MOST_SAMPLES = 6  # of an operator and dtype
_DTYPES = (torch.float32, torch.int64, torch.bool)


def main() -> None:
    """Record all, and write what ended its recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output")
    parser.add_argument("--seconds", type=float, default=600, help="after which the rest is left out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    report = _recorded(options.seconds)
    for name, operators in report["ended"].items():
        print(f"{name:32} {', '.join(operators)}")
    print(f"{report['samples']} samples, {len(report['ended'])} of {report['operators']} operators ended a recording")
    write(report, options.output)


def _recorded(seconds: float) -> dict[str, Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    end, graphs = time.monotonic() + seconds, list[torch.cuda.CUDAGraph]()
    ended, raised = collections.defaultdict[str, set[str]](set), set[str]()
    samples = seen = 0
    for operator in sorted(op_db, key=lambda each: str(each.name)):
        if time.monotonic() > end:
            break
        seen += 1
        for call in _calls(operator):
            with contextlib.suppress(Exception), _Operators() as operators:  # some samples fail as they are
                call()
                call()  # whatever is chosen in a first call is by now
                samples += 1
                how = _outcome(call, graphs)
                if how == "ended":
                    ended[operator.name] |= operators.names
                elif how == "raised":
                    raised.add(operator.name)
    facts = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name(), **processor_facts()}
    facts["date"] = time.strftime("%Y-%m-%d")
    found = {name: sorted(operators) for name, operators in ended.items()}
    return {"environment": facts, "samples": samples, "operators": seen, "ended": found, "raised": sorted(raised)}


def _calls(operator: Any) -> Iterator[Callable[[], Any]]:
    for dtype in _DTYPES:
        if dtype not in operator.supported_dtypes("cuda"):
            continue
        with contextlib.suppress(Exception):  # a recording that was ended can leave cuSOLVER unable to make more
            samples = operator.sample_inputs("cuda", dtype, requires_grad=False)
            for _, sample in zip(range(_MOST_SAMPLES), samples, strict=False):
                yield functools.partial(operator, sample.input, *sample.args, **sample.kwargs)


class _Operators(TorchDispatchMode):
    """The names of the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def _outcome(call: Callable[[], Any], graphs: list[torch.cuda.CUDAGraph]) -> str:
    """Return what came of a recording: ``recorded``, ``raised``, or ``ended`` where CUDA has refused to go on.

    Args:
        graphs: those so far. To destroy one in the recording of another ends that one.
    """
    graph, stream, pool = torch.cuda.CUDAGraph(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
    graphs.append(graph)
    torch.cuda.synchronize()
    gc.disable()
    outcome = "recorded"
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                call()
            except Exception:
                outcome = "raised"
            try:
                graph.capture_end()
            except Exception:
                outcome = "ended"
                with contextlib.suppress(RuntimeError):
                    torch._C._cuda_endAllocateToPool(0, pool)
                torch.cuda.default_generators[0].graphsafe_set_state(torch.Generator("cuda"))
    finally:
        gc.enable()
    torch.cuda.synchronize()
    return outcome


if __name__ == "__main__":
    main()
