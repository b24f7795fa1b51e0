"""Tiny VAEs with and without our nodes, in one workflow, and by how much what comes out differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dev.host import ComfyServer
from tools.workflows import Workflow

BOUND = 2e-2 if torch.cuda.is_available() else 1e-5
"""Relative error. In fp32 on the CPU a compiled sum is another order of the same additions (measured: 1e-6)."""

UNTOUCHED = BOUND if torch.cuda.is_available() else 0.0
"""Relative error where the host's own code ran on the same weights; ``pictures.assert_untouched`` says why."""


@dataclass(frozen=True)
class TinyFamily:
    """A kind of TinyVAE and what it is given here: the engine, and how large an image it encodes in little time."""

    kind: str
    channels: int
    engine: str
    largest_encoded: int


# Compiling takes a minute, the eager engine no time; it runs the same captures with the same ranges.
FAMILIES = (
    TinyFamily("sd", 4, "inductor", 320),
    TinyFamily("flux", 16, "eager", 128),
    TinyFamily("taesd", 4, "eager", 256),
)
SD = FAMILIES[0]


class Bench:
    """Runs things with and without the node, in one workflow, and says by how much they differ."""

    def __init__(self, server: ComfyServer, family: TinyFamily, engine: str | None = None, **inputs: Any) -> None:
        self._server = server
        self._family = family
        self._loader = {"kind": family.kind, "dtype": "float32", "seed": 0}
        self._speedup = {"engine": engine or family.engine, "compile": "wait", **inputs}

    def decoded(self, width: int, height: int, batch: int, seed: int, **tiles: int) -> float:
        """The error of decoding a latent; in tiles where their sizes are given."""
        latent = self._latent(width, height, batch, seed)
        values = {"temporal_size": 64, "temporal_overlap": 8, **tiles} if tiles else {}
        return self._error(latent, "VAEDecodeTiled" if tiles else "VAEDecode", values, "samples", 0)

    def encoded(self, width: int, height: int, batch: int, seed: int, **tiles: int) -> float:
        """The error of encoding an image; in tiles where their sizes are given."""
        image = self._image(width, height, batch, seed)
        values = {"temporal_size": 64, "temporal_overlap": 8, **tiles} if tiles else {}
        return self._error(image, "VAEEncodeTiled" if tiles else "VAEEncode", values, "pixels", 0)

    def inpainted(self, width: int, height: int, seed: int) -> float:
        """The error of encoding for inpainting."""
        values = {"mask": ["data", 1], "grow_mask_by": 6}
        return self._error(self._image(width, height, 1, seed), "VAEEncodeForInpaint", values, "pixels", 0)

    def _latent(self, width: int, height: int, batch: int, seed: int) -> dict[str, Any]:
        inputs = {"seed": seed, "width": width, "height": height, "batch": batch, "channels": self._family.channels}
        return {"class_type": "TinyLatent", "inputs": inputs}

    def _image(self, width: int, height: int, batch: int, seed: int) -> dict[str, Any]:
        return {"class_type": "TinyImage", "inputs": {"seed": seed, "width": width, "height": height, "batch": batch}}

    def _error(self, data: dict[str, Any], node: str, values: dict[str, Any], name: str, output: int) -> float:
        def using(vae: str) -> dict[str, Any]:
            return {"class_type": node, "inputs": {name: ["data", 0], "vae": [vae, 0], **values}}

        workflow: Workflow = {
            "loader": {"class_type": "TinyVAE", "inputs": self._loader},
            "speedup": {"class_type": "OneDiffVAESpeedup", "inputs": {"vae": ["loader", 0], **self._speedup}},
            "data": data,
            "actual": using("speedup"),
            "expected": using("loader"),
        }
        compared = {"actual": ["actual", output], "expected": ["expected", output]}
        workflow["error"] = {"class_type": "RelativeError", "inputs": compared}
        result = self._server.run(workflow)
        assert result.status == "success", result.error
        (error,) = result.outputs["error"]["error"]
        return float(error)
