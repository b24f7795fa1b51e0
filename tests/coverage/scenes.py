"""Tiny models of three families in this process, and images made with them.

Only to be imported where ComfyUI may be: it changes the interpreter it is imported into.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.models.checkpoints import checkpoint_file
from tools.models.formats import scaled_fp8

HEIGHT, WIDTH = 8, 12
"""Of the latent. They differ, so that one taken for the other shows."""
STEPS, CFG, SEED = 2, 3.0, 5


@dataclass(frozen=True)
class Family:
    """A tiny checkpoint and what its images are made from.

    Attributes:
        scaled_fp8: whether the matrices of its blocks are in 8 bits, with a scale each.
    """

    checkpoint: str
    latent_channels: int
    context: int
    pooled: int = 0
    control: str | None = None
    scaled_fp8: bool = False


FAMILIES = {
    "sd15": Family("sd15_deep", 4, 768, control="sd15_control"),
    "sdxl": Family("sdxl_deep", 4, 2048, pooled=1280, control="sdxl_control"),
    "flux": Family("flux_min", 16, 64, pooled=32),
    "flux scaled fp8": Family("flux_min", 16, 64, pooled=32, scaled_fp8=True),
    "sd15 inpainting": Family("sd15_inpaint", 4, 768),
}


@dataclass(frozen=True)
class Scene:
    """One image: a MODEL, conditioning, and what the sampler is told.

    Attributes:
        models: further MODELs of the family, by name, for a workflow that uses several.
        mask: where the latent may change, [1, 1, height, width].
    """

    family: Family
    models: Models
    model: Any
    positive: list[Any]
    negative: list[Any]
    steps: int = STEPS
    cfg: float = CFG
    size: tuple[int, int] = (HEIGHT, WIDTH)
    batch: int = 1
    mask: torch.Tensor | None = None
    latent: torch.Tensor | None = field(default=None, repr=False)

    def on(self, model: Any) -> Scene:
        return replace(self, model=model)

    def with_prompt(self, positive: list[Any], negative: list[Any] | None = None) -> Scene:
        return replace(self, positive=positive, negative=self.negative if negative is None else negative)

    def image(self) -> torch.Tensor:
        """The latent that ComfyUI's own sampler makes, [batch, channels, height, width]."""
        import comfy.sample

        generator = torch.Generator().manual_seed(SEED)
        noise = torch.randn(self.batch, self.family.latent_channels, *self.size, generator=generator)
        latent = torch.zeros_like(noise) if self.latent is None else self.latent
        torch.manual_seed(SEED)  # some patches draw random numbers of their own
        done: torch.Tensor = comfy.sample.sample(
            *(self.model, noise, self.steps, self.cfg, "euler", "normal", self.positive, self.negative, latent),
            noise_mask=self.mask,
            disable_pbar=True,
            seed=SEED,
        )
        return done

    def eager_image(self) -> tuple[torch.Tensor, int]:
        """The image of a MODEL that is not accelerated, and how often the model's own code ran for it."""
        kind, calls = type(self.model.model.diffusion_model), 0
        forward = kind._forward

        @functools.wraps(forward)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return forward(*args, **kwargs)

        with mock.patch.object(kind, "_forward", counted):
            return self.image(), calls


class Models:
    """The MODELs of one family, each loaded when it is first asked for.

    Args:
        folder: of the tiny checkpoints.
        accelerate: what every MODEL goes through right behind its loader.
    """

    def __init__(self, family: Family, folder: Path, accelerate: Callable[[Any], Any] = lambda model: model) -> None:
        self.family = family
        self.folder = folder
        self._accelerate = accelerate
        self._loaded: dict[str, Any] = {}

    def accelerated(self, accelerate: Callable[[Any], Any]) -> Models:
        """The same MODELs, accelerated."""
        other = Models(self.family, self.folder, accelerate)
        other._loaded = self._loaded
        return other

    @property
    def plain(self) -> Any:
        return self._accelerate(self._load("plain", 1.0))

    @property
    def other(self) -> Any:
        """Another checkpoint of the same architecture."""
        return self._accelerate(self._load("other", 0.97))

    def control(self) -> Any:
        """A ControlNet for this family."""
        import comfy.controlnet

        if "control" not in self._loaded:
            control = self.family.control
            weights = self.weights(control) if control else _flux_control(self.weights(self.family.checkpoint))
            self._loaded["control"] = comfy.controlnet.load_controlnet_state_dict(weights)
        return self._loaded["control"]

    def weights(self, checkpoint: str) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / checkpoint_file(checkpoint))

    def scene(self) -> Scene:
        """The family's image without anything special."""
        return Scene(self.family, self, self.plain, prompt(self.family, 1), prompt(self.family, 2))

    def _load(self, name: str, scale: float) -> Any:
        import comfy.sd

        if name not in self._loaded:
            weights = {key: weight * scale for key, weight in self.weights(self.family.checkpoint).items()}
            if self.family.scaled_fp8:
                weights = scaled_fp8(weights, _DIFFUSION_MODEL)
            model = comfy.sd.load_state_dict_guess_config(weights, output_vae=False, output_clip=False)[0]
            self._loaded[name] = model
        return self._loaded[name]


def prompt(family: Family, seed: int, tokens: int = 77) -> list[Any]:
    """Random conditioning in the host's form."""
    generator = torch.Generator().manual_seed(seed)
    extras: dict[str, Any] = {}
    if family.pooled:
        extras["pooled_output"] = torch.randn(1, family.pooled, generator=generator)
    return [[torch.randn(1, tokens, family.context, generator=generator), extras]]


_DIFFUSION_MODEL = "model.diffusion_model."


def _flux_control(checkpoint: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Weights of a ControlNet in the form that XLabs published for Flux, over a copy of the model's blocks."""
    weights = {
        name.removeprefix(_DIFFUSION_MODEL).replace("_norm.weight", "_norm.scale"): weight.clone()
        for name, weight in checkpoint.items()
        if name.startswith(_DIFFUSION_MODEL) and "final_layer" not in name
    }
    generator = torch.Generator().manual_seed(9)

    def layer(name: str, *shape: int) -> None:
        spread = float(torch.tensor(shape[1:]).prod()) ** -0.5
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator) * spread
        weights[f"{name}.bias"] = torch.zeros(shape[0])

    hidden, width = weights["img_in.weight"].shape
    layer("controlnet_blocks.0", hidden, hidden)
    layer("controlnet_single_blocks.0", hidden, hidden)
    layer("pos_embed_input", hidden, width)
    for index, channels in enumerate([3, *[16] * 7]):
        layer(f"input_hint_block.{2 * index}", 16, channels, 3, 3)
    return weights
