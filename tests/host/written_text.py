"""Text that a text encoder writes, token by token: with ComfyUI alone and with ours.

    python written_text.py COMFY_DIR

Prints both as JSON, how many graphs were made for it, and why calls were ComfyUI's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMFY_DIR, HERE = sys.argv[1], Path(__file__).resolve().parent
sys.path[:0] = [COMFY_DIR, str(HERE.parents[1]), str(HERE / "tiny_nodes")]
sys.argv = sys.argv[:1]

import comfy.cli_args  # noqa: E402

comfy.cli_args.args.cpu = comfy.cli_args.args.use_pytorch_cross_attention = True

import torch  # noqa: E402
from text_encoders import TinyTextEncoder  # noqa: E402

from onediff_comfy.host.adapters.text_encoder import accelerate_clip  # noqa: E402
from onediff_comfy.host.process.process import metrics  # noqa: E402


def written(clip: Any) -> list[int]:
    tokens = clip.tokenize("a lighthouse on a cliff")
    return list(clip.generate(tokens, do_sample=False, max_length=6, seed=1))


with torch.inference_mode():
    clip = TinyTextEncoder.execute("z_image", 0).args[0]
    expected = written(clip)
    ours = written(accelerate_clip(clip, "eager"))
    counted = metrics().snapshot()
    found = {"expected": expected, "ours": ours, **{name: counted[name] for name in ("captured", "fallbacks")}}
    sys.stdout.write(json.dumps(found))
