"""Short status texts on a node in the editor."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..language import in_their_language

log = logging.getLogger(__name__)


def status_of(node_id: str | None) -> Callable[[str], None]:
    """Return a function that shows a text on the node ``node_id``, in the person's language.

    Without a server it does nothing.
    """
    if node_id is None:
        return lambda _text: None

    # What a node expands to has its id, a dot, and more. The editor knows only the node itself.
    shown_on = node_id.partition(".")[0]

    def show(text: str) -> None:
        from server import PromptServer

        server = getattr(PromptServer, "instance", None)
        if server is not None:
            server.send_progress_text(in_their_language(text), shown_on)

    def show_if_possible(text: str) -> None:
        # A status text is never worth a failed image.
        try:
            show(text)
        except Exception:
            log.debug("could not show %r on node %s", text, node_id, exc_info=True)

    return show_if_possible
