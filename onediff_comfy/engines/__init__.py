"""The engines by name, and the choice that ``auto`` makes."""

from __future__ import annotations

import contextlib
import threading

import torch

from ..messages import joined, message
from ..settings import ENGINE_NAMES
from .base import Engine, EngineError
from .cudagraph import CudaGraphEngine
from .eager import EagerEngine
from .inductor.engine import InductorEngine
from .oneflow import OneFlowEngine

ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (InductorEngine(), OneFlowEngine(), CudaGraphEngine(), EagerEngine())
}
"""Every engine, by its name."""
# What ``auto`` tries, best first. Eager is not among them: it is no faster than the host, and a
# person who asked for speed must be told why there is none.
_AUTO_ORDER = ("inductor", "cudagraph")


def choose(name: str, device: torch.device) -> Engine:
    """The engine called ``name`` (one of ``ENGINE_NAMES``) for models that run on ``device``.

    Raises:
        EngineError: there is no such engine, or it cannot serve this device; says why.
    """
    if name not in ENGINE_NAMES:
        raise EngineError(
            message("there is no engine “{name}”; choose one of {names}", name=name, names=", ".join(ENGINE_NAMES))
        )
    reasons = []
    for candidate in _AUTO_ORDER if name == "auto" else (name,):
        reason = ENGINES[candidate].unavailable(device)
        if reason is None:
            return ENGINES[candidate]
        reasons.append(message("the {candidate} engine is not available: {reason}", candidate=candidate, reason=reason))
    raise EngineError(joined("; ", reasons))


def prepare(name: str) -> None:
    """Import what the engine called ``name`` will need, on a thread of its own; returns at once.

    A compiler's imports take longer than loading a kept graph. Here they overlap with the host
    loading the model and encoding the prompt, or reading weights from a file. Nothing is imported
    for an engine that cannot be used on this machine.
    """
    threading.Thread(target=_prepare, args=(name,), name="onediff-prepare", daemon=True).start()


def _prepare(name: str) -> None:
    with contextlib.suppress(EngineError):
        choose(name, torch.device("cuda" if torch.cuda.is_available() else "cpu")).prepare()
