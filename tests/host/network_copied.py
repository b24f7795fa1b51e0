"""Our own copy of a ControlNet's network that Dynamic VRAM has brought to a device before.

    python network_copied.py COMFY_DIR

Prints as JSON which of Dynamic VRAM's notes the copy has, and whether it computes what the network computes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path[:0] = [sys.argv.pop(), str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import comfy.ops  # noqa: E402
import torch  # noqa: E402

from onediff_comfy.host.adapters.controlnet import _own_network  # noqa: E402


def main() -> None:
    with torch.inference_mode():
        network = torch.nn.Sequential(comfy.ops.manual_cast.Linear(4, 4), torch.nn.ReLU())
        layer, page, x = network[0], torch.zeros(64, dtype=torch.uint8), torch.randn(2, 4)
        for parameter in network.parameters():  # the host leaves them as the memory was: NaN equals nothing
            torch.nn.init.normal_(parameter)
        expected = network(x)
        noted = {
            "_v": (object(), 0, 64),
            "_v_signature": b"1",
            "_v_weight": page.view(torch.float32).view(4, 4),
            "_v_bias": None,
            "_pin_state": {"fast_disk": False},
            "_pins": {"weights": {"pin": torch.zeros(64, dtype=torch.uint8)}},
        }
        vars(layer).update(noted)
        network._v_block = noted["_v"]
        own = _own_network(network)
    left = {name for copied in own.modules() for name in vars(copied) if name in noted or name == "_v_block"}
    kept = all(vars(layer)[name] is value for name, value in noted.items())
    same = bool(torch.equal(own(x), expected)) and own[0].weight.data_ptr() == layer.weight.data_ptr()
    sys.stdout.write(json.dumps({"left": sorted(left), "kept": kept, "same": same}) + "\n")


main()
