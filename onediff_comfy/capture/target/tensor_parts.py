"""Weights that are several tensors, as those of quantised checkpoints are.

To a model such a weight is one tensor, to a graph it is several: data in few bits, and their scales. PyTorch has a
protocol for classes like that: ``__tensor_flatten__`` gives the names of the plain tensors and a context of plain
values (which layout it is, which dtype it stands for), and ``__tensor_unflatten__`` puts them together again. So each
plain tensor is an input of the graph, under the weight's name and its own, and the context is part of the fingerprint.
While a forward is traced, wholes made of the graph's inputs are in the places of the weights, and what torch's
functions do with them is what their class does, in operators on plain tensors.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from ...messages import Message, message
from ..call import NotCovered

PLAIN = frozenset((torch.nn.Parameter, torch.Tensor, torch.nn.Buffer))
"""Classes of weights that are one tensor and nothing else."""


class WeightFormat(ABC):
    """A way in which one weight is several plain tensors."""

    @abstractmethod
    def covers(self, weight: Any) -> bool:
        """Return True for such a weight, and for what stands in its place during a trace."""

    @abstractmethod
    def names(self, weight: Any) -> tuple[str, ...]:
        """What the weight's parts are called; none of them has a dot."""

    @abstractmethod
    def parts(self, weight: Any) -> Sequence[torch.Tensor]:
        """The weight's plain tensors, as they are now, in the order of their names. Asked for in every call."""

    @abstractmethod
    def context(self, weight: Any) -> Any:
        """What else there is to the weight: plain values, which decide on what is computed with the parts."""

    def metadata(self, function: Any, args: tuple[Any, ...]) -> Any:
        """What a function tells of a weight that is not what the tensor in its place would tell."""
        return NotImplemented

    @abstractmethod
    def whole(self, kind: type, parts: Mapping[str, torch.Tensor], context: Any) -> Any:
        """A weight of the class ``kind``, put together."""

    @abstractmethod
    def call(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a torch function gives for such weights among its arguments, in functions of plain tensors.

        Raises:
            NotCovered: that is not known.
        """


class TensorSubclasses(WeightFormat):
    """Any library's, by PyTorch's protocol for them."""

    def covers(self, weight: Any) -> bool:
        kind = type(weight)
        # PyTorch's own classes have the protocol too, and take part in a trace by themselves.
        return hasattr(kind, "__tensor_flatten__") and not kind.__module__.startswith("torch.")

    def names(self, weight: Any) -> tuple[str, ...]:
        return tuple(name for name, _ in self._pieces(weight))

    def parts(self, weight: Any) -> Sequence[torch.Tensor]:
        return [part for _, part in self._pieces(weight)]

    def context(self, weight: Any) -> Any:
        names, context = weight.__tensor_flatten__()
        pieces = {name: getattr(weight, name) for name in names}
        inner = {name: (type(p), self.context(p)) for name, p in pieces.items() if self.covers(p)}
        return context, tuple(weight.shape), tuple(weight.stride()), tuple(names), inner

    def whole(self, kind: Any, parts: Mapping[str, torch.Tensor], context: Any) -> Any:
        own, shape, stride, names, inner = context
        pieces = {name: parts[name] for name in names if name not in inner}
        for name, (inner_kind, inner_context) in inner.items():
            start = f"{name}{_WITHIN}"
            within = {part.removeprefix(start): tensor for part, tensor in parts.items() if part.startswith(start)}
            pieces[name] = self.whole(inner_kind, within, inner_context)
        return kind.__tensor_unflatten__(pieces, own, shape, stride)

    def call(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = next(type(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if self.covers(leaf))
        operator, args, kwargs = _as_operator(function, args, kwargs)
        if operator is None:
            raise NotCovered(
                message(
                    "weights of {file} are used in a way that no graph can follow ({what})",
                    file=kind_of_file(kind),
                    what=getattr(function, "__name__", str(function)),
                )
            )
        return kind.__torch_dispatch__(operator, types, args, kwargs)

    def _pieces(self, weight: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name in weight.__tensor_flatten__()[0]:
            piece = getattr(weight, name)
            if self.covers(piece):
                yield from ((f"{name}{_WITHIN}{inner}", part) for inner, part in self._pieces(piece))
            else:
                yield name, piece


_WITHIN = "/"
_aten = torch.ops.aten
_OPERATORS: Mapping[Any, Any] = {
    F.linear: _aten.linear.default,
    torch.mm: _aten.mm.default,
    torch.Tensor.mm: _aten.mm.default,
    torch.matmul: _aten.matmul.default,
    torch.Tensor.matmul: _aten.matmul.default,
    torch.Tensor.__matmul__: _aten.matmul.default,
    torch.addmm: _aten.addmm.default,
    torch.t: _aten.t.default,
    torch.Tensor.t: _aten.t.default,
    torch.Tensor.to: _aten.to.dtype_layout,
    torch.Tensor.detach: _aten.detach.default,
    torch.Tensor.contiguous: _aten.contiguous.default,
    torch.Tensor.view: _aten.view.default,
    torch.Tensor.reshape: _aten.reshape.default,
    torch.Tensor.clone: _aten.clone.default,
    torch.clone: _aten.clone.default,
}
"""What PyTorch hands to a class's ``__torch_dispatch__`` in inference mode, in which hosts run their models."""
_METADATA = frozenset(
    (
        *(torch.Tensor.dim, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.numel, torch.Tensor.nelement),
        *(torch.Tensor.is_contiguous, torch.Tensor.is_floating_point, torch.Tensor.element_size),
        *(torch.Tensor.get_device, torch.Tensor.__len__, torch.is_floating_point, torch.numel),
    )
)
_ATTRIBUTES = frozenset(
    ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_sparse")
)


def _reads_metadata(function: Any) -> bool:
    if getattr(function, "__name__", "") == "__get__":
        return getattr(function.__self__, "__name__", "") in _ATTRIBUTES
    return function in _METADATA


def _as_operator(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The ATen operator that a function of torch's is, and its arguments by position as far as it has such."""
    operator = function if isinstance(function, torch._ops.OpOverload) else _OPERATORS.get(function)
    if operator is None:
        return None, args, kwargs
    positional, named = list(args), dict(kwargs)
    for argument in operator._schema.arguments[len(positional) :]:
        if argument.kwarg_only or argument.name not in named:
            break
        positional.append(named.pop(argument.name))
    return operator, tuple(positional), named


def format_of(weight: Any, formats: Sequence[WeightFormat]) -> WeightFormat | None:
    """How this weight is several tensors; None if it is one, or if that is not known."""
    return None if type(weight) in PLAIN else next((form for form in formats if form.covers(weight)), None)


def part_name(weight: str, part: str) -> str:
    """Under which name a part is a weight of a graph."""
    return f"{weight}{_WITHIN}{part}"


def kind_of_file(kind: type, quantisation: object = None) -> Message:
    """What kind of checkpoint has weights of this class, for people.

    Args:
        kind: a class of tensors.
        quantisation: what the library calls its number format, if that is known.
    """
    library = kind.__module__.replace("\\", "/").rpartition("/")[2].partition(".")[0]
    if isinstance(quantisation, str):
        library = f"{library} {quantisation.upper()}"
    return message("a {library} checkpoint", library=library)


@dataclass(frozen=True)
class _Place:
    """Where a weight of several parts is in a layer, and how it is put together."""

    layer: torch.nn.Module
    name: str
    parts: tuple[str, ...]
    form: WeightFormat
    kind: type
    context: Any

    def put_together(self) -> None:
        parts = {part: getattr(self.layer, part_name(self.name, part)) for part in self.parts}
        # Beside the parameters, where a layer's own attributes are found first.
        self.layer.__dict__[self.name] = self.form.whole(self.kind, parts, self.context)


class Wholes:
    """Weights of several parts during a trace.

    Args:
        layers: whose parameters and buffers are looked at. They have the parts in the places of the wholes from now
            on; whoever traces puts the layers' attributes back afterwards.
        formats: the ways in which a weight may be several tensors.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], formats: Sequence[WeightFormat]) -> None:
        self._formats = formats
        self._places: list[_Place] = []
        shared: dict[int, dict[str, torch.nn.Parameter]] = {}
        for layer in layers:
            for holder in ("_parameters", "_buffers"):
                weights = layer.__dict__[holder]
                if any(format_of(weight, formats) for weight in weights.values()):
                    layer.__dict__[holder] = dict(self._taken_apart(layer, weights, shared))

    def _taken_apart(
        self, layer: torch.nn.Module, weights: Mapping[str, Any], shared: dict[int, dict[str, torch.nn.Parameter]]
    ) -> Iterator[tuple[str, Any]]:
        for name, weight in weights.items():
            form = format_of(weight, self._formats)
            if form is None:
                yield name, weight
                continue
            names = form.names(weight)
            if id(weight) not in shared:
                parts = zip(names, form.parts(weight), strict=True)
                shared[id(weight)] = {part: torch.nn.Parameter(tensor, requires_grad=False) for part, tensor in parts}
            self._places.append(_Place(layer, name, names, form, type(weight), form.context(weight)))
            yield from ((part_name(name, part), tensor) for part, tensor in shared[id(weight)].items())

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, layers have wholes for their weights, made of what the parts are now."""
        if not self._places:
            yield
            return
        with _Calls(self._formats):
            for place in self._places:
                place.put_together()
            try:
                yield
            finally:
                for place in self._places:
                    place.layer.__dict__.pop(place.name, None)


class _Calls(TorchFunctionMode):
    """Has the formats answer torch functions of their weights."""

    def __init__(self, formats: Sequence[WeightFormat]) -> None:
        super().__init__()
        self._formats = formats

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        form = next((form for leaf in leaves if (form := self._form(leaf)) is not None), None)
        if form is None:
            return func(*args, **kwargs)
        known = form.metadata(func, args)
        if known is not NotImplemented:
            return known
        if _reads_metadata(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with self:
            return form.call(func, types, args, kwargs)

    def _form(self, leaf: Any) -> WeightFormat | None:
        return format_of(leaf, self._formats) if isinstance(leaf, torch.Tensor) else None
