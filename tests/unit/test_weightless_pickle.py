"""compilation/weightless_pickle.py: what another process captures is the module as it is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation.weightless_pickle import Unpicklable, from_bytes, to_bytes


class BuiltAnew(nn.Module):
    """Is pickled as layers of einops are: by what it was built with."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.offset = factor, 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.offset


def test_a_layer_that_would_be_built_anew_comes_back_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), BuiltAnew(2.0)).eval()
    model[1].offset = 3.0
    read = from_bytes(to_bytes(model), torch.device("cpu"))
    assert not any(layer.training for layer in read.modules())
    assert (read[1].factor, read[1].offset) == (2.0, 3.0)  # type: ignore[index]
    assert Target(read).fingerprint == Target(model).fingerprint


def test_what_another_process_cannot_have_is_said() -> None:
    model = nn.Linear(2, 2)
    model.function = lambda: None
    with pytest.raises(Unpicklable, match="lambda"):
        to_bytes(model)
