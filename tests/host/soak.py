"""A thousand images of random shapes in one process, in less memory than their graphs would like.

    python tests/host/soak.py COMFY_DIR CHECKPOINT IMAGES REPORT

Writes a report in JSON. A process of its own, because ComfyUI changes the interpreter it is imported into.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    import torch

BUCKETS = ((80, 80), (96, 128), (160, 160))
"""Width and height of sizes that get graphs of their own, for one image at a time."""
TOKENS = 77
SIDES = range(64, 161, 16)
IN_A_BUCKET = 0.4  # of the images
COMPARED_EVERY = 20
MEASURED_EVERY = 100
BUDGET_SHARE = 0.6  # of what all graphs would hold


def main() -> None:
    comfy_dir, checkpoint, images, report = sys.argv[1:]
    sys.argv = sys.argv[:1]  # the host parses the command line when it is imported
    sys.path.insert(0, comfy_dir)
    from comfy.cli_args import args

    args.cpu = args.use_pytorch_cross_attention = True
    import torch

    with torch.inference_mode():  # as the host's executor runs every node
        Path(report).write_text(json.dumps(_Soak(checkpoint).run(int(images)), indent=1))


class _Soak:
    def __init__(self, checkpoint: str) -> None:
        import comfy.sd

        from onediff_comfy.buckets import BucketSet
        from onediff_comfy.host.adapters.model import accelerate

        self.plain = comfy.sd.load_checkpoint_guess_config(checkpoint, output_vae=False, output_clip=False)[0]
        buckets = BucketSet.parse("\n".join(f"{width}x{height} b1" for width, height in BUCKETS))
        self.fast = accelerate(self.plain, "inductor", buckets=buckets)
        self.dice = random.Random(11)

    def run(self, images: int) -> dict[str, Any]:
        from onediff_comfy.host.adapters.model import preparing
        from onediff_comfy.host.process.process import library, metrics

        cache = library().cache
        prepared = preparing(self.fast, exact=True)
        for number, size in enumerate([*BUCKETS, (112, 64)]):
            self.image(prepared, (*size, 1), TOKENS, number)
        whole, graphs = cache.nbytes, len(cache)
        cache.budget = int(BUDGET_SHARE * whole)
        cache.trim()
        before = metrics().snapshot()
        held, memory, errors = [], [], []
        for number in range(1, images + 1):
            shape, tokens = self.change()
            picture = self.image(self.fast, shape, tokens, number)
            held.append(cache.nbytes)
            if number % COMPARED_EVERY == 0:
                errors.append(_difference(picture, self.image(self.plain, shape, tokens, number)))
            if number % MEASURED_EVERY == 0:
                memory.append(psutil.Process().memory_info().rss / 2**20)
        after = metrics().snapshot()
        counted = {name: after[name] - before[name] for name, value in after.items() if isinstance(value, int)}
        return {
            "graphs": graphs,
            "all_graphs_bytes": whole,
            "budget_bytes": cache.budget,
            "most_held_bytes": max(held),
            "counted": counted,
            "fallbacks": after["fallbacks"],
            "compared": len(errors),
            "worst_difference": max(errors),
            "memory_mb": memory,
        }

    def change(self) -> tuple[tuple[int, int, int], int]:
        """A size and batch, and how many tokens the prompt has."""
        if self.dice.random() < IN_A_BUCKET:
            return (*self.dice.choice(BUCKETS), 1), TOKENS
        size = self.dice.choice(SIDES), self.dice.choice(SIDES)
        if size in BUCKETS:  # where another prompt would need another graph, and two images may be one with its cfg
            return (*size, 3), TOKENS
        return (*size, self.dice.randint(1, 3)), self.dice.choice((TOKENS, 2 * TOKENS, 3 * TOKENS))

    def image(self, model: Any, shape: tuple[int, int, int], tokens: int, seed: int) -> torch.Tensor:
        import comfy.sample
        import torch

        width, height, batch = shape
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(batch, 16, height // 8, width // 8, generator=generator)
        prompt = torch.randn(1, tokens, 64, generator=generator)
        conditioning = [[prompt, {"pooled_output": torch.randn(1, 32, generator=generator)}]]
        latent = torch.zeros_like(noise)
        done: torch.Tensor = comfy.sample.sample(
            model, noise, 1, 1.0, "euler", "normal", conditioning, conditioning, latent, disable_pbar=True, seed=seed
        )
        return done


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a share of the range; as in ``pictures.assert_same_picture``."""
    return float((actual - expected).abs().max() / (expected.max() - expected.min()))


if __name__ == "__main__":
    main()
