"""Whose code something is: the node, or the custom-node pack, by the name that a person knows."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import folder_paths

from ...messages import Message, joined, message

_MOST_NAMES = 3
_HELPERS: Mapping[str, str] = {"comfy_api.torch_helpers": "TorchCompileModel"}
"""Modules of the host that nodes call to put code into a model, and the host's node that does."""


def owner_of(source: str) -> str | None:
    """Return whose code ``source`` (as of ``source_of``) is: a node's display name, or a pack's; None if nobody knows.

    A function that is defined in a node's class is that node's. Otherwise it is of the pack in whose folder its file
    lies, or, in a file of the host's own nodes, of the few that are there.
    """
    module, _, name = source.partition(":")
    for prefix, node in _HELPERS.items():
        if module.startswith(prefix):
            return display_name(node)
    in_file = {node: kind for node, kind in nodes_by_class().items() if getattr(kind, "__module__", None) == module}
    outermost = name.split(".")[0]
    own = [node for node, kind in in_file.items() if kind.__qualname__.split(".")[0] == outermost]
    if own:
        return display_name(own[0])
    pack = _pack(module)
    if pack is not None:
        return pack
    return " / ".join(map(display_name, list(in_file)[:_MOST_NAMES])) or None


def owners_of(things: Iterable[Any]) -> Message:
    """Return whose code functions are, each once, for people."""
    from ...capture.handed_over import source_of  # needs torch, and the pack loads where that is too old

    owners = dict.fromkeys(owner_of(source_of(thing)) or message("another node") for thing in things)
    return joined(" / ", owners or [message("another node")])


def nodes_by_class() -> Mapping[str, Any]:
    """Return the classes of all nodes of this host, by what workflows call them."""
    found: Mapping[str, Any] = getattr(sys.modules.get("nodes"), "NODE_CLASS_MAPPINGS", {})
    return found


def display_name(node: str) -> str:
    """Return what people see of the class of nodes that workflows call ``node``."""
    names: Mapping[str, str] = getattr(sys.modules.get("nodes"), "NODE_DISPLAY_NAME_MAPPINGS", {})
    return names.get(node) or node


def _pack(module: str) -> str | None:
    """Return the folder, or file, below custom_nodes that a module's file is in."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    # A pack may be a link to where it is being written, and so may custom_nodes.
    paths = Path(file).absolute(), Path(file).resolve()
    for folder in map(Path, folder_paths.get_folder_paths("custom_nodes")):
        for path in paths:
            for root in (folder.absolute(), folder.resolve()):
                if path.is_relative_to(root):
                    return path.relative_to(root).parts[0]
    return None
