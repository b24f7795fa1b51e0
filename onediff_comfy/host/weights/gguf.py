"""GGUF checkpoints, as the pack ComfyUI-GGUF loads them: blocks of bytes that each layer makes numbers of.

A weight there is a tensor of bytes that notes on itself which type its blocks are of, which shape it stands for, and
the patches of LoRAs, which the layer applies once it has numbers. So its parts are the bytes, the tensors of the
patches and the numbers that these are multiplied by, and in its place a trace has a tensor of bytes with such notes.
The pack's own layers do the rest.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...capture.call import NotCovered
from ...capture.target.tensor_parts import WeightFormat
from ...messages import message

_BYTES = "bytes"
_PLAIN_TYPES = ("F32", "F16")  # whose tensors hold numbers, and are used as they are
_KEPT = (torch.Tensor.clone, torch.Tensor.detach)


class _OnDevice(NamedTuple):
    """The tensors of a weight's patches where the weight is, and what they were made of."""

    patches: list[Any]
    device: torch.device
    tensors: list[torch.Tensor]

    def is_of(self, patches: list[Any], device: torch.device) -> bool:
        same = len(patches) == len(self.patches) and all(map(operator.is_, patches, self.patches))
        return same and device == self.device


class BlocksOfBytes(WeightFormat):
    """Any tensor that notes on itself the type and the shape of what its bytes stand for."""

    def __init__(self) -> None:
        self._on_device: MutableMapping[torch.Tensor, _OnDevice] = WeakTensorKeyDictionary()

    def covers(self, weight: Any) -> bool:
        return isinstance(weight, torch.Tensor) and hasattr(weight, "tensor_type") and hasattr(weight, "tensor_shape")

    def names(self, weight: Any) -> tuple[str, ...]:
        return (_BYTES, *(f"patch_{index}" for index, _ in enumerate(_tensors(_numbers_as_tensors(weight.patches)))))

    def parts(self, weight: Any) -> Sequence[torch.Tensor]:
        with torch._C.DisableTorchFunctionSubclass():
            return [torch.Tensor.as_subclass(weight, torch.Tensor), *self._tensors_of_patches(weight)]

    def context(self, weight: Any) -> Any:
        return weight.tensor_type, tuple(weight.tensor_shape), _described(_numbers_as_tensors(weight.patches))

    def whole(self, kind: type, parts: Mapping[str, torch.Tensor], context: Any) -> Any:
        tensor_type, shape, patches = context
        data, *rest = parts.values()
        stand_in = data.view(data.shape)
        return _noted(stand_in, tensor_type, torch.Size(shape), _put_together(patches, iter(rest)))

    def metadata(self, function: Any, args: tuple[Any, ...]) -> Any:
        reads = getattr(function, "__name__", "") == "__get__" and function.__self__.__name__ == "shape"
        return args[0].tensor_shape if reads else NotImplemented

    def call(self, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        weight = next(arg for arg in (*args, *kwargs.values()) if self.covers(arg))
        if function in _KEPT:
            return weight
        if function is torch.Tensor.to:
            moved = _without_notes(weight).to(*args[1:], **kwargs)
            return _noted(moved, weight.tensor_type, weight.tensor_shape, list(weight.patches))
        if getattr(function, "__name__", "") == "__get__" and function.__self__.__name__ == "data":
            return _without_notes(weight)
        if getattr(weight.tensor_type, "name", None) not in _PLAIN_TYPES:
            raise NotCovered(
                message(
                    "weights of {file} are used in a way that no graph can follow ({what})",
                    file=message("a {library} checkpoint", library="GGUF"),
                    what=getattr(function, "__name__", str(function)),
                )
            )
        plain = [_without_notes(arg) if self.covers(arg) else arg for arg in args]
        return function(*plain, **{k: _without_notes(v) if self.covers(v) else v for k, v in kwargs.items()})

    def _tensors_of_patches(self, weight: Any) -> Sequence[torch.Tensor]:
        """On the weight's device: the pack leaves LoRAs in CPU memory, and moves them there at every call."""
        if not weight.patches:
            return ()
        patches = list(_single_patches(weight.patches))
        found = self._on_device.get(weight)
        if found is None or not found.is_of(patches, weight.device):
            tensors = [tensor.to(weight.device) for tensor in _tensors(_numbers_as_tensors(weight.patches))]
            found = self._on_device[weight] = _OnDevice(patches, weight.device, tensors)
        return found.tensors


def _noted(tensor: Any, tensor_type: Any, shape: Any, patches: Any) -> Any:
    tensor.tensor_type, tensor.tensor_shape, tensor.patches = tensor_type, shape, patches
    return tensor


def _without_notes(weight: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunction():  # which would ask for what this is
        plain: torch.Tensor = torch.ops.aten.alias(weight)
    return plain


def _single_patches(value: Any) -> Iterator[Any]:
    """The patches in lists of them, and in the pairs of such a list and a weight's name."""
    if isinstance(value, list) or (isinstance(value, tuple) and value and isinstance(value[0], list)):
        for item in value:
            yield from _single_patches(item)
    else:
        yield value


def _numbers_as_tensors(value: Any) -> Any:
    """Patches with tensors in the places of numbers that a LoRA is only multiplied by: its strength and its alpha.

    They are in float64, as Python's numbers are, so that products of them are rounded as before. A strength that code
    compares with 1, as where a LoRA has magnitudes of its own (DoRA), stays the number that it is.
    """
    if isinstance(value, tuple) and len(value) > 1 and isinstance(value[0], (int, float)) and _is_plain_lora(value[1]):
        strength, lora, *rest = value
        up, down, alpha, *others = lora.weights
        same = copy.copy(lora)
        same.weights = (up, down, None if alpha is None else _tensor_of(alpha), *others)
        same.loaded_keys = set()  # what its file called it: nobody reads that later
        return (_tensor_of(strength), same, *rest)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_numbers_as_tensors, value))
    return value


def _is_plain_lora(value: Any) -> bool:
    weights = getattr(value, "weights", None)
    return getattr(value, "name", None) == "lora" and isinstance(weights, tuple) and weights[4:5] == (None,)


def _tensor_of(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in patches, in order: they are lists and tuples, and objects that keep theirs as attributes."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        for name in sorted(vars(value)):
            yield from _tensors(vars(value)[name])


class _Tensor:
    """Stands for a tensor in what is described."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tensor)

    def __hash__(self) -> int:
        return 0


def _described(value: Any) -> Any:
    """Patches with nothing in the places of tensors."""
    if isinstance(value, torch.Tensor):
        return _Tensor()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_described, value))
    if hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        return ("object", type(value), {name: _described(item) for name, item in sorted(vars(value).items())})
    return value


def _put_together(described: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(described, _Tensor):
        return next(tensors)
    if isinstance(described, tuple) and len(described) == 3 and described[0] == "object":
        made = object.__new__(described[1])
        made.__dict__.update((name, _put_together(item, tensors)) for name, item in described[2].items())
        return made
    if isinstance(described, (list, tuple)):
        return type(described)(_put_together(item, tensors) for item in described)
    return copy.copy(described)
