"""Patches that try to make a wrong picture: each changes what it reads, or lets somebody else change it.

Each is a function that makes a patch and what changes it: called between calls, and before the second run.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import random
import time
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import other_module
import torch
from torch import nn

Patch = Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]
Change = Callable[[], object]
Adversary = Callable[[], tuple[Patch, Change]]

COUNT = 0
NOTES: dict[str, float] = {"n": 0.0}
SEEN: list[float] = []
SCALE = 1.2
TENSOR = torch.tensor(1.2)
CONTEXT = contextvars.ContextVar("scale", default=1.2)
ARRAY = np.array([1.2])
_CACHE: dict[int, torch.Tensor] = {}


def reset() -> None:
    """Have everything outside of the patches as it was."""
    global COUNT, SCALE, TENSOR
    COUNT, SCALE, TENSOR = 0, 1.2, torch.tensor(1.2)
    NOTES.clear()
    NOTES["n"] = 0.0
    SEEN.clear()
    _CACHE.clear()
    ARRAY[0] = 1.2
    CONTEXT.set(1.2)
    other_module.reset()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    for kind in (OfClass, WithProperty, Slotted):
        kind.reset()
    global_attribute.__dict__.clear()
    default_grows.__defaults__[0].clear()  # type: ignore[index]
    remembered.cache_clear()


def nothing() -> None:
    """Change nothing."""


# -- what a patch changes by itself ----------------------------------------------------------------


class Counts:
    def __init__(self) -> None:
        self.k = 0

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        self.k += 1
        return out * (1 + 0.1 * self.k)


def object_counts() -> tuple[Patch, Change]:
    return Counts(), nothing


def list_in_closure_counts() -> tuple[Patch, Change]:
    n = [0]

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        n[0] += 1
        return out * (1 + 0.1 * n[0])

    return patch, nothing


def cell_keeps_what_it_saw() -> tuple[Patch, Change]:
    seen = None

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        nonlocal seen
        result = out * 1.1 if seen is None else out * 1.2
        seen = out
        return result

    return patch, nothing


def counter_in_a_cell() -> tuple[Patch, Change]:
    count = 0

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        nonlocal count
        count += 1
        return out * (1 + 0.1 * count)

    return patch, nothing


def global_counts() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return out * (1 + 0.1 * COUNT)

    return patch, nothing


def global_is_only_written() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        global COUNT
        COUNT = len(SEEN) + 1
        SEEN.append(1.0)
        return out * (1 + 0.1 * COUNT)

    return patch, nothing


def global_dict_counts() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        NOTES["n"] += 1
        return out * (1 + 0.1 * NOTES["n"])

    return patch, nothing


def global_list_grows() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        SEEN.append(1.0)
        return out * (1 + 0.1 * len(SEEN))

    return patch, nothing


def global_cache() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        if out.shape[-1] not in _CACHE:
            _CACHE[out.shape[-1]] = torch.arange(out.shape[-1], dtype=out.dtype)
        return out + _CACHE[out.shape[-1]]

    return patch, nothing


def function_attribute_counts() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        patch.k = getattr(patch, "k", 0) + 1  # type: ignore[attr-defined]
        return out * (1 + 0.1 * patch.k)  # type: ignore[attr-defined]

    return patch, nothing


def global_attribute(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
    vars(global_attribute)["k"] = vars(global_attribute).get("k", 0) + 1
    return out * (1 + 0.1 * vars(global_attribute)["k"])


def attribute_of_a_global_function_counts() -> tuple[Patch, Change]:
    return global_attribute, nothing


def options_are_written() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        extra["seen"] = extra.get("seen", 0) + 1
        return out * (1 + 0.1 * extra["seen"])

    return patch, nothing


def a_table_in_the_options_is_written() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        extra["kept"]["n"] = extra["kept"].get("n", 0) + 1
        return out * (1 + 0.1 * extra["kept"]["n"])

    return patch, nothing


def default_grows(out: torch.Tensor, extra: dict[str, Any], seen: list[int] = []) -> torch.Tensor:  # noqa: B006
    seen.append(1)
    return out * (1 + 0.1 * len(seen))


def a_default_grows() -> tuple[Patch, Change]:
    return default_grows, nothing


def a_default_of_a_helper_grows() -> tuple[Patch, Change]:
    return (lambda out, extra: default_grows(out, extra)), nothing


class OfClass:
    count = 0
    scale = 1.2

    @classmethod
    def reset(cls) -> None:
        cls.count, cls.scale = 0, 1.2

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        type(self).count += 1
        return out * (1 + 0.1 * self.count)


def class_counts() -> tuple[Patch, Change]:
    return OfClass(), nothing


def generator_is_consumed() -> tuple[Patch, Change]:
    numbers = (n for n in range(1, 100))
    return (lambda out, extra: out * (1 + 0.1 * next(numbers))), nothing


def iterator_is_consumed() -> tuple[Patch, Change]:
    numbers = iter([1, 2, 3, 4, 5, 6, 7, 8, 9] * 9)
    return (lambda out, extra: out * (1 + 0.1 * next(numbers))), nothing


def set_grows() -> tuple[Patch, Change]:
    seen: set[int] = set()

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        seen.add(len(seen))
        return out * (1 + 0.1 * len(seen))

    return patch, nothing


def writes_into_its_tensor() -> tuple[Patch, Change]:
    kept = torch.ones(4)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        kept.add_(0.1)
        return out * kept

    return patch, nothing


def writes_into_a_view_of_its_tensor() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    part = kept[:2]

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        part.mul_(1.1)
        return out * kept

    return patch, nothing


def writes_into_a_parameter() -> tuple[Patch, Change]:
    layer = nn.Linear(4, 4).requires_grad_(False)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        layer.bias += 0.1
        return layer(out)

    return patch, nothing


def registers_a_buffer() -> tuple[Patch, Change]:
    layer = nn.Linear(4, 4).requires_grad_(False)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        layer.register_buffer("last", getattr(layer, "last", torch.ones(4)) * 1.1)
        return layer(out) * layer.last

    return patch, nothing


def rebinds_its_tensor() -> tuple[Patch, Change]:
    holder = types.SimpleNamespace(t=torch.ones(4))

    class Holds:
        def __init__(self) -> None:
            self.t = torch.ones(4)

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            self.t = self.t * 1.1
            return out * self.t * holder.t

    return Holds(), nothing


def moving_average() -> tuple[Patch, Change]:
    """As a step-to-step smoothing patch does."""
    state: dict[str, torch.Tensor] = {}

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        before = state.get("out", out)
        state["out"] = (out + before) / 2
        return state["out"]

    return patch, nothing


# -- what nobody can foresee -----------------------------------------------------------------------


def draws_from_python() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + random.random())), nothing


def draws_from_a_generator_of_its_own() -> tuple[Patch, Change]:
    own = random.Random(1)
    return (lambda out, extra: out * (1 + own.random())), nothing


def draws_from_numpy() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + float(np.random.rand()))), nothing


def draws_from_torch() -> tuple[Patch, Change]:
    return (lambda out, extra: out + torch.randn(4)), nothing


def seeds_torch() -> tuple[Patch, Change]:
    """What comes after it in the host draws other numbers."""

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(5)
        return out * 1.1

    return patch, nothing


def draws_from_a_torch_generator() -> tuple[Patch, Change]:
    own = torch.Generator().manual_seed(1)
    return (lambda out, extra: out + torch.randn(4, generator=own)), nothing


def reads_a_context_variable() -> tuple[Patch, Change]:
    return (lambda out, extra: out * CONTEXT.get()), lambda: CONTEXT.set(CONTEXT.get() + 0.1)


def counts_by_weakref() -> tuple[Patch, Change]:
    class Held:
        scale = 1.2

    held = Held()
    reference = weakref.ref(held)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        found = reference()
        return out * (found.scale if found is not None else 2.0)

    def change() -> None:
        nonlocal held
        held = Held()

    return patch, change


@functools.lru_cache
def remembered(n: int) -> float:
    return n * SCALE


def reads_what_is_remembered() -> tuple[Patch, Change]:
    def change() -> None:
        global SCALE
        SCALE += 0.1
        remembered.cache_clear()

    return (lambda out, extra: out * remembered(1)), change


def remembers_by_itself() -> tuple[Patch, Change]:
    @functools.lru_cache
    def grid(n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.float32)

    return (lambda out, extra: out + grid(4)), nothing


def decides_by_values() -> tuple[Patch, Change]:
    return (lambda out, extra: out * 1.5 if out.mean() > 0 else out * 0.9), nothing


def reads_the_noise_level() -> tuple[Patch, Change]:
    return (lambda out, extra: out * 1.5 if extra["sigmas"][0].item() > 0.5 else out), nothing


def identity_of_an_object_counts() -> tuple[Patch, Change]:
    holder = [torch.ones(4)]
    known = id(holder)
    return (lambda out, extra: out * (2 if id(holder) == known else 3)), nothing


# -- what others change ----------------------------------------------------------------------------


def cell_is_rebound() -> tuple[Patch, Change]:
    scale = 1.2

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * scale

    def change() -> None:
        nonlocal scale
        scale += 0.1

    return patch, change


def tensor_in_a_cell_is_rebound() -> tuple[Patch, Change]:
    kept = torch.ones(4)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * kept

    def change() -> None:
        nonlocal kept
        kept = kept * 1.1

    return patch, change


def global_is_rebound() -> tuple[Patch, Change]:
    def change() -> None:
        global SCALE
        SCALE += 0.1

    return (lambda out, extra: out * SCALE), change


def global_tensor_is_rebound() -> tuple[Patch, Change]:
    def change() -> None:
        global TENSOR
        TENSOR = TENSOR * 1.1

    return (lambda out, extra: out * TENSOR), change


def global_tensor_is_written() -> tuple[Patch, Change]:
    return (lambda out, extra: out * TENSOR), lambda: TENSOR.mul_(1.1)


def global_array_is_written() -> tuple[Patch, Change]:
    def change() -> None:
        ARRAY[0] += 0.1

    return (lambda out, extra: out * float(ARRAY[0])), change


def array_in_a_closure_is_written() -> tuple[Patch, Change]:
    array = np.array([1.2])

    def change() -> None:
        array[0] += 0.1

    return (lambda out, extra: out * float(array[0])), change


def variable_of_another_module() -> tuple[Patch, Change]:
    def change() -> None:
        other_module.SCALE += 0.1

    return (lambda out, extra: out * other_module.SCALE), change


def table_of_another_module() -> tuple[Patch, Change]:
    def change() -> None:
        other_module.TABLE["scale"] += 0.1

    return (lambda out, extra: out * other_module.TABLE["scale"]), change


def list_of_another_module() -> tuple[Patch, Change]:
    def change() -> None:
        other_module.LISTED[0] += 0.1

    return (lambda out, extra: out * other_module.LISTED[0]), change


def tensor_of_another_module() -> tuple[Patch, Change]:
    def change() -> None:
        other_module.TENSOR = other_module.TENSOR * 1.1

    return (lambda out, extra: out * other_module.TENSOR), change


def function_of_another_module_is_replaced() -> tuple[Patch, Change]:
    original = other_module.helper

    def change() -> None:
        other_module.helper = lambda value: original(value) * 2  # type: ignore[assignment]

    return (lambda out, extra: other_module.helper(out)), change


def variable_read_by_a_helper() -> tuple[Patch, Change]:
    def change() -> None:
        other_module.SCALE += 0.1

    return (lambda out, extra: other_module.helper(out)), change


def function_attribute_is_set() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * patch.scale  # type: ignore[attr-defined]

    def change() -> None:
        patch.scale += 0.1  # type: ignore[attr-defined]

    patch.scale = 1.2  # type: ignore[attr-defined]
    return patch, change


def default_is_replaced() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any], scale: float = 1.2) -> torch.Tensor:
        return out * scale

    def change() -> None:
        patch.__defaults__ = (patch.__defaults__[0] + 0.1,)  # type: ignore[index]

    return patch, change


def default_list_is_changed() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any], scale: list[float] = [1.2]) -> torch.Tensor:  # noqa: B006
        return out * scale[0]

    def change() -> None:
        patch.__defaults__[0][0] += 0.1  # type: ignore[index]

    return patch, change


def code_is_replaced() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * 1.2

    def other(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * 1.7

    def change() -> None:
        patch.__code__ = other.__code__

    return patch, change


def partial_holds_a_list() -> tuple[Patch, Change]:
    def patch(scale: list[float], out: torch.Tensor, extra: dict[str, Any], *, more: list[float]) -> torch.Tensor:
        return out * scale[0] * more[0]

    scale, more = [1.2], [1.1]

    def change() -> None:
        scale[0] += 0.1
        more[0] += 0.1

    return functools.partial(patch, scale, more=more), change


class Scaled:
    def __init__(self) -> None:
        self.scale = 1.2
        self.tensor = torch.ones(4)

    def patch(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * self.scale * self.tensor


def object_of_a_method_changes() -> tuple[Patch, Change]:
    held = Scaled()

    def change() -> None:
        held.scale += 0.1

    return held.patch, change


def tensor_of_an_object_is_replaced() -> tuple[Patch, Change]:
    held = Scaled()

    def change() -> None:
        held.tensor = held.tensor * 1.1

    return held.patch, change


def tensor_is_written_in_place() -> tuple[Patch, Change]:
    held = Scaled()
    return held.patch, lambda: held.tensor.mul_(1.1)


def tensor_gets_other_data() -> tuple[Patch, Change]:
    held = Scaled()

    def change() -> None:
        held.tensor.data = held.tensor.data * 1.1

    return held.patch, change


def tensor_is_of_another_shape_at_the_same_address() -> tuple[Patch, Change]:
    kept = torch.arange(1.0, 17.0).view(4, 4)[:1]

    def change() -> None:
        kept.set_(kept.untyped_storage(), 0, (2, 4), (4, 1))

    return (lambda out, extra: out * kept.sum(0)), change


def tensor_is_strided_in_another_way() -> tuple[Patch, Change]:
    kept = torch.arange(1.0, 17.0).view(4, 4)

    def change() -> None:
        kept.t_()

    return (lambda out, extra: out @ kept), change


def class_is_replaced() -> tuple[Patch, Change]:
    class Other(Scaled):
        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * 1.7

    class One(Scaled):
        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * 1.2

    held = One()

    def change() -> None:
        held.__class__ = Other  # type: ignore[assignment]

    return held, change


def class_attribute_is_replaced() -> tuple[Patch, Change]:
    class Held:
        scale = 1.2

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale

    def change() -> None:
        Held.scale += 0.1

    return Held(), change


def method_is_replaced() -> tuple[Patch, Change]:
    class Held:
        def scale(self) -> float:
            return 1.2

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale()

    def change() -> None:
        Held.scale = lambda self: 1.7  # type: ignore[method-assign]

    return Held(), change


class Slotted:
    __slots__ = ("scale", "tensor", "unset")

    @classmethod
    def reset(cls) -> None:
        pass

    def __init__(self) -> None:
        self.scale, self.tensor = 1.2, torch.ones(4)

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * self.scale * self.tensor


def slot_changes() -> tuple[Patch, Change]:
    held = Slotted()

    def change() -> None:
        held.scale += 0.1

    return held, change


def tensor_in_a_slot_changes() -> tuple[Patch, Change]:
    held = Slotted()

    def change() -> None:
        held.tensor = held.tensor * 1.1

    return held, change


class WithProperty:
    factor = 1.2

    @classmethod
    def reset(cls) -> None:
        cls.factor = 1.2

    @property
    def scale(self) -> float:
        return SCALE * self.factor

    def __getattr__(self, name: str) -> float:
        return 1.1 if name == "made_up" else getattr(super(), name)

    def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * self.scale * self.made_up


def property_reads_a_global() -> tuple[Patch, Change]:
    def change() -> None:
        global SCALE
        SCALE += 0.1
        WithProperty.factor += 0.1

    return WithProperty(), change


def nested_functions() -> tuple[Patch, Change]:
    scales = {"inner": [1.2]}

    def outer() -> Patch:
        def inner() -> Patch:
            return lambda out, extra: out * scales["inner"][0]

        return inner()

    def change() -> None:
        scales["inner"][0] += 0.1

    return outer(), change


def function_calls_itself() -> tuple[Patch, Change]:
    scale = 1.2

    def patch(out: torch.Tensor, extra: dict[str, Any], depth: int = 2) -> torch.Tensor:
        return out * scale if depth == 0 else patch(out * 1.1, extra, depth - 1)

    def change() -> None:
        nonlocal scale
        scale += 0.1

    return patch, change


def objects_refer_to_each_other() -> tuple[Patch, Change]:
    one, other = Scaled(), Scaled()
    one.other, other.other = other, [one, (other,)]  # type: ignore[attr-defined]

    def change() -> None:
        other.scale += 0.1
        one.tensor = one.tensor * 1.1

    return (lambda out, extra: one.other.patch(out, extra) * one.other.other[0].tensor), change  # type: ignore[attr-defined]


def object_is_global_and_held() -> tuple[Patch, Change]:
    held = NOTES

    def change() -> None:
        NOTES["n"] += 1

    return (lambda out, extra: out * (1 + held["n"]) if held is NOTES else out * 0), change


def tensor_has_attributes() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    kept.scale = 1.2  # type: ignore[attr-defined]

    def change() -> None:
        kept.scale += 0.1  # type: ignore[attr-defined]

    return (lambda out, extra: out * getattr(kept, "scale", 1.0) * kept), change


def hook_is_set_on_a_layer() -> tuple[Patch, Change]:
    layer = nn.Linear(4, 4).requires_grad_(False)

    def change() -> None:
        layer.register_forward_hook(lambda module, args, out: out * 1.5)

    return (lambda out, extra: layer(out)), change


def weight_is_replaced() -> tuple[Patch, Change]:
    layer = nn.Linear(4, 4).requires_grad_(False)

    def change() -> None:
        layer.weight = nn.Parameter(layer.weight * 1.1, requires_grad=False)

    return (lambda out, extra: layer(out)), change


def layer_is_switched_to_training() -> tuple[Patch, Change]:
    layer = nn.BatchNorm1d(4).eval().requires_grad_(False)

    def change() -> None:
        layer.eps *= 100

    return (lambda out, extra: layer(out)), change


def dict_changes_its_order() -> tuple[Patch, Change]:
    table = {"a": 1.2, "b": 1.5}

    def change() -> None:
        first = next(iter(table))
        table[first] = table.pop(first)

    return (lambda out, extra: out * next(iter(table.values()))), change


def keys_change_places() -> tuple[Patch, Change]:
    table = {"a": 1.2, "b": 1.5}

    def change() -> None:
        items = list(table.items())
        table.clear()
        table.update({items[1][0]: items[0][1], items[0][0]: items[1][1]})

    return (lambda out, extra: out * table["a"]), change


def defaults_of_a_dataclass() -> tuple[Patch, Change]:
    @dataclasses.dataclass
    class Settings:
        scale: float = 1.2
        parts: list[float] = dataclasses.field(default_factory=lambda: [1.1])

    settings = Settings()

    def change() -> None:
        settings.parts[0] += 0.1

    return (lambda out, extra: out * settings.scale * settings.parts[0]), change


# -- nothing is wrong with these -------------------------------------------------------------------


def returns_its_tensor() -> tuple[Patch, Change]:
    kept = torch.arange(4.0).expand(2, 4).contiguous()

    def change() -> None:
        kept.add_(1)

    return (lambda out, extra: kept), change


def reads_its_block() -> tuple[Patch, Change]:
    scales = torch.tensor([1.2, 1.5])
    return (lambda out, extra: out * scales[extra["block"]]), nothing


def reads_the_step_without_deciding() -> tuple[Patch, Change]:
    return (lambda out, extra: out * extra["sigmas"][0]), nothing


def has_a_cache_of_its_own_that_is_full() -> tuple[Patch, Change]:
    cache = {4: torch.arange(4.0)}

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        if out.shape[-1] not in cache:
            cache[out.shape[-1]] = torch.zeros(out.shape[-1])
        return out + cache[out.shape[-1]]

    return patch, nothing


def takes_the_time() -> tuple[Patch, Change]:
    return (lambda out, extra: out * (1 + time.time() % 1)), nothing


def takes_the_time_in_a_roundabout_way() -> tuple[Patch, Change]:
    clock = __import__("time").perf_counter
    return (lambda out, extra: out * (1 + clock() % 1)), nothing


EAGER: tuple[Adversary, ...] = (
    object_counts,
    list_in_closure_counts,
    cell_keeps_what_it_saw,
    counter_in_a_cell,
    global_counts,
    global_is_only_written,
    global_dict_counts,
    global_list_grows,
    function_attribute_counts,
    attribute_of_a_global_function_counts,
    a_table_in_the_options_is_written,
    a_default_grows,
    a_default_of_a_helper_grows,
    class_counts,
    generator_is_consumed,
    iterator_is_consumed,
    set_grows,
    writes_into_its_tensor,
    writes_into_a_view_of_its_tensor,
    writes_into_a_parameter,
    registers_a_buffer,
    rebinds_its_tensor,
    moving_average,
    draws_from_python,
    draws_from_a_generator_of_its_own,
    draws_from_numpy,
    draws_from_torch,
    seeds_torch,
    draws_from_a_torch_generator,
    reads_a_context_variable,
    counts_by_weakref,
    reads_what_is_remembered,
    remembers_by_itself,
    decides_by_values,
    identity_of_an_object_counts,
    global_tensor_is_rebound,
    global_tensor_is_written,
    tensor_of_another_module,
    object_is_global_and_held,
    tensor_has_attributes,
    global_cache,
)
"""Which no graph may serve."""

SERVED: tuple[Adversary, ...] = (
    cell_is_rebound,
    tensor_in_a_cell_is_rebound,
    global_is_rebound,
    global_array_is_written,
    array_in_a_closure_is_written,
    variable_of_another_module,
    table_of_another_module,
    list_of_another_module,
    function_of_another_module_is_replaced,
    variable_read_by_a_helper,
    function_attribute_is_set,
    default_is_replaced,
    default_list_is_changed,
    code_is_replaced,
    partial_holds_a_list,
    object_of_a_method_changes,
    tensor_of_an_object_is_replaced,
    tensor_is_written_in_place,
    tensor_gets_other_data,
    tensor_is_of_another_shape_at_the_same_address,
    tensor_is_strided_in_another_way,
    class_is_replaced,
    class_attribute_is_replaced,
    method_is_replaced,
    slot_changes,
    tensor_in_a_slot_changes,
    property_reads_a_global,
    nested_functions,
    function_calls_itself,
    objects_refer_to_each_other,
    weight_is_replaced,
    hook_is_set_on_a_layer,
    layer_is_switched_to_training,
    dict_changes_its_order,
    keys_change_places,
    defaults_of_a_dataclass,
    options_are_written,
    returns_its_tensor,
    reads_its_block,
    reads_the_step_without_deciding,
    reads_the_noise_level,
    has_a_cache_of_its_own_that_is_full,
)
"""Which a graph serves, rightly, whatever changes."""

BY_THE_CLOCK: tuple[Adversary, ...] = (takes_the_time, takes_the_time_in_a_roundabout_way)
"""Which no graph may serve, and which give nothing twice."""

WRITES: tuple[Adversary, ...] = (
    writes_into_its_tensor,
    writes_into_a_view_of_its_tensor,
    writes_into_a_parameter,
    global_cache,
    moving_average,
)
"""Which write, or keep, tensors that outlive the call."""
