"""Parts of a graph that repeat, as functions that are compiled once each.

A transformer is the same block many times over, with other weights. A compiler is given them all in one
graph and works through each. Here every part of a graph that is *textually* the same as others, sizes, layouts
and dtypes included, becomes one subgraph that is called from each place (``invoke_subgraph``, which PyTorch's
own ``nested_compile_region`` makes). SDXL's 70 blocks are two functions then.

The module that a node came from only says where it may pay to cut: what is equal is found by comparing.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import Graph, GraphModule, Node

from ....capture.graph_text import argument_text

# A function cannot be fused with what is around it, so small parts and rare ones are left where they are.
_SMALLEST = 24  # nodes
_RAREST = 3  # times


@dataclass(frozen=True)
class _Region:
    """A stretch of a graph, seen as a function.

    Attributes:
        nodes: one after the other.
        inputs: what it uses of others, in the order of use.
        outputs: what others use of it.
        text: what it computes, the same for two regions that are the same function.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    text: str


def share_regions(graph: GraphModule) -> GraphModule:
    """``graph`` with its repeated parts as subgraphs; itself where none repeat.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    groups = _repeated(_body(graph.graph))
    return _rewritten(graph, groups) if groups else graph


def _body(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


# -- finding them ------------------------------------------------------------------------------


def _repeated(body: Sequence[Node]) -> list[list[_Region]]:
    """Groups of equal regions; of those that hold one another, the largest without repetition inside."""
    groups: defaultdict[str, list[tuple[range, _Region]]] = defaultdict(list)
    for span in _modules(body):
        nodes = tuple(body[span.start : span.stop])
        if len(nodes) >= _SMALLEST and all(map(_may_be_inside, nodes)):
            region = _region(nodes)
            if region.outputs and not any(map(_may_be_a_view, region.outputs)):
                groups[region.text].append((span, region))
    simple: list[list[tuple[range, _Region]]] = []
    for group in sorted((group for group in groups.values() if len(group) >= _RAREST), key=_length):
        first = group[0][0]
        if not any(sum(_within(span, first) for span, _ in smaller) > 1 for smaller in simple):
            simple.append(group)
    taken: set[int] = set()
    found = []
    for group in reversed(simple):
        free = [(span, region) for span, region in group if taken.isdisjoint(span)]
        if len(free) >= _RAREST:
            found.append([region for _, region in free])
            taken.update(index for span, _ in free for index in span)
    return found


def _length(group: Sequence[tuple[range, _Region]]) -> int:
    return len(group[0][0])


def _within(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _modules(body: Sequence[Node]) -> Iterator[range]:
    """Where each module's nodes are, if they are in one piece."""
    places: defaultdict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(body):
        for path in {path for path, _ in node.meta.get("nn_module_stack", {}).values()}:
            places[path].append(index)
    spans = {(at[0], at[-1] + 1) for at in places.values() if at[-1] - at[0] + 1 == len(at)}
    return (range(*span) for span in sorted(spans))


def _may_be_inside(node: Node) -> bool:
    """Not what has a graph of its own, nor convolutions: the layout of images is chosen for a whole graph."""
    return node.op == "call_function" and "conv" not in str(node.target)


def _may_be_a_view(node: Node) -> bool:
    """Whether a result may share memory with an argument, which results of a subgraph must not."""
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _region(nodes: tuple[Node, ...]) -> _Region:
    inside = {node: index for index, node in enumerate(nodes)}
    inputs: dict[Node, int] = {}

    def name(node: Node) -> str:
        return f"%{inside[node]}" if node in inside else f"${inputs.setdefault(node, len(inputs))}"

    lines = [
        f"{node.target} {argument_text(node.args, name)} {argument_text(node.kwargs, name)} -> {_described(node)}"
        for node in nodes
    ]
    outputs = tuple(node for node in nodes if any(user not in inside for user in node.users))
    lines += [f"input {_described(node)}" for node in inputs]
    lines += [f"output {inside[node]}" for node in outputs]
    return _Region(nodes, tuple(inputs), outputs, "\n".join(lines))


def _described(node: Node) -> str:
    described = []
    for value in pytree.tree_leaves(node.meta.get("val")):
        tensor = isinstance(value, torch.Tensor)
        described.append(f"{value.dtype} {value.shape} {value.stride()} {value.device}" if tensor else str(value))
    return " ".join(described)


# -- rewriting ---------------------------------------------------------------------------------


def _rewritten(module: GraphModule, groups: Sequence[Sequence[_Region]]) -> GraphModule:
    root = torch.nn.Module()
    for name, child in module.named_children():
        root.add_module(name, child)
    graph, copies = Graph(), dict[Node, Node]()
    symbols: dict[sympy.Symbol, Node] = {}
    calls: dict[Node, tuple[str, _Region, tuple[sympy.Symbol, ...]]] = {}  # by the first node of each region
    skipped: set[Node] = set()
    for number, group in enumerate(groups):
        name = f"region_{number}"
        sizes = _sizes(group[0])
        root.add_module(name, _function(group[0], sizes, module.graph))
        for region in group:
            calls[region.nodes[0]] = name, region, sizes
            skipped.update(region.nodes)
    for node in module.graph.nodes:
        if node in calls:
            name, region, sizes = calls[node]
            for size in sizes:
                if size not in symbols:
                    symbols[size] = _symbol(graph, size, module.graph, copies)
            operands = [copies[item] for item in region.inputs] + [symbols[size] for size in sizes]
            call = graph.call_function(invoke_subgraph, (graph.get_attr(name), name, *operands))
            call.meta["val"] = tuple(output.meta["val"] for output in region.outputs)
            for index, output in enumerate(region.outputs):
                copies[output] = graph.call_function(operator.getitem, (call, index))
                copies[output].meta = dict(output.meta)
        elif node not in skipped:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.lint()
    return GraphModule(root, graph)


def _sizes(region: _Region) -> tuple[sympy.Symbol, ...]:
    """The symbols that its sizes are made of, but for those that are inputs already."""
    found: set[sympy.Symbol] = set()
    for node in (*region.inputs, *region.nodes):
        for size in _symbolic_sizes(node):
            found |= size.node.expr.free_symbols
    given = {size.node.expr for node in region.inputs for size in _symbolic_sizes(node) if node.meta["val"] is size}
    return tuple(sorted(found - given, key=str))


def _symbolic_sizes(node: Node) -> Iterator[torch.SymInt]:
    for value in pytree.tree_leaves(node.meta.get("val")):
        sizes: Iterable[Any] = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        yield from (size for size in sizes if isinstance(size, torch.SymInt))


def _function(region: _Region, sizes: Sequence[sympy.Symbol], outer: Graph) -> GraphModule:
    graph, copies = Graph(), dict[Node, Node]()
    for node in region.inputs:
        copies[node] = graph.placeholder(f"input_{len(copies)}")
        copies[node].meta = {"val": node.meta["val"]}
    for size in sizes:
        graph.placeholder(str(size)).meta["val"] = _holder(outer, size)[2]
    for node in region.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in region.outputs))
    return GraphModule({}, graph)


def _symbol(graph: Graph, size: sympy.Symbol, outer: Graph, copies: dict[Node, Node]) -> Node:
    """A node of ``graph`` that is this symbol's value."""
    holder, axis, value = _holder(outer, size)
    node = graph.call_function(torch.ops.aten.sym_size.int, (copies[holder], axis))
    node.meta["val"] = value
    return node


def _holder(graph: Graph, size: sympy.Symbol) -> tuple[Node, int, torch.SymInt]:
    """An input of ``graph`` with an axis that is this symbol.

    Of axes that were found to be equal each keeps the symbol that it had at first. One whose own symbol this is goes
    first: to a subgraph Inductor hands an axis by its own symbol, and knows sizes there by this one alone.
    """
    found = [
        (getattr(value.node, "_expr", size) != size, node, axis, value)
        for node in graph.find_nodes(op="placeholder")
        for axis, value in enumerate(node.meta["val"].shape)
        if isinstance(value, torch.SymInt) and value.node.expr == size
    ]
    if not found:
        raise LookupError(f"no input has an axis of size {size}")
    _, node, axis, value = min(found, key=operator.itemgetter(0))
    return node, axis, value
