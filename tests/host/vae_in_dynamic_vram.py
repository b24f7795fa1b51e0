"""VAEs in Dynamic VRAM, which are served from the pages that the host keeps their weights in.

    python vae_in_dynamic_vram.py COMFY_DIR CHECKPOINT

Prints as JSON, by VAE, of each image and video how far it is from an ordinary VAE's, and what served it. One VAE is of
images, in several dtypes of its file and of what it computes in; one is of videos, which are decoded in pieces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.ops  # noqa: E402
import comfy.sd  # noqa: E402
import pages_of_cpu  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.wan.vae import WanVAE  # noqa: E402
from pages_of_cpu import Pages, looked_at  # noqa: E402

from benchmarks.memory_modes import off  # noqa: E402
from onediff_comfy.engines.eager import EagerGraph  # noqa: E402
from onediff_comfy.host.adapters.vae import accelerate_vae, find_vae_dispatcher, preparing  # noqa: E402
from onediff_comfy.host.weights import pinned_module  # noqa: E402

Weights = dict[str, torch.Tensor]


class Kind(NamedTuple):
    """A VAE from a file.

    Attributes:
        weights: of the file.
        dtype: what it computes in.
        latents: what is decoded: sizes of two, and of a third.
    """

    weights: Weights
    dtype: torch.dtype
    latents: tuple[tuple[int, ...], ...]

    def loaded(self) -> Any:
        """Return the VAE; in Dynamic VRAM, since that has begun, with weights that are not on the device."""
        vae = comfy.sd.VAE(sd=dict(self.weights), dtype=self.dtype)
        if vae.is_dynamic():
            pages_of_cpu.off_device(vae.patcher)
            vae.patcher.cached_patcher_init = self._loaded_again, ()
        return vae

    def _loaded_again(self, disable_dynamic: bool) -> Any:
        """Return the patcher of another one, as the host's loaders do when they are asked for a resident form."""
        return self.loaded().patcher

    def jobs(self) -> dict[str, Callable[[Any], torch.Tensor]]:
        """Return what is done with it, by name."""
        generator = torch.Generator().manual_seed(1)
        one, other = (torch.randn(shape, generator=generator) for shape in self.latents)
        frames = 1 if one.ndim < 5 else 4 * one.shape[2] - 3
        pixels = torch.rand(frames, 64, 96, 3, generator=generator)
        return {
            "decoded": lambda vae: vae.decode(one),
            "of another size": lambda vae: vae.decode(other),
            "in tiles": lambda vae: vae.decode_tiled(other, tile_x=8, tile_y=8, overlap=2),
            "encoded": lambda vae: vae.encode(pixels),
        }


def of_images(weights: Weights, stored: torch.dtype, dtype: torch.dtype) -> Kind:
    return Kind({name: weight.to(stored) for name, weight in weights.items()}, dtype, ((1, 16, 8, 8), (2, 16, 12, 10)))


def of_videos() -> Kind:
    """Wan 2.1's, with few channels: the host takes all else of it from the file."""
    module = WanVAE(dim=8, z_dim=16, temperal_downsample=[False, True, True])
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=max(1, weight[0].numel()) ** -0.5)
    return Kind(module.state_dict(), torch.float32, ((1, 16, 7, 6, 8), (1, 16, 9, 10, 4)))


def case(vae: Any, job: Callable[[Any], torch.Tensor], expected: torch.Tensor) -> dict[str, Any]:
    dispatcher = find_vae_dispatcher(vae)
    assert dispatcher is not None
    actual, found = looked_at(dispatcher, vae.patcher, lambda: job(vae))
    return {"off": off(actual, expected), **found}


def of_kind(kind: Kind, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    memory.unload_all_models()
    vae = kind.loaded()
    fast, jobs = accelerate_vae(vae, "eager"), kind.jobs()
    found: dict[str, Any] = {"shared": fast.patcher.model is vae.patcher.model}
    found |= {name: case(fast, job, expected[name]) for name, job in jobs.items()}
    decoded = jobs["decoded"], expected["decoded"]
    found["decoded again"] = case(fast, *decoded)
    found["prepared"] = case(preparing(fast), *decoded)
    fast.patcher.partially_unload(None, 1e30)
    found["taken away and back"] = case(fast, *decoded)
    Pages.room = 1
    memory.unload_all_models()
    found["no room"] = case(fast, *decoded)
    Pages.room = 1 << 20
    memory.unload_all_models()
    found["room again"] = case(fast, *decoded)
    found["by the host"] = off(decoded[0](vae), decoded[1])
    return found


def wrong_weights(kind: Kind, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What an image holds is not what the host computes with, as on a host that has moved on.

    So it is from the first call on, or once decoding was seen to be right.
    """
    memory.unload_all_models()
    jobs, right, found = kind.jobs(), pinned_module.put, dict[str, Any]()
    first, later = (accelerate_vae(kind.loaded(), "eager") for _ in range(2))
    before = case(later, jobs["decoded"], expected["decoded"])
    later.patcher.partially_unload(None, 1e30)
    pinned_module.put = lambda weights, found: right(  # type: ignore[assignment]
        weights, tuple(None if weight is None else weight * 1.5 for weight in found)
    )
    found["decoded"], found["decoded again"] = (case(first, jobs["decoded"], expected["decoded"]) for _ in range(2))
    found["encoded later"] = case(later, jobs["encoded"], expected["encoded"])
    pinned_module.put = right
    return {"before": before, **found}


def replaced(kind: Kind, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Another extension has put a function of its own in the place of the module's ``decode``."""
    memory.unload_all_models()
    fast, jobs = accelerate_vae(kind.loaded(), "eager"), kind.jobs()
    module = fast.patcher.model
    own = module.decode
    module.decode = lambda latent: own(latent)
    return case(fast, jobs["decoded"], expected["decoded"])


def short_of_memory(kind: Kind, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Memory runs out whenever a graph answers, in each of many images; then it does not, and the weights come."""
    memory.unload_all_models()
    fast, jobs, call, tried = accelerate_vae(kind.loaded(), "eager"), kind.jobs(), EagerGraph.__call__, [0]

    def failing(*_given: Any) -> Any:
        tried[0] += 1
        raise torch.OutOfMemoryError

    EagerGraph.__call__, found = failing, list[dict[str, Any]]()  # type: ignore[method-assign, assignment]
    for _ in range(8):
        tried[0] = 0
        found.append(case(fast, jobs["decoded"], expected["decoded"]) | {"tried": tried[0]})
    EagerGraph.__call__ = call  # type: ignore[method-assign]
    other = case(fast, jobs["of another size"], expected["of another size"])
    for _ in range(8):
        found.append(case(fast, jobs["decoded"], expected["decoded"]))
    return {"images": found, "of another size": other}


def not_brought(kind: Kind, expected: torch.Tensor) -> list[dict[str, Any]]:
    """ComfyUI's own function raises an error that is not for want of memory when it is asked for all weights."""
    memory.unload_all_models()
    fast, decoded, bring = accelerate_vae(kind.loaded(), "eager"), kind.jobs()["decoded"], comfy.ops.cast_bias_weight

    def failing(layer: Any, given: Any = None, *rest: Any, **options: Any) -> Any:
        if given is None:  # the layer's own forward gives what it computes with
            raise ValueError("a file that is gone")
        return bring(layer, given, *rest, **options)

    comfy.ops.cast_bias_weight = failing
    found = [case(fast, decoded, expected) for _ in range(2)]
    comfy.ops.cast_bias_weight = bring
    return found


class Drawing(WanVAE):  # type: ignore[misc]
    """Draws a random number for each video that it encodes, of which no graph answers anything."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        encoded: torch.Tensor = super().encode(x)
        return encoded


def stubborn(own: type) -> type:
    """Return a class of VAEs that take no image of 64 latents a side."""

    class Stubborn(own):  # type: ignore[misc, valid-type]
        def decode(self, z: torch.Tensor) -> torch.Tensor:
            if z.shape[-1] == 64:
                raise ValueError("not 64")
            decoded: torch.Tensor = super().decode(z)
            return decoded

    return Stubborn


def of_class(kind: Kind, of: Callable[[type], type], job: Callable[[Any], torch.Tensor]) -> dict[str, Any]:
    """Return what becomes of a VAE whose module is of another class, and whether as many numbers were drawn as by it.

    Args:
        of: returns the class, given the host's.
    """
    memory.unload_all_models()
    vae = kind.loaded()
    vae.first_stage_model.__class__ = of(type(vae.first_stage_model))
    fast, states = accelerate_vae(vae, "eager"), list[torch.Tensor]()
    torch.manual_seed(0)
    expected = job(vae)
    states.append(torch.get_rng_state())
    torch.manual_seed(0)
    found = case(fast, job, expected)
    states.append(torch.get_rng_state())
    return found | {"as many drawn": torch.equal(*states)}


def main() -> None:
    model = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_model=False)[2]
    weights = model.get_sd()
    kinds = {
        "32 bits": of_images(weights, torch.float32, torch.float32),
        "16 bits, computes in 32": of_images(weights, torch.float16, torch.float32),
        "32 bits, computes in 16": of_images(weights, torch.float32, torch.bfloat16),
        "videos": of_videos(),
    }
    with torch.inference_mode():
        expected = {}
        for name, kind in kinds.items():
            vae = kind.loaded()
            expected[name] = {what: job(vae) for what, job in kind.jobs().items()}
        del vae
        memory.unload_all_models()
        pages_of_cpu.begin()
        found: dict[str, Any] = {name: of_kind(kind, expected[name]) for name, kind in kinds.items()}
        for name in ("32 bits", "videos"):
            found[f"wrong: {name}"] = wrong_weights(kinds[name], expected[name])
            found[f"replaced: {name}"] = replaced(kinds[name], expected[name])
        found["short of memory"] = short_of_memory(kinds["32 bits"], expected["32 bits"])
        found["not brought"] = not_brought(kinds["32 bits"], expected["32 bits"]["decoded"])
        large = torch.randn((1, 16, 72, 72), generator=torch.Generator().manual_seed(2))
        found["stubborn"] = of_class(kinds["32 bits"], stubborn, lambda vae: vae.decode(large))
        found["drawing"] = of_class(kinds["videos"], lambda _own: Drawing, kinds["videos"].jobs()["encoded"])
    sys.stdout.write(json.dumps(found) + "\n")


main()
