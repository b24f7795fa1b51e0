"""Object patches of a CLIP, through the host's patcher, behind the speedup node, before it and in another workflow.

    python patched_encoder.py COMFY_DIR

Prints as JSON how far what is encoded is from the host's own, by case, and what the patch changes.
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


def encoded(clip: Any) -> torch.Tensor:
    result: torch.Tensor = clip.encode_from_tokens(clip.tokenize("a lighthouse on a cliff"))
    return result.clone()


def patched(clip: Any) -> Any:
    """Return a clone whose encoder leaves no masked token in."""
    clone = clip.clone()
    clone.patcher.add_object_patch("clip_l.zero_out_masked", True)
    return clone


with torch.inference_mode():
    clip = TinyTextEncoder.execute("sd15", 0).args[0]
    plain, expected = encoded(clip), encoded(patched(clip))
    found = {"changes": expected - plain}
    encoded(clip)  # so that no patch is in place when the node runs
    found["behind"] = encoded(patched(accelerate_clip(clip, "eager"))) - expected
    encoded(clip)
    found["before"] = encoded(accelerate_clip(patched(clip), "eager")) - expected
    encoded(patched(clip))  # another workflow's, which stays loaded
    found["elsewhere"] = encoded(accelerate_clip(clip, "eager")) - plain
    sys.stdout.write(json.dumps({name: float(off.norm() / expected.norm()) for name, off in found.items()}))
