"""Calls of every operator in the lowering table, with arguments as models make them and at the edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(0)


@dataclass(frozen=True)
class Case:
    """One call; its tensors are inputs of the graph, everything else is in it."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def call(*args: Any, **kwargs: Any) -> Case:
    return Case(args, kwargs)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) + 0.1


def whole(*shape: int, low: int = -9, high: int = 10) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator)


def truth(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) > 0.5


CASES: dict[Any, list[Case]] = {}


def _enter(operators: Any, *cases: Case) -> None:
    for one in operators if isinstance(operators, (list, tuple)) else [operators]:
        CASES.setdefault(one, []).extend(cases)


# -- pointwise -------------------------------------------------------------------------------------

_enter(
    [aten.abs.default, aten.neg.default, aten.square.default, aten.sign.default],
    call(real(2, 3, 4)),
    call(real()),
    call(whole(5)),
)
_enter(
    [
        aten.exp.default,
        aten.expm1.default,
        aten.sin.default,
        aten.cos.default,
        aten.tan.default,
        aten.tanh.default,
        aten.atan.default,
        aten.erf.default,
        aten.sigmoid.default,
        aten.relu.default,
        aten.silu.default,
        aten.mish.default,
        aten.hardswish.default,
        aten.floor.default,
        aten.ceil.default,
        aten.round.default,
    ],
    call(real(2, 3, 4)),
    call(real(7) * 5),
    call(real()),
)
_enter(
    [aten.log.default, aten.log1p.default, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default],
    call(positive(2, 3, 4)),
    call(positive(1)),
)
_enter(aten.gelu.default, call(real(2, 3) * 3), call(real(2, 3) * 3, approximate="tanh"))
_enter(aten.leaky_relu.default, call(real(9)), call(real(9), 0.2))
_enter(aten.elu.default, call(real(9)), call(real(9), 1.5))
_enter(aten.softplus.default, call(real(9) * 20), call(real(9), 2))
_enter(
    [aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor],
    call(real(2, 3, 4), real(2, 3, 4)),
    call(real(2, 3, 1), real(3, 4)),
    call(real(2, 3), real()),
    call(real(2, 3), whole(2, 3)),
    call(whole(4), whole(4)),
    call(real(2), real(2), alpha=2),
)
_enter([aten.add.Tensor, aten.sub.Tensor], call(real(2, 3), 1.5), call(whole(4), 2))
_enter([aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar], call(real(2, 3), 1.5), call(whole(4), 2), call(real(3), 2))
_enter(
    aten.mul.Tensor, call(real(2, 3), real(3)), call(real(2), 0.5), call(whole(3), whole(3)), call(real(3), truth(3))
)
_enter(aten.mul.Scalar, call(real(2, 3), 0.5), call(whole(3), 3))
_enter(
    aten.div.Tensor,
    call(real(2, 3), positive(3)),
    call(real(2), 4.0),
    call(whole(6), 4),
    call(whole(6), whole(6, low=1)),
)
_enter(aten.div.Scalar, call(real(2, 3), 0.3), call(whole(6), 4))
_enter(
    aten.div.Tensor_mode,
    call(real(9) * 9, positive(9), rounding_mode="floor"),
    call(real(9) * 9, positive(9), rounding_mode="trunc"),
    call(whole(9), whole(9, low=1), rounding_mode="floor"),
    call(real(9), positive(9), rounding_mode=None),
)
_enter(aten.div.Scalar_mode, call(whole(9), 4, rounding_mode="floor"), call(whole(9), 4, rounding_mode="trunc"))
_enter(aten.floor_divide.default, call(whole(9), 4), call(whole(9), whole(9, low=1)))
_enter(aten.remainder.Scalar, call(whole(9), 4), call(real(9), 0.7))
_enter(aten.remainder.Tensor, call(whole(9), whole(9, low=1)), call(real(9), positive(9)))
_enter(aten.pow.Tensor_Scalar, call(real(5), 2), call(positive(5), 0.5), call(positive(5), -1.0), call(real(3), 3))
_enter(aten.pow.Tensor_Tensor, call(positive(5), real(5)))
_enter(aten.pow.Scalar, call(10000, real(5)), call(2.5, real(2, 3)))
_enter([aten.maximum.default, aten.minimum.default], call(real(2, 3), real(2, 3)), call(real(2, 3), real(3)))
_enter(
    aten.clamp.default, call(real(9), -0.5, 0.5), call(real(9), None, 0.3), call(real(9), -0.2), call(whole(9), -2, 2)
)
_enter([aten.clamp_min.default, aten.clamp_max.default], call(real(9), 0.1))
_enter(aten.addcmul.default, call(real(2, 3), real(2, 3), real(3)), call(real(3), real(3), real(3), value=0.5))
_enter(aten.addcdiv.default, call(real(2, 3), real(2, 3), positive(3)), call(real(3), real(3), positive(3), value=2))
_enter(aten.lerp.Scalar, call(real(2, 3), real(2, 3), 0.3))
_enter(aten.lerp.Tensor, call(real(2, 3), real(2, 3), positive(3)))
_comparisons = [getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")]
_enter(
    [packet.Tensor for packet in _comparisons],
    call(whole(20, low=0, high=3), whole(20, low=0, high=3)),
    call(real(2, 3), real(3)),
)
_enter([packet.Scalar for packet in _comparisons], call(whole(20, low=0, high=3), 1), call(real(7), 0.2))
_enter(aten.logical_not.default, call(truth(9)), call(whole(9, low=0, high=2)))
_enter([aten.logical_and.default, aten.logical_or.default], call(truth(9), truth(9)))
_enter(aten.where.self, call(truth(2, 3), real(2, 3), real(2, 3)), call(truth(2, 1), real(2, 3), real(3)))
_enter(aten.masked_fill.Scalar, call(real(2, 3), truth(2, 3), -1.5), call(real(2, 3), truth(3), float("-inf")))
_enter(
    aten._to_copy.default,
    call(real(5), dtype=torch.float64),
    call(real(5) * 5, dtype=torch.int64),
    call(truth(5), dtype=torch.float32),
    call(whole(5), dtype=torch.bool),
    call(whole(5), dtype=torch.float32),
    call(whole(5).to(torch.int16), dtype=torch.float32),
    call(real(5)),
)

# -- reductions and norms --------------------------------------------------------------------------

_enter(
    [aten.sum.dim_IntList, aten.mean.dim],
    call(real(2, 3, 4), [1]),
    call(real(2, 3, 4), [-1, 0], True),
    call(real(2, 3), None),
)
_enter(aten.sum.default, call(real(2, 3)), call(whole(5)), call(truth(5)))
_enter(aten.mean.default, call(real(2, 3)))
_enter(
    [aten.var.correction, aten.std.correction, aten.var_mean.correction],
    call(real(2, 3, 4), [1, 2], correction=0),
    call(real(2, 3, 4), [-1], correction=1, keepdim=True),
    call(real(2, 9), None),
)
_enter([aten.amax.default, aten.amin.default], call(real(2, 3, 4), [1]), call(real(2, 3), [-1], True), call(real(2, 3)))
_enter([aten.max.default, aten.min.default], call(real(2, 3)))
_enter(aten.argmax.default, call(real(2, 7), -1), call(real(2, 7), 0, True), call(real(2, 7)))
_enter(aten.linalg_vector_norm.default, call(real(2, 3, 4), 2, [-1], True), call(real(2, 3)))
_enter(aten.cumsum.default, call(real(2, 5), -1), call(whole(2, 5), 0))
_enter([aten._softmax.default], call(real(2, 3, 5), -1, False), call(real(2, 3, 5), 1, False))
_enter(aten.softmax.int, call(real(2, 3, 5), -1), call(real(2, 5), 0))
_enter(
    aten.layer_norm.default,
    call(real(2, 3, 8), [8], real(8), real(8)),
    call(real(2, 3, 8), [8]),
    call(real(2, 3, 8), [3, 8], real(3, 8), real(3, 8), 1e-3),
)
_enter(aten.rms_norm.default, call(real(2, 3, 8), [8], real(8), 1e-6), call(real(2, 8), [8]))
_enter(
    aten.group_norm.default,
    call(real(2, 8, 5, 7), 4, real(8), real(8)),
    call(real(2, 8, 5), 2, None, None, 1e-6),
    call(real(1, 4, 3, 3, 2), 4, real(4), real(4)),
)

# -- matrix products -------------------------------------------------------------------------------

_enter(aten.outer.default, call(real(3), real(4)))
_enter(aten.mm.default, call(real(3, 4), real(4, 5)), call(real(1, 4), real(4, 1)))
_enter(aten.bmm.default, call(real(2, 3, 4), real(2, 4, 5)))
_enter(
    aten.matmul.default,
    call(real(2, 5, 3, 4), real(2, 5, 4, 6)),
    call(real(3, 4), real(4, 5)),
    call(real(2, 3, 4), real(4, 5)),
)
_enter(
    aten.linear.default,
    call(real(2, 3, 8), real(5, 8), real(5)),
    call(real(3, 8), real(5, 8)),
    call(real(2, 2, 3, 8), real(1, 8), real(1)),
)
_enter(
    aten.addmm.default,
    call(real(5), real(3, 4), real(4, 5)),
    call(real(3, 5), real(3, 4), real(4, 5), beta=0.5, alpha=2),
)
_enter(
    aten.baddbmm.default,
    call(real(2, 3, 5), real(2, 3, 4), real(2, 4, 5), beta=0, alpha=0.3),
    call(real(2, 3, 5), real(2, 3, 4), real(2, 4, 5), alpha=2),
)
_enter(
    aten.einsum.default,
    call("...n,d->...nd", [real(2, 7), real(4)]),
    call("b i d, b j d -> b i j", [real(2, 3, 4), real(2, 5, 4)]),
)

# -- convolution and resolution --------------------------------------------------------------------

_enter(aten.conv1d.default, call(real(2, 4, 9), real(6, 4, 3), real(6), [1], [1]))
_enter(
    aten.conv2d.default,
    call(real(2, 4, 9, 8), real(6, 4, 3, 3), real(6), [1, 1], [1, 1]),
    call(real(2, 4, 9, 8), real(6, 4, 3, 3), None, [2, 2], [1, 1]),
    call(real(1, 4, 6, 6), real(8, 1, 3, 3), real(8), [1, 1], [2, 2], [2, 2], 4),
    call(real(1, 4, 6, 6), real(8, 4, 1, 1)),
)
_enter(aten.conv3d.default, call(real(1, 2, 4, 5, 6), real(3, 2, 3, 3, 3), real(3), [1, 1, 1], [1, 1, 1]))
_enter(
    aten.conv2d.padding,
    call(real(1, 4, 6, 7), real(8, 4, 3, 3), real(8), [1, 1], "same"),
    call(real(1, 4, 6, 7), real(8, 4, 3, 3)),
)
_enter(aten.conv_transpose2d.input, call(real(1, 4, 5, 6), real(4, 3, 4, 4), real(3), [2, 2], [1, 1]))
_enter(
    aten.convolution.default,
    call(real(2, 4, 9, 8), real(6, 4, 3, 3), real(6), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    call(real(1, 4, 5), real(4, 3, 4), None, [2], [1], [1], True, [0], 1),
)
_enter(
    aten.avg_pool2d.default,
    call(real(2, 3, 8, 6), [2, 2]),
    call(real(2, 3, 8, 6), [3, 3], [2, 2], [1, 1]),
    call(real(2, 3, 8, 6), [3, 3], [2, 2], [1, 1], False, False),
)
_enter(aten.max_pool2d.default, call(real(2, 3, 8, 6), [2, 2]), call(real(2, 3, 8, 6), [3, 3], [1, 1], [1, 1]))
_enter(
    aten.upsample_nearest2d.vec,
    call(real(1, 3, 5, 4), None, [2.0, 2.0]),
    call(real(1, 3, 5, 4), [10, 8], None),
    call(real(1, 3, 5, 4), [7, 9], None),
)
_enter(aten.upsample_nearest2d.default, call(real(1, 3, 5, 4), [10, 8]), call(real(1, 3, 6, 4), [3, 2]))
_enter(
    aten.upsample_bilinear2d.vec,
    call(real(1, 3, 5, 4), [10, 8], False, None),
    call(real(1, 3, 5, 4), [9, 7], True, None),
    call(real(1, 3, 5, 4), None, False, [2.0, 2.0]),
)
_enter(aten.pixel_shuffle.default, call(real(2, 12, 3, 5), 2), call(real(12, 3, 5), 2))
_enter(aten.pixel_unshuffle.default, call(real(2, 3, 6, 4), 2))

# -- attention -------------------------------------------------------------------------------------

_q, _k, _v = real(2, 4, 7, 8), real(2, 4, 9, 8), real(2, 4, 9, 8)
_enter(
    aten.scaled_dot_product_attention.default,
    call(_q, _k, _v),
    call(_q, _k, _v, real(7, 9)),
    call(_q, _k, _v, truth(2, 1, 7, 9) | torch.eye(7, 9, dtype=torch.bool)),
    call(_q, _q, _q, is_causal=True),
    call(_q, _k, _v, scale=0.1),
    call(real(2, 7, 8), real(2, 9, 8), real(2, 9, 8)),
)

# -- views and moves -------------------------------------------------------------------------------

_enter(
    [
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
        aten.lift_fresh_copy.default,
        aten.contiguous.default,
    ],
    call(real(2, 3)),
)
_enter(aten.dropout.default, call(real(2, 3), 0.0, False))
_enter(
    [aten.view.default, aten.reshape.default, aten._unsafe_view.default],
    call(real(2, 3, 4), [6, 4]),
    call(real(2, 3, 4), [2, -1]),
    call(real(2, 1), [1, 2, 1]),
    call(real(1), []),
)
_enter(aten.flatten.using_ints, call(real(2, 3, 4, 5), 2), call(real(2, 3, 4), 0, 1), call(real()))
_enter(aten.unflatten.int, call(real(2, 12), -1, [3, 4]))
_enter(aten.permute.default, call(real(2, 3, 4), [0, 2, 1]), call(real(2, 3, 4), [-1, 0, 1]))
_enter(aten.transpose.int, call(real(2, 3, 4), 1, 2), call(real(2, 3, 4), -1, 0))
_enter(aten.t.default, call(real(2, 3)), call(real(3)))
_enter(aten.movedim.int, call(real(2, 3, 4), 1, -1), call(real(2, 3, 4), -1, 0))
_enter(aten.expand.default, call(real(2, 1, 4), [2, 3, 4]), call(real(4), [2, -1]), call(real(1, 1), [-1, 5]))
_enter(aten.unsqueeze.default, call(real(2, 3), 0), call(real(2, 3), -1), call(real(2, 3), 1), call(real(), 0))
_enter(aten.squeeze.default, call(real(1, 3, 1)))
_enter(aten.squeeze.dim, call(real(1, 3, 1), 0), call(real(1, 3, 1), 1), call(real(1, 3, 1), -1))
_enter(aten.squeeze.dims, call(real(1, 3, 1), [0, 2]))
_enter(
    aten.cat.default,
    call([real(2, 3), real(2, 5)], 1),
    call([real(2, 3), real(1, 3), real(2, 3)]),
    call([real(2, 3), real(2, 2)], -1),
)
_enter(aten.stack.default, call([real(2, 3), real(2, 3)]), call([real(2, 3), real(2, 3)], -1))
_enter(aten.split.Tensor, call(real(2, 7), 3, 1), call(real(6, 2), 3), call(real(2, 6), 2, -1))
_enter(aten.split_with_sizes.default, call(real(2, 7), [3, 4], 1), call(real(7, 2), [1, 6]))
_enter(aten.chunk.default, call(real(2, 8), 2, -1), call(real(7, 2), 3))
_enter(aten.unbind.int, call(real(3, 4)), call(real(2, 3), -1))
_enter(aten.select.int, call(real(2, 3, 4), 1, 2), call(real(2, 3), -1, -1), call(real(3), 0, 1))
_enter(
    aten.slice.Tensor,
    call(real(5, 6), 0, 1, 3),
    call(real(5, 6), 1, -2, 9223372036854775807),
    call(real(5, 6), -1, None, None, 2),
    call(real(5, 6), 0, 0, 9223372036854775807),
    call(real(5, 6), 1, 2, -1),
)
_enter(aten.narrow.default, call(real(5, 6), 1, 2, 3))
_enter(aten.copy.default, call(real(2, 3), real(2, 3)), call(real(2, 3), real(3)), call(real(2, 3), whole(2, 3)))
_enter(
    aten.slice_scatter.default,
    call(real(5, 6), real(5, 2), 1, 2, 4),
    call(real(5, 6), real(3, 6), 0, 0, 3),
    call(real(4), real(4)),
)
_enter(aten.select_scatter.default, call(real(5, 6), real(5), 1, 2), call(real(5, 6), real(6), 0, -1))
_enter(aten.repeat.default, call(real(2, 3), [2, 2]), call(real(3), [2, 1, 2]))
_enter(aten.repeat_interleave.self_int, call(real(2, 3), 2, 0), call(real(2, 3), 3, -1), call(real(2, 3), 2))
_enter(aten.flip.default, call(real(2, 3, 4), [1]), call(real(2, 3), [0, -1]))
_enter(aten.roll.default, call(real(5, 6), [2], [1]), call(real(5, 6), [1, -2], [0, 1]), call(real(5, 6), [3]))
_enter(aten.constant_pad_nd.default, call(real(2, 3, 4), [1, 2]), call(real(2, 3, 4, 4), [0, 1, 2, 0], 1.5))
_enter(
    aten.pad.default,
    call(real(1, 2, 4, 5), [0, 1, 0, 1]),
    call(real(1, 2, 4, 5), [1, 1, 1, 1], "reflect"),
    call(real(1, 2, 4, 5), [1, 2, 2, 1], "replicate"),
    call(real(1, 2, 4, 5), [1, 2, 3, 0], "circular"),
    call(real(1, 2, 4, 5), [0, 0, 0, 0], "circular"),
    call(real(1, 2, 4), [0, 0]),
)

# -- creation and indexing -------------------------------------------------------------------------

_enter(
    aten.full.default,
    call([2, 3], 1.5),
    call([2], 3),
    call([], 2.5),
    call([2], True),
    call([2, 2], 1, dtype=torch.float32, device=torch.device("cpu")),
)
_enter([aten.zeros.default, aten.ones.default], call([2, 3]), call([4], dtype=torch.int64), call([3], dtype=torch.bool))
_enter(aten.full_like.default, call(real(2, 3), 1.5), call(whole(2), 3))
_enter(aten.fill.Scalar, call(real(2, 3), 1.5))
_enter(aten.fill.Tensor, call(real(2, 3), real()))
_enter([aten.zeros_like.default, aten.ones_like.default], call(real(2, 3)), call(real(2), dtype=torch.int64))
_enter([aten.new_zeros.default, aten.new_ones.default], call(real(2, 3), [4]), call(whole(2), [2, 2]))
_enter(aten.scalar_tensor.default, call(1.5), call(2, dtype=torch.int64))
_enter(aten.arange.default, call(5), call(5, dtype=torch.float32))
_enter(aten.arange.start, call(2, 7), call(0, 4, dtype=torch.float32))
_enter(aten.arange.start_step, call(1, 9, 2), call(0, 2, 0.5), call(9, 1, -3))
_enter(aten.linspace.default, call(0, 1, 5), call(-1.5, 2.5, 8, dtype=torch.float32), call(3, 4, 1), call(0, 63, 64))
_enter(aten.embedding.default, call(real(9, 4), whole(2, 3, low=0, high=9)))
_enter(
    aten.index_select.default,
    call(real(5, 6), 1, whole(3, low=0, high=6)),
    call(real(5, 6), -2, whole(3, low=0, high=5)),
)
_enter(aten.gather.default, call(real(4, 5), 1, whole(4, 2, low=0, high=5)))
_enter(
    aten.index.Tensor,
    call(real(5, 6), [whole(3, low=0, high=5)]),
    call(real(5, 6, 2), [None, whole(2, 2, low=0, high=6)]),
)
_enter(
    aten.meshgrid.indexing, call([real(3), real(4)], indexing="ij"), call([real(2), real(3), real(4)], indexing="ij")
)
_enter([aten.tril.default, aten.triu.default], call(real(4, 5)), call(real(3, 3), 1), call(real(2, 3, 3), -1))


def enter_host_operators() -> None:
    """Operators that are declared by a library of the host's; known once it is imported."""
    import comfy_kitchen  # noqa: F401

    rope, rotations, scale = torch.ops.comfy_kitchen, real(1, 1, 7, 4, 2, 2), real(8)
    _enter(rope.apply_rope1.default, call(real(2, 3, 7, 8), rotations))
    _enter(rope.apply_rope.default, call(real(2, 3, 7, 8), real(2, 3, 7, 8), rotations))
    _enter(rope.rms_rope1.default, call(real(2, 3, 7, 8), rotations, scale))
    _enter(
        rope.rms_rope.default,
        call(real(2, 3, 7, 8), real(2, 3, 7, 8), rotations, scale, real(8), 1e-5),
        call(real(2, 3, 7, 8), real(2, 3, 7, 8), rotations, scale),
    )


def cases() -> Iterator[tuple[str, Callable[..., Any], Case]]:
    """(name, operator, call) of each."""
    enter_host_operators()
    for one, its_cases in CASES.items():
        for number, case in enumerate(its_cases):
            yield f"{one}-{number}", one, case
