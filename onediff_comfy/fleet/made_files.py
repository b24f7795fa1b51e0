"""The files that ComfyUI lists in a prompt's outputs, and what they are called where they are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote


def shown_files(outputs: Any) -> Iterable[dict[str, Any]]:
    """Find the files in a prompt's outputs, each with the node and the kind that it was listed under."""
    for node, output in outputs.items() if isinstance(outputs, dict) else ():
        for kind, items in output.items() if isinstance(output, dict) else ():
            for item in items if isinstance(items, list) else ():
                if isinstance(item, dict) and isinstance(item.get("filename"), str):
                    yield {**item, "nodeId": node, "mediaType": kind}


_MADE = ("output", "temp")  # types of files that a prompt makes; "input" is a person's


def made_files(outputs: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Find the files in a prompt's outputs that the prompt made."""
    return (shown for shown in shown_files(outputs) if shown.get("type") in _MADE)


def tagged(outputs: Mapping[str, Any], tag: str) -> dict[str, Any]:
    """Return a prompt's outputs with a tag before the subfolder of each file that it made.

    Workers number their files alike, so the tag says whose file it is; and which run's, as a second run of a prompt is
    not to replace what the first has made.
    """

    def item(shown: Any) -> Any:
        if not isinstance(shown, dict) or shown.get("type") not in _MADE or "filename" not in shown:
            return shown
        return {**shown, "subfolder": f"{tag}/{shown.get('subfolder') or ''}".rstrip("/")}

    def kinds(output: Any) -> Any:
        if not isinstance(output, dict):
            return output
        return {kind: list(map(item, items)) if isinstance(items, list) else items for kind, items in output.items()}

    return {node: kinds(output) for node, output in outputs.items()}


def kept_name(tag: str, shown: Mapping[str, Any]) -> str:
    """Return the journal's name for a file that a worker lists: one that every store takes, whatever is listed."""
    listed = (*tag.split("."), shown.get("type"), shown.get("subfolder"), shown["filename"])
    return "/".join(_step(step) for part in listed if part for step in str(part).split("/") if step)


def _step(text: str) -> str:
    """Return one step of an object's name, in which ``%41`` stands for what some store does not take.

    A folder numbers what is being written with ``#``; some stores read ``\\`` as ``/``.
    """
    if not text.strip("."):
        return text.replace(".", "%2E")
    return "".join(
        character
        if character.isprintable() and character not in "%#\\"
        else quote(character, safe="", errors="surrogatepass")
        for character in text
    )
