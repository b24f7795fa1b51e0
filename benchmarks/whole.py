"""Time whole images and videos: a prompt's encoding, the steps, and decoding; eager and ours by turns.

    COMFYUI_PATH=... ONEDIFF_CACHE_DIR=FOLDER python -m benchmarks.whole --model z-image
    ... python -m benchmarks.whole --model tiny --variants eager,onediff-eager        on a CPU, to see that it runs

Models of few steps, in which both ends weigh as much as the middle. Everything has real size and random weights. Each
image has another prompt. With --part, that part alone is made, so that several processes can compile side by side.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .checkpoints import load
from .host import reported, start_host
from .sampling import Bench, add_format, arguments, counters, spread, when_done
from .vae import random_vae
from .variants import Variant
from .video_vae import random_video_vae

if TYPE_CHECKING:
    import torch

PARTS = ("text", "steps", "decoding")
_PROMPT = (
    "Photograph {} of a harbour at dawn, fishing boats with peeling paint in the foreground, nets drying over a stone "
    "wall, an old man who mends one of them, gulls in the mist, warm light from a kitchen window, cobbles wet from the "
    "night's rain, shallow depth of field, 35 mm film."
)


@dataclass(frozen=True)
class Whole:
    """What makes an image or a video of a prompt.

    Attributes:
        family: one of ``benchmarks.models.FAMILIES``.
        text_encoder: one of ``benchmarks.text_encoders.TEXT_ENCODERS``.
        vae: makes a VAE.
        steps: that people run it with.
    """

    family: str
    text_encoder: str
    vae: Callable[[], Any]
    steps: int


_FLUX_VAE = functools.partial(random_vae, 128, latent=16)
_WAN_VAE = functools.partial(random_video_vae, 96)
WHOLES = {
    "z-image": Whole("z-image", "qwen3-4b", _FLUX_VAE, 8),
    "qwen-image": Whole("qwen-image", "qwen2.5-7b", _WAN_VAE, 4),
    "wan-5s": Whole("wan-5s", "umt5-xxl", _WAN_VAE, 4),
    "tiny": Whole("tiny-wan-long", "tiny-umt5", functools.partial(random_video_vae, 16), 4),
}
"""Whole images and videos, by name."""


def main() -> int:
    """Run the benchmark; write JSON, print a table. Ends with 1 if one of ours failed or was not ours throughout."""
    options = arguments(str(__doc__), tuple(WHOLES), _add_options)
    options.steps = options.steps or WHOLES[options.model].steps
    start_host(cuda_malloc=not options.disable_cuda_malloc)
    report = reported(lambda: _WholeBench(options).run(), options.output)
    _print_table(report)
    return any(_ran_otherwise(row) for name, row in report["variants"].items() if name.startswith("onediff"))


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_format(parser)
    parser.add_argument("--part", choices=PARTS, help="make this part alone, of what the others would give")
    parser.set_defaults(steps=None, variants=["eager", "onediff-inductor"])


class _WholeBench(Bench):
    """Times the whole of what one model makes. A variant is a MODEL, a CLIP and a VAE."""

    def __init__(self, options: argparse.Namespace) -> None:
        from .text_encoders import TEXT_ENCODERS

        whole = WHOLES[options.model]
        self.parts = PARTS if options.part is None else (options.part,)
        super().__init__(options, self._load, whole.family)
        self.clip = TEXT_ENCODERS[whole.text_encoder].load(self.device) if "text" in self.parts else None
        self.vae = whole.vae() if "decoding" in self.parts else None

    def _load(self, family: Any, device: torch.device) -> Any:
        return load(family, device, self.options.format) if "steps" in self.parts else None

    def accelerated(self, name: str) -> Any:
        from onediff_comfy.host.adapters.text_encoder import accelerate_clip
        from onediff_comfy.host.adapters.vae import accelerate_vae

        kind = Variant.parse(name)
        model, clip, vae = self.model, self.clip, self.vae
        if kind.base == "onediff":
            assert kind.compiler is not None
            clip = clip and accelerate_clip(clip, kind.compiler)
            vae = vae and accelerate_vae(vae, kind.compiler)
        return model and kind.apply(model), clip, vae

    def make(self, name: str, seed: int, callback: Callable[..., None] | None = None) -> tuple[Any, dict[str, float]]:
        """Make a picture, [images, height, width, 3] on the CPU, or what the last part gives.

        Noted are each part's seconds, and how many of its calls ran eager.
        """
        model, clip, vae = self.models[name]
        moments = [_moment()]
        positive, negative = self.sampler.prompts[0]
        made = self.sampler.noise(seed)
        if clip is not None:
            positive = clip.encode_from_tokens_scheduled(clip.tokenize(_PROMPT.format(seed)))
            made = positive[0][0]
            moments.append(_moment())
        if model is not None:
            made = self.sampler.of(model, seed, positive, negative, callback)
            moments.append(_moment())
        if vae is not None:
            made = vae.decode(made)
            moments.append(_moment())
        noted: dict[str, float] = {}
        for part, (before, after) in zip(self.parts, itertools.pairwise(moments), strict=True):
            noted |= {f"{part}_s": after[0] - before[0], f"{part}_eager": after[1] - before[1]}
        return made, noted

    def summary(self, images: list[dict[str, Any]]) -> dict[str, Any]:
        """What a variant's timed images come to: the whole, the median of each part, and a step."""
        found = super().summary(images) | spread("whole_s", [image["s"] for image in images])
        for part in self.parts:
            found[f"{part}_s"] = statistics.median(image[f"{part}_s"] for image in images)
            found[f"{part}_eager"] = sum(image[f"{part}_eager"] for image in images)
        if "steps" in self.parts:
            found |= spread("step_ms", [1000 * image["steps_s"] / self.options.steps for image in images])
        return found


def _moment() -> tuple[float, int]:
    """Seconds of a clock once the device is done, and how many calls have run eager so far."""
    return when_done(), counters()["fallbacks"]


def _ran_otherwise(row: dict[str, Any]) -> bool:
    """Whether a variant of ours failed, or a part of it was not ours. A video's first pieces are ComfyUI's."""
    return "failed" in row or not row["calls"] or any(row.get(f"{part}_eager") for part in ("text", "steps"))


def _print_table(report: dict[str, Any]) -> None:
    print(f"\n{report['what']['model']} {report['what']['format']}; {report['environment']}")
    for name, row in report["variants"].items():
        if "failed" in row:
            print(f"{name:20} failed: {row['failed']}", flush=True)
            continue
        parts = ", ".join(f"{part} {row[f'{part}_s']:.3f}" for part in PARTS if f"{part}_s" in row)
        error = f", relative error {row['relative_error']:.1e}" if "relative_error" in row else ""
        peak = f", peak {row['peak_mib']:.0f} MiB" if row["peak_mib"] else ""
        calls = f", {row['calls']} calls served, {row['calls_eager']} eager"
        print(f"{name:20} {row['whole_s']:8.3f} s ({parts}){error}{peak}{calls}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
