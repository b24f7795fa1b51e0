"""Prints as JSON what identifies the models of all families.

python same_model.py COMFY_DIR FOLDER          before and after an image; leaves the models in FOLDER
python same_model.py COMFY_DIR FOLDER again    as a process that compiles in the background reads them there
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

comfyui, folder, again = sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
root = Path(__file__).resolve().parents[2]
sys.path[:0] = [comfyui, str(root), str(root / "tests" / "families")]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management  # noqa: E402
import torch  # noqa: E402
from worker import image  # noqa: E402

from onediff_comfy.capture.target.target import Target  # noqa: E402
from onediff_comfy.compilation import weightless_pickle  # noqa: E402
from onediff_comfy.host.process.services import host_services  # noqa: E402
from tools.models.families import FAMILIES, QUANTISED  # noqa: E402

HOST = host_services()


def fingerprint(module: torch.nn.Module) -> str:
    """Return what identifies a module as it is now."""
    return Target(module, HOST.code, HOST.formats).fingerprint


def main() -> None:
    found = {}
    for name, family in {**FAMILIES, **QUANTISED}.items():
        left = folder / name
        if again:
            if left.exists():  # what cannot be pickled is not compiled in the background
                data, device = left.read_bytes(), torch.device("cpu")
                module = weightless_pickle.from_bytes(data, device, HOST.formats, HOST.layer_factory)
                found[name] = fingerprint(module)
            continue
        model = family.load()
        module = model.model.diffusion_model
        comfy.model_management.load_models_gpu([model])
        before = fingerprint(module)
        image(family, model)
        found[name] = [before, fingerprint(module)]
        with contextlib.suppress(weightless_pickle.Unpicklable):
            left.write_bytes(weightless_pickle.to_bytes(module, HOST.formats, HOST.layer_factory))
    sys.stdout.write(json.dumps(found) + "\n")


with torch.inference_mode():
    main()
