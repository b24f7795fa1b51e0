"""The module that is accelerated: its weights as they are now, and what identifies its code.

Weights are inputs of a compiled graph, so their values do not matter here: two checkpoints of one
architecture have the same fingerprint. Everything else that can change what the forward computes
does matter: classes, plain attributes, weight names, shapes, dtypes and layouts.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .call import NotCovered

# nn.Module's own bookkeeping: described through named_modules/parameters/buffers, or checked apart.
_MODULE_INTERNALS = frozenset(vars(torch.nn.Module()))
_MAX_DEPTH = 6
# Subclasses (quantised tensors) carry scales and dispatch rules that a plain graph input would lose.
_PLAIN_WEIGHTS = (torch.nn.Parameter, torch.Tensor, torch.nn.Buffer)


@dataclass(frozen=True)
class WeightSpec:
    """A weight's name in the module and what compiled code assumes of it."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Target:
    """A module seen as code plus weights.

    Built once per module and cheap to ask again: ``weights`` reads the tensors that are in place
    *now* (a LoRA replaces them, an offload moves them), ``is_current`` tells whether the module is
    still the one that was fingerprinted.

    Attributes:
        layers: the module and all its submodules.
        specs: every weight by name.
        fingerprint: sha256 over code and weight metadata.
        refusal: why the module's forward is not the one its classes define, if it is not.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.layers = tuple(module.modules())
        self.refusal = _code_refusal(module)
        self._token = _token(module)
        self._slots: dict[str, tuple[dict[str, Any], str]] = {}
        specs = []
        for path, owner in module.named_modules():
            for holder in (owner._parameters, owner._buffers):
                for name, tensor in holder.items():
                    if tensor is not None:
                        full = f"{path}.{name}" if path else name
                        self._slots[full] = (holder, name)
                        specs.append(_weight_spec(full, tensor))
        self.specs: dict[str, WeightSpec] = {spec.name: spec for spec in specs}
        self.fingerprint = _fingerprint(module, specs)

    def is_current(self) -> bool:
        """Whether no submodule was replaced, re-classed or given a forward of its own since."""
        return _token(self.module) == self._token

    def weights(self, names: tuple[str, ...], device: torch.device) -> list[torch.Tensor]:
        """The named weights as they are in place now, all on ``device``.

        Raises:
            NotCovered: a weight is gone, is on another device, or is of another dtype, shape or class.
        """
        slots = self._slots
        try:
            tensors = [holder[name] for holder, name in map(slots.__getitem__, names)]
        except KeyError as error:
            raise NotCovered("a weight of the model was removed") from error
        specs = self.specs
        for name, tensor in zip(names, tensors, strict=True):
            spec = specs[name]
            if tensor is None or tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                raise NotCovered("a weight of the model was replaced by one of another shape or dtype")
            if tensor.device != device:
                raise NotCovered(f"weights are not resident on {device} (offloaded)")
            if type(tensor) not in _PLAIN_WEIGHTS:
                raise NotCovered(f"weights are {type(tensor).__qualname__}s, which no graph can take yet")
        return tensors


def _weight_spec(name: str, tensor: torch.Tensor) -> WeightSpec:
    return WeightSpec(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)


def _token(module: torch.nn.Module) -> tuple[tuple[int, int, bool, bool], ...]:
    """Changes when a submodule is replaced, gains attributes or hooks, or its forward is overridden; ~1 µs a layer."""
    return tuple((id(m), len(m.__dict__), "forward" in m.__dict__, _has_hooks(m)) for m in module.modules())


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _code_refusal(module: torch.nn.Module) -> str | None:
    for path, layer in module.named_modules():
        if "forward" in layer.__dict__:
            return f"the forward of layer {path or '(root)'} was replaced by another extension"
        if _has_hooks(layer):
            return f"layer {path or '(root)'} has a forward hook from another extension"
    return None


def _fingerprint(module: torch.nn.Module, specs: list[WeightSpec]) -> str:
    digest = hashlib.sha256()
    for path, owner in module.named_modules():
        digest.update(f"module {path} {_qualified(type(owner))} {owner.training}\n".encode())
        for name, value in sorted(vars(owner).items()):
            if name not in _MODULE_INTERNALS:
                digest.update(f"  {name} = {' '.join(_describe(value, _MAX_DEPTH))}\n".encode())
    for spec in specs:
        digest.update(f"weight {spec.name} {spec.shape} {spec.stride} {spec.dtype}\n".encode())
    return digest.hexdigest()


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _describe(value: Any, depth: int) -> Iterator[str]:
    """A description of ``value`` that is the same in every process: no ids, no default reprs."""
    if value is None or isinstance(value, (bool, int, str, bytes, enum.Enum, torch.dtype, torch.device)):
        yield repr(value)
    elif isinstance(value, float):
        yield value.hex()
    elif isinstance(value, torch.Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)} {tensor_digest(value)}"
    elif isinstance(value, type):
        yield f"class {_qualified(value)}"
    elif isinstance(value, torch.nn.Module):
        # A module kept outside the tree (in a list, say): its weights would be baked in unseen.
        yield f"module {_qualified(type(value))}"
    elif isinstance(value, types.FunctionType):
        yield f"function {value.__module__}.{value.__qualname__} {_code_digest(value.__code__)}"
    elif depth == 0:
        yield f"... {_qualified(type(value))}"
    elif isinstance(value, dict):
        for key, child in sorted(value.items(), key=lambda item: repr(item[0])):
            yield from (f"{key!r}:", *_describe(child, depth - 1))
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from _describe(child, depth - 1)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(" ".join(_describe(child, depth - 1)) for child in value)
    elif dataclasses.is_dataclass(value):
        yield _qualified(type(value))
        for item in dataclasses.fields(value):
            yield from (f"{item.name}=", *_describe(getattr(value, item.name), depth - 1))
    else:
        yield _qualified(type(value))
        yield from _describe(getattr(value, "__dict__", None), depth - 1)


def _code_digest(code: types.CodeType) -> str:
    constants = [_code_digest(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    text = repr((code.co_code, constants, code.co_names, code.co_varnames))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tensor_digest(tensor: torch.Tensor) -> str:
    """sha256 over a tensor's values (on the CPU, contiguous), for constants that belong to the code."""
    if tensor.is_meta:
        return "meta"
    data = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()
