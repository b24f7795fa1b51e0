"""Norms of a query's and a key's heads and their rotation (RoPE) in one kernel.

Image transformers norm each head of each token, put text and image together, and rotate pairs of channels by the
token's place. That is a kernel for each norm and comfy-kitchen's for the rotation, which reads and writes everything
once more: 105 µs for a block of Flux with 4608 tokens on an H200, of which 35 are left (benchmarks/NOTES.md, section
30). Written in plain operators it is no faster: a rotation reads its norm at other places than it writes, so Inductor
writes the norm first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ....capture.shape_range import always_contiguous
from .rewriting import Copied, Replacement, replace_nodes

aten = torch.ops.aten
_ROPE = "comfy_kitchen::apply_rope"
_ATTENTION = {
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "onediff_comfy::cudnn_attention",
    "onediff_comfy::wide_attention",
}
"""What takes heads however they lie in memory, and the only use of rotated heads that these may lie otherwise for."""
_CASTS = {aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32}
_MOST_HEADS_AT_ONCE = 32
_WIDTHS = (32, 64, 128, 256)


class _Norm(NamedTuple):
    """The norm of each head of some tokens: in a graph, or with its tensors.

    Attributes:
        heads: of four axes, not normed.
        scale: of a head's channels.
        eps: added to the mean of squares.
    """

    heads: Any
    scale: Any
    eps: float


def fuse_norm_and_rope(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with each rotation of normed heads as one operator; ``graph`` itself where there are none.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    fused: dict[Node, Replacement | None] = {}
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == _ROPE:
            forms = {rotated: _fused(node.args[rotated.args[1]], node.args[2], rotated) for rotated in node.users}
            if len(forms) == 2 and all(forms.values()):
                fused.update(forms)
    rewritten = replace_nodes(graph, fused.get)
    for node in rewritten.graph.nodes:
        if node.target is norm_rope():
            node.meta["val"] = _tokens_together(node.meta["val"], node.args[-1])
    return rewritten


def _tokens_together(heads: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a tensor that lies in memory as the operator's result, with a token's heads together."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2) if axis == 2 else heads.contiguous()


def _fused(heads: Any, rotations: Any, rotated: Node) -> Replacement | None:
    """Return what computes rotated heads from such that are not normed yet; None if something does not fit."""
    value, matrices = heads.meta["val"], rotations.meta["val"]
    if value.dtype not in _DTYPES or value.ndim != 4 or matrices.ndim != 6 or matrices.dtype != torch.float32:
        return None
    axis = 2 if matrices.shape[1] == 1 else 1
    batch, tokens, width = value.shape[0], value.shape[axis], value.shape[3]
    if (
        not isinstance(value.shape[3 - axis], int)
        or width not in _WIDTHS
        or tuple(matrices.shape[3:]) != (width // 2, 2, 2)
    ):
        return None
    of_tokens = matrices.shape[3 - axis] == 1 and statically_known_true(matrices.shape[axis] == tokens)
    of_samples = statically_known_true(matrices.shape[0] == batch) or statically_known_true(matrices.shape[0] == 1)
    lies_as_before = axis == 1 and always_contiguous(value)
    if not (of_tokens and of_samples and (lies_as_before or _is_only_attended_to(rotated))):
        return None
    origin = _origin(heads)
    parts = [origin]
    if origin.target is aten.cat.default and len(origin.args) > 1 and origin.args[1] in (axis, axis - 4):
        parts = list(origin.args[0])  # type: ignore[arg-type]
    norms = [_norm(part, width, value.dtype) for part in parts]
    if not all(norms):
        return None

    def fuse(new: Graph, copied: Copied) -> Node:
        known = [norm for norm in norms if norm is not None]
        lists = [copied(norm.heads) for norm in known], [copied(norm.scale) for norm in known]
        return new.call_function(norm_rope(), (*lists, [norm.eps for norm in known], copied(rotations), axis))

    return fuse


def _is_only_attended_to(rotated: Node) -> bool:
    """Return True if nothing but attention uses a tensor: what uses it otherwise was traced with another layout."""
    targets = [user.target for user in rotated.users]
    return all(isinstance(target, torch._ops.OpOverload) and target._schema.name in _ATTENTION for target in targets)


def _norm(part: Node, width: int, dtype: torch.dtype) -> _Norm | None:
    node = _origin(part)
    if node.target is not aten.rms_norm.default:
        return None
    arguments: tuple[Any, ...] = (*node.args, None, None)
    heads, shape, scale, eps = arguments[:4]
    if list(shape) != [width] or scale is None or {heads.meta["val"].dtype, scale.meta["val"].dtype} != {dtype}:
        return None
    return _Norm(heads, scale, torch.finfo(torch.float32).eps if eps is None else float(eps))


def _origin(node: Node) -> Node:
    """Return the node before casts that change nothing."""
    while node.target in _CASTS:
        before, value = node.args[0], node.meta["val"]
        assert isinstance(before, Node)
        given = before.meta["val"]
        if (given.dtype, given.device) != (value.dtype, value.device):
            break
        node = before
    return node


def _launch(norm: _Norm, rotations: torch.Tensor, out: torch.Tensor, axis: int, first: Any) -> None:
    """Norm and rotate some tokens.

    Args:
        rotations: contiguous.
        out: of all tokens, [batch, tokens, heads, width].
        axis: which has the tokens of what is normed.
        first: of these tokens among all.
    """
    from ..norm_rope_kernel import norm_rope_kernel

    tensor = norm.heads if norm.heads.stride(3) == 1 else norm.heads.contiguous()
    heads, width = tensor.shape[3 - axis], tensor.shape[3]
    for_all = statically_known_true(rotations.shape[0] == 1)  # a symbol may be 1 in one call alone
    at_once = min(_MOST_HEADS_AT_ONCE, 1 << (heads - 1).bit_length())
    grid = (tensor.shape[axis], tensor.shape[0], -(-heads // at_once))
    torch.library.wrap_triton(norm_rope_kernel)[grid](
        tensor,
        norm.scale.contiguous(),
        rotations,
        out,
        first,
        heads,
        tensor.stride(0),
        tensor.stride(axis),
        tensor.stride(3 - axis),
        0 if for_all else rotations.stride(0),
        2 * width,
        out.stride(0),
        out.stride(1),
        out.stride(2),
        norm.eps,
        HEADS=at_once,
        WIDTH=width,
    )


@functools.cache
def norm_rope() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::norm_rope``: normed and rotated heads, of parts that are put together.

    It takes parts of four axes, a scale and an epsilon for each, rotations of [batch or 1, 1, tokens, width / 2, 2, 2]
    in float32, or with heads and tokens the other way round, and which axis has the tokens. Sums and products are in
    float32, and rounded as the norm and the rotation by themselves round. Its memory has a token's heads together.
    """

    @torch.library.triton_op("onediff_comfy::norm_rope", mutates_args=())
    def norm_rope(
        parts: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        eps: Sequence[float],
        rotations: torch.Tensor,
        axis: int,
    ) -> torch.Tensor:
        heads, width = parts[0].shape[3 - axis], parts[0].shape[3]
        out = parts[0].new_empty((parts[0].shape[0], rotations.shape[axis], heads, width))
        matrices, first = rotations.contiguous(), 0
        for part, scale, epsilon in zip(parts, scales, eps, strict=True):
            _launch(_Norm(part, scale, epsilon), matrices, out, axis, first)
            first = first + part.shape[axis]
        return out.transpose(1, 2) if axis == 2 else out

    @norm_rope.register_kernel("cpu")
    def _(parts: Any, scales: Any, eps: Any, rotations: torch.Tensor, axis: int) -> torch.Tensor:
        normed = [F.rms_norm(p, s.shape, s, e) for p, s, e in zip(parts, scales, eps, strict=True)]
        whole = torch.cat(normed, axis)
        pairs = whole.float().unflatten(-1, (-1, 1, 2))
        rotated = rotations[..., 0] * pairs[..., 0] + rotations[..., 1] * pairs[..., 1]
        return _tokens_together(rotated.flatten(-2).to(whole.dtype), axis)

    operator: Callable[..., torch.Tensor] = torch.ops.onediff_comfy.norm_rope.default
    return operator
