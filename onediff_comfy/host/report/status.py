"""Short status texts on a node in the editor."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from ...messages import Message, joined, message
from ..language import in_their_language

log = logging.getLogger(__name__)

EVENT = "onediff.status"
"""The message to the editor that goes with each text: ``node``, ``text`` and ``progress`` (see ``progress_of``)."""

_WORK = ("capturing", "compiling", "loading", "waiting")
"""How the texts of work that somebody waits for begin, in English."""

_BACKGROUND = "compiling in the background"


def status_of(node_id: str | None) -> Callable[[str], None]:
    """Return a function that shows a text on the node ``node_id``, in the person's language.

    Without a server it does nothing.
    """
    if node_id is None:
        return lambda _text: None

    # What a node expands to, and a part of a node that does several things, has the node's id, a dot, and a name. The
    # editor knows only the node itself.
    shown_on, _, part = node_id.partition(".")

    def show(text: str) -> None:
        from server import PromptServer

        server = getattr(PromptServer, "instance", None)
        if server is not None:
            whole = in_their_language(_with_other_parts(shown_on, part, text))
            server.send_progress_text(whole, shown_on)
            server.send_sync(EVENT, {"node": shown_on, "text": whole, "progress": progress_of(text)}, server.client_id)

    def show_if_possible(text: str) -> None:
        # A status text is never worth a failed image.
        try:
            show(text)
        except Exception:
            log.debug("could not show %r on node %s", text, node_id, exc_info=True)

    return show_if_possible


def progress_of(text: str) -> dict[str, float | str | None] | None:
    """Return how far the work is that a text tells of, as data for the editor's bar; None if it tells of none.

    Returns:
        ``phase``, its first word in English, or ``background``; ``seconds`` so far and ``expected``, None where the
        text does not say.
    """
    if not isinstance(text, Message):
        return None
    word = text.template.split(" ")[0].strip(",")
    if word not in _WORK or "failed" in text.template:
        return None
    phase = "background" if text.template.startswith(_BACKGROUND) else word
    return {"phase": phase, "seconds": _number(text, "seconds"), "expected": _number(text, "expected")}


def _number(text: Message, name: str) -> float | None:
    value = text.values.get(name)
    return round(float(value), 1) if isinstance(value, (int, float)) else None


def forget_parts(node_id: str | None) -> None:
    """Forget what the parts of a node said: it runs anew, maybe in another workflow."""
    _said().pop(node_id, None)


def _with_other_parts(shown_on: str, part: str, text: str) -> str:
    """Return what a part of a node says, with what its other parts said last: the editor shows one text on a node."""
    if not any(map(str.isalpha, part)):  # the node itself, or a number that the host's GraphBuilder gave
        return text
    parts = _said().setdefault(shown_on, {})
    parts[part] = text
    if len(parts) == 1:
        return text
    lines: list[Message] = [message("{part}: {text}", part=part, text=said) for part, said in parts.items()]
    return joined("\n", lines)


@functools.cache
def _said() -> dict[str | None, dict[str, str]]:
    """Return what each part of the nodes that have several said last, by node and part."""
    return {}
