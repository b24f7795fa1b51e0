"""Ways to run a MODEL, by name.

    eager                        as ComfyUI runs it
    torch_compile[-BACKEND]      through ComfyUI's node TorchCompileModel; BACKEND: inductor (the default) or cudagraphs
    onediff-ENGINE               through OneDiff Model Speedup; ENGINE: inductor, cudagraph, ...

Each of these may be followed by

    +fp8                         with large layers in 8 bits; behind onediff-ENGINE only
    +easycache[:THRESHOLD]       and through ComfyUI's node EasyCache, with the node's own threshold if none is given
    +steps:THRESHOLD             and through OneDiff Step Cache; behind onediff-ENGINE only

``easycache`` alone stands for ``eager+easycache``.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any

from onediff_comfy.settings import ENGINE_NAMES

_NAME = re.compile(
    r"(?P<base>eager|torch_compile|onediff)(-(?P<compiler>\w+))?(\+(?P<precision>fp8))?"
    r"(\+(?P<cache>easycache|steps)(:(?P<threshold>\d+(\.\d+)?))?)?"
)
_COMPILERS = {"eager": (None,), "torch_compile": (None, "inductor", "cudagraphs"), "onediff": ENGINE_NAMES}


@dataclass(frozen=True)
class Variant:
    """What a name says.

    Attributes:
        base: ``eager``, ``torch_compile`` or ``onediff``.
        compiler: the backend of ``torch_compile`` or the engine of ``onediff``; None for the default, or eager.
        precision: one of ``PRECISIONS``.
        cache: ``easycache``, ``steps`` or None.
        threshold: of the cache; None for the node's own.
    """

    base: str
    compiler: str | None
    precision: str
    cache: str | None
    threshold: float | None

    @classmethod
    def parse(cls, name: str) -> Variant:
        """
        Raises:
            ValueError: there is no such variant.
        """
        match = _NAME.fullmatch(f"eager+{name}" if name.startswith("easycache") else name)
        if match is None or match["compiler"] not in _COMPILERS[match["base"]]:
            raise ValueError(f"unknown variant {name!r}; {__name__} lists them")
        threshold = float(match["threshold"]) if match["threshold"] else None
        if match["precision"] and match["base"] != "onediff":
            raise ValueError(f"{name!r}: fp8 is written onediff-ENGINE+fp8")
        if match["cache"] == "steps" and (match["base"] != "onediff" or threshold is None):
            raise ValueError(f"{name!r}: a step cache is written onediff-ENGINE+steps:THRESHOLD")
        return cls(match["base"], match["compiler"], match["precision"] or "lossless", match["cache"], threshold)

    @property
    def lossy(self) -> bool:
        """Whether it leaves out work or bits, and so makes another picture."""
        return self.cache is not None or self.precision != "lossless"

    def apply(self, model: Any) -> Any:
        """A clone of ``model`` that runs in this way."""
        return self._cached(self._compiled(model))

    def _compiled(self, model: Any) -> Any:
        if self.base == "torch_compile":
            from comfy_extras.nodes_torch_compile import TorchCompileModel

            return TorchCompileModel.execute(model, self.compiler or "inductor").args[0]
        if self.base == "onediff":
            from onediff_comfy.host.adapters.model import accelerate

            assert self.compiler is not None
            return accelerate(model, self.compiler, precision=self.precision)
        return model.clone()

    def _cached(self, model: Any) -> Any:
        if self.cache == "easycache":
            from comfy_extras.nodes_easycache import EasyCacheNode

            inputs = EasyCacheNode.define_schema().inputs
            values = {item.id: item.default for item in inputs if item.id != "model"}
            if self.threshold is not None:
                values["reuse_threshold"] = self.threshold
            return EasyCacheNode.execute(model, **values).args[0]
        if self.cache == "steps":
            from onediff_comfy.host.adapters.model import with_step_cache

            assert self.threshold is not None
            return with_step_cache(model, self.threshold)
        return model


def names(text: str) -> list[str]:
    """The names in a comma-separated list.

    Raises:
        argparse.ArgumentTypeError: there is no such variant.
    """
    found = text.split(",")
    try:
        for name in found:
            Variant.parse(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def variant(model: Any, name: str) -> Any:
    """A clone of ``model`` that runs in the way called ``name``."""
    return Variant.parse(name).apply(model)
