"""A function that no trace can look into, as one operator: a graph calls the one that its call brings.

Attention libraries launch kernels of their own. Their result has the shape and dtype of ordinary attention, and no more
need be known while a forward is traced. What the function is handed is noted there: tensors and sizes are operands, all
else is text. When the graph runs, the operator hands the same to the function that the call's options hold by then.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from ...messages import message
from ..call import NotCovered
from ..values.value_text import code_digest

_OPTIONS: ContextVar[Mapping[str, Any] | None] = ContextVar("options of the call that is being answered", default=None)
_AS_THEY_ARE = (type(None), bool, int, str)
_ABSENT = object()


@contextlib.contextmanager
def options_given(options: Mapping[str, Any]) -> Iterator[None]:
    """Run graphs inside for a call with these options, whose functions they call."""
    token = _OPTIONS.set(options)
    try:
        yield
    finally:
        _OPTIONS.reset(token)


Like = Callable[..., torch.Tensor]
"""Takes what a function takes, and gives a tensor of the same shape and dtype. It can be traced."""


def put_stand_ins(options: dict[str, Any], bag: str, likes: Mapping[str, Like]) -> None:
    """Put into options, as a forward is about to be handed them, what is traced in the place of functions.

    Args:
        bag: the name by which the functions may be handed the options.
        likes: by the option's name. Each is handed, before its other arguments, the function that runs where there is
            no such option.
    """
    handed: dict[str, Any] = {}
    options.update({name: _stand_in(name, bag, handed, like) for name, like in likes.items()})
    handed.update(options)


def _stand_in(name: str, bag: str, handed: Mapping[str, Any], like: Like) -> Callable[..., torch.Tensor]:
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        result = like(*args, **kwargs)
        notes = _Notes(name)
        own = {key: value for key, value in kwargs.items() if key != bag or value is None}
        text = {"option": name, "args": [notes.of(value) for value in args], "kwargs": notes.of(own)}
        if own.keys() != kwargs.keys():
            text["options"] = {"name": bag, **notes.changes(handed, kwargs[bag])}
        return call_option()(notes.tensors, notes.sizes, json.dumps(text), list(result.shape), result.dtype)

    return call


class _Notes:
    """Notes what a function is handed.

    Args:
        name: of the option.

    Attributes:
        tensors: that it is handed.
        sizes: that it is handed, and that are symbols.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.tensors: list[torch.Tensor] = []
        self.sizes: list[Any] = []

    def of(self, value: Any) -> Any:
        """Return a value as JSON.

        Raises:
            NotCovered: it cannot be written down.
        """
        kind = type(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return {"tensor": len(self.tensors) - 1}
        if isinstance(value, torch.SymInt):
            self.sizes.append(value)
            return {"size": len(self.sizes) - 1}
        if kind in _AS_THEY_ARE:
            return value
        if kind is float:
            return {"float": value.hex()}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind in (list, tuple):
            return {kind.__name__: [self.of(part) for part in value]}
        if kind is dict:
            return {"dict": [[self.of(key), self.of(part)] for key, part in value.items()]}
        if kind is torch.Size:
            return {"Size": [self.of(part) for part in value]}
        if kind is torch.device:
            return {"device": str(value)}
        place = _place_of(value)
        if place is None:
            raise NotCovered(
                message("{option} is handed a {kind}, which no graph can take", option=self._name, kind=kind.__name__)
            )
        return {"function": place}

    def changes(self, handed: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """Return how options differ from those that the forward was handed: each is another object, or is gone."""
        changed = {key: value for key, value in now.items() if handed.get(key, _ABSENT) is not value}
        return {"changed": self.of(changed), "gone": [key for key in handed if key not in now]}


def _place_of(function: Any) -> list[Any] | None:
    """Return where a function is found: its module, its name there, whether what is found wraps it, and its code."""
    if type(function) is not types.FunctionType or function.__closure__ or function.__kwdefaults__:
        return None
    for wrapped in (False, True):
        if _at(function.__module__, function.__qualname__, wrapped) is function:
            return [function.__module__, function.__qualname__, wrapped, code_digest(function.__code__)]
    return None


def _at(module: str, name: str, wrapped: bool) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return getattr(found, "__wrapped__", None) if wrapped else found


def _found(module: str, name: str, wrapped: bool, code: str) -> Any:
    """Return the function that was noted. Whoever has put another one there has not put it into the model, too.

    Raises:
        LookupError: another is there by now.
    """
    found = _at(module, name, wrapped)
    if type(found) is not types.FunctionType or code_digest(found.__code__) != code:
        raise LookupError(f"{module}.{name} is another function by now")
    return found


@functools.cache
def call_option() -> Callable[..., torch.Tensor]:
    """The operator ``onediff_comfy::call_option``, which calls a function of the options that the call brings.

    It takes the tensors and sizes that the function is handed, all else as text, and the shape and dtype of what the
    function gives, which is contiguous.
    """

    @torch.library.custom_op("onediff_comfy::call_option", mutates_args=())
    def call_option(
        tensors: Sequence[torch.Tensor], sizes: Sequence[int], text: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        # SageAttention 1 writes to its keys. What a graph has there may be somebody else's too.
        output = _called(_text(text), [tensor.clone() for tensor in tensors], sizes)
        if not isinstance(output, torch.Tensor) or (output.shape, output.dtype) != (torch.Size(shape), dtype):
            found = f"{output.dtype}{list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
            raise TypeError(f"it gave {found} in place of {dtype}{list(shape)}")
        # New memory, which the graph may write to: it may have given what it keeps.
        return output.clone(memory_format=torch.contiguous_format)

    @call_option.register_fake
    def _(
        tensors: Sequence[torch.Tensor], _sizes: Sequence[int], _text: str, shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return tensors[0].new_empty(shape, dtype=dtype)

    operator: Callable[..., torch.Tensor] = torch.ops.onediff_comfy.call_option.default
    return operator


def _called(text: Mapping[str, Any], tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    options = _OPTIONS.get()
    if options is None:
        raise RuntimeError("a graph that calls a function of the options was run without any")
    read = functools.partial(_read, tensors=tensors, sizes=sizes)
    args, kwargs = [read(noted) for noted in text["args"]], read(text["kwargs"])
    changes = text.get("options")
    if changes is not None:
        kept = {key: option for key, option in options.items() if key not in changes["gone"]}
        kwargs[changes["name"]] = kept | read(changes["changed"])
    function = options.get(text["option"])
    return function(*args, **kwargs) if function is not None else args[0](*args[1:], **kwargs)


_text = functools.lru_cache(maxsize=1024)(json.loads)
"""Reads a text that an operator of a graph has, and that is the same in every step. Nobody writes to what it gives."""


def _read(noted: Any, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> Any:
    """Return the value that ``_Notes.of`` has noted."""
    if type(noted) in _AS_THEY_ARE:
        return noted
    ((kind, content),) = noted.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "size":
            return sizes[content]
        case "float":
            return float.fromhex(content)
        case "dtype":
            return getattr(torch, content)
        case "device":
            return torch.device(content)
        case "function":
            return _found(*content)
        case "dict":
            return {_read(key, tensors, sizes): _read(part, tensors, sizes) for key, part in content}
    parts = [_read(part, tensors, sizes) for part in content]
    return {"list": list, "tuple": tuple, "Size": torch.Size}[kind](parts)
