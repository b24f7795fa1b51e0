"""The graph that was used last, loaded before anybody asks for it."""

from __future__ import annotations

import comfy.model_management

from ...cache.keys import Variant, compiler
from ...engines import choose
from .process import library, store


def import_compiler() -> None:
    """Import what makes graphs here, on the caller's thread.

    Raises:
        EngineError: nothing does.
    """
    choose("auto", comfy.model_management.get_torch_device()).prepare()


def load() -> None:
    """Load the graph that was used last by any process, if it is one for the host's device as it is now.

    It is the likeliest to be asked for. And most of what a load takes is once in a process, whichever graph it is of.

    Raises:
        EngineError: what made it cannot be had here.
    """
    latest = store().latest()
    if latest is None:
        return
    device = comfy.model_management.get_torch_device()
    engine = choose(latest.engine, device)
    here = compiler(engine, device, Variant.of(latest.options))
    if here.options == latest.options and here.environment == latest.environment:
        library().builder.loaded(latest.key, engine, device, while_waiting=lambda _seconds: None)
