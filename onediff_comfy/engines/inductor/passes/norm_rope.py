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

from .rewriting import Copied, Replacement, replace_nodes

aten = torch.ops.aten
_ROPE = "comfy_kitchen::apply_rope"
_CASTS = {aten.to.device, aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default}
_DTYPES = {torch.float16, torch.bfloat16, torch.float32}
_MOST_HEADS_AT_ONCE = 32
_WIDTHS = (32, 64, 128, 256)


class _Norm(NamedTuple):
    """The norm of each head of some tokens.

    Attributes:
        heads: of four axes, not normed.
        scale: of a head's channels.
        eps: added to the mean of squares.
    """

    heads: Node
    scale: Node
    eps: float


def fuse_norm_and_rope(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with each rotation of normed heads as one operator; ``graph`` itself where there are none.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    fused: dict[Node, Callable[[Graph, Copied], Node]] = {}
    for node in graph.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name == _ROPE:
            *rotated, rotations = node.args
            forms = [_fused(tensor, rotations) for tensor in rotated]
            if all(forms):
                fused.update({user: forms[user.args[1]] for user in node.users})

    def find(node: Node) -> Replacement | None:
        return fused.get(node)

    return replace_nodes(graph, find)


def _fused(rotated: Any, rotations: Any) -> Replacement | None:
    """Return what computes a rotated tensor from heads that are not normed yet; None if something does not fit."""
    value, matrices = rotated.meta["val"], rotations.meta["val"]
    if value.dtype not in _DTYPES or value.ndim != 4 or matrices.ndim != 6 or matrices.dtype != torch.float32:
        return None
    axis = 2 if matrices.shape[1] == 1 else 1
    batch, tokens, heads, width = value.shape[0], value.shape[axis], value.shape[3 - axis], value.shape[3]
    if not isinstance(heads, int) or width not in _WIDTHS or tuple(matrices.shape[3:]) != (width // 2, 2, 2):
        return None
    of_tokens = matrices.shape[3 - axis] == 1 and statically_known_true(matrices.shape[axis] == tokens)
    of_samples = statically_known_true(matrices.shape[0] == batch) or statically_known_true(matrices.shape[0] == 1)
    if not of_tokens or not of_samples:
        return None
    origin = _origin(rotated)
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
        from ..norm_rope_kernel import norm_rope_kernel

        batch, heads, width = parts[0].shape[0], parts[0].shape[3 - axis], parts[0].shape[3]
        tokens = rotations.shape[axis]
        out = parts[0].new_empty((batch, tokens, heads, width))
        rotations, first = rotations.contiguous(), 0
        for_all = type(rotations.shape[0]) is int and rotations.shape[0] == 1  # a symbol may be 1 in one call
        at_once = min(_MOST_HEADS_AT_ONCE, 1 << (heads - 1).bit_length())
        for part, scale, epsilon in zip(parts, scales, eps, strict=True):
            part = part if part.stride(3) == 1 else part.contiguous()
            grid = (part.shape[axis], batch, -(-heads // at_once))
            torch.library.wrap_triton(norm_rope_kernel)[grid](
                part,
                scale.contiguous(),
                rotations,
                out,
                first,
                heads,
                part.stride(0),
                part.stride(axis),
                part.stride(3 - axis),
                0 if for_all else rotations.stride(0),
                2 * width,
                out.stride(0),
                out.stride(1),
                out.stride(2),
                epsilon,
                HEADS=at_once,
                WIDTH=width,
            )
            first = first + part.shape[axis]
        return out.transpose(1, 2) if axis == 2 else out

    @norm_rope.register_kernel("cpu")
    def _(parts: Any, scales: Any, eps: Any, rotations: torch.Tensor, axis: int) -> torch.Tensor:
        normed = [F.rms_norm(p, s.shape, s, e) for p, s, e in zip(parts, scales, eps, strict=True)]
        whole = torch.cat(normed, axis)
        pairs = whole.float().unflatten(-1, (-1, 1, 2))
        rotated = rotations[..., 0] * pairs[..., 0] + rotations[..., 1] * pairs[..., 1]
        return rotated.flatten(-2).to(whole.dtype)

    operator: Callable[..., torch.Tensor] = torch.ops.onediff_comfy.norm_rope.default
    return operator
