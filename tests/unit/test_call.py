"""capture/call.py: a call is split into structure and tensors, and nothing is lost or confused."""

from __future__ import annotations

import gc
import inspect
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onediff_comfy.capture.call import NotCovered, Signature, TensorSpec, bind, split
from onediff_comfy.capture.parameters import parameters_of

OPTIONS = "transformer_options"


def signature(**arguments: Any) -> Signature:
    return split(arguments).signature


# -- bind --------------------------------------------------------------------------------------


def family(x: Any, timestep: Any, context: Any = None, *, scale: float = 1.0, **kwargs: Any) -> None:
    """A forward as the host's model families write them."""


def test_bind_gives_positions_names_and_defaults_one_form() -> None:
    expected = {"x": 1, "timestep": 2, "context": None, "scale": 1.0}
    assert bind(family, (1, 2), {}) == expected
    assert bind(family, (1,), {"timestep": 2}) == expected
    assert bind(family, (), {"timestep": 2, "x": 1, "context": None}) == expected


def test_bind_flattens_keyword_extras() -> None:
    assert bind(family, (1, 2, 3), {"y": 4, "control": 5}) == {
        "x": 1,
        "timestep": 2,
        "context": 3,
        "scale": 1.0,
        "y": 4,
        "control": 5,
    }


def test_bind_remembers_forms_of_calls_and_no_values() -> None:
    """Extras may be called anything, in any order; what is remembered of a function is bounded."""

    def open_to_all(x: Any, scale: Any = 1.0, **kwargs: Any) -> None: ...

    for number in range(100):
        bound = bind(open_to_all, (number,), {f"extra{number}": -number})
        assert bound == {"x": number, "scale": 1.0, f"extra{number}": -number}
    for named in ({"b": 3, "a": 4}, {"a": 5, "b": 6}):
        assert list(bind(open_to_all, (1,), named).items()) == [("x", 1), ("scale", 1.0), *named.items()]
    assert parameters_of(open_to_all) is parameters_of(open_to_all)
    assert len(parameters_of(open_to_all).places) <= 64


def test_bind_follows_names_where_families_order_parameters_differently() -> None:
    def other(context: Any, x: Any, timestep: Any) -> None: ...

    assert bind(other, (3, 1, 2), {}) == {"x": 1, "timestep": 2, "context": 3}


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1,), {}), ((1, 2, 3, 4), {}), ((1, 2), {"x": 3}), ((), {})],
    ids=["missing", "too many", "twice", "none"],
)
def test_bind_refuses_arguments_that_do_not_fit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(NotCovered, match="do not fit"):
        bind(family, args, kwargs)


def test_bind_refuses_what_has_no_name() -> None:
    def variadic(*tensors: Any) -> None: ...

    def positional(x: Any, /) -> None: ...

    for function in (variadic, positional):
        with pytest.raises(NotCovered, match="positional-only"):
            bind(function, (1,), {})


# -- split and rebuild -------------------------------------------------------------------------

TENSORS = [
    torch.arange(6.0).reshape(2, 3),
    torch.arange(6.0).reshape(2, 3).T,
    torch.arange(24, dtype=torch.float16).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0, 3),
    torch.tensor([True, False]),
    torch.nn.Parameter(torch.ones(2)),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
DEVICES = [torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda"), torch.device("meta")]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.just(-0.0),
    st.text(),
    st.sampled_from(DTYPES),
    st.sampled_from(DEVICES),
    st.sampled_from(TENSORS),
)
PLAIN_KEYS = st.one_of(st.text(max_size=4), st.integers(), st.none())
KEYS = st.one_of(PLAIN_KEYS, st.tuples(st.text(max_size=4), st.integers()))
TREES = st.recursive(
    LEAVES,
    lambda children: st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(KEYS, children, max_size=4),
    ),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(st.text(min_size=1, max_size=6), TREES, max_size=4)


def same(left: Any, right: Any) -> bool:
    """Equality that tells types, signs of zero and NaN apart, and looks into tensors."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        if math.isnan(left) or math.isnan(right):
            return math.isnan(left) and math.isnan(right)
        return left == right and math.copysign(1, left) == math.copysign(1, right)
    return bool(left == right)


@given(ARGUMENTS)
@settings(max_examples=200, deadline=None)
def test_rebuild_gives_back_what_was_split(arguments: dict[str, Any]) -> None:
    call = split(arguments)
    assert same(call.rebuild(call.tensors), arguments)


@given(ARGUMENTS)
@settings(max_examples=100, deadline=None)
def test_split_is_a_function_of_the_call_alone(arguments: dict[str, Any]) -> None:
    """Neither the order of arguments, nor identities of objects, nor a second look changes the signature."""
    first = split(arguments).signature
    second = split(dict(reversed(arguments.items()))).signature
    assert first == second
    assert hash(first) == hash(second)
    assert first.lines() == second.lines()


def test_rebuild_puts_the_given_tensors_where_the_old_ones_were() -> None:
    call = split({"b": [torch.zeros(2), {"k": torch.ones(2)}], "a": torch.full((2,), 2.0)})
    one, two, three = torch.rand(2), torch.rand(2), torch.rand(2)
    assert [tensor[0].item() for tensor in call.tensors] == [2.0, 0.0, 1.0]
    rebuilt = call.rebuild([one, two, three])
    assert rebuilt["a"] is one
    assert rebuilt["b"][0] is two
    assert rebuilt["b"][1]["k"] is three


def test_rebuilt_containers_are_new_so_that_a_forward_cannot_write_into_the_callers() -> None:
    inner: dict[str, Any] = {"list": [1]}
    call = split({"x": inner})
    call.rebuild(())["x"]["list"].append(2)
    assert inner == {"list": [1]}
    assert call.rebuild(())["x"] == {"list": [1]}


DISTINCT = [
    None,
    True,
    False,
    1,
    0,
    -1,
    1.0,
    0.0,
    -0.0,
    math.nan,
    math.inf,
    -math.inf,
    0.1,
    math.nextafter(0.1, 1),
    "",
    "1",
    "True",
    "None",
    "cpu",
    "torch.float32",
    torch.float32,
    torch.float16,
    torch.device("cpu"),
    torch.device("cuda", 0),
    torch.device("cuda", 1),
    [],
    (),
    {},
    [1],
    (1,),
    [[1], 2],
    [1, [2]],
    [1, 2],
    {"1": 1},
    {1: 1},
    {"a": None},
    {None: 1},
    {(1, 2): 1},
    {("1", 2): 1},
]


def test_values_that_python_calls_equal_give_different_signatures() -> None:
    """1, 1.0 and True; 0.0 and -0.0; a list and a tuple; a text and what it spells."""
    signatures = [signature(x=value) for value in DISTINCT]
    assert len(set(signatures)) == len(DISTINCT)
    assert len({"\n".join(each.lines()) for each in signatures}) == len(DISTINCT)


def test_an_argument_that_is_none_differs_from_one_that_is_absent_and_from_a_tensor() -> None:
    x = torch.zeros(1, 2)
    given_values: list[dict[str, Any]] = [{"x": x}, {"x": x, "y": None}, {"x": x, "y": x}]
    assert len({signature(**arguments) for arguments in given_values}) == 3


def test_the_name_of_an_argument_counts() -> None:
    assert signature(a=torch.zeros(2)) != signature(b=torch.zeros(2))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 4, 8),
        torch.zeros(1, 5, 8),
        torch.zeros(1, 4, 9),
        torch.zeros(4, 8),
        torch.zeros(1, 4, 8, 1),
        torch.zeros(1, 4, 8, dtype=torch.float16),
        torch.zeros(1, 4, 8, device="meta"),
    ],
    ids=["batch", "middle", "last", "fewer", "more", "dtype", "device"],
)
def test_every_size_and_the_dtype_and_the_device_of_a_tensor_count(other: torch.Tensor) -> None:
    base, changed = signature(x=torch.zeros(1, 4, 8)), signature(x=other)
    assert base != changed
    assert base.lines() != changed.lines()


def test_the_values_of_a_tensor_do_not_count() -> None:
    assert signature(x=torch.zeros(2)) == signature(x=torch.ones(2))


def test_which_argument_has_which_size_counts() -> None:
    small, large = torch.zeros(1), torch.zeros(2)
    assert signature(a=small, b=large) != signature(a=large, b=small)


def test_tensors_become_contiguous_without_grad_and_keep_their_values() -> None:
    for tensor in TENSORS:
        call = split({"x": tensor})
        assert call.tensors[0].is_contiguous()
        assert not call.tensors[0].requires_grad
        assert torch.equal(call.tensors[0], tensor)
    assert signature(x=torch.zeros(3, 2).T) == signature(x=torch.zeros(2, 3))


def test_a_tensor_that_is_contiguous_already_is_not_copied() -> None:
    tensor = torch.rand(3)
    assert split({"x": tensor}).tensors[0].data_ptr() == tensor.data_ptr()


def test_tensor_spec_reads_like_a_tensor() -> None:
    assert str(TensorSpec((2, 4), torch.float16, torch.device("cpu"))) == "float16[2x4]@cpu"
    assert str(TensorSpec((), torch.float32, torch.device("cpu"))) == "float32[scalar]@cpu"


# -- what no graph can take --------------------------------------------------------------------


class TensorSubclass(torch.Tensor):
    pass


class DictSubclass(dict[str, Any]):
    pass


class StrSubclass(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (object(), "object"),
        (lambda: None, "function"),
        (len, "builtin_function_or_method"),
        (int, "type"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (1j, "complex"),
        (torch.nn.Identity(), "Identity"),
        (torch.zeros(2).as_subclass(TensorSubclass), "TensorSubclass"),
        (DictSubclass(), "DictSubclass"),
        (StrSubclass("x"), "StrSubclass"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({1.5: 1}, "float"),
        ({True: 1}, "bool"),  # Python calls it equal to the key 1
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_what_is_neither_plain_data_nor_a_tensor_is_refused_with_its_path(value: Any, named: str) -> None:
    with pytest.raises(NotCovered, match=named) as refusal:
        split({"context": {"list": [0, value]}})
    assert "context.list[1]" in refusal.value.reason


def test_a_refusal_holds_no_address() -> None:
    """Reasons are counted, so two objects of a kind must give one reason."""
    reasons = set()
    for _ in range(2):
        with pytest.raises(NotCovered) as refusal:
            split({"x": object()})
        reasons.add(refusal.value.reason)
    assert len(reasons) == 1


# -- options -----------------------------------------------------------------------------------


def with_options(options: dict[str, Any], read: tuple[str, ...] = ()) -> Signature:
    return split({"x": torch.zeros(1), OPTIONS: options}, options_name=OPTIONS, options_read=read).signature


def test_of_an_option_that_is_not_read_only_the_name_counts() -> None:
    assert with_options({"a": 1, "b": object()}) == with_options({"a": 2, "b": lambda: None})
    assert with_options({"a": 1}) != with_options({"b": 1})
    assert with_options({"a": 1}) != with_options({})
    assert with_options({"a": 1}).lines() != with_options({"b": 1}).lines()


def test_whether_an_option_is_none_counts_even_if_it_is_not_read() -> None:
    assert with_options({"a": None}) != with_options({"a": 1})
    assert with_options({"a": None}).lines() != with_options({"a": 1}).lines()


def test_the_value_of_an_option_that_is_read_counts() -> None:
    one, two = with_options({"a": 1}, ("a",)), with_options({"a": 2}, ("a",))
    assert one != two
    assert one.lines() != two.lines()
    assert with_options({"a": 1, "b": 1}, ("a",)) == with_options({"a": 1, "b": 2}, ("a",))


def test_a_tensor_in_an_option_that_is_read_becomes_an_input() -> None:
    call = split({OPTIONS: {"sigmas": torch.ones(3)}}, options_name=OPTIONS, options_read=("sigmas",))
    assert [tuple(spec.shape) for spec in call.signature.tensors] == [(3,)]
    assert set(call.rebuild(call.tensors)[OPTIONS]) == {"sigmas"}


def test_an_option_that_is_read_but_absent_is_no_error() -> None:
    assert with_options({}, ("a",)) == with_options({})
    assert with_options({}, ("a",)) != with_options({"a": None}, ("a",))


def test_an_option_that_is_read_and_cannot_be_a_graphs_input_is_refused() -> None:
    with pytest.raises(NotCovered, match=r"transformer_options\.patch.*function"):
        with_options({"patch": lambda: None}, ("patch",))


@given(st.permutations(["a", "b", "c", "d"]), st.permutations(["a", "c"]))
def test_the_order_of_options_does_not_matter(order: list[str], read: list[str]) -> None:
    values = {"a": 1, "b": object(), "c": {"x": 1, "y": 2}, "d": None}
    assert with_options({name: values[name] for name in order}, tuple(read)) == with_options(values, ("c", "a"))


def test_the_order_of_arguments_does_not_matter_and_that_of_keys_does() -> None:
    one, two = torch.zeros(1), torch.zeros(2)
    assert signature(a=one, b={"x": one, "y": two}) == signature(b={"x": one, "y": two}, a=one)
    assert signature(a=one, b={"x": one, "y": two}) != signature(b={"y": two, "x": one}, a=one)
    backwards = split({"a": {"y": one, "x": two}})
    assert list(backwards.rebuild(backwards.tensors)["a"]) == ["y", "x"]


def test_the_options_themselves_are_left_alone() -> None:
    options = {"a": [1], "b": torch.zeros(1)}
    before = dict(options)
    split({OPTIONS: options}, options_name=OPTIONS, options_read=("a", "b"))
    assert options.keys() == before.keys()
    assert all(options[name] is before[name] for name in options)


def test_options_that_are_none_are_a_call_like_any_other() -> None:
    none = split({"x": torch.zeros(1), OPTIONS: None}, options_name=OPTIONS)
    assert none.rebuild(none.tensors)[OPTIONS] is None
    assert none.signature != with_options({})


class Owner:
    def method(self, x: int, y: Any = 1) -> None:
        """A forward with a default."""


def test_what_was_read_of_a_function_holds_while_its_code_and_defaults_do(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner()
    assert bind(owner.method, (0,), {}) == {"x": 0, "y": 1}
    monkeypatch.setattr(Owner.method, "__defaults__", (1.0,))  # equal, and of another type
    assert type(bind(owner.method, (0,), {})["y"]) is float
    monkeypatch.setattr(Owner.method, "__code__", (lambda self, other, y=1: None).__code__)
    assert bind(owner.method, (0,), {}) == {"other": 0, "y": 1.0}
    monkeypatch.setattr(Owner.method, "__kwdefaults__", {"y": 3})
    assert bind(owner.method, (0,), {})["other"] == 0
    monkeypatch.setattr(Owner.method, "__signature__", inspect.signature(lambda self, own: None), raising=False)
    assert bind(owner.method, (0,), {}) == {"own": 0}


def test_functions_of_one_code_are_told_apart_by_their_defaults_and_none_is_kept() -> None:
    def made(value: object, closure: object) -> Any:
        def function(x: int, y: object = value) -> object:
            return closure

        return function

    held = [Owner(), Owner()]
    alive = [weakref.ref(each) for each in held]
    functions = [made(index, each) for index, each in enumerate(held)]
    assert [bind(function, (0,), {})["y"] for function in (*functions, *functions)] == [0, 1, 0, 1]
    del functions[:], held[:]
    gc.collect()
    assert [each() for each in alive] == [None, None]
