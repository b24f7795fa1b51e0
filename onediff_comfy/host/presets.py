"""What OneDiff Optimize chooses for a model: how much a step cache may leave out, and whether 8 bits pay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..settings import PRECISIONS, STEP_CACHE_THRESHOLD

LOSSLESS, FP8 = PRECISIONS

THRESHOLDS: Mapping[str, float] = {
    # What the authors of the first block cache found for these, by the same measure:
    # https://huggingface.co/docs/diffusers/optimization/para_attn
    "Flux": 0.08,
    "FluxInpaint": 0.08,
    "HunyuanVideo": 0.06,
    "HunyuanVideoI2V": 0.06,
}
"""How much the result of the first block may change, by the host's name of the family; of others ``threshold_for``
gives OneDiff Step Cache's default."""

FP8_PAYS: Mapping[str, str] = {
    "Flux": "2026-11-23-h200-flux-1024-prompts-on-the-gpu.json",
    "FluxInpaint": "2026-11-23-h200-flux-1024-prompts-on-the-gpu.json",
    "FluxSchnell": "2026-11-23-h200-flux-1024-prompts-on-the-gpu.json",
}
"""Families that are faster in 8 bits, with the measurement among ``benchmarks/results`` that says so. SDXL is not: its
layers are too small."""


@dataclass(frozen=True)
class Preset:
    """How a model is to be accelerated.

    Attributes:
        precision: one of ``settings.PRECISIONS``.
        threshold: of the step cache; 0 for none.
    """

    precision: str = LOSSLESS
    threshold: float = 0.0


def preset_for(goal: str, model: Any) -> Preset:
    """Return what serves a goal best for a model.

    Args:
        goal: one of ``settings.GOALS``.
        model: a ComfyUI MODEL.
    """
    family = _family_of(model)
    if goal == "exact":
        return Preset()
    threshold = THRESHOLDS.get(family, STEP_CACHE_THRESHOLD)
    if goal == "faster" or family not in FP8_PAYS:
        return Preset(threshold=threshold)
    return Preset(FP8, threshold)


def _family_of(model: Any) -> str:
    """Return the host's name of a model's family (a class of comfy.supported_models); empty if it has none."""
    config = getattr(getattr(model, "model", None), "model_config", None)
    return type(config).__name__ if config is not None else ""
