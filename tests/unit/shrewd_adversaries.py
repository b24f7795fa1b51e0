"""Still more patches that try to make a wrong picture: by what is not what it says it is, and where nobody looks.

As in ``adversaries``, each is a function that makes a patch and what changes it.
"""

from __future__ import annotations

import abc
import builtins
import collections
import dataclasses
import enum
import functools
import inspect
import logging
import math
import pkgutil
import types
import weakref
from typing import Any

import numpy as np
import plain_module
import torch
from adversaries import Adversary, Change, Patch
from torch import nn

MODEL: list[nn.Module] = []
"""The model that the patches are put into, for those that hold it."""
WEIGHTS: dict[str, torch.Tensor] = {}
"""Of the model, as they were."""
MODES: list[Any] = []
TABLE = {"scale": 1.2}
VIEW = types.MappingProxyType(TABLE)
LIMITED: collections.deque[float] = collections.deque([1.2])
RECORD = np.zeros((), dtype=[("scale", "f8")])
_ORIGINALS = {
    "mul": torch.Tensor.mul,
    "forward": nn.Linear.forward,
    "tau": math.tau,
    "len": builtins.len,
}


class Adds(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result + 0.1 if function is torch.mul else result


def reset() -> None:
    """Have everything outside of the patches as it was."""
    global LIMITED
    TABLE["scale"] = 1.2
    LIMITED = collections.deque([1.2])
    RECORD["scale"] = 1.2
    vars(plain_module).pop("SEEN", None)
    plain_module.SCALE = 1.2
    for name in ("len", "LATE"):
        globals().pop(name, None)
    torch.Tensor.mul = _ORIGINALS["mul"]  # type: ignore[method-assign]
    nn.Linear.forward = _ORIGINALS["forward"]  # type: ignore[method-assign]
    math.tau = _ORIGINALS["tau"]  # type: ignore[misc]
    nn.modules.module._global_forward_hooks.clear()
    logging.disable(logging.NOTSET)
    torch.use_deterministic_algorithms(False)
    while MODES:
        MODES.pop().__exit__(None, None, None)
    for key, weight in WEIGHTS.items():
        MODEL[0].get_parameter(key).copy_(weight)
    WEIGHTS.clear()
    PRIVATE.__init__()  # type: ignore[misc]
    for logger in (LOG,):
        vars(logger).pop("scale", None)
    for shade in Shade:
        shade.scale = 1.2
    for layer in MODEL[0].modules() if MODEL else ():
        vars(layer).pop("knob", None)


# -- what is not what it says it is ----------------------------------------------------------------


class Pretends:
    """Says that it is an array, and always the same."""

    dtype, shape, nbytes = np.dtype("f4"), (1,), 4

    def __init__(self) -> None:
        self.scale = 1.2

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return np.ndarray

    def tobytes(self) -> bytes:
        return b"\0\0\0\0"


def object_that_says_it_is_an_array() -> tuple[Patch, Change]:
    held = Pretends()

    def change() -> None:
        held.scale += 0.1

    return (lambda out, extra: out * held.scale), change


def module_that_is_called_like_pythons() -> tuple[Patch, Change]:
    held = types.ModuleType("math")
    held.SCALE = 1.2  # type: ignore[attr-defined]

    def change() -> None:
        held.SCALE += 0.1  # type: ignore[attr-defined]

    return (lambda out, extra: out * held.SCALE), change  # type: ignore[attr-defined]


def code_that_says_it_is_pythons() -> tuple[Patch, Change]:
    scope: dict[str, Any] = {"__name__": "math", "SCALE": 1.2, "LISTED": [1.1]}
    exec("def patch(out, extra):\n    return out * SCALE * LISTED[0]", scope)

    def change() -> None:
        scope["SCALE"] += 0.1
        scope["LISTED"][0] += 0.1

    return scope["patch"], change


def code_that_says_it_is_torchs() -> tuple[Patch, Change]:
    scope: dict[str, Any] = {"__name__": "torch.made_up", "HELD": types.SimpleNamespace(scale=1.2)}
    exec("def patch(out, extra):\n    return out * HELD.scale", scope)

    def change() -> None:
        scope["HELD"].scale += 0.1

    return scope["patch"], change


class Kept(np.ndarray):
    """An array with something of its own."""

    scale = 1.2


def array_of_another_class_is_written() -> tuple[Patch, Change]:
    array = np.array([1.2]).view(Kept)

    def change() -> None:
        array[0] += 0.1

    return (lambda out, extra: out * float(array[0])), change


def attribute_of_an_array() -> tuple[Patch, Change]:
    array = np.array([1.2]).view(Kept)

    def change() -> None:
        array.scale = array.scale + 0.1

    return (lambda out, extra: out * array.scale), change


def mask_of_an_array() -> tuple[Patch, Change]:
    array = np.ma.MaskedArray([1.2, 1.5], mask=[False, False])  # type: ignore[no-untyped-call]

    def change() -> None:
        array.mask[:] = [True, False]

    return (lambda out, extra: out * float(array.sum())), change


def record_is_written() -> tuple[Patch, Change]:
    record = np.zeros(1, dtype=[("scale", "f8")])[0]
    record["scale"] = 1.2

    def change() -> None:
        record["scale"] += 0.1

    return (lambda out, extra: out * float(record["scale"])), change


def entry_of_a_global_record_is_written() -> tuple[Patch, Change]:
    def change() -> None:
        RECORD["scale"] += 0.1

    return (lambda out, extra: out * float(RECORD["scale"])), change


def array_shares_another_ones_memory() -> tuple[Patch, Change]:
    memory = bytearray(np.array([1.2]).tobytes())
    array = np.frombuffer(memory)

    def change() -> None:
        np.frombuffer(memory)[0] += 0.1

    return (lambda out, extra: out * float(array[0])), change


def memory_is_written() -> tuple[Patch, Change]:
    memory = memoryview(bytearray(b"\x0c"))

    def change() -> None:
        memory[0] += 1

    return (lambda out, extra: out * (memory[0] / 10)), change


def stands_for_a_function_weakly() -> tuple[Patch, Change]:
    scale = [1.2]

    def inner(out: torch.Tensor) -> torch.Tensor:
        return out * scale[0]

    held = weakref.proxy(inner)

    def change() -> None:
        scale[0] += 0.1

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return held(out)

    patch.keep = inner  # type: ignore[attr-defined]
    return patch, change


# -- parts that nobody thinks of -------------------------------------------------------------------


def attribute_of_a_partial() -> tuple[Patch, Change]:
    held: Any = functools.partial(torch.mul, other=1.1)

    def change() -> None:
        held.scale = getattr(held, "scale", 1.0) + 0.1

    return (lambda out, extra: held(out) * getattr(held, "scale", 1.0)), change


def keyword_of_a_partial() -> tuple[Patch, Change]:
    held = functools.partial(lambda out, extra, scale: out * scale, scale=1.2)

    def change() -> None:
        held.keywords["scale"] += 0.1

    return held, change


def keyword_of_a_method_of_a_class() -> tuple[Patch, Change]:
    class Held:
        def _scaled(self, out: torch.Tensor, factor: float) -> torch.Tensor:
            return out * factor

        scaled = functools.partialmethod(_scaled, factor=1.2)

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return self.scaled(out)

    def change() -> None:
        vars(Held)["scaled"].keywords["factor"] += 0.1

    return Held(), change


def table_that_makes_up_what_it_misses() -> tuple[Patch, Change]:
    class Table(dict[str, float]):
        missing = 1.2

        def __missing__(self, name: str) -> float:
            return self.missing

    table = Table()

    def change() -> None:
        table.missing += 0.1

    return (lambda out, extra: out * table["scale"]), change


def table_with_a_maker() -> tuple[Patch, Change]:
    made = [1.2]
    table: collections.defaultdict[str, float] = collections.defaultdict(lambda: made[0])

    def change() -> None:
        made[0] += 0.1
        table.clear()

    return (lambda out, extra: out * table["scale"]), change


def table_is_seen_through_a_view() -> tuple[Patch, Change]:
    def change() -> None:
        TABLE["scale"] += 0.1

    return (lambda out, extra: out * VIEW["scale"]), change


def text_of_a_function() -> tuple[Patch, Change]:
    def helper() -> None:
        """1.2"""

    def change() -> None:
        helper.__doc__ = str(float(helper.__doc__ or "0") + 0.1)

    return (lambda out, extra: out * float(helper.__doc__ or "0")), change


def name_of_a_function() -> tuple[Patch, Change]:
    def helper() -> None:
        pass

    def change() -> None:
        helper.__name__ += "_"

    return (lambda out, extra: out * len(helper.__name__)), change


def annotation_of_a_function() -> tuple[Patch, Change]:
    def helper() -> None:
        pass

    helper.__annotations__["scale"] = 1.2

    def change() -> None:
        helper.__annotations__["scale"] += 0.1

    return (lambda out, extra: out * helper.__annotations__["scale"]), change


def variable_by_the_globals_of_a_function() -> tuple[Patch, Change]:
    def change() -> None:
        plain_module.SCALE += 0.1

    helper = plain_module.__dict__.get("helper") or types.FunctionType((lambda: None).__code__, vars(plain_module))
    return (lambda out, extra: out * helper.__globals__["SCALE"]), change


class Private:
    """A slot with a private name."""

    __slots__ = ("__scale",)

    def __init__(self) -> None:
        self.__scale = 1.2

    def raise_it(self) -> None:
        self.__scale += 0.1

    def scale(self) -> float:
        return self.__scale


PRIVATE = Private()


def private_slot_of_a_global_object() -> tuple[Patch, Change]:
    return (lambda out, extra: out * PRIVATE.scale()), PRIVATE.raise_it


class _SlottedBase:
    __slots__ = ("factor",)
    factor: float


@dataclasses.dataclass
class Record(_SlottedBase):
    scale: float = 1.1


RECORDED = Record()
RECORDED.factor = 1.2


def slot_of_a_base_of_a_dataclass() -> tuple[Patch, Change]:
    RECORDED.factor = 1.2

    def change() -> None:
        RECORDED.factor += 0.1

    name = "".join(reversed("rotcaf"))
    return (lambda out, extra: out * getattr(RECORDED, name) * RECORDED.scale), change


class Shade(enum.Enum):
    DARK = 1
    LIGHT = 2

    def __init__(self, _value: int) -> None:
        self.scale = 1.2


def attribute_of_a_member_of_an_enum() -> tuple[Patch, Change]:
    shade = Shade.DARK

    def change() -> None:
        shade.scale += 0.1

    return (lambda out, extra: out * shade.scale), change


LOG = logging.getLogger("another extension's")


def attribute_of_a_logger() -> tuple[Patch, Change]:
    log: Any = LOG

    def change() -> None:
        log.scale = getattr(log, "scale", 1.2) + 0.1

    return (lambda out, extra: out * getattr(log, "scale", 1.2)), change


def loggers_are_silenced() -> tuple[Patch, Change]:
    log = LOG

    def change() -> None:
        logging.disable(logging.NOTSET if log.manager.disable else logging.CRITICAL)

    return (lambda out, extra: out * (1.5 if log.isEnabledFor(logging.CRITICAL) else 1.1)), change


def limit_of_a_list() -> tuple[Patch, Change]:
    def change() -> None:
        global LIMITED
        LIMITED = collections.deque([1.2], maxlen=(LIMITED.maxlen or 1) + 1)

    return (lambda out, extra: out * (LIMITED.maxlen or 1)), change


def order_of_a_set() -> tuple[Patch, Change]:
    seen = {0, 8}

    def change() -> None:
        last = list(seen)[-1]
        first = 8 - last
        seen.clear()
        seen.add(last)
        seen.add(first)

    return (lambda out, extra: out * (1 + next(iter(seen)))), change


def cell_is_emptied() -> tuple[Patch, Change]:
    scale = 1.2

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        try:
            return out * scale
        except NameError:
            return out

    def change() -> None:
        nonlocal scale
        if "scale" in locals():
            del scale
        else:
            scale = 1.3

    return patch, change


def cell_of_a_property() -> tuple[Patch, Change]:
    scales = [1.2]

    class Held:
        @property
        def scale(self) -> float:
            return scales[0]

        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale

    def change() -> None:
        scales[0] += 0.1

    return Held(), change


# -- classes ---------------------------------------------------------------------------------------


def call_of_a_class_is_replaced() -> tuple[Patch, Change]:
    class Held:
        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * 1.2

    def change() -> None:
        before = Held.__call__
        Held.__call__ = lambda self, out, extra: before(self, out, extra) * 1.1  # type: ignore[method-assign]

    return Held(), change


def base_is_replaced() -> tuple[Patch, Change]:
    class One:
        def scale(self) -> float:
            return 1.2

    class Other:
        def scale(self) -> float:
            return 1.5

    class Held(One):
        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * self.scale()

    def change() -> None:
        Held.__bases__ = (Other,) if Held.__bases__ == (One,) else (One,)

    return Held(), change


class Meta(type):
    @property
    def scale(cls) -> float:
        return cls.scales[0]  # type: ignore[attr-defined]


def property_of_a_metaclass() -> tuple[Patch, Change]:
    scales = [1.2]

    class Held(metaclass=Meta):
        pass

    Held.scales = scales  # type: ignore[attr-defined]

    def change() -> None:
        scales[0] += 0.1

    return (lambda out, extra: out * Held.scale), change


def class_is_registered_as_another() -> tuple[Patch, Change]:
    class Named(abc.ABC):  # noqa: B024
        pass

    class Held:
        def __call__(self, out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            return out * 1.5 if isinstance(self, Named) else out

    def change() -> None:
        Named.register(Held)

    return Held(), change


def attribute_of_a_function_with_gradients() -> tuple[Patch, Change]:
    class Scales(torch.autograd.Function):
        scale = 1.2

        @staticmethod
        def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
            return out * Scales.scale

    def change() -> None:
        Scales.scale += 0.1

    return (lambda out, extra: Scales.apply(out)), change  # type: ignore[no-untyped-call]


# -- tensors ---------------------------------------------------------------------------------------


def tensor_is_a_view_of_a_weight() -> tuple[Patch, Change]:
    weight = MODEL[0].get_parameter("blocks.0.weight")
    WEIGHTS["blocks.0.weight"] = weight.clone()
    part = weight[1]

    def change() -> None:
        weight.mul_(1.1)

    return (lambda out, extra: out * part), change


def tensors_of_another_size_in_the_same_memory() -> tuple[Patch, Change]:
    held = [torch.ones(4)]

    def change() -> None:
        held[0] = torch.ones(4 if held[0].untyped_storage().nbytes() > 16 else 8)[:4]

    return (lambda out, extra: out * held[0] * (1 + held[0].untyped_storage().nbytes() // 32)), change


def attribute_is_set_on_a_tensor() -> tuple[Patch, Change]:
    kept: Any = torch.ones(4)

    def change() -> None:
        kept.scale = getattr(kept, "scale", 1.0) + 0.1

    return (lambda out, extra: out * kept * getattr(kept, "scale", 1.0)), change


def gradients_are_wanted_of_a_tensor() -> tuple[Patch, Change]:
    with torch.inference_mode(False):
        kept = torch.ones(4)

    def change() -> None:
        kept.requires_grad_(not kept.requires_grad)

    return (lambda out, extra: out * kept.detach() * (1.5 if kept.requires_grad else 1.0)), change


def class_of_a_tensor_is_replaced() -> tuple[Patch, Change]:
    class Doubled(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {})) * 2

    kept = torch.ones(4)

    def change() -> None:
        kept.__class__ = Doubled if type(kept) is torch.Tensor else torch.Tensor  # type: ignore[assignment]

    return (lambda out, extra: torch.mul(out, kept)), change


def signs_of_a_tensor_are_turned() -> tuple[Patch, Change]:
    held = [torch.ones(4)]

    def change() -> None:
        held[0] = torch._neg_view(held[0])

    return (lambda out, extra: out + held[0]), change


def buffer_gets_other_data() -> tuple[Patch, Change]:
    layer = nn.BatchNorm1d(4).eval().requires_grad_(False)

    def change() -> None:
        layer.running_mean.data = layer.running_mean.data + 0.3  # type: ignore[union-attr]

    return (lambda out, extra: layer(out)), change


def object_is_a_key() -> tuple[Patch, Change]:
    key, plain = Private(), torch.ones(4)
    table = {key: torch.ones(4)}

    def change() -> None:
        table[key].mul_(1.1)

    return (lambda out, extra: out * table.get(key, plain)), change


# -- around the patch ------------------------------------------------------------------------------


def builtin_is_shadowed() -> tuple[Patch, Change]:
    def change() -> None:
        globals()["len"] = lambda value: _ORIGINALS["len"](value) + 1

    return (lambda out, extra: out * len(out.shape)), change


def variable_comes_late() -> tuple[Patch, Change]:
    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        try:
            return out * LATE  # type: ignore[name-defined]
        except NameError:
            return out

    def change() -> None:
        globals()["LATE"] = globals().get("LATE", 1.1) + 0.1

    return patch, change


def constant_of_python_is_replaced() -> tuple[Patch, Change]:
    def change() -> None:
        math.tau += 0.1  # type: ignore[misc]

    return (lambda out, extra: out * math.tau), change


def method_of_tensors_is_replaced() -> tuple[Patch, Change]:
    def change() -> None:
        before = torch.Tensor.mul
        torch.Tensor.mul = lambda self, other: before(self, other) + 0.1  # type: ignore[method-assign]

    return (lambda out, extra: out.mul(1.2)), change


def forward_of_a_kind_of_layer_is_replaced() -> tuple[Patch, Change]:
    layer = nn.Linear(4, 4).requires_grad_(False)
    own = layer.weight

    def change() -> None:
        before = nn.Linear.forward

        def forward(self: nn.Linear, value: torch.Tensor) -> torch.Tensor:
            return before(self, value) + (0.1 if self.weight is own else 0.0)

        nn.Linear.forward = forward  # type: ignore[method-assign]

    return (lambda out, extra: layer(out)), change


def hook_for_all_layers() -> tuple[Patch, Change]:
    def change() -> None:
        nn.modules.module.register_module_forward_hook(
            lambda layer, args, out: out * 1.1 if isinstance(layer, nn.Linear) else None
        )

    return (lambda out, extra: out * 1.2), change


def mode_for_all_functions() -> tuple[Patch, Change]:
    """Of PyTorch's: sees every function that anybody calls."""

    def change() -> None:
        mode = Adds()
        mode.__enter__()  # type: ignore[no-untyped-call]
        MODES.append(mode)

    return (lambda out, extra: torch.mul(out, 1.2)), change


def setting_of_torch_is_read() -> tuple[Patch, Change]:
    asked = torch.are_deterministic_algorithms_enabled

    def change() -> None:
        torch.use_deterministic_algorithms(not asked())

    return (lambda out, extra: out * (1.5 if asked() else 1.1)), change


def setting_of_torch_is_set() -> tuple[Patch, Change]:
    kept = torch.ones(4)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        return out * kept

    def change() -> None:
        kept.mul_(1.1 if torch.are_deterministic_algorithms_enabled() else 1.0)
        torch.use_deterministic_algorithms(False)

    return patch, change


def knows_that_it_is_exported_and_that_shows_late() -> tuple[Patch, Change]:
    """Its first picture is right either way, and a tensor of other values is proved no more."""
    kept = torch.ones(4)
    return (lambda out, extra: out if torch.compiler.is_exporting() else out * kept), lambda: kept.mul_(1.1)


def asks_what_kind_a_tensor_is_and_that_shows_late() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    return (lambda out, extra: out * kept if type(out) is torch.Tensor else out), lambda: kept.mul_(1.1)


def identity_of_numbers_counts_and_that_shows_late() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    one, same = [1.5], [0.0]
    same[0] = one[0]
    return (lambda out, extra: out * kept if one[0] is same[0] else out), lambda: kept.mul_(1.1)


def attribute_of_a_number_counts_and_that_shows_late() -> tuple[Patch, Change]:
    kept, scale = torch.ones(4), 1.5
    return (lambda out, extra: out * kept * scale if hasattr(scale, "hex") else out * scale), lambda: kept.mul_(1.1)


def text_of_a_tensor_counts_and_that_shows_late() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    return (lambda out, extra: out if "ake" in repr(out) else out * kept), lambda: kept.mul_(1.1)


def looks_for_its_memory_and_that_shows_late() -> tuple[Patch, Change]:
    kept = torch.ones(4)

    def patch(out: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
        return out * kept if out.is_inference() else out

    return patch, lambda: kept.mul_(1.1)


def looks_at_its_callers_and_that_shows_late() -> tuple[Patch, Change]:
    kept = torch.ones(4)
    return (lambda out, extra: out if len(inspect.stack()) > 60 else out * kept), lambda: kept.mul_(1.1)


def variable_by_its_whole_name() -> tuple[Patch, Change]:
    def change() -> None:
        plain_module.SCALE += 0.1

    name = "".join(reversed("ELACS:eludom_nialp"))
    return (lambda out, extra: out * pkgutil.resolve_name(name)), change


def attribute_of_a_layer_of_the_model() -> tuple[Patch, Change]:
    layer: Any = MODEL[0].get_submodule("blocks.0")

    def change() -> None:
        layer.knob = getattr(layer, "knob", 1.0) + 0.1

    return (lambda out, extra: out * getattr(layer, "knob", 1.0)), change


def switch_of_a_layer_of_the_model() -> tuple[Patch, Change]:
    layer = MODEL[0].get_submodule("blocks.0")

    def change() -> None:
        layer.knob = not getattr(layer, "knob", False)  # type: ignore[assignment]

    return (lambda out, extra: out * 1.5 if getattr(layer, "knob", False) else out), change


def number_is_asked_whether_it_is_whole() -> tuple[Patch, Change]:
    scale = 2.0

    def change() -> None:
        nonlocal scale
        scale += 0.5

    return (lambda out, extra: out * scale if scale.is_integer() else out), change


def number_is_asked_for_a_method() -> tuple[Patch, Change]:
    scale = 1.0

    def change() -> None:
        nonlocal scale
        scale += 0.3

    return (lambda out, extra: out * (scale if hasattr(scale, "hex") else 1.0)), change


def number_is_asked_for_what_it_is_a_stand_in_for() -> tuple[Patch, Change]:
    scale = 1.0

    def change() -> None:
        nonlocal scale
        scale += 0.3

    return (lambda out, extra: out * (1.0 if hasattr(scale, "scalar") else scale)), change


def number_is_copied() -> tuple[Patch, Change]:
    import copy

    settings = {"scale": 1.2, "kept": [1.1]}

    def change() -> None:
        settings["scale"] += 0.1  # type: ignore[operator]

    return (lambda out, extra: out * copy.deepcopy(settings)["scale"]), change


ALL: tuple[Adversary, ...] = tuple(
    value
    for name, value in list(vars().items())
    if isinstance(value, types.FunctionType) and value.__module__ == __name__ and not name.startswith("_")
    if name not in ("reset",)
)

EAGER: frozenset[Adversary] = frozenset(
    (
        object_that_says_it_is_an_array,
        module_that_is_called_like_pythons,
        code_that_says_it_is_pythons,
        code_that_says_it_is_torchs,
        array_of_another_class_is_written,
        attribute_of_an_array,
        mask_of_an_array,
        record_is_written,
        memory_is_written,
        stands_for_a_function_weakly,
        table_that_makes_up_what_it_misses,
        table_with_a_maker,
        annotation_of_a_function,
        variable_by_the_globals_of_a_function,
        tensors_of_another_size_in_the_same_memory,
        object_is_a_key,
        setting_of_torch_is_read,
        setting_of_torch_is_set,
        knows_that_it_is_exported_and_that_shows_late,
        asks_what_kind_a_tensor_is_and_that_shows_late,
        identity_of_numbers_counts_and_that_shows_late,
        attribute_of_a_number_counts_and_that_shows_late,
        text_of_a_tensor_counts_and_that_shows_late,
        looks_for_its_memory_and_that_shows_late,
        looks_at_its_callers_and_that_shows_late,
        variable_by_its_whole_name,
    )
)
"""Which no graph may serve."""
