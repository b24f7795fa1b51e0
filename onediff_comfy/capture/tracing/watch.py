"""What sees every torch function of a traced forward, and errors that code in the options may hide."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from ...messages import message
from ..call import NotCovered
from ..handed_over import ChangedState, Copies
from ..rewrites.op_substitutions import SIZELESS, Forms

_TENSOR = torch._C.TensorBase
_OF_MEMORY = frozenset(
    (
        *(vars(_TENSOR)[name].__get__ for name in ("_version", "_base")),
        *(_TENSOR.data_ptr, _TENSOR.storage_offset, _TENSOR.untyped_storage, _TENSOR._is_view, _TENSOR.is_inference),
        *(_TENSOR.is_pinned, _TENSOR.is_set_to, torch.Tensor.storage, torch.Tensor.is_shared),
    )
)
"""What tells of a tensor's memory, of which those that stand for it in a trace have none."""


_MOST_TERMS = 64
"""Of the expression of a size. The longest of SD 1.5, SDXL and Flux has 5."""


class SizesGrow(NotCovered):
    """Sizes are calculated from sizes again and again, which no symbols can follow."""

    def __init__(self) -> None:
        super().__init__(message("its sizes are calculated from one another in a way that is too long for symbols"))


class Watch(TorchFunctionMode):
    """Sees every torch function of the traced forward.

    Calls ``check`` before each, so that a trace can be interrupted; and calls others in place of those
    that are not to be traced as they are.

    Args:
        check: what it raises ends the trace.
        substitutions: functions that are called in the place of others.
        general: sizes are symbols.
        wary: code that the options hold is traced too. It may catch errors that only a trace raises.

    Attributes:
        raised: errors in torch functions and in what stands for options and numbers.
        copies: of functions, that are traced.
        held: the tensors that stand for those that functions hold.
    """

    def __init__(self, check: Callable[[], None], substitutions: Forms, general: bool, wary: bool) -> None:
        super().__init__()
        self._interrupted, self._wary, self._general = check, wary, general
        self._substitutions = {**substitutions, **SIZELESS} if general else substitutions
        self.raised: list[BaseException] = []
        self.copies: Copies | None = None
        self.held: Sequence[torch.Tensor] = ()
        self._options: dict[str, Any] = {}
        self._handed: dict[str, Any] = {}
        self._inside: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._interrupted()
        function = self._substitutions.get(func, func)
        if not self._wary:
            return self._watched(function(*args, **(kwargs or {})))
        try:
            if function in _OF_MEMORY and any(args[0] is held for held in self.held):
                raise NotCovered(message("code in the options looks at where a tensor lies"))
            return self._watched(function(*args, **(kwargs or {})))
        except Exception as error:
            self.raised.append(error)
            raise

    def _watched(self, output: Any) -> Any:
        """Return what a function gave.

        Raises:
            SizesGrow: PyTorch would take longer for each size than for the one before, and for the last for ever.
        """
        if self._general and isinstance(output, torch.Tensor):
            for size in output.shape:
                if isinstance(size, torch.SymInt) and _is_long(size.node.expr):
                    raise SizesGrow
        return output

    def handing(self, options: dict[str, Any]) -> dict[str, Any]:
        """Take note of the options that the forward is handed, and return them."""
        self._options, self._handed = options, dict(options)
        self._inside = [(each, _entries(each)) for value in options.values() for each in _containers(value)]
        return options

    def forward_ended(self) -> None:
        """See that nothing changed that a graph would leave as it is, and that nobody took an error for an answer.

        An option itself may be set to what is no tensor: the host's models note there which block is being computed.

        Raises:
            ChangedState: something did.
            Exception: somebody did.
        """
        self.held = ()  # what comes now is no code of theirs
        if not all(_holds(each, entries) for each, entries in self._inside):
            raise ChangedState
        left = {name: value for name, value in self._options.items() if self._handed.get(name) is not value}
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(left)):  # for somebody to find it there
            raise ChangedState
        if self.copies is None:
            return
        self.copies.check()
        for error in self.raised:
            raise error


def _containers(value: Any) -> Iterator[Any]:
    """Yield the dicts and lists that a value is, or has in it, whatever depth."""
    if type(value) in (dict, list, tuple):
        if type(value) is not tuple:
            yield value
        for part in value.values() if type(value) is dict else value:
            yield from _containers(part)


def _entries(container: Any) -> tuple[Any, ...]:
    return (*container, *container.values()) if type(container) is dict else tuple(container)


def _holds(container: Any, entries: tuple[Any, ...]) -> bool:
    """Return True if a container holds the very objects that it held."""
    now = _entries(container)
    return len(now) == len(entries) and all(map(operator.is_, now, entries))


def _is_long(expression: sympy.Basic) -> bool:
    return next(itertools.islice(sympy.preorder_traversal(expression), _MOST_TERMS, None), None) is not None
