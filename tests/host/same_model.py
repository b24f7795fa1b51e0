"""Prints as JSON what identifies the models of all families.

python same_model.py COMFY_DIR FOLDER          before and after an image; leaves the models in FOLDER
python same_model.py COMFY_DIR FOLDER again    as a process that compiles in the background reads them there
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

comfyui, folder, again = sys.argv[1], Path(sys.argv[2]), len(sys.argv) > 3
sys.argv = sys.argv[:1]  # the host reads the command line when it is imported
root = Path(__file__).resolve().parents[2]
sys.path[:0] = [comfyui, *(str(root / path) for path in ("", "tests/families", "tests/host"))]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = args.use_pytorch_cross_attention = True
import comfy.model_management  # noqa: E402
import torch  # noqa: E402
from tiny_nodes.text_encoders import _FAMILIES as TEXT_ENCODERS  # noqa: E402
from tiny_nodes.text_encoders import TinyTextEncoder  # noqa: E402
from worker import image  # noqa: E402

from onediff_comfy.capture.target.target import Target  # noqa: E402
from onediff_comfy.compilation import weightless_pickle  # noqa: E402
from onediff_comfy.host.adapters.text_encoder import stacks_of  # noqa: E402
from onediff_comfy.host.process.services import host_services  # noqa: E402
from tools.models.families import FAMILIES, QUANTISED  # noqa: E402

HOST = host_services()


def fingerprint(module: torch.nn.Module) -> str:
    """Return what identifies a module as it is now."""
    return Target(module, HOST.code, HOST.formats).fingerprint


def models() -> Iterator[tuple[str, torch.nn.Module, Callable[[], object]]]:
    """Yield modules by name, and what uses each once."""
    for name, family in {**FAMILIES, **QUANTISED}.items():
        model = family.load()
        comfy.model_management.load_models_gpu([model])
        yield name, model.model.diffusion_model, functools.partial(image, family, model)
    for name in TEXT_ENCODERS:
        clip = TinyTextEncoder.execute(name, 1).args[0]
        comfy.model_management.load_models_gpu([clip.patcher])
        for index, stack in enumerate(stacks_of(clip)):
            yield f"text {name} {index}", stack, lambda: clip.encode_from_tokens(clip.tokenize("a dog"))  # noqa: B023


def main() -> None:
    found: dict[str, object] = {}
    for left in folder.iterdir() if again else ():
        module = weightless_pickle.from_bytes(left.read_bytes(), torch.device("cpu"), HOST.formats, HOST.layer_factory)
        found[left.name] = fingerprint(module)
    for name, module, use in models() if not again else ():
        before = fingerprint(module)
        use()
        found[name] = [before, fingerprint(module)]
        with contextlib.suppress(weightless_pickle.Unpicklable):  # what cannot be is not compiled in the background
            (folder / name).write_bytes(weightless_pickle.to_bytes(module, HOST.formats, HOST.layer_factory))
    sys.stdout.write(json.dumps(found) + "\n")


with torch.inference_mode():
    main()
