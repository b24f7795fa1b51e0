"""Which model families are accelerated: what tests/families holds each to, and docs/models.md, written from it.

python -m tools.supported --write
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from dev.environment import COMFYUI_VERSION, repository

from .models.encoders import ENCODERS
from .models.families import FAMILIES, QUANTISED

NAMES = (*FAMILIES, *QUANTISED)

REFUSED: Mapping[str, str] = {
    "hunyuan_dit": "writes to its inputs",
}
"""Families that cannot be captured yet, with what their reason says."""

CAPTURED_AGAIN: Mapping[str, set[str]] = {
    "svd": {"prompt"},  # one image embedding, or several
    "lumina2": {"batch"},  # takes its samples apart in a loop
    "z_image": {"batch"},
    "hidream": {"batch"},
    "cosmos": {"size", "batch", "prompt", "frames"},  # what its general graph excludes these sizes by is not known yet
    "cosmos_predict2": {"size"},
}
"""Changes for which a family may need another capture, because its code takes decisions by them."""

EXCLUDED = ("cosmos",)
"""Families whose graphs for all sizes exclude the very sizes that they were made for, by conditions: each change costs
another such capture, for it may hold for other sizes, and one for these sizes."""

STREAMED_AGAIN: Mapping[str, set[str]] = {
    "svd": {"prompt"},
    "flux": {"batch"},  # modulations of one sample broadcast, in these too
    "flux2": {"batch"},
    "hunyuan_video": {"batch"},
    "hidream": {"batch"},
    "ernie_image": {"batch"},
    "pixart": {"size"},  # its blocks are told the size in numbers
}
"""Changes for which a block may need another capture, where a model does not fit and is served block by block."""

STREAMED = tuple(name for name in FAMILIES if name not in REFUSED and not name.startswith("cosmos"))
"""Families that the tests also run with no weights on the device."""

COMPILED = ("sd3", "qwen_image", "wan21", *QUANTISED)
"""Families of different kinds that Inductor compiles in the tests, too: no wrappers of its own, an image model, a
video model, and all of fewer bits. Those of the checkpoints that the other tests use (SD1.5, SDXL, Flux) are
compiled there."""

DOCUMENT = repository() / "docs" / "models.md"

_HEAD = """\
# Model families

<!-- Written by python -m tools.supported --write; tests/families measures what it says. Do not edit. -->

Each is tested in ComfyUI {host} with a small model of random weights that ComfyUI's own classes build: images (or
videos) of several sizes, batches and prompt lengths, compared with ComfyUI's own. SD1.5, SDXL, their inpainting
models, Flux and their ControlNets are tested through the server besides; with what other nodes they go together is
in [coverage.md](coverage.md).

Where a model does not fit into memory, graphs of its blocks serve it one after the other; the last column says for what
a block is compiled again.

| family | ComfyUI's name | diffusion model | compiled again for another | block by block |
|---|---|---|---|---|
"""


_OF_FEW_BITS = """
## Weights of fewer bits

With a LoRA of two strengths besides, which costs no other compilation. `fp8` is a checkpoint that multiplies in 8 bits
where the GPU can, `fp8-full` one that says it must not, `scaled_fp8` the older form of that, and `fp8_cast` is
`weight_dtype` of ComfyUI's own loader; `qwen3` is a text encoder, a CLIP object. What is empty is not tested. With our
capture and PyTorch's own kernels images are ComfyUI's to the bit. In bold: compiled by Inductor in these tests too, and
no further off than half as much again as ComfyUI's own answer to noise that is another by 2⁻¹⁴ of itself. What is
compiled of SDXL is a narrow UNet: a CPU multiplies 8-bit numbers one by one.

"""


def document() -> str:
    """The text of docs/models.md."""
    rows = []
    for name, family in FAMILIES.items():
        state = _state(name)
        if name in COMPILED:
            state += ", Inductor in these tests too"
        again = ", ".join(sorted(CAPTURED_AGAIN.get(name, ()))) or ("–" if name in REFUSED else "nothing")
        streamed = (", ".join(sorted(STREAMED_AGAIN.get(name, ()))) or "nothing") if name in STREAMED else "not tested"
        rows.append(f"| {name} | {family.supported} | {state} | {again} | {streamed} |\n")
    return _HEAD.format(host=COMFYUI_VERSION) + "".join(rows) + _formats()


def _state(name: str) -> str:
    if name in REFUSED:
        return f"eager: {REFUSED[name]}"
    return "**accelerated**" if name in COMPILED else "accelerated"


def _formats() -> str:
    """Families whose weights are of fewer bits, with the forms of their checkpoints as columns."""
    weights = {name: _form(family.weights) for name, family in QUANTISED.items()}
    weights |= {name: _form(encoder.weights) for name, encoder in ENCODERS.items()}
    tested = {name: name.partition(f"_{form}")[0] for name, form in weights.items()}
    forms = list(dict.fromkeys(weights.values()))
    rows = []
    for base in dict.fromkeys(tested.values()):
        names = {weights[name]: name for name, of in tested.items() if of == base}
        cells = (_state(names[form]) if form in names else "" for form in forms)
        rows.append(f"| {base} | {' | '.join(cells)} |\n")
    head = f"| family | {' | '.join(forms)} |\n|---{'|---' * len(forms)}|\n"
    return _OF_FEW_BITS + head + "".join(rows)


def _form(weights: str) -> str:
    return weights.replace(" ", "_")


def main(arguments: Sequence[str]) -> None:
    """Print the document, and write it where asked to."""
    print(document())
    if arguments == ["--write"]:
        DOCUMENT.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
