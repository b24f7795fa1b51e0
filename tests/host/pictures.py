"""Tiny model families, what the pack counted, and when two pictures are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load

from dev.host import ComfyServer, RunResult
from tools.models.checkpoints import checkpoint_file
from tools.workflows import Workflow, text_to_image

_PLAIN = "plain"
PATIENCE_S = 900
"""That another process may take to compile."""
MEANWHILE = {
    "a graph is made in the background once the first image is there",
    "a graph is being compiled in the background",
}
"""Why calls are eager until the graph is there."""


@dataclass(frozen=True)
class TinyFamily:
    """A tiny checkpoint and how to prompt it."""

    checkpoint: str
    conditioning: Mapping[str, int]
    cfg: float
    steps: int = 3

    def workflow(
        self, seed: int = 1, engine: str | None = None, size: int | tuple[int, int] = 128, **more: Any
    ) -> Workflow:
        """Text to image at ``size``, in pixels, or (width, height)."""
        width, height = (size, size) if isinstance(size, int) else size
        return text_to_image(
            checkpoint_file(self.checkpoint),
            width=width,
            height=height,
            steps=self.steps,
            cfg=self.cfg,
            seed=seed,
            engine=engine,
            conditioning=self.conditioning,
            save_latent=True,
            **more,
        )

    def compared(self, seed: int, engine: str = "inductor", **more: Any) -> Workflow:
        """The same image with and without the speedup node, in one workflow and without decoding; for ``pair_of``."""
        workflow = self.workflow(seed, engine, **more)
        for name in ("decode", "save"):
            del workflow[name]
        plain = {**workflow["sampler"]["inputs"], "model": ["loader", 0]}
        workflow["plain_sampler"] = {**workflow["sampler"], "inputs": plain}
        saved = {"samples": ["plain_sampler", 0], "filename_prefix": _PLAIN}
        workflow["save_plain"] = {**workflow["save_latent"], "inputs": saved}
        return workflow


FAMILIES = {
    "sd15": TinyFamily("sd15_min", {"tokens": 77, "dim": 768, "pooled_dim": 0}, 7.0),
    "sdxl": TinyFamily("sdxl_min", {"tokens": 77, "dim": 2048, "pooled_dim": 1280}, 7.0),
    "flux": TinyFamily("flux_min", {"tokens": 77, "dim": 64, "pooled_dim": 32}, 1.0),
}


OTHER = {"sd15": "sd15_min_other", "sdxl": "sdxl_min_other"}
"""Checkpoints with the architecture of a family and other weights."""


class Counters:
    """What the pack counted since this object was made."""

    def __init__(self, server: ComfyServer) -> None:
        self._server = server
        self._before = server.get_json("/onediff/report")

    def __getattr__(self, name: str) -> int:
        return int(self._server.get_json("/onediff/report")[name] - self._before[name])

    @property
    def graphs(self) -> list[dict[str, Any]]:
        """The graphs that were compiled or loaded, in order."""
        made: list[dict[str, Any]] = self._server.get_json("/onediff/report")["graphs"]
        return made[len(self._before["graphs"]) :]

    @property
    def fallbacks(self) -> dict[str, int]:
        """Eager calls by reason."""
        before = self._before["fallbacks"]
        now = self._server.get_json("/onediff/report")["fallbacks"]
        return {reason: count - before.get(reason, 0) for reason, count in now.items() if count > before.get(reason, 0)}


def compiled_twice(server: ComfyServer) -> list[str]:
    """What the server compiled more than once since it started: must be nothing, whatever was asked of it."""
    keys = Counter(graph["key"] for graph in server.get_json("/onediff/report")["graphs"] if graph["how"] == "compiled")
    return [key for key, count in keys.items() if count > 1]


def latent_of(result: RunResult) -> torch.Tensor:
    """The sampler's output, unrounded; fails the test if the run failed."""
    assert result.status == "success", result.error or result
    ((_, data),) = result.latents
    return load(data)["latent_tensor"]


def pair_of(result: RunResult) -> tuple[torch.Tensor, torch.Tensor]:
    """The latents of a ``TinyFamily.compared`` workflow: with the speedup node, and without."""
    assert result.status == "success", result.error or result
    latents = {name.startswith(_PLAIN): load(data)["latent_tensor"] for name, data in result.latents}
    return latents[False], latents[True]


def assert_same_picture(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for rounding.

    In fp32 on the CPU the bound is 1e-4 of the latent's range: a compiled sum is another order of
    the same additions, each off by 6e-8 of its size, over a few thousand terms and a few steps
    (measured: 1e-6), while an 8-bit picture has steps of 4e-3. On a GPU the models run in 16 bits
    and the bound is that of dispatch's own proof.
    """
    assert actual.shape == expected.shape
    bound = 2e-2 if torch.cuda.is_available() else 1e-4
    span = float(expected.max() - expected.min())
    assert span > 0.1, "a flat picture proves nothing"
    difference = float((actual - expected).abs().max())
    assert difference <= bound * span, f"off by {difference / span:.2e} of the range"


def assert_untouched(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The host's own code ran, on the same weights: not one bit differs.

    On a GPU the bound is rounding. There the host's convolutions gave other last bits (4e-3 of the
    largest value in fp16) when a model was loaded anew or without Dynamic VRAM; models without
    convolutions did not. The cause was not established (benchmarks/NOTES.md).
    """
    if torch.cuda.is_available():
        assert_same_picture(actual, expected)
    else:
        assert torch.equal(actual, expected)
