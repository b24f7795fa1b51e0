"""The nodes of a graph as text that is the same in every process, and the digest of such text."""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


class AddressInText(Exception):
    """A text that is to be the same in every process holds an address in memory; says where, without it."""


def argument_text(value: Any, name: Callable[[torch.fx.Node], str]) -> str:
    """Return the arguments of a graph's node as canonical text.

    Args:
        value: what a node holds as ``args`` or ``kwargs``, or a part of it.
        name: the text for another node.
    """
    if isinstance(value, torch.fx.Node):
        return name(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(argument_text(item, name) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {argument_text(item, name)}' for key, item in sorted(value.items()))}}}"
    if isinstance(value, types.FunctionType):
        return target_text(value)
    return value.hex() if isinstance(value, float) else repr(value)


def target_text(target: Any) -> str:
    """Return what a graph's node calls. Python functions by module and name, for ``str`` gives them their address."""
    return f"{target.__module__}.{target.__qualname__}" if isinstance(target, types.FunctionType) else str(target)


def graph_lines(graph: torch.fx.GraphModule) -> Iterator[str]:
    """Yield a graph's canonical text: nodes by position, no names, no addresses."""
    positions: dict[torch.fx.Node, int] = {}

    def numbers(sizes: Sequence[Any]) -> tuple[Any, ...]:
        # Symbols and their ranges are in the digest by themselves, under names that are the same everywhere.
        return tuple("*" if isinstance(size, torch.SymInt) else size for size in sizes)

    def name(node: torch.fx.Node) -> str:
        return f"%{positions[node]}"

    for position, node in enumerate(graph.graph.nodes):
        positions[node] = position
        if node.op == "placeholder":
            value = node.meta.get("val")
            described = (
                f"{value.dtype} {numbers(value.shape)} {numbers(value.stride())} {value.device}"
                if isinstance(value, torch.Tensor)
                else repr(value)
            )
            yield f"%{position} = input {described}"
        elif node.op == "get_attr":
            attribute = graph.get_submodule(str(node.target)) if hasattr(graph, str(node.target)) else None
            yield f"%{position} = graph"
            if isinstance(attribute, torch.fx.GraphModule):
                yield from (f"  {line}" for line in graph_lines(attribute))
        else:
            arguments = f"{argument_text(node.args, name)} {argument_text(node.kwargs, name)}"
            yield f"%{position} = {node.op} {target_text(node.target)} {arguments}"


_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")


def text_digest(lines: Sequence[str]) -> str:
    """Return the sha256 over lines that identify something in every process.

    Raises:
        AddressInText: a line holds an address, which is another in every process.
    """
    for line in lines:
        if _ADDRESS.search(line):
            raise AddressInText(_ADDRESS.sub("at …", line))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
