"""``float(size)`` in a model's code, traced as an operator.

Python's ``float`` gives a number whatever it is given, and a size that was a symbol is fixed by it for good: such a
model would have another graph for each size. The host's code is not touched. While a graph for all sizes is traced,
layers have bound copies of those of their methods that call ``float``, and these call another one.
"""

from __future__ import annotations

import builtins
import dis
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

_NAME = "float"


def keep_sizes_symbolic(layers: Sequence[torch.nn.Module], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Set copies of methods on layers that keep a size a symbol where theirs would make it a number.

    Functions that these methods call by a global name are followed. A function that uses ``float`` in another way than
    by calling it stays as it is, and so do methods that a layer has an attribute of its own for.

    Args:
        layers: get further attributes; the caller puts back what they had.
        forward: what will be called.

    Returns:
        The function to call in place of ``forward``.
    """
    methods = {kind: _methods(kind) for kind in {type(layer) for layer in layers}}
    begin = [function for of_kind in methods.values() for function in of_kind.values()]
    bound = forward if isinstance(forward, types.MethodType) else None
    if bound is not None and isinstance(bound.__func__, types.FunctionType):
        begin.append(bound.__func__)
    copies = _copies(begin)
    if not copies:
        return forward
    for layer in layers:
        for name, function in methods[type(layer)].items():
            if function in copies and name not in layer.__dict__:
                layer.__dict__[name] = types.MethodType(copies[function], layer)
    if bound is not None and bound.__func__ in copies:
        return types.MethodType(copies[bound.__func__], bound.__self__)  # type: ignore[index]
    return forward


def _float(value: Any = 0.0, /) -> Any:
    """Convert to a number as ``float`` does, but for sizes that are symbols."""
    return torch.sym_float(value) if isinstance(value, torch.SymInt | torch.SymFloat) else float(value)


def _methods(kind: type) -> dict[str, types.FunctionType]:
    """Return the methods of a class of layers that are not PyTorch's, by name."""
    found: dict[str, types.FunctionType] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            found.pop(name, None)
            if isinstance(value, types.FunctionType) and not _is_torchs(value) and not name.startswith("__"):
                found[name] = value
    return found


def _is_torchs(function: types.FunctionType) -> bool:
    return str(function.__module__).partition(".")[0] == "torch"


def _copies(begin: Iterable[types.FunctionType]) -> Mapping[types.FunctionType, types.FunctionType]:
    """Return copies of those functions that convert sizes, or call by name, in some steps, one that does."""
    called: dict[types.FunctionType, dict[str, types.FunctionType]] = {}
    remaining = list(begin)
    while remaining:
        function = remaining.pop()
        if function not in called:
            called[function] = _called(function)
            remaining += called[function].values()
    wanted = {function for function in called if _converts(function)}
    callers = set(wanted)
    while callers:
        callers = {f for f, others in called.items() if f not in wanted and not wanted.isdisjoint(others.values())}
        wanted |= callers
    copies = {function: _copy(function) for function in wanted}
    for function, copy in copies.items():
        copy.__globals__.update({name: copies[other] for name, other in called[function].items() if other in copies})
    return copies


def _called(function: types.FunctionType) -> dict[str, types.FunctionType]:
    """Return the functions that a function names, by the name that it has for them."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    values = ((name, function.__globals__.get(name)) for name in names)
    return {name: f for name, f in values if isinstance(f, types.FunctionType) and not _is_torchs(f)}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _converts(function: types.FunctionType) -> bool:
    """Return True if a function calls ``float``, and does nothing else with it."""
    if sys.version_info < (3, 11) or _NAME in function.__globals__:  # where the bytecode does not say what is called
        return False
    uses = [
        instruction
        for code in _codes(function.__code__)
        if _NAME in code.co_names
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval == _NAME
    ]
    # The lowest bit of the argument says that the value is loaded to be called.
    return bool(uses) and all((use.arg or 0) & 1 for use in uses)


def _copy(function: types.FunctionType) -> types.FunctionType:
    """Return the same function with global names of its own, and with our ``float`` if it calls that."""
    known = {**function.__globals__}
    if _converts(function):
        known["__builtins__"] = {**vars(builtins), _NAME: _float}
    copy = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    return copy
