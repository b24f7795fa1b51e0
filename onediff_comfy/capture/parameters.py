"""What a function's parameters are called, and what is called with copies of them.

Reading the names takes as long as all else that is asked of a block's call.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function or a method: that of its code and its defaults, as they are now.

    It is remembered where there is nothing but these to read it from: no wrapper, no signature of its own, no defaults
    that can change in place.
    """
    plain = function.__func__ if type(function) is types.MethodType else function
    if type(plain) is not types.FunctionType or plain.__dict__ or plain.__kwdefaults__:
        return inspect.signature(function)
    code, defaults, read = plain.__code__, plain.__defaults__, read_of(plain.__code__, plain is not function)
    if not read or read[0] is not defaults:
        # Of a function that is nobody's: what is remembered keeps no closure, and so no model.
        bare = types.FunctionType(code, {}, code.co_name, defaults, tuple(types.CellType() for _ in code.co_freevars))
        read[:] = defaults, inspect.signature(types.MethodType(bare, code) if plain is not function else bare)
    signature: inspect.Signature = read[1]
    return signature


@functools.lru_cache(maxsize=256)
def read_of(_code: types.CodeType, _is_method: bool) -> list[Any]:
    """Return what was read of a function with this code: its defaults, by identity, and the signature; or nothing.

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
