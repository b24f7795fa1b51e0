"""An accelerated model that nothing samples, because a node behind it made another model of it.

ModelMergeSimple, for instance, takes the weights of its second model and everything else of its first. Nobody calls the
second, so no wrapper of ours learns of it. But the host reports the progress of nodes: a node behind ours that went
through several steps, while no run of our model began, has sampled another model.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from ...messages import Message, message
from ...serving.dispatcher import Dispatcher
from .owners import display_name, nodes_by_class
from .status import status_of

log = logging.getLogger(__name__)

_MODEL = "MODEL"


def say_if_unused(dispatcher: Dispatcher, node_id: str | None) -> None:
    """Have the node ``node_id`` say so if a node behind it samples in this prompt without the model that it gave.

    Say nothing in a host that does not report the progress of nodes.
    """
    if node_id is None:
        return
    try:
        from comfy_execution.progress import ProgressHandler, add_progress_handler, get_progress_state

        prompt = get_progress_state().dynprompt
    except Exception:  # another version of the host; a text is never worth a failed image
        log.debug("cannot watch how nodes get on", exc_info=True)
        return
    ours, seen = node_id, weakref.ref(dispatcher)  # weak, for the host keeps handlers until the next prompt

    class Watch(ProgressHandler):  # defined here, for older hosts have no such class
        def finish_handler(self, node_id: str, state: Mapping[str, Any], prompt_id: str) -> None:
            served = seen()
            if served is None or served.runs or state["max"] <= 1:
                return
            try:
                reason = _why_unused(prompt, ours, node_id)
            except Exception:  # a text is never worth a failed image
                log.debug("could not tell what is behind node %s", ours, exc_info=True)
                return
            if reason is not None:
                self.disable()
                status_of(ours)(reason)
                log.warning("OneDiff: node %s: %s", ours, reason)

    add_progress_handler(Watch(f"onediff_{ours}"))


def way_between(prompt: Any, node_id: str, behind: str) -> list[str] | None:
    """Return the nodes from ``node_id`` to ``behind``, both included; None if the latter does not depend on the former.

    Args:
        prompt: the host's ``DynamicPrompt``.
        node_id: of the node that comes first.
        behind: of the node that comes last.
    """
    ways, looked_at = [[behind]], {behind}
    for way in ways:
        if way[0] == node_id:
            return way
        for source in _sources(prompt, way[0]):
            if source not in looked_at:
                looked_at.add(source)
                ways.append([source, *way])
    return None


def _sources(prompt: Any, node_id: str) -> Iterator[str]:
    """Return the nodes that a node takes something from."""
    for value in prompt.get_node(node_id)["inputs"].values():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str):
            yield value[0]


def _why_unused(prompt: Any, ours: str, sampler: str) -> Message | None:
    """Return why ``sampler`` did not sample the model of ``ours``, for people; None if it is not behind it.

    By the first node on the way that takes two models.
    """
    # A part of a node that accelerates several things has an id of its own, which the prompt does not have.
    way = way_between(prompt, ours if prompt.has_node(ours) else ours.partition(".")[0], sampler)
    if way is None:
        return None
    for node in way[1:]:
        if _models_taken(prompt, node) > 1:
            kind = display_name(prompt.get_node(node)["class_type"])
            return message(
                "not used: “{node}” makes one model of two, and keeps only the weights of this one; put OneDiff Model "
                "Speedup behind “{node}”",
                node=kind,
            )
    return message(
        "not used: “{sampler}” sampled another model; connect this one's output to it",
        sampler=display_name(prompt.get_node(sampler)["class_type"]),
    )


def _models_taken(prompt: Any, node_id: str) -> int:
    """Return to how many inputs of a node a MODEL is connected."""
    node = prompt.get_node(node_id)
    kinds = nodes_by_class()[node["class_type"]].INPUT_TYPES()
    declared = {**kinds.get("required", {}), **kinds.get("optional", {})}
    return sum(name in declared and declared[name][0] == _MODEL for name in node["inputs"])
