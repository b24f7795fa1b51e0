"""Which model families are accelerated: what tests/families holds each to, and docs/models.md, written from it.

python -m dev.supported --write
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from .environment import COMFYUI_VERSION, repository
from .families import FAMILIES, QUANTISED

NAMES = (*FAMILIES, *QUANTISED)

REFUSED: Mapping[str, str] = {
    "hunyuan_dit": "writes to its inputs",
}
"""Families that cannot be captured yet, with what their reason says."""

CAPTURED_AGAIN: Mapping[str, set[str]] = {
    "svd": {"prompt"},  # one image embedding, or several
    "lumina2": {"batch"},  # takes its samples apart in a loop
    "z_image": {"batch"},
    "hidream": {"size", "batch", "prompt"},  # one graph for each: its 4-D text conditioning reads as an image
    "cosmos": {"size", "batch", "prompt", "frames"},  # what its general graph excludes these sizes by is not known yet
    "cosmos_predict2": {"size"},
}
"""Changes for which a family may need another capture, because its code takes decisions by them."""

COMPILED = ("sd3", "qwen_image", "wan21", "flux_fp8", "flux_int8", "wan21_nvfp4")
"""Families of different kinds that Inductor compiles in the tests, too: no wrappers of its own, an image model, a
video model, and models of fewer bits. Those of the checkpoints that the other tests use (SD1.5, SDXL, Flux) are
compiled there."""

DOCUMENT = repository() / "docs" / "models.md"

_HEAD = """\
# Model families

<!-- Written by python -m dev.supported --write; tests/families measures what it says. Do not edit. -->

Each is tested in ComfyUI {host} with a small model of random weights that ComfyUI's own classes build: images (or
videos) of several sizes, batches and prompt lengths, compared with ComfyUI's own. SD1.5, SDXL, their inpainting
models, Flux and their ControlNets are tested through the server besides; with what other nodes they go together is
in [coverage.md](coverage.md).

| family | ComfyUI's name | diffusion model | compiled again for another |
|---|---|---|---|
"""


def document() -> str:
    """The text of docs/models.md."""
    families = {**FAMILIES, **QUANTISED}
    rows = []
    for name in NAMES:
        state = f"eager: {REFUSED[name]}" if name in REFUSED else "accelerated"
        if name in COMPILED:
            state = f"**{state}**, Inductor in these tests too"
        again = ", ".join(sorted(CAPTURED_AGAIN.get(name, ()))) or ("–" if name in REFUSED else "nothing")
        rows.append(f"| {name} | {families[name].supported} | {state} | {again} |\n")
    return _HEAD.format(host=COMFYUI_VERSION) + "".join(rows)


def main(arguments: Sequence[str]) -> None:
    """Print the document, and write it where asked to."""
    print(document())
    if arguments == ["--write"]:
        DOCUMENT.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
