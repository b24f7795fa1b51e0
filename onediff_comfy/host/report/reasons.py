"""Reasons in the words of a person who uses nodes and files, and knows no code.

The log keeps what the core says: the argument, the class. What a node or the report shows is worded here: by what stood
in the call, and whose code it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ...messages import Message, message, reworded
from .owners import owner_of

_SIZES = re.compile(r"\[(\d+x\d+(?:x\d+)?x\d+x\d+)\]")
_OPTIONS = "transformer_options."

ADDED: tuple[tuple[str, Message], ...] = (
    (f"{_OPTIONS}patches.attn1_output_patch", message("a patch of what attention gives, as PAG's")),
    (f"{_OPTIONS}patches.attn2_output_patch", message("a patch of what attention gives, as PAG's")),
    (f"{_OPTIONS}patches.attn", message("a patch of what goes into attention, as a hypernetwork's or HyperTile's")),
    (f"{_OPTIONS}patches_replace.attn", message("attention in place of the model's, as IP-Adapter's or PAG's")),
    (f"{_OPTIONS}patches_replace.", message("blocks in place of the model's")),
    (f"{_OPTIONS}patches.", message("a patch of the model's blocks, as FreeU's")),
    (f"{_OPTIONS}optimized_attention_override", message("another attention for the whole model, as SageAttention")),
    (_OPTIONS, message("an option for the model")),
    ("control", message("what a ControlNet gives")),
)
"""What a person has added to a model, by the beginning of the argument that it comes in; the first that fits."""


def in_their_words(text: str) -> str:
    """Return a message with the code in it replaced by what a person knows; any other string as it is."""
    return reworded(text, _reworded)


def _reworded(said: Message) -> Message:
    word = WORDS.get(said.template)
    return said if word is None else word(said.values)


def size_in_their_words(call: str, pixels: int) -> str:
    """Return the size of a call as an image's: ``768×512 b2`` for ``float16[2x4x64x96]@cuda:0``; others as they are.

    Args:
        call: its largest tensor, ``[batch, channels, (frames,) height, width]``, as the core writes it.
        pixels: as of ``process.NodeOrigin``.
    """
    sizes = _SIZES.search(call)
    if sizes is None or not pixels:
        return call
    batch, _, *frames, height, width = map(int, sizes[1].split("x"))
    return f"{width * pixels}×{height * pixels} b{batch}" + "".join(f" f{number}" for number in frames)


Values = Mapping[str, str | int | float]


def _argument(values: Values) -> Message:
    path, node = str(values["path"]), owner_of(str(values["source"]))
    what = next((what for beginning, what in ADDED if path.startswith(beginning)), None)
    what = what or message("something that the model is called with")
    if "why" in values:
        return message(
            "{node} adds code to the model ({what}), which no graph can take: {why}",
            node=node or message("another node"),
            what=what,
            why=values["why"],
        )
    if node is None:
        return message("another node adds code to the model ({what}), which no graph can take", what=what)
    return message("{node} adds code to the model ({what}), which no graph can take", node=node, what=what)


def _changes_state(values: Values) -> Message:
    node = owner_of(str(values["source"])) or message("another node")
    return message("{node} adds code to the model, and it or other code beside it changes what it keeps", node=node)


def _cannot_be_captured(values: Values) -> Message:
    node = owner_of(str(values["source"])) or message("another node")
    return message(
        "{node} adds code to the model, with which it cannot be captured ({kind}: {first_line})",
        node=node,
        kind=values["kind"],
        first_line=values["first_line"],
    )


def _differed(values: Values) -> Message:
    node = owner_of(str(values["source"])) or message("another node")
    return message(
        "{node} adds code to the model, with which a graph differed from eager by {error:.2g}",
        node=node,
        error=values["error"],
    )


WORDS: Mapping[str, Callable[[Values], Message]] = {
    "argument {path} holds a {kind}, which no graph can take": _argument,
    "argument {path} holds {name}, which no graph can take: {why}": _argument,
    "{name}, which the options hold, changes what it keeps": _changes_state,
    "the model cannot be captured with {name}, which the options hold ({kind}: {first_line})": _cannot_be_captured,
    "a graph with {name}, which the options hold, is off by {error:.2g} (at most {allowed:.2g})": _differed,
}
"""How messages of the core are worded for people, by template."""
