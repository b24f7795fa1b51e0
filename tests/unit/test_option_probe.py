"""capture/option_probe.py: a stand-in may be carried around; using it in any way names the option."""

from __future__ import annotations

import copy
import json
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onediff_comfy.capture.option_probe import OptionProbe, OptionRead

X = torch.zeros(2, 2)

USES: dict[str, Callable[[Any], Any]] = {
    "truth": lambda w: bool(w),
    "if": lambda w: 1 if w else 2,
    "not": lambda w: not w,
    "and": lambda w: w and 1,
    "iteration": lambda w: list(iter(w)),
    "for": lambda w: [item for item in w],  # noqa: C416
    "star": lambda w: [*w],
    "double star": lambda w: dict(**w),
    "unpacking": lambda w: (lambda a, b: a)(*w),
    "next": lambda w: next(w),
    "reversed": lambda w: reversed(w),
    "sorted": lambda w: sorted([w, 1]),
    "len": lambda w: len(w),
    "in it": lambda w: 1 in w,
    "it in a list": lambda w: w in [1],
    "item": lambda w: w["a"],
    "slice": lambda w: w[1:],
    "set item": lambda w: operator.setitem(w, 0, 1),
    "delete item": lambda w: operator.delitem(w, 0),
    "as an index": lambda w: [1, 2][w],
    "as a key": lambda w: {1: 2}.get(w),
    "in a set": lambda w: {w},
    "attribute": lambda w: w.shape,
    "method": lambda w: w.get("a"),
    "hasattr": lambda w: hasattr(w, "a"),
    "getattr with default": lambda w: getattr(w, "a", None),
    "set attribute": lambda w: setattr(w, "a", 1),
    "delete attribute": lambda w: delattr(w, "a"),
    "vars": lambda w: vars(w),
    "dir": lambda w: dir(w),
    "class": lambda w: w.__class__,
    "call": lambda w: w(1),
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "sub": lambda w: w - 1,
    "rsub": lambda w: 1 - w,
    "mul": lambda w: w * 2,
    "rmul": lambda w: 2.0 * w,
    "truediv": lambda w: w / 2,
    "rtruediv": lambda w: 2 / w,
    "floordiv": lambda w: w // 2,
    "mod": lambda w: w % 2,
    "divmod": lambda w: divmod(w, 2),
    "pow": lambda w: w**2,
    "rpow": lambda w: 2**w,
    "matmul": lambda w: w @ w,
    "iadd": lambda w: operator.iadd(w, 1),
    "neg": lambda w: -w,
    "pos": lambda w: +w,
    "abs": lambda w: abs(w),
    "invert": lambda w: ~w,
    "bit or": lambda w: w | {},
    "bit and": lambda w: w & 1,
    "shift": lambda w: w << 1,
    "round": lambda w: round(w),
    "floor": lambda w: math.floor(w),
    "ceil": lambda w: math.ceil(w),
    "trunc": lambda w: math.trunc(w),
    "sqrt": lambda w: math.sqrt(w),
    "equal": lambda w: w == 1,
    "not equal": lambda w: w != 1,
    "less": lambda w: w < 1,
    "greater or equal": lambda w: w >= 1,
    "equal to a list with it": lambda w: [w] == [1],
    "max": lambda w: max(w, 1),
    "hash": lambda w: hash(w),
    "isinstance": lambda w: isinstance(w, (int, str)),
    "isinstance of dict": lambda w: isinstance(w, dict),
    "is a tensor": lambda w: torch.is_tensor(w),
    "int": lambda w: int(w),
    "float": lambda w: float(w),
    "complex": lambda w: complex(w),
    "index": lambda w: range(w),
    "str": lambda w: str(w),
    "repr": lambda w: repr(w),
    "bytes": lambda w: bytes(w),
    "f-string": lambda w: f"{w}",
    "percent": lambda w: "%s" % w,  # noqa: UP031
    "with": lambda w: w.__enter__(),
    "json": lambda w: json.dumps(w),
    "pickle": lambda w: pickle.dumps(w),
    "torch add": lambda w: torch.add(X, w),
    "torch add, first": lambda w: torch.add(w, X),
    "torch keyword": lambda w: torch.add(X, X, alpha=w),
    "torch out": lambda w: torch.add(X, X, out=w),
    "torch cat": lambda w: torch.cat([X, w]),
    "torch stack": lambda w: torch.stack((w, w)),
    "torch where": lambda w: torch.where(X > 0, X, w),
    "torch full": lambda w: torch.full((2,), w),
    "torch zeros": lambda w: torch.zeros(2, w),
    "torch device": lambda w: torch.zeros(2, device=w),
    "torch tensor": lambda w: torch.tensor([w]),
    "functional": lambda w: torch.nn.functional.interpolate(X[None, None], scale_factor=w),
    "einsum": lambda w: torch.einsum("ij,jk->ik", X, w),
    "linear": lambda w: torch.nn.functional.linear(X, w),
    "attention": lambda w: torch.nn.functional.scaled_dot_product_attention(X, X, X, attn_mask=w),
    "tensor times": lambda w: X * w,
    "times tensor": lambda w: w * X,
    "tensor method": lambda w: X.to(w),
    "tensor view": lambda w: X.view(w, 2),
    "tensor index": lambda w: X[w],
    "tensor index in a tuple": lambda w: X[:, w],
    "tensor set item": lambda w: operator.setitem(X, 0, w),
}


@pytest.mark.parametrize("use", USES)
def test_every_use_names_the_option(use: str) -> None:
    with pytest.raises(OptionRead) as read:
        USES[use](OptionProbe("cond_or_uncond"))
    assert read.value.name == "cond_or_uncond"


# Object's own protocol: reached through __getattribute__ (which raises), or not a use of the value.
_NOT_A_USE = {
    *("__class__", "__doc__", "__init__", "__new__", "__init_subclass__", "__subclasshook__", "__class_getitem__"),
    *("__getattribute__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__"),
    *("__sizeof__", "__dir__", "__dict__", "__weakref__", "__module__", "__name__", "__qualname__"),
    *("__getformat__", "__setformat__"),  # of float, the latter before Python 3.11
    *("__annotations__", "__builtins__", "__closure__", "__code__", "__defaults__", "__globals__", "__kwdefaults__"),
    *("__type_params__", "__get__", "__text_signature__", "__self__", "__annotate__", "__getnewargs_ex__"),
    *("__deepcopy__", "__copy__", "__torch_dispatch__", "__torch_function__", "__cuda_array_interface__"),
    *(
        "__array__",
        "__array_wrap__",
        "__array_priority__",
        "__dlpack__",
        "__dlpack_device__",
        "__dlpack_c_exchange_api__",
    ),
    *("__rdiv__", "__div__", "__idiv__", "__nonzero__", "__long__", "__buffer__", "__release_buffer__", "__replace__"),
    "__signature__",
}


@pytest.mark.parametrize(
    "kind",
    [bool, int, float, complex, str, bytes, list, tuple, dict, set, range, type(lambda: 0), torch.Tensor],
    ids=lambda kind: kind.__name__,
)
def test_no_special_method_of_a_real_value_is_forgotten(kind: type) -> None:
    special = {name for name in dir(kind) if name.startswith("__") and name.endswith("__")} - _NOT_A_USE
    special = {name for name in special if callable(getattr(kind, name))}
    assert special - set(vars(OptionProbe)) == set()


def test_except_exception_does_not_hide_a_read() -> None:
    """Models wrap whole blocks in ``try``."""
    assert not issubclass(OptionRead, Exception)


def test_carrying_a_stand_in_around_is_no_use() -> None:
    """What models do with options they never look into: store, pass on, copy the bag."""
    stand_in = OptionProbe("a")
    bag = {"a": stand_in}
    copies = [bag.copy(), dict(bag), dict(**bag), {**bag}, bag | {}, copy.copy(bag), copy.deepcopy(bag)]
    assert all(other["a"] is stand_in for other in copies)
    assert copy.copy(stand_in) is stand_in
    assert copy.deepcopy([stand_in, {"b": stand_in}])[1]["b"] is stand_in
    assert [stand_in, *(stand_in,)][1] is stand_in
    assert bag.get("a") is stand_in
    assert bag.pop("a") is stand_in
    assert (lambda *args, **kwargs: kwargs["k"])(stand_in, k=stand_in) is stand_in


def test_is_none_is_answered_without_a_read() -> None:
    """Rightly so: an option that is None is never probed."""
    assert OptionProbe("a") is not None


@pytest.mark.xfail(strict=True, reason="hole: callable() answers True of every stand-in; `is True` answers False")
@pytest.mark.parametrize("use", [callable, lambda w: w is True], ids=["callable", "is True"])
def test_uses_that_python_lets_nobody_see(use: Callable[[Any], Any]) -> None:
    with pytest.raises(OptionRead):
        use(OptionProbe("a"))
