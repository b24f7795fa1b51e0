"""The graphs that were used last, loaded before anybody asks for them."""

from __future__ import annotations

from collections.abc import Callable

import comfy.model_management

from ...cache.keys import CompilerFingerprint, Variant, compiler
from ...engines import choose
from ...engines.base import EngineError
from ...store.artifact import Manifest
from .process import library, store

_MOST = 4  # of a workflow: two text encoders, a model and a VAE


def import_compiler() -> None:
    """Import what makes graphs here, on the caller's thread.

    Raises:
        EngineError: nothing does.
    """
    choose("auto", comfy.model_management.get_torch_device()).prepare()


def load(before_each: Callable[[], None] = lambda: None) -> None:
    """Load the few graphs that were used last by any process, those for the host's device as it is now.

    They are the likeliest to be asked for. And most of what a load takes is once in a process, whichever graph it is.

    Args:
        before_each: called before a graph is loaded; may wait.
    """
    for latest in store().latest(_MOST):
        before_each()
        _load(latest)


def _load(manifest: Manifest) -> None:
    device = comfy.model_management.get_torch_device()
    try:
        engine = choose(manifest.engine, device)
    except EngineError:  # it cannot be had here
        return
    theirs = CompilerFingerprint(manifest.engine, manifest.options, manifest.environment)
    if compiler(engine, device, Variant.of(manifest.options)) == theirs:
        library().builder.load_ahead(manifest.key, engine, device)
