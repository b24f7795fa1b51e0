"""Norms of a query's and a key's heads and their rotation (RoPE) in one kernel.

Image transformers norm each head of each token, put text and image together, and rotate pairs of channels by the
token's place. That is a kernel for each norm and comfy-kitchen's for the rotation, which reads and writes everything
once more: 105 µs for a block of Flux with 4608 tokens on an H200, of which 35 are left (benchmarks/NOTES.md, section
30). comfy-kitchen's one kernel for both takes 170 µs for a block of Z-Image (section 35). Written in plain operators it
is no faster: a rotation reads its norm at other places than it writes, so Inductor writes the norm first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ....capture.shape_range import always_contiguous
from ....once import once
from .rewriting import Copied, Replacement, replace_nodes

aten = torch.ops.aten
_ROPE = {f"comfy_kitchen::{name}" for name in ("apply_rope", "apply_rope1", "rms_rope", "rms_rope1")}
"""The host's rotations of a query and a key, and of one tensor; those of ``rms`` norm their heads before."""
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


class _Rotation(NamedTuple):
    """What one of the host's operators does with a query or a key.

    Attributes:
        rotated: has the result.
        heads: of four axes, not rotated.
        matrices: a rotation for each token and pair of channels.
        norm: what the operator does before it rotates.
    """

    rotated: Node
    heads: Any
    matrices: Any
    norm: _Norm | None


def fuse_norm_and_rope(graph: GraphModule) -> GraphModule:
    """Return ``graph`` with each rotation of normed heads as one operator; ``graph`` itself where there are none.

    Args:
        graph: functional, with fake tensors under ``val`` as ``torch.export`` leaves them.
    """
    fused: dict[Node, Replacement | None] = {}
    for node in graph.graph.nodes:
        forms = {rotation.rotated: _fused(rotation) for rotation in _rotations(node)}
        if all(forms.values()):
            fused.update(forms)
    rewritten = replace_nodes(graph, fused.get)
    for node in rewritten.graph.nodes:
        if node.target is norm_rope():
            node.meta["val"] = _tokens_together(node.meta["val"], node.args[-1])
    return rewritten


def _tokens_together(heads: torch.Tensor, axis: int) -> torch.Tensor:
    """Return a tensor that lies in memory as the operator's result, with a token's heads together."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2) if axis == 2 else heads.contiguous()


def _rotations(node: Node) -> list[_Rotation]:
    """Return what is rotated if a node is one of the host's rotations, all of whose results are used."""
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    if schema is None or schema.name not in _ROPE or node.kwargs:
        return []
    given: list[Any] = [*node.args, *(argument.default_value for argument in schema.arguments[len(node.args) :])]
    count = len(schema.returns)
    results = {0: node} if count == 1 else {result.args[1]: result for result in node.users}
    matrices, scales, eps = given[count], given[count + 1 : -1], given[-1]
    if len(results) < count:
        return []
    return [
        _Rotation(results[index], heads, matrices, _Norm(heads, scales[index] or scales[0], eps) if scales else None)
        for index, heads in enumerate(given[:count])
    ]


def _fused(rotation: _Rotation) -> Replacement | None:
    """Return what computes rotated heads from such that are not normed yet; None if something does not fit."""
    rotated, heads, rotations, norm = rotation
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
    # A block of a transformer is handed its rotations, and nothing says that there is one for each token.
    is_another_count = statically_known_true(matrices.shape[axis] != tokens)
    of_tokens = matrices.shape[3 - axis] == 1 and not is_another_count
    of_samples = statically_known_true(matrices.shape[0] == batch) or statically_known_true(matrices.shape[0] == 1)
    lies_as_before = axis == 1 and always_contiguous(rotated.meta["val"])
    if not (of_tokens and of_samples and (lies_as_before or _is_only_attended_to(rotated))):
        return None
    norms = [norm] if norm is not None else _norms_of_parts(heads, axis)
    if not all(norm is not None and _is_of_heads(norm, width, value.dtype) for norm in norms):
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


def _norms_of_parts(heads: Node, axis: int) -> list[_Norm | None]:
    """Return the norms of what heads are put together of, token behind token; of what is not normed None."""
    origin = _origin(heads)
    parts = [origin]
    if origin.target is aten.cat.default and len(origin.args) > 1 and origin.args[1] in (axis, axis - 4):
        parts = list(origin.args[0])  # type: ignore[arg-type]
    return [_norm(_origin(part)) for part in parts]


def _norm(node: Node) -> _Norm | None:
    if node.target is not aten.rms_norm.default:
        return None
    arguments: tuple[Any, ...] = (*node.args, None, None)
    heads, shape, scale, eps = arguments[:4]
    if scale is None or list(shape) != list(scale.meta["val"].shape):
        return None
    return _Norm(heads, scale, torch.finfo(torch.float32).eps if eps is None else float(eps))


def _is_of_heads(norm: _Norm, width: int, dtype: torch.dtype) -> bool:
    """Return True if a norm is of each head's channels, and its scale has their dtype."""
    scale = norm.scale.meta["val"]
    return tuple(scale.shape) == (width,) and {norm.heads.meta["val"].dtype, scale.dtype} == {dtype}


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
    from ..kernels import norm_rope_kernel

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
        rotations.shape[axis] - 1,
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


@once
def norm_rope() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::norm_rope``: normed and rotated heads, of parts that are put together.

    It takes parts of four axes, a scale and an epsilon for each, rotations of [batch or 1, 1, tokens, width / 2, 2, 2]
    in float32, or with heads and tokens the other way round, and which axis has the tokens. Of more rotations than
    tokens it takes the first, and one is for all tokens, as it is to the host. Sums and products are in float32, and
    rounded as the norm and the rotation by themselves round. Its memory has a token's heads together.
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
        tokens = sum(part.shape[axis] for part in parts)
        out = parts[0].new_empty((parts[0].shape[0], tokens, heads, width))
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
        rotations = rotations.narrow(axis, 0, min(rotations.shape[axis], whole.shape[axis]))
        rotated = rotations[..., 0] * pairs[..., 0] + rotations[..., 1] * pairs[..., 1]
        return _tokens_together(rotated.flatten(-2).to(whole.dtype), axis)

    operator: Callable[..., torch.Tensor] = torch.ops.onediff_comfy.norm_rope.default
    return operator
