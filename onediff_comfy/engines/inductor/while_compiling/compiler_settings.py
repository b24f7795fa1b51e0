"""Inductor with PyTorch's own settings, whatever an extension has set in this process.

Settings like ``max_autotune`` or a pass of somebody's own are variables of the process. A graph's key does not have
them, and other processes and machines use the graph: so it is compiled as if nobody had changed them. What a person
sets by environment variables (``TORCHINDUCTOR_...``) is PyTorch's own from the start, and stays.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
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
            stack.enter_context(config.patch(dict(set_otherwise(config))))
        yield


def set_otherwise(config: Any) -> Mapping[str, Any]:
    """Return PyTorch's own value of each setting that code in this process has set to another.

    Args:
        config: a module of settings, as ``torch._inductor.config``.
    """
    entries: Mapping[str, Any] = config._config  # nothing public tells a setting's own value
    found = {}
    for name, entry in entries.items():
        if entry.alias is not None or entry.justknob is not None or entry.hide or name.startswith(_OF_THE_MACHINE):
            continue
        chosen = entry.user_override
        chosen = chosen.get() if hasattr(chosen, "get") and not isinstance(chosen, dict) else chosen  # of this thread
        own = next(value for value in (entry.env_value_force, entry.env_value_default, entry.default) if _is_set(value))
        if _is_set(chosen) and chosen != own:
            found[name] = copy.deepcopy(own)
    return found


def _is_set(value: object) -> bool:
    """Return False for what PyTorch has in the place of a value that nobody gave."""
    from torch.utils._config_module import _UNSET_SENTINEL

    return value is not _UNSET_SENTINEL
