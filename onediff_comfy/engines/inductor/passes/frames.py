"""Convolutions over frames, with each pixel's channels together in memory.

cuDNN computes with channels together, and turns what lies otherwise round before each convolution and back after it.
Inductor asks for them so where a convolution has two sides, and not where it has frames, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ....once import once
from .rewriting import Copied, Replacement, replace_nodes

aten = torch.ops.aten
_CONVOLUTIONS: dict[Any, tuple[Any, ...]] = {  # by default, behind image, weight and bias
    aten.conv3d.default: ([1, 1, 1], [0, 0, 0], [1, 1, 1], 1),
    aten.convolution.default: ([1, 1, 1], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1),
}
_AXES = 5
_STRIDE = [1, 1, 1]  # another cuts an image into patches, which is a product


def put_channels_together(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with such convolutions; ``graph`` itself where there is none over frames.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    rewritten = replace_nodes(graph, _together)
    if rewritten is not graph:
        for node in rewritten.graph.nodes:
            if node.target is aten.view.default:  # what it looks at may lie otherwise now
                node.target = aten.reshape.default
        rewritten.recompile()
    return rewritten


def _together(node: Node) -> Replacement | None:
    operands = _operands(node)
    if operands is None:
        return None
    image, weight, bias, *window = operands

    def replacement(new: Graph, copied: Copied) -> Node:
        together: dict[str, Any] = {"memory_format": torch.channels_last_3d}
        placed = [new.call_function(aten.clone.default, (copied(each),), together) for each in (image, weight)]
        output = new.call_function(conv3d_together(), (*placed, *window))
        if not isinstance(bias, Node):
            return output
        shaped = new.call_function(aten.view.default, (copied(bias), [-1, 1, 1, 1]))
        return new.call_function(aten.add.Tensor, (output, shaped))

    return replacement


def _operands(node: Node) -> tuple[Any, ...] | None:
    """Return a convolution's image, weight, bias, stride, padding, dilation and groups; None for any other node."""
    defaults = _CONVOLUTIONS.get(node.target)
    if defaults is None or node.kwargs or node.meta["val"].ndim != _AXES:
        return None
    found = (*node.args, *(None, *defaults)[len(node.args) - 2 :])
    if node.target is aten.convolution.default:
        *operands, transposed, _, groups = found
        found = () if transposed else (*operands, groups)
    return found if found and list(found[3]) == _STRIDE else None


@once
def conv3d_together() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::conv3d_together``: a convolution over frames without bias.

    What it takes and gives lies in memory as ``torch.channels_last_3d``.
    """

    def computed(
        image: torch.Tensor,
        weight: torch.Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> torch.Tensor:
        image, weight = (each.contiguous(memory_format=torch.channels_last_3d) for each in (image, weight))
        output: torch.Tensor = aten.conv3d.default(image, weight, None, stride, padding, dilation, groups)
        return output.contiguous(memory_format=torch.channels_last_3d)

    operator = torch.library.custom_op("onediff_comfy::conv3d_together", computed, mutates_args=())
    operator.register_fake(computed)
    found: Callable[..., torch.Tensor] = torch.ops.onediff_comfy.conv3d_together.default
    return found
