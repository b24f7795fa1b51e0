"""What Save, Load, the report, Warm Up and the nodes ask of a MODEL, a VAE, a CLIP or a CONTROL_NET alike.

Each kind of object answers with an ``Adapter`` in the module that accelerates it. A module is imported when its kind is
first asked for, because the host may have changed what another kind needs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...messages import Message
from ..compatibility import KINDS, host_changed

if TYPE_CHECKING:
    import torch

    from ...serving.dispatcher import Dispatcher
    from ...store.artifact import Manifest

_MODULES: Mapping[str, str] = {
    "model": ".model",
    "vae": ".vae",
    "clip": ".text_encoder",
    "control_net": ".controlnet",
}


def _nothing(*_asked: Any) -> None:
    return None


def _patcher(thing: Any) -> Any:
    return getattr(thing, "patcher", None)


def _unchanged(thing: Any, _exact: bool) -> Any:
    return thing


def module_at(*names: str) -> Callable[[Any], Sequence[torch.nn.Module]]:
    """Return a function that gives the module at a path of attributes; nothing where no module is."""

    def modules(thing: Any) -> Sequence[torch.nn.Module]:
        import torch

        found = functools.reduce(lambda holder, name: getattr(holder, name, None), names, thing)
        return [found] if isinstance(found, torch.nn.Module) else []

    return modules


@dataclass(frozen=True)
class Adapter:
    """The answers of one kind of object. The first argument of every function is the host's object.

    Attributes:
        node: the display name of the node that accelerates it.
        accelerate: return an accelerated copy. Takes the engine (one of ``settings.ENGINE_NAMES``), the id of the node
            that shows what is going on, and what else the kind's node lets a person choose, by name. Where nothing can
            be captured, warn and return the object itself.
        find_dispatcher: return what serves its calls; None if it is not accelerated.
        modules: return the modules whose calls are served once it is accelerated. None for a ControlLora, whose network
            is built anew for each image, and for what cannot be accelerated.
        patcher: return the host's ``ModelPatcher`` of its weights, or None.
        dtype: return the dtype of images or latents when they come to the modules; None where that is not known.
        other_architecture: return why a graph with this manifest is for another architecture although all weights that
            it names are there; or None.
        preparing: return a copy whose calls wait for their graphs; with ``True``, for graphs of one size as well.
    """

    node: Message
    accelerate: Callable[..., Any]
    find_dispatcher: Callable[[Any], Dispatcher | None]
    modules: Callable[[Any], Sequence[torch.nn.Module]]
    patcher: Callable[[Any], Any] = _patcher
    dtype: Callable[[Any], torch.dtype | None] = _nothing
    other_architecture: Callable[[Any, Manifest], Message | None] = _nothing
    preparing: Callable[[Any, bool], Any] = _unchanged


def adapter_of(kind: str) -> Adapter:
    """Return the adapter of a kind of object.

    Args:
        kind: a key of ``compatibility.KINDS``.
    """
    found: Adapter = importlib.import_module(_MODULES[kind], __package__).ADAPTER
    return found


def dispatcher_of(kind: str, thing: Any) -> Dispatcher | None:
    """Return what serves the calls of ``thing``; None if it is not accelerated, or this host has no such objects."""
    return adapter_of(kind).find_dispatcher(thing) if host_changed(KINDS[kind]) is None else None


def device_of(kind: str, thing: Any) -> torch.device:
    """Return the device on which ``thing`` computes."""
    import comfy.model_management

    device: torch.device | None = getattr(adapter_of(kind).patcher(thing), "load_device", None)
    return device or comfy.model_management.get_torch_device()
