"""Attach a dispatcher to an object of the host: what all kinds of objects share."""

from __future__ import annotations

import functools
import logging
from typing import Any

from comfy.patcher_extension import CallbacksMP

from ...engines import prepare
from ...messages import Message, message
from ...serving.dispatcher import Dispatcher
from ...serving.options import Options
from ..process.process import NodeOrigin, accelerated, library, metrics
from ..process.services import host_services
from ..report.status import status_of

log = logging.getLogger(__name__)

KEY = "onediff"
"""The key of our wrappers, callbacks and attachments on the host's patchers."""


def dispatcher_for(
    kind: str,
    engine: str,
    node_id: str | None,
    options: Options,
    dispatcher: type[Dispatcher] = Dispatcher,
) -> Dispatcher:
    """Return a new dispatcher for one of the host's objects, and tell the report about it.

    Args:
        kind: the host's name for such objects: MODEL, VAE, CLIP, CONTROL_NET.
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
        options: what was chosen.
        dispatcher: the class.
    """
    if options.compile == "wait":  # else nobody waits yet, and imports compete with all that runs; see ``CompileDelay``
        prepare(engine)
    made = dispatcher(engine, library(), host_services(), status_of(node_id), options)
    library().recordings.turns.record_on_this_thread()
    accelerated()[made] = NodeOrigin(kind, node_id)
    return made


def unfit(name: str, thing: Any, wanted: Message) -> Message:
    """Return why nothing of what came to a node's input can be captured, for people.

    Args:
        name: of the input.
        thing: what came to it.
        wanted: what it should be.
    """
    if thing is None:
        return message("the node before this one gave nothing to the input {name}", name=name)
    return message(
        "what the node before this one gave to the input {name} is not {wanted} (its type is {kind})",
        name=name,
        wanted=wanted,
        kind=type(thing).__qualname__,
    )


def pass_through(thing: Any, reason: Message, node_id: str | None, name: str = "it") -> Any:
    """Return ``thing`` itself, after a warning that says why nothing of it can be captured.

    Args:
        name: what the log calls it.
    """
    metrics().fell_back(reason)
    status_of(node_id)(message("not accelerated: {reason}", reason=reason))
    log.warning("OneDiff: %s; %s passes through unchanged", reason, name)
    return thing


class StandsFor(type):
    """The class of classes that stand for one of the host's, and equal it.

    Other extensions ask what they are handed by ``type(it) == ControlNet``, and leave alone what is not just that.
    """

    _stands_for: type

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls._stands_for

    def __hash__(cls) -> int:
        return hash(cls._stands_for)


@functools.cache
def with_methods_of(methods: type, kind: type) -> Any:
    """Return a subclass of a class of the host's with these methods before its own; the class itself if it is one."""
    if issubclass(kind, methods):
        return kind
    of_classes = StandsFor if type(kind) is type else type("StandsFor", (StandsFor, type(kind)), {})
    return of_classes(kind.__name__, (methods, kind), {"__module__": kind.__module__, "_stands_for": kind})


def release_on_detach(patcher: Any) -> None:
    """Release recordings when the host takes the weights of ``patcher`` off the device, and when its model dies.

    They hold addresses of weights that are about to go, and memory that the host wants. So do functions that nodes
    have put into models, which go with them. The host also *detaches* whatever it is about to load, a model that is
    there already included, before every image: then weights stay where they are, and so do recordings. Making them
    anew took 0.2 s an image (H200, SDXL).
    """
    recordings = library().recordings
    patcher.remove_callbacks_with_key(CallbacksMP.ON_DETACH, KEY)
    patcher.add_callback_with_key(CallbacksMP.ON_DETACH, KEY, _release_if_unloaded)
    recordings.release_with(patcher.model)


def _release_if_unloaded(_patcher: Any, weights_go: bool) -> None:
    if weights_go:
        library().release()
