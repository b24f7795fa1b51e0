"""Deliberate faults in what tells calls apart: the matrix has to notice each of them.

A new graph is compared with eager by the product itself, once per sizes. These faults let calls be
served by graphs that were compared with something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Breakage:
    """A fault, and the row in which it must show."""

    apply: Callable[[], None]
    row: str
    family: str = "flux"


def _options_are_forgotten() -> None:
    """Patches are neither part of a call's identity nor handed to the capture."""
    from onediff_comfy.compilation.compile_graph import Maker
    from onediff_comfy.serving import module_guard

    split, make = module_guard.split, Maker.make

    def split_without(arguments: Mapping[str, Any], *, options_name: str, **others: Any) -> Any:
        return split({**arguments, options_name: {}}, options_name=options_name, **others)

    def make_without(self: Maker, library: Any, what: Any, *others: Any) -> Any:
        return make(self, library, dataclasses.replace(what, options={}), *others)

    module_guard.split, Maker.make = split_without, make_without


def _dtypes_are_forgotten() -> None:
    _tensors_are_told_apart_by(lambda spec: (spec.shape, spec.device))


def _lengths_are_forgotten() -> None:
    """Of prompts, which are the tensors with three axes; and graphs are made for one set of sizes alone.

    A graph for all sizes is right in spite of it.
    """
    from onediff_comfy.engines.eager import EagerEngine

    EagerEngine.general = False
    _tensors_are_told_apart_by(
        lambda spec: (spec.shape[::2] if len(spec.shape) == 3 else spec.shape, spec.dtype, spec.device)
    )


def _tensors_are_told_apart_by(facts: Callable[[Any], tuple[Any, ...]]) -> None:
    from onediff_comfy.capture.call import TensorSpec

    TensorSpec.__eq__ = lambda spec, other: facts(spec) == facts(other)
    TensorSpec.__hash__ = lambda spec: hash(facts(spec))
    TensorSpec.__str__ = lambda spec: repr(facts(spec))


BREAKAGES: Mapping[str, Breakage] = {
    "options": Breakage(_options_are_forgotten, "two attention patches"),
    "dtypes": Breakage(_dtypes_are_forgotten, "timesteps in float64"),
    "lengths": Breakage(_lengths_are_forgotten, "prompt lengths, cfg"),
}
