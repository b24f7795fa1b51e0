"""What a function's parameters are called, and what is called with copies of them.

Reading the names and sorting arguments by them takes as long as all else that is asked of a block's call. So both are
done once, for a function and for calls of one form.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

_MOST_FORMS = 64  # of calls of one function


class Places(NamedTuple):
    """Where arguments are in calls of one form.

    Attributes:
        names: of the arguments, in the order of the parameters.
        indices: of each, among a call's values: positional ones, then those by name, then ``defaults``.
        defaults: of what is not given.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    defaults: tuple[Any, ...]


class Parameters:
    """A function's parameters.

    Args:
        signature: of the function.

    Attributes:
        signature: likewise.
        variadic: the name of the first parameter, if it takes all positional arguments, as SD3's blocks have it.
        nameless: the name of one that cannot be given by its name; None of none.
        places: of calls that came, by how many positional arguments they had and the names of the others.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        self.signature = signature
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        first = next(iter(kinds), None)
        self.variadic = first if first is not None and kinds[first] is inspect.Parameter.VAR_POSITIONAL else None
        without_name = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
        self.nameless = next((name for name, kind in kinds.items() if kind in without_name), None)
        self.places: dict[tuple[int, tuple[str, ...]], Places] = {}

    def find_places(self, positional: int, named: tuple[str, ...]) -> Places:
        """Return where arguments are in calls with so many positional ones, and others of these names. Remember it.

        Raises:
            TypeError: they do not fit.
        """
        given = positional + len(named)
        bound = self.signature.bind(*range(positional), **dict(zip(named, range(positional, given), strict=True)))
        found, defaults = dict[str, int](), list[Any]()
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                found |= bound.arguments.get(name, {})
            elif name in bound.arguments:
                found[name] = bound.arguments[name]
            else:
                found[name] = given + len(defaults)
                defaults.append(parameter.default)
        if len(self.places) >= _MOST_FORMS:
            self.places.clear()
        places = self.places[positional, named] = Places(tuple(found), tuple(found.values()), tuple(defaults))
        return places


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or a method: that of its code and its defaults, as they are now."""
    return parameters_of(function).signature


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a function or a method: those of its code and its defaults, as they are now.

    They are remembered where there is nothing but these to read them from: no wrapper, no signature of its own, no
    defaults that can change in place.
    """
    plain = function.__func__ if type(function) is types.MethodType else function
    if type(plain) is not types.FunctionType or plain.__dict__ or plain.__kwdefaults__:
        return Parameters(inspect.signature(function))
    code, defaults, read = plain.__code__, plain.__defaults__, read_of(plain.__code__, plain is not function)
    if not read or read[0] is not defaults:
        # Of a function that is nobody's: what is remembered keeps no closure, and so no model.
        bare = types.FunctionType(code, {}, code.co_name, defaults, tuple(types.CellType() for _ in code.co_freevars))
        signature = inspect.signature(types.MethodType(bare, code) if plain is not function else bare)
        read[:] = defaults, Parameters(signature)
    parameters: Parameters = read[1]
    return parameters


@functools.lru_cache(maxsize=256)
def read_of(_code: types.CodeType, _is_method: bool) -> list[Any]:
    """Return what was read of a function with this code: its defaults, by identity, and the parameters; or nothing.

    Equal defaults may be of other types.
    """
    return []


class OnCopies:
    """A method that is called with copies of its tensors, for it writes to what it is handed.

    Args:
        method: of a module's.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return self.method(*args, **kwargs)


def method_of(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called in the end."""
    return forward.method if type(forward) is OnCopies else forward
