"""What people change between two pictures, at real size: right, and what each change costs.

    COMFYUI_PATH=... python -m benchmarks.changes --model sdxl --engine inductor --output FILE

LoRA on, another strength, a second one, off; models unloaded and loaded again; a ControlNet on, another
strength, off. Each picture is made by the host alone and by ours, compared, and timed from the change to the
latent. With ``--control`` ControlNets are included: the diffusion model with residuals is another graph. The three
graphs of these pictures, each compiled for minutes, can be made before, in three processes at once:

    for graph in model control controlled; do python -m benchmarks.changes --control --prepare $graph & done; wait
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .host import reported, start_host
from .sampling import environment

_STEPS = 4
_PREPARED = ("model", "control", "controlled")


def main() -> int:
    """Run the benchmark and write JSON; 1 if a picture is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["sd15", "sdxl"], default="sdxl")
    parser.add_argument("--engine", default="inductor")
    parser.add_argument("--size", type=int, default=1024, help="side of the image in pixels")
    parser.add_argument("--control", action="store_true", help="with a ControlNet")
    parser.add_argument("--dynamic-vram", action="store_true", help="as the host's server keeps weights by default")
    parser.add_argument(
        "--prepare",
        choices=_PREPARED,
        help="only make the graph of the model, of the ControlNet, or of the model with it",
    )
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    start_host(options.dynamic_vram)
    if options.prepare:
        reported(lambda: _Changes(options).prepare(), options.output)
        return 0
    report = reported(lambda: _Changes(options).run(), options.output)
    return int(report["worst_error"] > report["allowed"])


class _Changes:
    def __init__(self, options: argparse.Namespace) -> None:
        import comfy.model_management
        import torch

        from .models import FAMILIES, load

        self.options = options
        self.family = FAMILIES[options.model]
        self.device = comfy.model_management.get_torch_device()
        self.folder = tempfile.TemporaryDirectory(prefix="onediff-changes-")
        file = Path(self.folder.name, "model.safetensors") if options.dynamic_vram else None
        self.model = load(self.family, self.device, file)
        self.noise = torch.randn(
            1,
            self.family.latent_channels,
            options.size // 8,
            options.size // 8,
            generator=torch.Generator().manual_seed(1),
        )

    def run(self) -> dict[str, Any]:
        import torch

        from onediff_comfy.host.process.process import metrics
        from onediff_comfy.serving.verification import numerics

        rows: list[dict[str, Any]] = []
        for what, change in self.changes():
            before = metrics().snapshot()
            row: dict[str, Any] = {"change": what}
            outputs = []
            for name in ("eager", "ours"):
                start = time.perf_counter()
                outputs.append(self.sample(*change(name == "ours")))
                row[f"{name}_s"] = round(time.perf_counter() - start, 3)
            after = metrics().snapshot()
            row["error"] = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
            for counted in ("captured", "compiled", "served", "recorded"):
                row[counted] = after[counted] - before[counted]
            row["eager_calls"] = {
                reason: count - before["fallbacks"].get(reason, 0)
                for reason, count in after["fallbacks"].items()
                if count > before["fallbacks"].get(reason, 0)
            }
            rows.append(row)
            print(row, flush=True)
        # A run of a few steps may be off by more than one call; its bound is that of the tests of pictures.
        allowed = 5 * numerics.limit({self.family.dtype}, torch.device(self.device))
        worst = max(row["error"] for row in rows)
        print(f"worst error {worst:.1e} (at most {allowed:.1e})")
        kept = {key: value for key, value in vars(self.options).items() if key != "output"}
        kept["weights"] = type(self.model).__name__
        return {**kept, "environment": environment(self.device), "rows": rows, "worst_error": worst, "allowed": allowed}

    def prepare(self) -> dict[str, Any]:
        """One picture with one of the two accelerated, whichever the graph is of."""
        from onediff_comfy.host.adapters.model import accelerate
        from onediff_comfy.host.process.process import metrics

        what = self.options.prepare
        model = self.model if what == "control" else accelerate(self.model, self.options.engine)
        start = time.perf_counter()
        self.sample(model, None if what == "model" else (self.control()[what == "control"], 0.7))
        made = metrics().snapshot()["graphs"]
        print(f"{what}: {time.perf_counter() - start:.1f} s, {made}", flush=True)
        return {"environment": environment(self.device), "prepared": what, "graphs": made}

    def changes(self) -> list[tuple[str, Callable[[bool], tuple[Any, Any]]]]:
        """What is changed, and how: told whether it is ours, gives the MODEL and the ControlNet (with strength)."""
        import comfy.model_management
        import comfy.sd

        from onediff_comfy.host.adapters.model import accelerate

        first, second = self.lora(1), self.lora(2)
        control = self.control() if self.options.control else None

        def lora(*loras: tuple[dict[str, Any], float], unload: bool = False, strength: float = 0.0) -> Any:
            def change(ours: bool) -> tuple[Any, Any]:
                if unload:
                    comfy.model_management.unload_all_models()
                model = self.model
                for weights, how_much in loras:
                    model, _ = comfy.sd.load_lora_for_models(model, None, weights, how_much, 0)
                applied = None if control is None or not strength else (control[ours], strength)
                return (accelerate(model, self.options.engine) if ours else model), applied

            return change

        steps = [
            ("nothing: the first picture", lora()),
            ("nothing: the second", lora()),
            ("nothing: the third", lora()),
            ("LoRA at 0.8", lora((first, 0.8))),
            ("LoRA at 0.8 again", lora((first, 0.8))),
            ("LoRA at 0.3", lora((first, 0.3))),
            ("a second LoRA", lora((first, 0.3), (second, 0.5))),
            ("LoRAs off", lora()),
            ("unloaded and loaded again", lora(unload=True)),
            ("the picture after", lora()),
        ]
        if control is not None:
            steps += [
                ("ControlNet at 0.7", lora(strength=0.7)),
                ("ControlNet at 0.7 again", lora(strength=0.7)),
                ("ControlNet at 0.2", lora(strength=0.2)),
                ("ControlNet at 0.2 with LoRA", lora((first, 0.8), strength=0.2)),
                ("ControlNet off", lora()),
            ]
        return steps

    def sample(self, model: Any, control: Any) -> Any:
        import comfy.sample
        import torch

        from .models import conditioning

        positive, negative = conditioning(self.family, 1), conditioning(self.family, 2)
        if control is not None:
            network, strength = control
            side = self.options.size
            image = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(3))
            # As the host's node Apply ControlNet does it; the module of that node needs video libraries.
            applied = network.copy().set_cond_hint(image, strength, (0.0, 1.0))
            positive, negative = (
                [[tensor, {**extras, "control": applied, "control_apply_to_uncond": False}] for tensor, extras in each]
                for each in (positive, negative)
            )
        latent = torch.zeros_like(self.noise)
        cfg = self.family.cfg
        return comfy.sample.sample(
            model, self.noise, _STEPS, cfg, "euler", "normal", positive, negative, latent, disable_pbar=True, seed=1
        )

    def lora(self, seed: int, rank: int = 16) -> dict[str, Any]:
        """A LoRA of random weights for every attention projection of the diffusion model."""
        import comfy.lora
        import torch

        generator = torch.Generator().manual_seed(seed)
        shapes = self.model.model.state_dict()
        weights = {}
        for key, name in comfy.lora.model_lora_keys_unet(self.model.model, {}).items():
            if key.startswith("lora_unet_") and ".attn" in name and name.endswith(".weight"):
                out_features, in_features = shapes[name].shape[:2]
                up = torch.randn(out_features, rank, generator=generator) * 0.1 / math.sqrt(rank)
                down = torch.randn(rank, in_features, generator=generator) / math.sqrt(in_features)
                weights[f"{key}.lora_up.weight"], weights[f"{key}.lora_down.weight"] = up, down
        assert weights, "the host names no weights that a LoRA could change"
        return weights

    def control(self) -> dict[bool, Any]:
        """A ControlNet of random weights as the host loads it, and ours (under True)."""
        import comfy.controlnet
        import torch

        from onediff_comfy.host.adapters.controlnet import accelerate_control

        from .models import control_shapes

        generator = torch.Generator().manual_seed(5)
        weights = {}
        for name, shape in control_shapes(self.options.model).items():
            noise = torch.randn(shape.shape, generator=generator)
            scale = 0.7 / math.sqrt(noise[0].numel()) if noise.ndim >= 2 else 0.02
            neutral = 1 if noise.ndim < 2 and name.endswith("weight") else 0
            weights[f"control_model.{name}"] = (neutral + scale * noise).to(self.family.dtype)
        plain = comfy.controlnet.load_controlnet_state_dict(weights)
        return {False: plain, True: accelerate_control(plain, self.options.engine)}


if __name__ == "__main__":
    sys.exit(main())
