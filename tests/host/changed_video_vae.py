"""A video VAE that other extensions change: what each does is done to ComfyUI's own and to ours.

    python changed_video_vae.py COMFY_DIR dynamic|resident

Prints as JSON, by what is done, how far each of three videos is from ComfyUI's own, what served them, and what the
extension has noted by then, of ComfyUI's and of ours.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
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

VIDEOS = 3
Before = Callable[[], None]
"""What is done before each video."""


def loaded(gain: float = 1.0) -> Any:
    vae = comfy.sd.VAE(sd={name: weight * gain for name, weight in WEIGHTS.items()}, dtype=torch.float32)
    if vae.is_dynamic():
        pages_of_cpu.off_device(vae.patcher)
    return vae


def nothing(_module: Any, _noted: list[Any]) -> Before:
    return lambda: None


def other_vae(module: Any, noted: list[Any]) -> Before:
    """Decodes with another VAE."""
    noted.append("1.3 times the weights")
    other = loaded(1.3)
    module.decode = other.first_stage_model.decode
    module.__dict__["kept"] = SimpleNamespace(vae=other)
    memory.load_models_gpu([other.patcher])
    return lambda: None


def object_of_its_own(module: Any, noted: list[Any]) -> Before:
    """Decodes by a method of another object."""

    class Decoder:
        def decode(self, z: torch.Tensor) -> torch.Tensor:
            noted.append("decoded")
            decoded: torch.Tensor = type(module).decode(module, z * 0.5)
            return decoded

    module.decode = Decoder().decode
    return lambda: None


def once(module: Any, noted: list[Any]) -> Before:
    """Halves what a layer of the decoder gives once in each video."""

    def before() -> None:
        def hook(_layer: Any, _given: Any, output: Any) -> Any:
            noted.append("fired")
            handle.remove()
            return [each * 0.5 for each in output] if isinstance(output, list) else output * 0.5

        handle = module.decoder.middle[0].register_forward_hook(hook)

    return before


def another_weight(module: Any, noted: list[Any]) -> Before:
    """Gives a layer of the decoder another weight while the second video is made."""
    videos = iter(range(VIDEOS))

    def before() -> None:
        def hook(_layer: Any, _given: Any, _output: Any) -> None:
            noted.append("fired")
            handle.remove()
            norm = module.decoder.head[0]
            norm.gamma = torch.nn.Parameter(norm.gamma * 2, requires_grad=False)

        if next(videos) == 1:
            handle = module.conv2.register_forward_hook(hook)

    return before


def counting(module: Any, noted: list[Any]) -> Before:
    """Keeps a count and what it has drawn by generators of others than torch."""

    class Counting(WanVAE):  # type: ignore[misc]
        def decode(self, z: torch.Tensor) -> torch.Tensor:
            self.count = getattr(self, "count", 0) + 1
            noted.append(self.count)
            decoded: torch.Tensor = super().decode(z * (1 + 0.1 * random.random())) + 0.01 * self.count
            return decoded

    random.seed(7)
    module.__class__ = Counting
    return lambda: None


def hooked(module: Any, noted: list[Any]) -> Before:
    """Looks at what a layer gives, a layer outside of what graphs answer."""
    module.conv2.register_forward_hook(lambda _layer, _given, output: noted.append(list(output.shape)))
    return lambda: None


ACTS = (nothing, other_vae, object_of_its_own, once, another_weight, counting, hooked)


def videos(vae: Any, serving: Any, act: Callable[[Any, list[Any]], Before]) -> tuple[list[torch.Tensor], list[Any]]:
    noted: list[Any] = []
    before = act(vae.patcher.model, noted)
    found = []
    for _ in range(VIDEOS):
        before()
        found.append(serving.decode(LATENT))
    return found, noted


def case(act: Callable[[Any, list[Any]], Before]) -> dict[str, Any]:
    memory.unload_all_models()
    theirs = loaded()
    expected, noted = videos(theirs, theirs, act)
    memory.unload_all_models()
    vae = loaded()
    fast = accelerate_vae(vae, "eager")
    dispatcher = find_vae_dispatcher(fast)
    assert dispatcher is not None
    before = dispatcher.metrics.snapshot()
    found, ours = videos(vae, fast, act)
    distances = [off(one, other) for one, other in zip(found, expected, strict=True)]
    changes = max(off(each, PLAIN) for each in expected)
    return {"off": distances, "changes": changes, "noted": [noted, ours]} | answered(
        before, dispatcher.metrics.snapshot()
    )


WEIGHTS = weights()
LATENT = torch.randn((1, 16, 7, 6, 8), generator=torch.Generator().manual_seed(1))
with torch.inference_mode():
    PLAIN = loaded().decode(LATENT)
    if where == "dynamic":
        pages_of_cpu.begin()
    sys.stdout.write(json.dumps({act.__name__: case(act) for act in ACTS}) + "\n")
