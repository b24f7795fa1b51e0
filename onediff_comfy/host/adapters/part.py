"""What is served of a model of the host's, and what has to be known of it."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...messages import message


class Part:
    """The part of a model of the host's that is served: of a BaseModel its diffusion model.

    Args:
        model: the host's object, on which it notes where weights are. It is not kept: it lives while it is called.

    Attributes:
        not_in_blocks: why it is not served block by block where that is not asked for.
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
        """Return the bytes that a call takes beside the weights, by the host's estimate; ``size`` is of a tensor."""
        return float(self.model.memory_required(size))

    @property
    def device(self) -> torch.device:
        """Return where the part runs."""
        device: torch.device = self.model.device
        return device

    def captured(self, forward: types.MethodType) -> Callable[..., Any]:
        """Return what is called in the place of ``forward``, of the part or of an image of it, and captured."""
        return forward
