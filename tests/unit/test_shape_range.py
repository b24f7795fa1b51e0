"""capture/shape_range.py: a range says exactly which sizes are in it, and folds lose nothing."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from onediff_comfy.capture.call import NotCovered, TensorSpec, split
from onediff_comfy.capture.shape_range import Axis, ShapeRange, batch_tensor, fold, unfold
from onediff_comfy.capture.tracing.example_sizes import (
    first_tensor,
    fold_factors,
    foldable,
    representative,
    symbolic_axes,
)

Shape = tuple[int, ...]


def specs(*shapes: Shape) -> list[TensorSpec]:
    return [TensorSpec(shape, torch.float32, torch.device("cpu")) for shape in shapes]


def one(*axes: Axis, conditions: tuple[str, ...] = (), **limits: tuple[int, int | None]) -> ShapeRange:
    """The range of one tensor; symbols without limits are 1 or more."""
    names = {axis[1] for axis in axes if not isinstance(axis, int)}
    return ShapeRange((axes,), {name: limits.get(name, (1, None)) for name in sorted(names)}, conditions)


S, T = (1, "s"), (1, "t")


@pytest.mark.parametrize(
    ("shapes", "size", "values"),
    [
        (one(2, 4), (2, 4), {}),
        (one(2, 4), (2, 5), None),
        (one(2, 4), (2,), None),
        (one(2, 4), (2, 4, 1), None),
        (one(), (), {}),
        (one(), (1,), None),
        (one(S, 4), (9, 4), {"s": 9}),
        (one(S, 4), (9, 5), None),
        (one(S, T), (9, 5), {"s": 9, "t": 5}),
        (one(S, S), (9, 9), {"s": 9}),
        (one(S, S), (9, 8), None),
        (
            one(
                (4, "s"),
            ),
            (12,),
            {"s": 3},
        ),
        (
            one(
                (4, "s"),
            ),
            (13,),
            None,
        ),
        (
            one(
                (4, "s"),
            ),
            (3,),
            None,
        ),
        (one((4, "s"), (2, "s")), (12, 6), {"s": 3}),
        (one((4, "s"), (2, "s")), (12, 8), None),
        (one(S, (2, "s")), (6, 12), {"s": 6}),
        (one(S, s=(2, 5)), (1,), None),
        (one(S, s=(2, 5)), (2,), {"s": 2}),
        (one(S, s=(2, 5)), (5,), {"s": 5}),
        (one(S, s=(2, 5)), (6,), None),
        (one(S, s=(2, None)), (10**9,), {"s": 10**9}),
        (one((8, "s"), s=(2, None)), (8,), None),
        (one(S, T, conditions=("s < t",)), (1, 2), {"s": 1, "t": 2}),
        (one(S, T, conditions=("s < t",)), (2, 2), None),
        (one(S, T, conditions=("s < t", "(s * t) % 3 == 0")), (2, 3), {"s": 2, "t": 3}),
        (one(S, T, conditions=("s < t", "(s * t) % 3 == 0")), (2, 4), None),
        (one(S, T, conditions=("max(s, t) <= 8 and not s == 3",)), (8, 1), {"s": 8, "t": 1}),
        (one(S, T, conditions=("max(s, t) <= 8 and not s == 3",)), (3, 1), None),
        (one(S, T, conditions=("min(s, t - 1) // 2 != -(-1)",)), (2, 9), None),
        # The condition is of the symbol, not of the size.
        (one((4, "s"), conditions=("s == 3",)), (12,), {"s": 3}),
        # As compilers for GPUs write that sums of sizes fit into 64 bits.
        (one(S, T, conditions=("9223372036854775808 > s + t*s",)), (2, 9), {"s": 2, "t": 9}),
    ],
)
def test_what_is_in_a_range_and_what_its_symbols_stand_for(
    shapes: ShapeRange, size: Shape, values: dict[str, int] | None
) -> None:
    assert shapes.values(specs(size)) == values


def test_a_symbol_has_one_value_in_all_tensors() -> None:
    shapes = ShapeRange(((S, 4), (S,), ((2, "s"), T)), {"s": (1, None), "t": (1, None)})
    assert shapes.values(specs((3, 4), (3,), (6, 1))) == {"s": 3, "t": 1}
    for other in [((3, 4), (2,), (6, 1)), ((3, 4), (3,), (3, 1)), ((3, 4), (3,)), ((3, 4), (3,), (6, 1), (1,)), ()]:
        assert shapes.values(specs(*other)) is None


def test_the_order_of_values_is_that_of_the_axes() -> None:
    """Proofs are kept as lists of values."""
    shapes = ShapeRange(((T, S),), {"s": (1, None), "t": (1, None)})
    assert list((shapes.values(specs((5, 7))) or {}).items()) == [("t", 5), ("s", 7)]


def test_the_exact_range_of_some_sizes_holds_these_alone() -> None:
    exact = ShapeRange.exactly(specs((2, 4), (), (7,)))
    assert exact.values(specs((2, 4), (), (7,))) == {}
    assert exact.values(specs((2, 4), (), (8,))) is None
    assert not exact.general
    assert one(S).general


def test_a_range_for_people() -> None:
    shapes = ShapeRange(((S, 4, (8, "t")), ()), {"s": (1, None), "t": (2, 64)})
    assert str(shapes) == "sx4x8t scalar (s 1+, t 2-64)"
    assert str(ShapeRange.exactly(specs((2, 4)))) == "2x4"


AXES = st.one_of(st.integers(1, 9), st.tuples(st.sampled_from([1, 2, 8]), st.sampled_from("stu")))
CONDITIONS = st.sampled_from(["s != 3", "(s * 2) % 3 == 1", "max(s, 4) // 2 < 3 or s > 9"])


@given(st.lists(st.lists(AXES, max_size=5), max_size=4), st.data())
def test_json_and_back_is_the_same_range(tensors: list[list[Axis]], data: st.DataObject) -> None:
    names = {axis[1] for axes in tensors for axis in axes if not isinstance(axis, int)}
    limit = st.tuples(st.integers(1, 3), st.none() | st.integers(3, 99))
    limits = {name: data.draw(limit) for name in sorted(names)}
    conditions = tuple(data.draw(st.lists(CONDITIONS, max_size=3))) if "s" in names else ()
    shapes = ShapeRange(tuple(map(tuple, tensors)), limits, conditions)
    again = ShapeRange.from_json(json.loads(json.dumps(shapes.to_json())))
    assert again == shapes
    assert repr(again) == repr(shapes), "it is part of a digest"
    for _ in range(3):
        sizes = {name: data.draw(st.integers(1, 12)) for name in sorted(names)}
        shape = [tuple(a if isinstance(a, int) else a[0] * sizes[a[1]] for a in axes) for axes in tensors]
        assert again.values(specs(*shape)) == shapes.values(specs(*shape))


REFUSED = {
    "a call": "print(s)",
    "an import": "__import__('os')",
    "a method": "s.bit_length() > 1",
    "an attribute": "s.real",
    "what a class can reach": "().__class__.__base__.__subclasses__()",
    "a subscript": "[1][0]",
    "a lambda": "(lambda: 1)()",
    "a comprehension": "[1 for i in (1,)]",
    "a generator in max": "max(i for i in (1,))",
    "a conditional": "1 if s else 0",
    "a walrus": "(s := 1)",
    "an f-string": "f'{s}'",
    "a call of a call": "max(1)(2)",
    "a starred call": "max(*s)",
    "an await": "await s",
    "bits": "s & 1",
    "a shift": "s << 9",
    "identity": "s is s",
    "membership": "s in s",
    "a statement": "import os",
    "two statements": "1; 2",
    "nothing": "",
    "half": "(s",
    "a null byte": "s\0",
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_condition_that_is_more_than_arithmetic_is_never_run(text: str) -> None:
    fields = {"axes": [[[1, "s"]]], "limits": {"s": [1, None]}, "conditions": [text]}
    with pytest.raises((NotCovered, ValueError)):
        ShapeRange.from_json(fields)
    with pytest.raises((NotCovered, ValueError)):
        one(S, conditions=(text,)).values(specs((2,)))


@pytest.mark.parametrize("text", ["(" * 500 + "s" + ")" * 500, "-" * 100_000 + "s", "s" + "+s" * 100_000])
def test_a_condition_nested_without_end_is_refused(text: str) -> None:
    """By an exception that loading a graph expects, not by a dead process."""
    with pytest.raises((NotCovered, ValueError, RecursionError, MemoryError)):
        one(S, conditions=(text,)).values(specs((2,)))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"axes": [], "limits": {}},
        {"axes": [["s"]], "limits": {}, "conditions": []},
        {"axes": [[[1]]], "limits": {}, "conditions": []},
        {"axes": [[None]], "limits": {}, "conditions": []},
        {"axes": 3, "limits": {}, "conditions": []},
        {"axes": [], "limits": {"s": [1]}, "conditions": []},
        {"axes": [], "limits": {"s": ["x", 2]}, "conditions": []},
        {"axes": [], "limits": {"s": None}, "conditions": []},
    ],
)
def test_what_is_no_range_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, IndexError)):
        ShapeRange.from_json(fields)


# -- sizes to trace with -----------------------------------------------------------------------

SIDES = st.integers(2, 200)
IMAGES = st.one_of(
    st.tuples(st.integers(1, 4), st.integers(1, 16), SIDES, SIDES),
    st.tuples(st.integers(1, 4), st.integers(1, 16), SIDES).map(lambda s: (*s, s[-1])),
    st.tuples(st.integers(1, 4), st.integers(1, 16), st.integers(1, 9), SIDES, SIDES),
)
OTHERS = st.one_of(
    st.tuples(),
    st.tuples(st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 300)),
    st.tuples(st.integers(1, 4), st.integers(1, 300), st.integers(1, 64)),
    st.tuples(st.integers(1, 4), st.integers(1, 300), st.just(1), st.integers(1, 64)),
)


def is_image(shape: Shape) -> bool:
    return len(shape) >= 4 and min(shape[-2:]) > 1


def goes_with(shape: Shape, first: Shape) -> bool:
    """Whether a tensor is an image that is stretched as the first is."""
    if not is_image(shape):
        return False
    pairs = list(zip(shape[-2:], first[-2:], strict=True))
    is_resized = any(
        all(larger == -(-smaller // by) for larger, smaller in given)
        for by in (1, 2, 4, 8, 16, 32)
        for given in (pairs, [(smaller, larger) for larger, smaller in pairs])
    )
    return shape[1] == first[1] or is_resized


def test_the_image_that_is_made_is_a_forwards_first_argument() -> None:
    """Arguments are in the order of their names, and a prompt's layers may come before the image."""

    def forward(x: list[torch.Tensor], context: torch.Tensor) -> None: ...

    arguments = {"context": torch.ones(1, 2, 16, 64), "x": [torch.ones(1, 16, 8, 8), torch.ones(1, 4, 6, 10)]}
    signature = split(arguments).signature
    first = first_tensor(signature, forward)
    assert first == 1
    assert representative(signature.tensors, None, 2, first) == [(1, 2, 16, 64), (1, 16, 32, 48), (1, 4, 6, 10)]
    assert list(fold_factors(signature.tensors, 2, first)) == [1]
    assert first_tensor(signature, lambda: None) is None


def test_sound_and_a_prompts_layers_keep_their_sizes() -> None:
    """LTX-2 insists on sixteen frequencies, HiDream on a width; a control image and a reference are stretched."""
    video, sound, layers = (1, 128, 13, 16, 24), (1, 8, 126, 16), (1, 32, 128, 4096)
    control, reference = (1, 3, 128, 192), (1, 128, 1, 30, 20)
    given = specs(video, sound, layers, control, reference)
    assert representative(given, None, 2) == [
        (1, 128, 13, 32, 48),
        sound,
        layers,
        (1, 3, 256, 384),
        (1, 128, 1, 60, 40),
    ]
    assert set(fold_factors(given, 2)) == {0, 3, 4}


@given(st.lists(st.one_of(IMAGES, OTHERS), min_size=1, max_size=5), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=400)
def test_representative_sizes_tell_axes_apart_and_keep_what_ties_them(shapes: list[Shape], multiple: int) -> None:
    """``multiple`` is kept where every image has it: a tied image is scaled by the same."""
    batch = batch_tensor(specs(*shapes))
    assume(batch is not None)
    assert batch is not None
    made = representative(specs(*shapes), batch, multiple)
    single = shapes[batch][0] == 1
    first = next(filter(is_image, shapes), ())
    kept = all(size % multiple == 0 for shape in shapes if goes_with(shape, first) for size in shape[-2:])
    for before, after in zip(shapes, made, strict=True):
        assert len(after) == len(before)
        if before:
            assert after[0] == (2 if single and before[0] == 1 else before[0])
        if goes_with(before, first):
            assert after[-2] != after[-1]
            assert min(after[-2:]) >= 32
            assert after[1:-2] == before[1:-2]
            assert not kept or all(size % multiple == 0 for size in after[-2:])
            assert after[-2] % before[-2] == 0
            assert (before[-2] < before[-1]) <= (after[-2] < after[-1])
        else:
            assert after[1:] == before[1:]


@given(
    st.lists(st.tuples(st.integers(1, 32), st.sampled_from([1, 2, 4, 8])), min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from([1, 2, 4]),
)
def test_images_of_one_ratio_stay_tied(scales: list[tuple[int, int]], square: bool, multiple: int) -> None:
    """A control image 8 times as large, a reference at half size: their ratio is what the forward relies on."""
    h, w = 4 * multiple, (4 if square else 6) * multiple
    shapes = [(1, channels, h * factor, w * factor) for channels, factor in scales]
    made = representative(specs(*shapes), 0, multiple)
    for axis in (-2, -1):
        assert len({Fraction(after[axis], before[axis]) for before, after in zip(shapes, made, strict=True)}) == 1


def test_representative_sizes_of_known_calls() -> None:
    """SDXL's latent with an image for its control net, at 8 times its size; and pixels at the deepest level."""
    call = specs((1, 4, 128, 128), (1, 4, 16, 16), (1,), (1, 77, 2048))
    assert representative(call, 0, 8) == [(2, 4, 256, 384), (2, 4, 32, 48), (2,), (2, 77, 2048)]
    assert representative(specs((2, 4, 96, 128)), 0, 8) == [(2, 4, 96, 128)]
    assert representative(specs((2, 4, 32, 32)), 0, 32) == [(2, 4, 32, 64)]
    assert representative(specs((2, 4, 8, 8)), 0, 1) == [(2, 4, 32, 48)]
    assert representative(specs((3, 5)), None) == [(3, 5)]


def test_the_batch_is_the_largest_images_first_axis_or_the_largest_tensors() -> None:
    assert batch_tensor(specs((1, 4096, 4096), (2, 4, 8, 8), (3, 4, 16, 16))) == 2
    assert batch_tensor(specs((1,), (2, 9), (3, 7))) == 2
    assert batch_tensor(specs((), (5,))) == 1
    assert batch_tensor(specs((), ())) is None
    assert batch_tensor([]) is None


# -- folds -------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 3), max_size=3), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.booleans())
def test_folding_and_unfolding_are_inverse_and_copy_nothing(
    lead: list[int], h: int, w: int, factor: int, video: bool
) -> None:
    image = torch.arange(torch.Size([*lead, h * factor, w * factor]).numel()).reshape(*lead, h * factor, w * factor)
    folded = fold(image, factor)
    assert folded.shape == (*lead, h, factor, w, factor)
    assert torch.equal(unfold(folded), image)
    assert folded.data_ptr() == image.data_ptr() == unfold(folded).data_ptr()
    row, column = h * factor - 1, w * factor - 1
    assert torch.equal(
        folded[..., row // factor, row % factor, column // factor, column % factor], image[..., row, column]
    )


@pytest.mark.parametrize(
    ("shape", "factor", "expected"),
    [
        ((1, 4, 16, 16), 8, True),
        ((1, 4, 3, 16, 24), 8, True),
        ((1, 4, 8, 16), 8, False),  # one of them: its symbol would be 1, which reads as broadcasting
        ((1, 4, 16, 8), 8, False),
        ((1, 4, 16, 20), 8, False),
        ((1, 4, 20, 16), 8, False),
        ((4, 16, 16), 8, False),
        ((1, 77, 1, 64), 8, False),
        ((), 2, False),
    ],
)
def test_what_can_be_folded(shape: Shape, factor: int, expected: bool) -> None:
    assert foldable(shape, factor) is expected


@pytest.mark.parametrize(
    ("ndim", "folded", "axes"),
    [
        (0, False, ()),
        (1, False, (0,)),
        (3, False, (0, 1, 2)),
        (4, False, (0, 2, 3)),
        (5, False, (0, 2, 3, 4)),
        (6, True, (0, 2, 4)),
        (7, True, (0, 2, 3, 5)),
    ],
)
def test_which_axes_are_symbols(ndim: int, folded: bool, axes: Shape) -> None:
    assert symbolic_axes(ndim, folded) == axes


def test_rotations_of_tokens_are_no_images() -> None:
    """A transformer's block is given [batch, 1, tokens, pairs, 2, 2]: tokens alone are any number of."""
    given = specs((1, 1, 48, 64, 2, 2), (1, 48, 128))
    assert batch_tensor(given) == 1
    assert representative(given, batch=1, multiple=2) == [(1, 1, 48, 64, 2, 2), (2, 48, 128)]
    assert fold_factors(given, 2) == {}
    assert symbolic_axes(6, folded=False) == (0, 1, 2)
    assert symbolic_axes(6, folded=True) == (0, 2, 4)  # an image whose sides are folded has as many axes
