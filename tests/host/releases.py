"""When CUDA graph recordings are thrown away, as the host loads and unloads models in this process.

    python releases.py COMFY_DIR CHECKPOINT

Prints as JSON how often, and how often the host detached a patcher, after each of a person's steps. There is nothing
to record on a CPU, so it is the asking that is counted.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

comfyui, checkpoint = sys.argv[1:]
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
sys.path[:0] = [comfyui, str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management as memory  # noqa: E402
import comfy.sd  # noqa: E402
import torch  # noqa: E402
from comfy.patcher_extension import CallbacksMP  # noqa: E402
from tiny_flux import sampled, with_lora  # noqa: E402

from onediff_comfy.host.adapters.model import accelerate  # noqa: E402
from onediff_comfy.runtime.recording_pool import RecordingPool  # noqa: E402

counts = {"released": 0, "detached": 0}
_release = RecordingPool.release


def released(pool: RecordingPool) -> int:
    counts["released"] += 1
    return _release(pool)


def detached(*_: Any) -> None:
    counts["detached"] += 1


def main() -> None:
    RecordingPool.release = released  # type: ignore[method-assign]
    found: dict[str, dict[str, int]] = {}

    def step(name: str) -> None:
        found[name] = dict(counts)
        counts.update(released=0, detached=0)

    with torch.inference_mode():
        plain = comfy.sd.load_checkpoint_guess_config(checkpoint, output_clip=False, output_vae=False)[0]
        model = accelerate(plain, "eager")
        model.add_callback(CallbacksMP.ON_DETACH, detached)
        sampled(model, 1)
        step("first image")
        sampled(model, 2)
        step("another seed")
        sampled(plain, 2)
        sampled(model, 2)
        step("after the model without the node")
        sampled(with_lora(model, 0.5), 2)
        step("a LoRA")
        sampled(model, 2)
        memory.unload_all_models()
        step("unloaded")
        sampled(model, 2)
        step("loaded again")
        del plain, model
        memory.cleanup_models()
        gc.collect()
        step("gone")
    sys.stdout.write(json.dumps(found) + "\n")


main()
