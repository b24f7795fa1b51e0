"""compilation/weightless_pickle.py: what another process captures is the module as it is here."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.capture.fingerprint.code_ownership import HostCode
from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation.weightless_pickle import LayerFactory, Unpicklable, from_bytes, to_bytes


class BuiltAnew(nn.Module):
    """Is pickled as layers of einops are: by what it was built with."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __getstate__(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def test_a_layer_that_is_built_anew_trains_no_more_than_before() -> None:
    model = nn.Sequential(nn.Linear(2, 2), BuiltAnew(2.0)).eval()
    read = from_bytes(to_bytes(model), torch.device("cpu"))
    assert not any(layer.training for layer in read.modules())
    assert Target(read).fingerprint == Target(model).fingerprint


def test_what_the_host_notes_on_a_module_stays_behind() -> None:
    """It may be of this process alone. A plain value may be the very object that another attribute has, too."""
    model: Any = nn.Sequential(nn.Linear(2, 2))
    model.pages, model.lowvram, model[0].factor = {"lock": threading.Lock()}, False, False
    with pytest.raises(Unpicklable, match="lock"):
        to_bytes(model)
    read: Any = from_bytes(to_bytes(model, notes={"pages", "lowvram"}), torch.device("cpu"))
    assert (read.pages, read.lowvram, read[0].factor) == (None, False, False)
    host = HostCode(notes=frozenset({"pages", "lowvram"}))
    assert Target(read, host).fingerprint == Target(model, host).fingerprint


def operations(factor: float) -> type:
    """Make a class of layers, another one each time, as the host does for a quantised checkpoint."""

    class Operations:
        given = factor

        class Scale(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * Operations.given

    return Operations


def made(kind: type) -> tuple[type, tuple[Any, ...]] | None:
    if "operations.<locals>" not in kind.__qualname__:
        return None
    holder = kind if kind.__name__ == "Operations" else kind.forward.__closure__[0].cell_contents  # type: ignore[attr-defined]
    return holder, (holder.given,)


def test_classes_of_layers_that_a_function_made_are_made_again() -> None:
    first, second = operations(2.0), operations(3.0)
    model = nn.Sequential(first.Scale(), first.Scale(), second.Scale())  # type: ignore[attr-defined]
    model.operations = first  # as models keep it, to make layers later
    with pytest.raises(Unpicklable, match="operations"):
        to_bytes(model)
    factory = LayerFactory(made, operations)
    read: Any = from_bytes(to_bytes(model, factory=factory), torch.device("cpu"), factory=factory)
    assert type(read[0]) is type(read[1]) is read.operations.Scale and type(read[2]) is not type(read[0])
    assert read(torch.ones(1)) == 2 * 2 * 3
    assert Target(read).fingerprint == Target(model).fingerprint


ACTIVATIONS = {"doubled": lambda x: x * 2, "halved": lambda x: x / 2}


def test_a_function_without_a_name_is_found_in_its_table() -> None:
    """ComfyUI's text encoders have their activations so."""
    model = nn.Linear(2, 2)
    model.activation = ACTIVATIONS["halved"]
    read: Any = from_bytes(to_bytes(model), torch.device("cpu"))
    assert read.activation is ACTIVATIONS["halved"]


def test_what_another_process_cannot_have_is_said() -> None:
    model = nn.Linear(2, 2)
    model.function = lambda: None
    with pytest.raises(Unpicklable, match="lambda"):
        to_bytes(model)
