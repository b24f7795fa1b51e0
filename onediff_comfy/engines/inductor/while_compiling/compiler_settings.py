"""Inductor with PyTorch's own settings, whatever an extension has set in this process.

Settings like ``max_autotune`` or a pass of somebody's own are variables of the process. A graph's key does not have
them, and other processes and machines use the graph: so it is compiled as if nobody had changed them. What a person
sets by environment variables (``TORCHINDUCTOR_...``) is PyTorch's own from the start, and stays.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Iterator
from typing import Any

import torch.fx.experimental._config as symbols

# How this machine compiles, and not what: they stay as they were set.
_OF_THE_MACHINE = (
    "compile_threads",
    "compile_worker_",
    "worker_",
    "cpp.cxx",
    "cuda.cuda_cxx",
    "trace.",
    "torchinductor_",
)


@contextlib.contextmanager
def as_pytorch_sets_them() -> Iterator[None]:
    """Have what is compiled or loaded inside compiled or loaded with PyTorch's own settings."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with contextlib.ExitStack() as stack:
        for config in (inductor_config, functorch_config, symbols):
            stack.enter_context(config.patch(set_otherwise(config)))
        yield


def set_otherwise(config: Any) -> dict[str, Any]:
    """Return PyTorch's own value of each setting that code in this process has set to another.

    Args:
        config: a module of settings, as ``torch._inductor.config``.
    """
    try:
        return {name: copy.deepcopy(own) for name, own, chosen in _settings(config) if chosen != own}
    except (AttributeError, ImportError, StopIteration):
        # Nothing public tells a setting's own value. A newer PyTorch may keep it elsewhere, and must compile all the
        # same; dev/torches.py shows where it does.
        return {}


def _settings(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, PyTorch's own value and the value in this thread of each setting that code has set."""
    from torch.utils._config_module import _UNSET_SENTINEL as unset

    for name, entry in config._config.items():
        if entry.alias is not None or entry.justknob is not None or entry.hide or name.startswith(_OF_THE_MACHINE):
            continue
        chosen = entry.user_override  # in PyTorch 2.13 each thread has its own
        chosen = chosen.get() if isinstance(chosen, contextvars.ContextVar) else chosen
        if chosen is not unset:
            values = (entry.env_value_force, entry.env_value_default, entry.default)
            yield name, next(value for value in values if value is not unset), chosen
