"""Graphs with some of their nodes replaced."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from torch.fx import Graph, GraphModule, Node

Copied = Callable[[Node], Node]
"""The node of the new graph that stands for one of the old."""

Replacement = Callable[[Graph, Copied], Node]
"""Adds to a new graph what replaces a node; returns what gives the node's value."""


def replace_nodes(graph: GraphModule, find: Callable[[Node], Replacement | None]) -> GraphModule:
    """Return ``graph`` with each node replaced for which ``find`` has a replacement; ``graph`` itself if there is none.

    What only replaced nodes used is left out.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them. A replacement keeps them.
        find: asked once about each node. A replacement may be a node that is there already, which stays as it is.
    """
    found = {node: replacement for node in graph.graph.nodes if (replacement := find(node)) is not None}
    if not found:
        return graph
    rewritten, copies = Graph(), dict[Node, Node]()
    for node in graph.graph.nodes:
        if node in found:
            before = len(rewritten.nodes)
            copies[node] = found[node](rewritten, copies.__getitem__)
            made = list(itertools.islice(reversed(rewritten.nodes), len(rewritten.nodes) - before))
            for new in made:  # belongs where the node was: what repeats is looked for module by module
                new.meta.setdefault("nn_module_stack", node.meta.get("nn_module_stack", {}))
            if copies[node] in made:
                copies[node].meta = dict(node.meta)
        else:
            copies[node] = rewritten.node_copy(node, copies.__getitem__)
    rewritten.eliminate_dead_code()
    rewritten.lint()
    return GraphModule(graph, rewritten)
