"""The demo: the same images without and with OneDiff Model Speedup, in a real ComfyUI, and once more after a restart.

    make demo [MODEL=flux] [CKPT=/path/to/checkpoint.safetensors]

Leaves the images, ``compare.png`` and ``report.json`` in ``demo/``. Compiled graphs stay in the demo's own folder,
unless ``ONEDIFF_CACHE_DIR`` names one: then they are kept there, sealed with the key that ComfyUI would use.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from onediff_comfy.folders import config_folder
from tools.models.checkpoints import checkpoint_file, ensure_checkpoints
from tools.workflows import text_to_image

from .environment import SetupError, comfyui_path, repository
from .host import ComfyServer, HostError, RunResult

SEEDS = (1, 2, 3, 4)
COMPARISON = "compare.png"
ON_A_CPU = (
    "There is no GPU here that PyTorch can use. The demo shows that the pictures are the same, compiled once, and kept "
    "across a restart. Speed needs a GPU: on a CPU do not expect any."
)
LARGEST_DIFFERENCE = 8
"""In steps of an 8-bit channel. Rounding differs between kernels; more than this can be seen."""


class DemoError(Exception):
    """The demo did not show what it promises; the message is one line."""


@dataclass(frozen=True)
class Model:
    """A model of random weights, and how it is sampled.

    Attributes:
        checkpoint: one of ``tools.models.checkpoints``.
        cfg: the guidance scale.
        conditioning: see ``text_to_image``: what stands for prompts where there is no text encoder.
    """

    checkpoint: str
    cfg: float
    conditioning: Mapping[str, int] | None = None


MODELS: Mapping[str, Model] = {
    "sd15": Model("sd15_tiny", cfg=7.0),
    "flux": Model("flux_min", cfg=1.0, conditioning={"tokens": 16, "dim": 64, "pooled_dim": 32}),
}
"""What ``MODEL`` may be."""

# On the CPU, threads that spin while they wait took 80 s for an image beside other busy processes.
_WAITING = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}

_CONDITIONING = ("tiny_nodes", repository() / "tests" / "host" / "tiny_nodes")


@dataclass(frozen=True)
class Size:
    """What is sampled: small enough on the CPU that the demo is mostly compiling."""

    pixels: int
    steps: int


@dataclass(frozen=True)
class Series:
    """The images of one way of sampling: PNG bytes and seconds, one of each per seed."""

    images: Sequence[bytes]
    seconds: Sequence[float]

    @property
    def first(self) -> float:
        return self.seconds[0]

    @property
    def steady(self) -> float:
        return statistics.median(self.seconds[1:])


def largest_difference(left: bytes, right: bytes) -> int:
    """The largest difference of any channel of any pixel between two images, 0 to 255.

    Raises:
        DemoError: the images differ in size.
    """
    first, second = (np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), np.int16) for data in (left, right))
    if first.shape != second.shape:
        raise DemoError(f"the images differ in size: {first.shape} and {second.shape}")
    return int(np.abs(first - second).max())


def comparison(plain: bytes, fast: bytes, captions: Sequence[str]) -> Image.Image:
    """Two images and how they differ, side by side.

    Args:
        plain: a PNG's bytes.
        fast: another's, of the same size.
        captions: below the first, the second, and the difference, which is shown at its largest as white.
    """
    first, second = (Image.open(io.BytesIO(data)).convert("RGB") for data in (plain, fast))
    off = np.abs(np.asarray(first, np.int16) - np.asarray(second, np.int16)).max(axis=2)
    difference = Image.fromarray((off * (255 // max(1, int(off.max())))).astype(np.uint8)).convert("RGB")
    side, band = max(_LEAST_SIDE, first.width), 44
    sheet = Image.new("RGB", (3 * side, side * first.height // first.width + band), "white")
    font, draw = ImageFont.load_default(size=15), ImageDraw.Draw(sheet)
    for column, (image, caption) in enumerate(zip((first, second, difference), captions, strict=True)):
        sheet.paste(image.resize((side, sheet.height - band), Image.Resampling.NEAREST), (column * side, 0))
        draw.multiline_text((column * side + 8, sheet.height - band + 4), caption, fill="black", font=font)
    return sheet


_LEAST_SIDE = 384  # of a picture in the comparison, so that its caption has room


class _Demo:
    def __init__(self, server: ComfyServer, model: Model, checkpoint: str, size: Size, folder: Path) -> None:
        self._server = server
        self._model = model
        self._checkpoint = checkpoint
        self._size = size
        self._folder = folder

    def series(self, name: str, engine: str | None) -> Series:
        """One image per seed, saved as ``name-1.png`` and so on."""
        results = []
        for number, seed in enumerate(SEEDS, start=1):
            result = self.image(f"{name} {number} of {len(SEEDS)}", seed, engine)
            (self._folder / f"{name}-{number}.png").write_bytes(result.images[0][1])
            results.append(result)
            if number == 1:
                self.report_after_first = self.report()
        return Series([result.images[0][1] for result in results], [result.seconds for result in results])

    def image(self, what: str, seed: int, engine: str | None) -> RunResult:
        print(f"  {what + ' ':.<30} ", end="", flush=True)
        pixels, steps = self._size.pixels, self._size.steps
        result = self._server.run(
            text_to_image(
                self._checkpoint,
                width=pixels,
                height=pixels,
                steps=steps,
                cfg=self._model.cfg,
                seed=seed,
                engine=engine,
                conditioning=self._model.conditioning,
            )
        )
        print(f"{result.seconds:6.2f} s", flush=True)
        if result.error is not None:
            raise DemoError(f"ComfyUI failed in {result.error['node_type']}: {result.error['exception_message']}")
        if not result.images:
            raise DemoError(f"ComfyUI made no image ({result.status})")
        return result

    def report(self) -> dict[str, Any]:
        return dict(self._server.get_json("/onediff/report"))


def run(folder: Path, base: Path) -> None:
    """Make the images, compare them, print the table and write ``report.json``.

    Args:
        folder: where the images and the report go.
        base: ComfyUI's base directory.

    Raises:
        DemoError: nothing was accelerated, or the images differ.
        HostError: the server failed.
        SetupError: there is no ComfyUI.
    """
    import torch

    cuda = torch.cuda.is_available()
    comfyui = comfyui_path()
    if not (comfyui / "main.py").is_file():
        raise SetupError("there is no ComfyUI yet; run make setup, or set COMFYUI_PATH")
    size = Size(512, 20) if cuda else Size(256, 6)
    model = _model()
    packs = [] if model.conditioning is None else [_CONDITIONING]
    server, again = (
        ComfyServer(comfyui, base, cpu=not cuda, packs=packs, env={**_folders(), **_WAITING}) for _ in range(2)
    )
    checkpoint = _checkpoint(model, comfyui, server.checkpoints)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if not cuda:
        print(ON_A_CPU, flush=True)
    print("Starting ComfyUI", flush=True)
    with server:
        device = server.get_json("/system_stats")["devices"][0]["name"]
        print(f"{checkpoint} on {device}, {size.pixels}x{size.pixels}, {size.steps} steps", flush=True)
        demo = _Demo(server, model, checkpoint, size, folder)
        plain = demo.series("plain", None)
        before = demo.report()
        fast = demo.series("onediff", "auto")
        first = demo.report_after_first
        demo.image("onediff 1 again", SEEDS[0], "auto")
        after = demo.report()
    print("Starting ComfyUI again", flush=True)
    with again:
        restarted = _Demo(again, model, checkpoint, size, folder)
        kept = restarted.image("first image", SEEDS[0], "auto")
        second = restarted.report()

    difference = max(map(largest_difference, plain.images, fast.images))
    graphs = after["graphs"][len(before["graphs"]) :]
    served = after["served"] - before["served"]
    report = {
        "eager_first_s": round(plain.first, 3),
        "eager_steady_s": round(plain.steady, 3),
        "speedup_first_s": round(fast.first, 3),
        "speedup_steady_s": round(fast.steady, 3),
        "graphs_compiled_first": first["compiled"] - before["compiled"],
        "graphs_compiled_again": after["compiled"] - first["compiled"],
        "graphs_loaded": after["loaded"] - before["loaded"],
        "max_abs_diff": difference,
        "engine": "+".join(sorted({graph["engine"] for graph in graphs})) if served and graphs else "none",
        "device": device,
        "restart_first_s": round(kept.seconds, 3),
        "restart_compiled": second["compiled"],
        "restart_loaded": second["loaded"],
        "images": sorted(path.name for path in folder.glob("*.png")),
    }
    captions = (
        f"ComfyUI\n{plain.steady:.2f} s",
        f"with OneDiff: {fast.steady:.2f} s\nfirst {fast.first:.2f} s, after a restart {kept.seconds:.2f} s",
        f"difference\nat most {difference} of 255",
    )
    comparison(plain.images[0], fast.images[0], captions).save(folder / COMPARISON)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    _print_table(report, after["fallbacks"], folder)
    if not served:
        reasons = "; ".join(after["fallbacks"]) or "the host handed no call to the node"
        raise DemoError(f"nothing was accelerated: {reasons}")
    if second["compiled"]:
        raise DemoError(f"{second['compiled']} graphs were compiled again after a restart")
    if difference > LARGEST_DIFFERENCE:
        raise DemoError(f"the images differ by {difference} of 255; at most {LARGEST_DIFFERENCE} is rounding")


def _model() -> Model:
    name = os.environ.get("MODEL") or "sd15"
    if name not in MODELS:
        raise DemoError(f"MODEL is {name}; it can be {' or '.join(MODELS)}")
    if os.environ.get("CKPT") and name != "sd15":
        raise DemoError("MODEL chooses among the tiny models; leave it out together with CKPT")
    return MODELS[name]


def _folders() -> Mapping[str, str]:
    """Return where the server keeps compiled graphs and its key, if the person says where: nothing by default."""
    given = os.environ.get("ONEDIFF_CACHE_DIR")
    if not given:
        return {}
    return {"ONEDIFF_CACHE_DIR": str(Path(given).resolve()), "ONEDIFF_CONFIG_DIR": str(config_folder().resolve())}


def _checkpoint(model: Model, comfyui: Path, folder: Path) -> str:
    """The name under which the server finds the checkpoint: the user's own, or the tiny one made here."""
    given = os.environ.get("CKPT")
    if not given:
        ensure_checkpoints(comfyui, folder, [model.checkpoint])
        return checkpoint_file(model.checkpoint)
    path = Path(given).expanduser().resolve()
    if not path.is_file():
        raise DemoError(f"CKPT is {given}, which is not a file")
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / path.name
    if link.is_symlink():
        link.unlink()
    if not link.exists():
        link.symlink_to(path)
    return link.name


def _print_table(report: Mapping[str, Any], fallbacks: Mapping[str, int], folder: Path) -> None:
    compiled = f"{report['graphs_compiled_first']} first, {report['graphs_compiled_again']} later"
    if report["graphs_loaded"]:
        compiled += f", {report['graphs_loaded']} loaded"
    onediff = f"onediff ({report['engine']})"
    rows = [
        ("", "first image", "steady image", "graphs compiled", "largest pixel difference"),
        ("eager", f"{report['eager_first_s']:.2f} s", f"{report['eager_steady_s']:.2f} s", "–", "–"),
        (
            onediff,
            f"{report['speedup_first_s']:.2f} s",
            f"{report['speedup_steady_s']:.2f} s",
            compiled,
            f"{report['max_abs_diff']} of 255",
        ),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    print()
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
    print("The first eager image includes loading the checkpoint, which the onediff images then find loaded;")
    print("the first onediff image includes compiling. Steady is the median of images 2 to 4.")
    print(
        f"After a restart of ComfyUI the first image took {report['restart_first_s']:.2f} s: "
        f"{report['restart_compiled']} compiled, {report['restart_loaded']} loaded. (Loading the checkpoint included.)"
    )
    if fallbacks:
        print("Some model calls ran without acceleration:")
        for reason, count in fallbacks.items():
            print(f"  {count} x {reason}")
    print(f"Images, {COMPARISON} and report.json: {os.path.relpath(folder)}/", flush=True)


def main() -> int:
    """The command line: 0 when the images were accelerated and equal, else 1 after one line that says why."""
    base = repository() / ".cache" / "demo-host"
    try:
        run(repository() / "demo", base)
    except (DemoError, SetupError, HostError, RuntimeError, OSError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        log = base / "server.log"
        seen = f" (server log: {os.path.relpath(log)})" if log.exists() else ""
        print(f"demo failed: {line}{seen}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
