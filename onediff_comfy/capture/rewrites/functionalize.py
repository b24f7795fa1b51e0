"""Operators that write to a tensor, replaced by those that give a new one.

torch.export makes a graph functional by tracing it once more, which takes twice as long as the export itself: 28 of 44
seconds of a UNet that adds a ControlNet's residuals in place. Most writing is of that kind, to a tensor that nobody
else has a view of, or to a part of such a tensor (positions in Flux and all that took them over, FreeU's channels and
masks), and needs no tracing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from ..shape_range import always_contiguous

aten = torch.ops.aten
# Of these, and by far not of all whose names differ by a line, the one computes what the other does, in the same dtype.
_USUAL = {
    getattr(aten, f"{name}_"): getattr(aten, name)
    for name in (
        *("add", "addcmul", "clamp", "detach", "div", "fill", "mul", "relu", "round", "sigmoid", "silu", "sub", "tanh"),
        "triu",
    )
}
_COPY = aten.copy_.default
_SCATTER = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default}
"""By the operator that gives a part of a tensor: the one that gives the tensor with another part."""
_THE_END = 2**63 - 1
"""What a slice without an end has in its place."""


def replace_writing(module: GraphModule) -> bool:
    """Make a graph functional where that is simple: all of it, or it stays as it is.

    Args:
        module: with fake tensors under ``val`` as ``torch.export`` leaves them, of which views share storages.

    Returns:
        Whether no operator writes to a tensor any more.
    """
    graph = module.graph
    writing = [node for node in graph.nodes if node.op == "get_attr" or _may_write(node.target)]
    same = _Same(graph)
    if not all(map(same.may_be_replaced, writing)):
        return False
    for node in writing:
        with graph.inserting_before(node):
            views = _views(node)
            part = node.args[1] if node.target is _COPY else _computed(graph, node)
            result = _scattered(graph, views, part)
        same.replace(node, result)
        graph.erase_node(node)
        for view in views:
            if not view.users:
                graph.erase_node(view)
    graph.lint()
    module.recompile()
    return True


def _may_write(operator: Any) -> bool:
    """Whether an operator writes to a tensor, as far as it says what it does."""
    if not isinstance(operator, torch._ops.OpOverload):
        return isinstance(operator, torch._ops.HigherOrderOperator)
    # Normalising over a batch updates its running statistics and does not say so.
    return operator._schema.is_mutable or any(part in operator.name() for part in ("batch_norm", "instance_norm"))


class _Same:
    """Which nodes of a graph are one tensor, and which are views of it."""

    def __init__(self, graph: Graph) -> None:
        self._places = {node: place for place, node in enumerate(graph.nodes)}
        self._sharing: defaultdict[int, list[Node]] = defaultdict(list)
        self._names: dict[Node, list[Node]] = {}  # of a tensor: what it was made by, and whatever wrote to it
        for node in graph.nodes:
            for storage in _storages(node):
                self._sharing[storage].append(node)

    def may_be_replaced(self, node: Node) -> bool:
        """Whether it is enough to use a new tensor from here on; asked of nodes in their order."""
        written: Any = None
        views = _views(node)
        if views:
            written = _whole_of(views, node)
        elif _functional(node.target) is not None and node.args:
            written = node.args[0]
        if not isinstance(written, Node) or not _gives_what_is_written(node, written):
            return False
        names = self._names[node] = self._names.setdefault(written, [written])
        names.append(node)
        (storage,) = _storages(written)
        sharing = self._sharing[storage]
        if any(other.op == "placeholder" for other in sharing):  # others see what is written there
            return False
        if any(_may_be_its_argument(other) for view in sharing for other in (view, *view.users)):
            return False
        return not any(self._is_seen(view, node) for view in sharing if view not in names)

    def replace(self, node: Node, result: Node) -> None:
        """From ``node`` on, ``result`` is the tensor that it wrote to; what gives it is right before ``node``."""
        place, made = self._places[node], node.prev
        while made not in self._places:
            self._places[made], made = place, made.prev
        for name in self._names[node]:
            name.replace_all_uses_with(result, lambda user: user is not result and self._places[user] > place)
        self._names[node].append(result)

    def _is_seen(self, view: Node, writing: Node) -> bool:
        """Whether what is written is read by way of an earlier view."""
        place = self._places[writing]
        return self._places[view] < place and any(self._places[user] > place for user in view.users)


def _functional(operator: Any) -> Any:
    """The operator that gives what this one writes to its first argument; None of all but the usual ones."""
    if not isinstance(operator, torch._ops.OpOverload) or operator.overloadpacket not in _USUAL:
        return None
    return getattr(_USUAL[operator.overloadpacket], operator._overloadname, None)


def _computed(graph: Graph, node: Node) -> Node:
    """Insert the operator that gives what ``node`` writes."""
    result = graph.call_function(_functional(node.target), node.args, node.kwargs)
    result.meta = dict(node.meta)
    return result


def _scattered(graph: Graph, views: list[Node], part: Node) -> Node:
    """Insert the operators that give the whole, of which ``part`` takes the place of what ``views`` show."""
    for view in views:
        if _shows_all(view):
            continue
        whole = _before(view)
        part = graph.call_function(_SCATTER[view.target], (whole, part, *view.args[1:]))  # type: ignore[index]
        part.meta = dict(whole.meta)
    return part


def _whole_of(views: list[Node], node: Node) -> Node | None:
    """Return the tensor of which ``node`` writes what ``views`` show; None where it is not only that."""
    others = [other for other in node.all_input_nodes if other is not views[0]]
    whole = views[-1].args[0]
    if node.users or not isinstance(whole, Node) or any(view.kwargs for view in views):
        return None
    if node.target is _COPY:
        # What is filled as a whole would be the very tensor that it is filled from, which may be written to as well.
        plain = len(node.args) == 2 and not node.kwargs and others and not all(map(_shows_all, views))
        if not plain or not _are_one_size(views[0], *others):
            return None
    elif _functional(node.target) is None:
        return None
    reads_itself = any(_storages(other) & _storages(whole) for other in others)
    return None if reads_itself else whole


def _views(node: Node) -> list[Node]:
    """Return the views by which ``node`` writes to a part of a tensor, the last one first; none for others."""
    views: list[Node] = []
    view = node.args[0] if node.args else None
    while isinstance(view, Node) and view.target in _SCATTER:
        views.append(view)
        view = view.args[0]
    return views


def _before(view: Node) -> Node:
    """Return what ``view`` shows a part of, without views that show all of it."""
    before = view.args[0]
    while isinstance(before, Node) and _shows_all(before):
        before = before.args[0]
    assert isinstance(before, Node)
    return before


def _shows_all(view: Node) -> bool:
    return view.target is aten.slice.Tensor and view.args[2:] == (0, _THE_END)


def _are_one_size(*nodes: Node) -> bool:
    """Whether all have the same sizes by what is written for them: to compare symbols would make a condition."""
    values = [node.meta.get("val") for node in nodes]
    sizes = {tuple(map(str, value.shape)) if isinstance(value, torch.Tensor) else None for value in values}
    return len(sizes) == 1 and None not in sizes


def _gives_what_is_written(node: Node, written: Node) -> bool:
    """Whether the functional operator's result is, in dtype and layout, what was written to."""
    tensors = [value for argument in node.all_input_nodes for value in _tensors(argument)]
    tensor = written.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or {other.dtype for other in tensors} != {tensor.dtype}:
        return False
    return always_contiguous(tensor)


def _may_be_its_argument(node: Node) -> bool:
    """Whether it gives the tensor itself that it is given, outside of training, though fakes do not show it."""
    return "dropout" in str(node.target)


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    return (value for value in pytree.tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor))


def _storages(node: Node) -> set[int]:
    return {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in _tensors(node)}
