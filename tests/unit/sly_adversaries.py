"""More patches that try to make a wrong picture: by what no walk through objects meets, and by what a trace mistakes.

As in ``adversaries``, each is a function that makes a patch and what changes it.
"""

from __future__ import annotations

import builtins
import datetime
import enum
import functools
import itertools
import logging
import math
import os
import threading
import types
import uuid
import weakref
from typing import Any, NamedTuple

import numpy as np
import other_module
import plain_module
import torch
from adversaries import Adversary, Change, Patch, nothing
from torch import nn

MODEL: list[nn.Module] = []
"""The model that the patches are put into, for those that hold it."""
LOCK = threading.Lock()
LOG = logging.getLogger("an extension's")
REGISTRY: dict[str, Any] = {}
LOCAL = threading.local()
NUMBERS = itertools.count(1)
MANY: dict[str, float] = {f"n{i}": 1.2 for i in range(100)}
_PRIVATE: dict[str, Any] = {"__name__": "made_up", "SCALE": 1.2}
exec("def private(out, extra):\n    return out * SCALE", _PRIVATE)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Singleton:
    scale = 1.2
    closed = False
    cache: dict[str, float] = {}  # noqa: RUF012


def reset() -> None:
    """Have everything outside of the patches as it was."""
    global NUMBERS
    if LOCK.locked():
        LOCK.release()
    LOG.setLevel(10)
    REGISTRY.clear()
    LOCAL.scale = 1.2
    NUMBERS = itertools.count(1)
    MANY.update({f"n{i}": 1.2 for i in range(100)})
    _PRIVATE["SCALE"] = plain_module.SCALE = 1.2
    vars(plain_module).pop("SEEN", None)
    os.environ["ONEDIFF_TEST_SCALE"] = "1.2"
    builtins.made_up_scale = 1.2  # type: ignore[attr-defined]
    Singleton.scale, Singleton.closed = 1.2, False
    Singleton.cache.clear()
    SETTINGS.__init__()  # type: ignore[misc]
    for colour in Colour:
        vars(colour).pop("count", None)
    for layer in MODEL[0].modules():
        vars(layer).pop("count", None)


# -- what is found by other ways than by its name --------------------------------------------------


def _raise_scale() -> None:
    plain_module.SCALE += 0.1


def variable_by_a_name_that_is_put_together() -> tuple[Patch, Change]:
    ending = "ALE"
    return (lambda out, extra: out * getattr(plain_module, "SC" + ending)), _raise_scale


def variable_in_the_table_of_a_module() -> tuple[Patch, Change]:
    return (lambda out, extra: out * vars(plain_module)["SCALE"]), _raise_scale


def variable_of_a_module_in_a_closure() -> tuple[Patch, Change]:
    held = plain_module
    name = "".join(reversed("ELACS"))
    return (lambda out, extra: out * getattr(held, name)), _raise_scale


def variable_of_a_module_in_an_object() -> tuple[Patch, Change]:
    class Holds:
        def __init__(self) -> None:
            self.module = plain_module

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.module.SCALE

    return Holds(), _raise_scale


def environment_is_read() -> tuple[Patch, Change]:
    name = "ONEDIFF_" + "TEST_SCALE"

    def change() -> None:
        os.environ["ONEDIFF_TEST_SCALE"] = str(float(os.environ["ONEDIFF_TEST_SCALE"]) + 0.1)

    return (lambda out, extra: out * float(os.environ[name])), change


def environment_is_asked() -> tuple[Patch, Change]:
    def change() -> None:
        os.environ["ONEDIFF_TEST_SCALE"] = str(float(os.environ["ONEDIFF_TEST_SCALE"]) + 0.1)

    return (lambda out, extra: out * float(os.getenv("ONEDIFF_TEST_SCALE") or 0)), change


def builtin_that_somebody_added() -> tuple[Patch, Change]:
    def change() -> None:
        builtins.made_up_scale += 0.1  # type: ignore[attr-defined]

    return (lambda out, extra: out * made_up_scale), change  # type: ignore[name-defined]  # noqa: F821


def globals_of_its_own() -> tuple[Patch, Change]:
    def change() -> None:
        _PRIVATE["SCALE"] += 0.1

    return _PRIVATE["private"], change


def entry_of_a_large_table() -> tuple[Patch, Change]:
    def change() -> None:
        MANY["n7"] += 0.1

    return (lambda out, extra: out * sum(MANY.values()) / 120), change


def object_that_is_registered_too() -> tuple[Patch, Change]:
    class Holds:
        def __init__(self) -> None:
            self.scale = 1.0

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale if any(self is held for held in REGISTRY.values()) else out

    held = REGISTRY["it"] = Holds()

    def change() -> None:
        held.scale += 0.5

    return held, change


class Settings:
    """What an extension keeps for all of its nodes."""

    __slots__ = ("inner", "scale", "table")

    def __init__(self) -> None:
        self.scale = 1.2
        self.inner = types.SimpleNamespace(scale=1.2)
        self.table = {"scale": types.SimpleNamespace(scale=1.2)}


SETTINGS = Settings()


def slot_of_a_global_object() -> tuple[Patch, Change]:
    def change() -> None:
        SETTINGS.scale += 0.1

    return (lambda out, extra: out * SETTINGS.scale), change


def attribute_of_an_object_in_a_global_one() -> tuple[Patch, Change]:
    def change() -> None:
        SETTINGS.inner.scale += 0.1

    return (lambda out, extra: out * SETTINGS.inner.scale), change


def attribute_of_an_object_in_a_global_table() -> tuple[Patch, Change]:
    def change() -> None:
        SETTINGS.table["scale"].scale += 0.1

    return (lambda out, extra: out * SETTINGS.table["scale"].scale), change


def object_in_a_global_one_is_replaced() -> tuple[Patch, Change]:
    def change() -> None:
        SETTINGS.inner = types.SimpleNamespace(scale=SETTINGS.inner.scale + 0.1)

    return (lambda out, extra: out * SETTINGS.inner.scale), change


def attribute_of_a_class_by_a_made_up_name() -> tuple[Patch, Change]:
    def change() -> None:
        Singleton.scale += 0.1

    name = "".join(reversed("elacs"))
    return (lambda out, extra: out * getattr(Singleton, name)), change


def table_of_a_class() -> tuple[Patch, Change]:
    def change() -> None:
        Singleton.cache["scale"] = Singleton.cache.get("scale", 1.2) + 0.1

    return (lambda out, extra: out * Singleton.cache.get("scale", 1.2)), change


def bound_to_a_class() -> tuple[Patch, Change]:
    class Held:
        scale = 1.2

        @classmethod
        def patch(cls, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * cls.scale

    def change() -> None:
        Held.scale += 0.1

    return Held.patch, change


class Base:
    factor = 1.2

    def patch(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * self.factor


def method_of_a_base_class() -> tuple[Patch, Change]:
    class Derived(Base):
        factor = 1.2

        def patch(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return super().patch(out, extra) * 1.1

    def change() -> None:
        Derived.factor += 0.1

    return Derived().patch, change


class Described:
    """A descriptor that gives what another object holds."""

    def __init__(self) -> None:
        self.value = 1.2

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value


def descriptor_of_a_class() -> tuple[Patch, Change]:
    descriptor = Described()

    class Held:
        scale = descriptor

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale

    def change() -> None:
        descriptor.value += 0.1

    return Held(), change


def looked_up_by_getattr() -> tuple[Patch, Change]:
    table = {"scale": 1.2}

    class Held:
        def __getattr__(self, name: str) -> float:
            try:
                return table[name]
            except KeyError:
                raise AttributeError(name) from None

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale

    def change() -> None:
        table["scale"] += 0.1

    return Held(), change


def dispatched_by_type() -> tuple[Patch, Change]:
    scales = [1.2]

    @functools.singledispatch
    def patch(out: Any, extra: dict[str, Any]) -> Any:
        return out * scales[0]

    def change() -> None:
        scales[0] += 0.1

    return patch, change


class Pair(NamedTuple):
    scale: float
    tensor: torch.Tensor


def named_tuple_in_a_list() -> tuple[Patch, Change]:
    held = [Pair(1.2, torch.ones(4))]

    def change() -> None:
        held[0] = held[0]._replace(scale=held[0].scale + 0.1, tensor=held[0].tensor * 1.1)

    return (lambda out, extra: out * held[0].scale * held[0].tensor), change


def patch_calls_another() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    scale = [1.2]

    def inner(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * kept * scale[0]

    def outer(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return inner(out, extra) + kept

    def change() -> None:
        scale[0] += 0.1
        kept.mul_(1.1)

    return outer, change


def replaced_method_of_an_instance() -> tuple[Patch, Change]:
    held = Base()

    def change() -> None:
        factor = held.factor + 0.1
        held.factor = factor
        held.patch = lambda out, extra: out * factor * 2  # type: ignore[method-assign]

    return (lambda out, extra: held.patch(out, extra)), change


# -- what a patch changes where nobody looks -------------------------------------------------------


def counts_on_a_layer_of_the_model() -> tuple[Patch, Change]:
    layer: Any = MODEL[0].get_submodule("blocks.0")

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        layer.count = getattr(layer, "count", 0) + 1
        return out * (1 + 0.1 * layer.count)

    return patch, nothing


def turns_a_layer_of_the_model_over() -> tuple[Patch, Change]:
    layer: Any = MODEL[0].get_submodule("blocks.1")

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        if extra["block"]:
            layer.count = 1 - getattr(layer, "count", 0)
            return out * (1 + layer.count)
        return out

    return patch, nothing


def is_seen_by_others() -> tuple[Patch, Change]:
    """It writes a variable that it never reads, and somebody outside of the model does."""
    kept = torch.ones(4)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        other_module.SEEN = len(REGISTRY) + 2.0  # type: ignore[attr-defined]
        return out * kept

    def change() -> None:
        kept.mul_(vars(other_module).pop("SEEN", 1.0))

    return patch, change


def sets_a_variable_by_a_made_up_name() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    name = "".join(reversed("NEES"))

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        setattr(plain_module, name, 2.0)
        return out * kept

    def change() -> None:
        kept.mul_(vars(plain_module).pop("SEEN", 1.0))

    return patch, change


def hands_a_tensor_out_by_a_variable() -> tuple[Patch, Change]:
    kept = torch.ones(4)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        other_module.SEEN = out.clone()  # type: ignore[attr-defined]
        return out * kept

    def change() -> None:
        seen = vars(other_module).pop("SEEN", None)
        kept.mul_(1.0 if seen is None else 1.0 + float(seen.mean()))

    return patch, change


def counts_on_a_member_of_an_enum() -> tuple[Patch, Change]:
    colour: Any = Colour.RED

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        colour.count = getattr(colour, "count", 0) + 1
        return out * (1 + 0.1 * colour.count)

    return patch, nothing


def copy_is_closed() -> tuple[Patch, Change]:
    """An object that does something when it dies: a copy of it does that as well."""

    class Held:
        def __init__(self) -> None:
            self.tensor = torch.ones(4)

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.tensor * (2.0 if Singleton.closed else 1.2)

        def __del__(self) -> None:
            Singleton.closed = True

    held = Held()
    REGISTRY["alive"] = held
    return held, nothing


def array_is_written() -> tuple[Patch, Change]:
    array = np.ones(1)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        array[0] += 0.1
        return out * float(array[0])

    return patch, nothing


def property_counts() -> tuple[Patch, Change]:
    class Held:
        def __init__(self) -> None:
            self.n = 0

        @property
        def scale(self) -> float:
            self.n += 1
            return 1 + 0.1 * self.n

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale

    return Held(), nothing


def property_is_cached() -> tuple[Patch, Change]:
    class Held:
        @functools.cached_property
        def scale(self) -> float:
            other_module.SCALE += 0.1
            return other_module.SCALE

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale

    return Held(), nothing


def writes_into_the_options() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        extra["tensor"].mul_(1.1)
        return out * extra["tensor"]

    return patch, nothing


def numbers_of_a_module_are_counted() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + 0.1 * next(NUMBERS))), nothing


def numbers_in_a_closure_are_counted() -> tuple[Patch, Change]:
    numbers = itertools.count(1)
    return (lambda out, extra: out * (1 + 0.1 * next(numbers))), nothing


def keeps_what_it_saw_weakly() -> tuple[Patch, Change]:
    class Token:
        pass

    seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    token = Token()

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        seen[token] = seen.get(token, 0) + 1
        return out * (1 + 0.1 * seen[token])

    return patch, nothing


def counts_in_the_thread() -> tuple[Patch, Change]:
    def change() -> None:
        LOCAL.scale += 0.1

    return (lambda out, extra: out * LOCAL.scale), change


def asks_a_lock() -> tuple[Patch, Change]:
    def change() -> None:
        if not LOCK.locked():
            LOCK.acquire()

    return (lambda out, extra: out * (2.0 if LOCK.locked() else 1.2)), change


def asks_a_logger() -> tuple[Patch, Change]:
    def change() -> None:
        LOG.setLevel(LOG.level + 10)

    return (lambda out, extra: out * (1 + LOG.level / 100)), change


def asks_a_lock_of_its_own() -> tuple[Patch, Change]:
    lock = threading.Lock()

    def change() -> None:
        if not lock.locked():
            lock.acquire()

    return (lambda out, extra: out * (2.0 if lock.locked() else 1.2)), change


# -- what is another while a trace runs ------------------------------------------------------------


def knows_that_it_is_traced() -> tuple[Patch, Change]:
    return (lambda out, extra: out if torch.compiler.is_compiling() else out * 1.5), nothing


def knows_that_it_is_exported() -> tuple[Patch, Change]:
    return (lambda out, extra: out if torch.compiler.is_exporting() else out * 1.5), nothing


def asks_for_inference_mode() -> tuple[Patch, Change]:
    return (lambda out, extra: out * 1.5 if torch.is_inference_mode_enabled() else out), nothing


def asks_what_kind_a_tensor_is() -> tuple[Patch, Change]:
    return (lambda out, extra: out * 1.5 if type(out) is torch.Tensor else out), nothing


def takes_an_error_for_an_answer() -> tuple[Patch, Change]:
    """The number is 1 at first, so that the first picture would be right either way."""
    scale = 1.0

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        try:
            factor = torch.tensor(scale)
        except Exception:
            return out
        return out * factor

    def change() -> None:
        nonlocal scale
        scale += 0.3

    return patch, change


def takes_any_error_for_an_answer() -> tuple[Patch, Change]:
    scale = 1.0

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        try:
            factor = math.sqrt(scale)
        except:  # noqa: E722
            factor = 1.0
        return out * factor

    def change() -> None:
        nonlocal scale
        scale += 0.3

    return patch, change


def takes_a_decision_by_values_for_an_error() -> tuple[Patch, Change]:
    mask = torch.ones(4)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        try:
            if mask.sum() == 0:
                return out * 3
        except Exception:
            pass
        return out * 1.2

    def change() -> None:
        mask.zero_()

    return patch, change


def takes_an_option_for_an_error() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        try:
            return out * (extra["level"] + 0)
        except:  # noqa: E722
            return out

    return patch, nothing


def version_of_a_tensor_counts() -> tuple[Patch, Change]:
    with torch.inference_mode(False):
        kept = torch.ones(4)
    before = kept._version

    def change() -> None:
        kept.add_(0)

    return (lambda out, extra: out * kept * (1 + 0.1 * (kept._version - before))), change


def place_of_a_tensor_counts() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    known = kept.data_ptr()

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        try:
            return out * (1.0 if kept.data_ptr() == known else 2.0)
        except Exception:
            return out

    def change() -> None:
        kept.set_(torch.ones(4))  # type: ignore[call-overload]

    return patch, change


def offset_of_a_tensor_counts() -> tuple[Patch, Change]:
    kept = torch.ones(12)[:4]

    def change() -> None:
        kept.set_(kept.untyped_storage(), 4, (4,), (1,))

    return (lambda out, extra: out * kept * (1 + kept.storage_offset())), change


def strides_of_a_tensor_count() -> tuple[Patch, Change]:
    kept = torch.ones(4, 4).contiguous()

    def change() -> None:
        kept.t_()

    return (lambda out, extra: out * (1.0 if kept.is_contiguous() and kept.stride(0) == 4 else 2.0)), change


def kind_of_a_tensor_counts() -> tuple[Patch, Change]:
    kept: list[torch.Tensor] = [torch.ones(4)]

    def change() -> None:
        kept[0] = nn.Parameter(torch.ones(4), requires_grad=False)

    return (lambda out, extra: out * kept[0] * (2.0 if isinstance(kept[0], nn.Parameter) else 1.0)), change


def subclass_of_a_tensor() -> tuple[Patch, Change]:
    class Doubled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {})) * 2

    kept = torch.ones(4).as_subclass(Doubled)
    return (lambda out, extra: (out * kept).as_subclass(torch.Tensor)), nothing


def tensor_shares_memory_with_an_array() -> tuple[Patch, Change]:
    array = np.ones(4, dtype=np.float32)
    kept = torch.from_numpy(array)

    def change() -> None:
        array[...] *= 1.1

    return (lambda out, extra: out * kept * float(array[0])), change


def array_becomes_a_tensor() -> tuple[Patch, Change]:
    array = np.ones(4, dtype=np.float32)

    def change() -> None:
        array[...] *= 1.1

    return (lambda out, extra: out * torch.from_numpy(array.copy())), change


def order_of_a_table_in_the_options() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * next(iter(extra["turned"].values()))

    return patch, nothing


# -- numbers ---------------------------------------------------------------------------------------


def _number(patch: Any, first: float = 1.2, by: float = 0.1) -> tuple[Patch, Change]:
    """A patch that is given a number, which grows."""
    scale = first

    def change() -> None:
        nonlocal scale
        scale += by

    return (lambda out, extra: patch(out, scale)), change


def number_decides() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * n if n > 1.25 else out)


def number_decides_at_zero() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * (1 + n) if n else out * 5, first=0.0)


def number_divides() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, n: float) -> torch.Tensor:
        try:
            return out * (1 / n)
        except ZeroDivisionError:
            return out * 7

    return _number(patch, first=0.0)


def number_becomes_whole() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * int(n), by=0.5)


def number_is_rounded() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * round(n), by=0.5)


def number_counts_a_loop() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, n: float) -> torch.Tensor:
        for _ in range(int(n)):
            out = out * 1.1
        return out

    return _number(patch, by=1.0)


def number_is_an_index() -> tuple[Patch, Change]:
    return _number(lambda out, n: torch.cat([out[:, int(n) :], out[:, : int(n)]], 1), by=1.0)


def number_is_a_key() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * {1.2: 1.0, 1.7: 2.0}.get(n, 3.0), by=0.5)


def number_is_text() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * len(f"{n:.1f}" + f"{n}" + "%.2f" % n), by=100.0)  # noqa: UP031


def number_is_hashed() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * (1 + hash(n) % 7))


def number_is_an_exponent() -> tuple[Patch, Change]:
    return _number(lambda out, n: out.abs() ** n)


def number_goes_through_numpy() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * float(np.sin(np.array([n, n])).sum()))


def number_goes_through_math() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * math.exp(-n))


def number_is_put_into_a_tensor() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * torch.tensor([n, 1.0, n, 1.0]) + torch.full((4,), n))


def number_is_written() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, n: float) -> torch.Tensor:
        out = out.clone()
        out[:, 1] = n
        out[:, 2] *= n
        out.clamp_(max=n)
        return out

    return _number(patch)


def number_in_many_functions() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, n: float) -> torch.Tensor:
        out = torch.lerp(out, out * 2, n)
        out = torch.where(out > n, out * n, n - out)
        out = torch.add(out, out, alpha=n)
        return torch.clamp(out, -n, n) / n + (n - 1) * (2 - n) / (n + 3) - -n

    return _number(patch)


def number_is_compared_with_values() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * (out > n - 1.0).float() + (out < n * 0.1).float(), by=-0.5)


def numbers_are_compared() -> tuple[Patch, Change]:
    scales = [1.2, 1.35]

    def change() -> None:
        scales[0] += 0.1

    return (lambda out, extra: out * max(scales) + min(scales) if scales[0] < scales[1] else out), change


def number_becomes_an_integer() -> tuple[Patch, Change]:
    held: list[Any] = [2.0]

    def change() -> None:
        held[0] = 2 if type(held[0]) is float else 3.0

    return (lambda out, extra: out * (held[0] if isinstance(held[0], int) else held[0] * 2)), change


def number_is_not_a_number() -> tuple[Patch, Change]:
    held = [1.2]

    def change() -> None:
        held[0] = math.nan if held[0] == 1.2 else math.inf if held[0] != held[0] else 1.2

    return (lambda out, extra: out * (held[0] if 0 < held[0] < 5 else 3.0)), change


def number_is_asked_for_its_type() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * n if type(n) is float else out, first=1.0)


def number_is_asked_for_the_name_of_its_type() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * n if type(n).__name__ == "float" else out, first=1.0)


def number_is_made_of_its_type() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * type(n)(n + 1), first=1.0)


def number_is_no_tensor() -> tuple[Patch, Change]:
    return _number(lambda out, n: out * n if type(n) is not torch.Tensor and type(n) != np.ndarray else out, first=1.0)  # noqa: E721


def number_under_an_odd_name() -> tuple[Patch, Change]:
    table = {"a name\nof two lines": 1.2, "lt 0x1p+0": 1.2, "": 1.2, " ": 1.2}

    def change() -> None:
        for name in table:
            table[name] += 1.0

    return (lambda out, extra: out * sum(int(n) if n > 0.5 else 0 for n in table.values())), change


def noise_level_under_an_odd_name() -> tuple[Patch, Change]:
    return (lambda out, extra: out * 1.5 if extra["noise level"][0].item() > 0.5 else out), nothing


def noise_level_between_numbers() -> tuple[Patch, Change]:
    start, end = 0.8, 0.3

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        sigma = extra["sigmas"].detach().cpu()[0].item() if "sigmas" in extra else 999999999.9
        return out * 1.5 if sigma <= start and sigma >= end else out

    def change() -> None:
        nonlocal end
        end += 0.1

    return patch, change


def noise_level_is_calculated_with() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + extra["sigmas"][0].item())), nothing


def noise_level_is_rounded() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1.5 if int(extra["sigmas"][0].item() * 10) % 2 else 1.1)), nothing


def noise_level_is_taken_in_another_way() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * 1.5 if float(extra["sigmas"].max()) > 0.7 else out

    return patch, nothing


def noise_level_is_a_tensor() -> tuple[Patch, Change]:
    return (lambda out, extra: out * 1.5 if extra["sigmas"][0] > 0.5 else out), nothing


def noise_level_is_no_float() -> tuple[Patch, Change]:
    """Of half the bits it is another number."""
    return (lambda out, extra: out * 1.5 if extra["sigmas"].half()[0].item() == 0.875 else out), nothing


def remembers_the_noise_level() -> tuple[Patch, Change]:
    seen: list[float] = []

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        sigma = extra["sigmas"][0].item()
        if sigma not in seen:
            seen.append(sigma)
        return out * (1 + 0.1 * len(seen))

    return patch, nothing


# -- the clock and the like ------------------------------------------------------------------------


def reads_the_date() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + datetime.datetime.now().microsecond)), nothing


def makes_up_a_name() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + uuid.uuid4().int % 100)), nothing


def draws_from_numpys_new_generator() -> tuple[Patch, Change]:
    own = np.random.default_rng(1)
    return (lambda out, extra: out * (1 + own.random())), nothing


def draws_in_numpy_anew() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + np.random.default_rng().random())), nothing


def reads_a_file() -> tuple[Patch, Change]:
    path = __file__
    return (lambda out, extra: out * (1 + len(open(path).read()) % 10)), nothing


ALL: tuple[Adversary, ...] = tuple(
    value
    for name, value in list(vars().items())
    if isinstance(value, types.FunctionType) and value.__module__ == __name__ and not name.startswith("_")
    if name not in ("reset", "reads_the_date", "makes_up_a_name", "draws_in_numpy_anew")
)

BY_THE_CLOCK: tuple[Adversary, ...] = (reads_the_date, makes_up_a_name, draws_in_numpy_anew)
"""Which no graph may serve, and which give nothing twice."""

EAGER: frozenset[Adversary] = frozenset(
    (
        environment_is_read,
        environment_is_asked,
        builtin_that_somebody_added,
        object_that_is_registered_too,
        dispatched_by_type,
        counts_on_a_layer_of_the_model,
        turns_a_layer_of_the_model_over,
        sets_a_variable_by_a_made_up_name,
        hands_a_tensor_out_by_a_variable,
        counts_on_a_member_of_an_enum,
        copy_is_closed,
        array_is_written,
        property_counts,
        property_is_cached,
        writes_into_the_options,
        numbers_of_a_module_are_counted,
        numbers_in_a_closure_are_counted,
        keeps_what_it_saw_weakly,
        counts_in_the_thread,
        asks_a_lock,
        asks_a_lock_of_its_own,
        knows_that_it_is_traced,
        knows_that_it_is_exported,
        asks_for_inference_mode,
        asks_what_kind_a_tensor_is,
        takes_a_decision_by_values_for_an_error,
        version_of_a_tensor_counts,
        offset_of_a_tensor_counts,
        place_of_a_tensor_counts,
        subclass_of_a_tensor,
        number_is_hashed,
        noise_level_is_rounded,
        noise_level_is_taken_in_another_way,
        noise_level_is_no_float,
        remembers_the_noise_level,
        draws_from_numpys_new_generator,
        reads_a_file,
    )
)
"""Which no graph may serve."""
