"""Functions of 64-bit numbers, computed once and kept.

Positions of tokens become angles in float64: a power for each channel, a sine and a cosine for each token and channel.
Inductor computes what is pointwise again wherever it is used: for each token the powers, for each entry of a rotation
all four. That took 1.3 ms of a Flux step on an H200, and a consumer's GPU has a twentieth of its 64-bit units.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ....capture.shape_range import always_contiguous
from .operands import in_memory
from .rewriting import Replacement, replace_nodes

aten = torch.ops.aten
_COSTLY = {aten.pow, aten.exp, aten.log, aten.sin, aten.cos, aten.tan, aten.sigmoid, aten.tanh}


def compute_once(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with the results of costly functions of float64 in memory; ``graph`` itself if there are none.

    Equal ones are computed once. (What reads no tensor, as powers of a ``linspace``, Inductor computes again even so.)

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    first: dict[str, Node] = {}

    def find(node: Node) -> Replacement | None:
        if not _is_costly(node):
            return None
        kept = first.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if kept is not node:
            return lambda _new, copied: copied(kept)
        return lambda new, copied: new.call_function(in_memory(), (new.node_copy(node, copied),))

    return replace_nodes(graph, find)


def _is_costly(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.overloadpacket not in _COSTLY:
        return False
    value = node.meta["val"]
    return bool(value.dtype == torch.float64) and always_contiguous(value)
