"""What a function's arguments are called. Asked at every call, so the answer is remembered."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...messages import message
from ..call import NotCovered


def bind(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``function(*args, **kwargs)`` by name, defaults filled in.

    Model families order their parameters differently, and callers mix positions and names: names
    are the only common ground.

    Raises:
        NotCovered: the function takes positional-only or variadic positional arguments.
    """
    signature = signature_of(function)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise NotCovered(message("the arguments do not fit the model's forward: {error}", error=error)) from error
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments.update(bound.arguments[name])
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise NotCovered(message("the model's forward takes positional-only arguments ({name})", name=name))
        else:
            arguments[name] = bound.arguments[name]
    return arguments


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or a method: that of its code and its defaults, as they are now.

    Reading one takes as long as all else that is asked of a block. It is remembered where there is nothing but code
    and defaults to read it from: no wrapper, no signature of its own, no defaults that can change in place.
    """
    plain = function.__func__ if isinstance(function, types.MethodType) else function
    if type(plain) is not types.FunctionType or vars(plain) or plain.__kwdefaults__:
        return inspect.signature(function)
    return _read(plain.__code__, _Defaults(plain.__defaults__), plain is not function)


class _Defaults:
    """Default values, which are the same if they are the very same tuple. Equal ones may be of other types."""

    def __init__(self, values: tuple[Any, ...] | None) -> None:
        self.values = values

    def __hash__(self) -> int:
        return id(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Defaults) and self.values is other.values


@functools.lru_cache(maxsize=256)
def _read(code: types.CodeType, defaults: _Defaults, is_method: bool) -> inspect.Signature:
    # Of a function that is nobody's: what is remembered keeps no closure, and so no model.
    closure = tuple(types.CellType() for _ in code.co_freevars)
    bare = types.FunctionType(code, {}, code.co_name, defaults.values, closure)
    return inspect.signature(types.MethodType(bare, code) if is_method else bare)
