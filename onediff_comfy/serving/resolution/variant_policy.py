"""Which engine makes an object's graphs, and in which variant: lossless or fp8, with or without a step cache."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from ...cache.keys import Variant, compiler
from ...capture.target.target import Target
from ...compilation.compile_graph import HostServices, Maker
from ...engines import choose
from ...engines.base import Engine
from ...messages import message

log = logging.getLogger(__name__)


class VariantPolicy:
    """Chooses a variant for each target, and remembers the variants that a target cannot have.

    Args:
        engine: one of ``ENGINE_NAMES``.
        precision: one of ``PRECISIONS``; with fp8, graphs are lossless where fp8 cannot be had or is too far off.
    """

    def __init__(self, engine: str, precision: str) -> None:
        self._engine, self._precision = engine, precision
        self._no_fp8: dict[str, str] = {}  # fingerprints of targets, and why
        self._no_reuse: dict[str, str] = {}
        self._told: set[str] = set()

    def engine(self, device: torch.device) -> Engine:
        """Return the engine for ``device``.

        Raises:
            EngineError: no engine can serve it.
        """
        return choose(self._engine, device)

    def chosen(self, device: torch.device) -> tuple[str, str]:
        """Return what makes graphs for ``device``: the engine's name, and one of ``PRECISIONS``.

        Raises:
            EngineError: no engine can serve it.
        """
        engine = self.engine(device)
        return engine.name, self._precision if self._why_not_fp8(engine, device) is None else "lossless"

    def maker(self, target: Target, device: torch.device, reusing: bool, host: HostServices) -> Maker:
        """Return what makes graphs of ``target``, in the fastest variant that it can have.

        Args:
            reusing: for runs that may reuse steps.

        Raises:
            EngineError: no engine can serve ``device``.
        """
        engine = self.engine(device)
        fp8 = self._precision == "fp8" and self._why_not_fp8(engine, device, target) is None
        variant = Variant(reusing and target.fingerprint not in self._no_reuse, fp8)
        return Maker(engine, device, compiler(engine, device, variant), host)

    def drop(self, target: Target, variant: Variant, reason: str) -> Variant | None:
        """Give up the step cache for ``target``, or else fp8. Return the variant that is left, None after the last."""
        if variant.reusable:
            self._no_reuse[target.fingerprint] = reason
            return replace(variant, reusable=False)
        if variant.fp8:
            self._no_fp8[target.fingerprint] = reason
            return replace(variant, fp8=False)
        return None

    def allow(self, target: Target, variant: Variant) -> None:
        """Take back that ``variant`` was dropped for ``target``."""
        (self._no_reuse if variant.reusable else self._no_fp8).pop(target.fingerprint, None)

    def why_no_reuse(self, target: Target) -> str:
        """Return why no steps of ``target`` can be reused although the run may reuse some."""
        return self._no_reuse.get(target.fingerprint, message("this model has no blocks that could be left out"))

    def note(self, target: Target, maker: Maker) -> str:
        """Return what the person should know of graphs by ``maker``: that they are not in fp8, though chosen so."""
        reason = self._why_not_fp8(maker.engine, maker.device, target) if self._precision == "fp8" else None
        if reason is None:
            return ""
        note = message("lossless instead of fp8: {reason}", reason=reason)
        if note not in self._told:
            self._told.add(note)
            log.warning("OneDiff: %s", note)
        return note

    def _why_not_fp8(self, engine: Engine, device: torch.device, target: Target | None = None) -> str | None:
        return engine.fp8_unavailable(device) or (self._no_fp8.get(target.fingerprint) if target is not None else None)
