"""``python -m onediff_comfy.host.process.compile_worker JOB RESULT PARENT``: one background compilation.

Takes over the settings of the ComfyUI that wants the graph, makes it, and leaves it in the store that both
share. Ends when its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from ...compilation.background import Job, Outcome
from ...files import write_atomically
from .host_settings import take_over, take_over_numbers

# Of 19. Where the image is made on the CPU too, a compiler that only gets what is left would never end.
_NICE_BESIDE_CPU, _NICE_BESIDE_GPU = 5, 19
_PARENT_POLL_S = 1.0


def main() -> int:
    work, result, parent = sys.argv[1:]
    sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    job = Job.from_bytes(Path(work).read_bytes())
    _stand_back(job)
    outcome = run(job)
    write_atomically(Path(result), json.dumps(asdict(outcome)).encode())  # or none: who is killed leaves no half
    return 0


def run(job: Job) -> Outcome:
    """Make the graph that ``job`` asks for, in the store."""
    take_over(job.settings)
    import torch

    from ...cache.keys import Variant, compiler
    from ...capture.call import NotCovered
    from ...capture.option_probe import OptionRead
    from ...capture.parameters import OnCopies
    from ...capture.target.target import Target
    from ...compilation import weightless_pickle
    from ...compilation.compile_graph import Maker, TargetCall
    from ...engines import choose
    from ...engines.base import EngineError
    from .process import library
    from .services import host_services

    device = torch.device(job.device)
    host = host_services()
    take_over_numbers(job.settings)
    module = weightless_pickle.from_bytes(job.module, device, host.formats, host.layer_factory)
    target = Target(module, host.code, host.formats)
    if target.fingerprint != job.fingerprint:
        return Outcome("another process sees other code: an extension has changed the model or the host")
    try:
        engine = choose(job.compiler["engine"], device)
        code = compiler(engine, device, Variant.of(job.compiler["options"]))
        if asdict(code) != job.compiler:
            return Outcome("another process would compile it for other settings")
        call = job.call()
        method = getattr(target.module, job.forward)
        forward = OnCopies(method) if job.on_copies else method
        what = TargetCall(target, forward, call, call.signature.options())
        made = Maker(engine, device, code, host).make(library(), what, job.general, show=lambda _text: None)
    except OptionRead as read:
        return Outcome(None, option=read.name)
    except (NotCovered, EngineError) as refusal:
        return Outcome(str(refusal))
    if library().metrics.snapshot()["not_kept"]:
        return Outcome("the compiled graph could not be kept for the process that wants it")
    takes_it = made is not None and made[1].shapes.values(what.call.signature.tensors) is not None
    return Outcome(None, graph=made[0] if made is not None and takes_it else None)


def _stand_back(job: Job) -> None:
    """Lower the priority of this process: making an image goes before compiling for the next one."""
    on_cpu = job.device.startswith("cpu")
    with contextlib.suppress(AttributeError, OSError):  # Windows has no nice()
        os.nice(_NICE_BESIDE_CPU if on_cpu else _NICE_BESIDE_GPU)
    if not on_cpu:
        # The GPU waits for one thread of the other process; compilers on every core would slow it.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, _cores() // 4)))


def _cores() -> int:
    """Return how many cores this process may use. A container, or whoever started the host, may leave it a few."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
