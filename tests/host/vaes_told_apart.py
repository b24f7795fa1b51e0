"""An extension's method, set on a class of ComfyUI's, that asks which VAE it was called for.

    python vaes_told_apart.py COMFY_DIR dynamic|resident

Two VAEs of one kind decode by turns; the method treats one of them in another way. Prints as JSON, by how it is told
apart, how far each image and each video is from ComfyUI's own, how far one treatment is from the other, and what served
them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

comfyui, where = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.wan.vae import WanVAE  # noqa: E402
from counting import answered  # noqa: E402
from small_video_vae import weights  # noqa: E402

from benchmarks.memory_modes import off  # noqa: E402
from onediff_comfy.host.adapters.vae import accelerate_vae, find_vae_dispatcher  # noqa: E402

ROUNDS = 2
Is = Callable[[Any], bool]
"""Whether a module is the one that is treated in another way."""
Begin = Callable[[], None]
"""What has it be treated so, if nothing did before."""


def loaded() -> Any:
    vae = comfy.sd.VAE(sd=dict(WEIGHTS), dtype=torch.float32)
    if vae.is_dynamic():
        pages_of_cpu.off_device(vae.patcher)
    return vae


def by_itself(module: Any) -> Is:
    return lambda asked: asked is module


def by_address(module: Any) -> Is:
    table = {id(module): True}
    return lambda asked: table.get(id(asked), False)


def by_key(module: Any) -> Is:
    table = {module: True}
    return lambda asked: asked in table


def by_text(module: Any) -> Is:
    """Compare what Python writes of an object of no special form, which has its address in it."""
    text = object.__repr__(module)
    return lambda asked: object.__repr__(asked) == text


def by_address_later(module: Any) -> tuple[Is, Begin]:
    table = dict[int, bool]()
    return lambda asked: table.get(id(asked), False), lambda: table.update({id(module): True})


def from_the_first_on(way: Callable[[Any], Is]) -> Callable[[Any], tuple[Is, Begin]]:
    return lambda module: (way(module), lambda: None)


WAYS = {way.__name__: from_the_first_on(way) for way in (by_itself, by_address, by_key, by_text)}
WAYS["by_address_later"] = by_address_later


def pictures(vaes: list[Any], serving: list[Any], way: str, first: int) -> list[torch.Tensor]:
    """Return images and videos of two VAEs by turns, of which the class's method is another extension's meanwhile."""
    (is_meant, begin), own = WAYS[way](vaes[0].patcher.model), WanVAE.decode

    def decode(self: Any, z: torch.Tensor) -> torch.Tensor:
        decoded: torch.Tensor = own(self, z) * (0.25 if is_meant(self) else 1.0)
        return decoded

    WanVAE.decode = decode
    try:
        found = []
        for latent in LATENTS:
            for turn in range(2 * ROUNDS):
                if turn == 2:
                    begin()
                found.append(serving[(first + turn) % 2].decode(latent))
        return found
    finally:
        WanVAE.decode = own


def case(way: str, first: int) -> dict[str, Any]:
    memory.unload_all_models()
    theirs = [loaded(), loaded()]
    expected = pictures(theirs, theirs, way, first)
    memory.unload_all_models()
    vaes = [loaded(), loaded()]
    fast = [accelerate_vae(vae, "eager") for vae in vaes]
    dispatchers = [find_vae_dispatcher(vae) for vae in fast]
    before = [dispatcher.metrics.snapshot() for dispatcher in dispatchers if dispatcher is not None]
    found = pictures(vaes, fast, way, first)
    after = [dispatcher.metrics.snapshot() for dispatcher in dispatchers if dispatcher is not None]
    return {
        "off": [off(one, other) for one, other in zip(found, expected, strict=True)],
        "apart": off(expected[2], expected[3]),
        "answered": [answered(*both) for both in zip(before, after, strict=True)],
    }


WEIGHTS = weights()
LATENTS = [torch.randn((1, 16, frames, 6, 8), generator=torch.Generator().manual_seed(1)) for frames in (1, 7)]
with torch.inference_mode():
    if where == "dynamic":
        pages_of_cpu.begin()
    found = {
        f"{way}, {'it' if first == 0 else 'the other'} first": case(way, first) for way in WAYS for first in (0, 1)
    }
    sys.stdout.write(json.dumps(found) + "\n")
