"""What is served of a model of the host's, and what has to be known of it."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...messages import Message, message

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Of a call: by position, and by name."""

NOT_IN_LAYERS = message("its weights do not all fit, and ComfyUI brings them layer by layer")
"""Why a part is not served that is never served block by block."""


class Part(abc.ABC):
    """A part of a model of the host's that is served.

    Attributes:
        not_in_blocks: why it is not served block by block where that is not asked for.
    """

    not_in_blocks: Message

    @property
    @abc.abstractmethod
    def model(self) -> Any:
        """Return the host's object, on which it notes where weights are."""

    @property
    @abc.abstractmethod
    def module(self) -> torch.nn.Module:
        """Return what is called, and has the layers."""

    @property
    @abc.abstractmethod
    def compute_dtype(self) -> torch.dtype:
        """Return what it computes in; its weights may be of another dtype."""

    @abc.abstractmethod
    def memory_required(self, size: torch.Size) -> float:
        """Return an estimate of the bytes that a call takes beside the weights; ``size`` is of a tensor of its."""

    @property
    def device(self) -> torch.device:
        """Return where it runs."""
        device: torch.device = self.model.device
        return device

    def captured(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called in the place of ``forward``, of the part or of an image of it, and captured."""
        return forward

    def shown_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
        """Return arguments of a smaller call by which the host shows what its weights compute.

        None where only the call itself does, whose arguments these are. Where less shows it a call leaves its arguments
        as they are. The host's code need not take less.
        """
        return None


class WholeModule(Part):
    """A module all of whose weights the host manages by themselves: the host's object, too.

    Args:
        module: this one.
    """

    not_in_blocks = NOT_IN_LAYERS

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def model(self) -> Any:
        return self._module

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self._module
        return module


class DiffusionModel(Part):
    """The diffusion model of a BaseModel of the host's.

    Args:
        model: is not kept: it lives while it is called.
    """

    not_in_blocks = message(
        "its weights do not all fit, and its blocks are not compiled in the background; choose compile: auto"
    )

    def __init__(self, model: Any) -> None:
        self._model = weakref.ref(model)

    @property
    def model(self) -> Any:
        model = self._model()
        assert model is not None  # it is being called
        return model

    @property
    def module(self) -> torch.nn.Module:
        module: torch.nn.Module = self.model.diffusion_model
        return module

    @property
    def compute_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.get_dtype_inference()
        return dtype

    def memory_required(self, size: torch.Size) -> float:
        return float(self.model.memory_required(size))
