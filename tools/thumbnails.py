"""The pictures of the workflows that ComfyUI's template browser shows: each graph as the editor draws it.

    python -m tools.thumbnails [NAME...]     # writes workflows/TITLE.jpg; all of them without a name

For a pack's template TITLE.json the editor asks for TITLE.jpg and shows it in a square. At the top stands the title,
and how long a step takes without and with the pack where that was measured.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page

from dev.editor import editor
from dev.environment import comfyui_path, repository
from dev.host import ComfyServer

from .templates import TITLES, Gain, gain_of
from .workflow_files import workflows
from .workflows import Workflow

SIDE = 640
"""Width and height of a thumbnail in pixels."""

MAXIMUM_BYTES = 60_000

_MARGIN = 30  # around the graph, in the editor's pixels
_NEAR = 2.4  # how wide the enlarged part is, in widths of our nodes' group
_STRIP = 0.26  # how much of the picture's height the whole graph may take
_LONGEST_BAR = 300
_RULE, _RULE_COLOUR = 4, (78, 122, 53)  # the line between the two
_HEAD = 210  # the height of what stands above the graph: title, gain
_INK, _GREY, _PAPER = (255, 255, 255), (138, 143, 152), (23, 27, 33)
_SETTLE = 700  # milliseconds that the editor takes to draw

# The folders under models in which the loaders look for what is named in these inputs.
_FOLDERS = {
    "ckpt_name": "checkpoints",
    "unet_name": "diffusion_models",
    "clip_name": "text_encoders",
    "clip_name1": "text_encoders",
    "clip_name2": "text_encoders",
    "vae_name": "vae",
    "lora_name": "loras",
    "control_net_name": "controlnet",
    "file": "onediff_graphs",
}

_BOUNDS = """() => {
    const boxes = [...app.graph._groups.map(group => group._bounding)];
    for (const node of app.graph._nodes)
        boxes.push([node.pos[0], node.pos[1] - LiteGraph.NODE_TITLE_HEIGHT, node.size[0],
                    node.size[1] + LiteGraph.NODE_TITLE_HEIGHT]);
    const left = Math.min(...boxes.map(box => box[0])), top = Math.min(...boxes.map(box => box[1]));
    return [left, top, Math.max(...boxes.map(box => box[0] + box[2])) - left,
            Math.max(...boxes.map(box => box[1] + box[3])) - top];
}"""
_FRAME = """([left, top, margin]) => {
    const view = app.canvas.ds;
    view.scale = 1;
    view.offset[0] = margin - left;
    view.offset[1] = margin - top;
    app.canvas.setDirty(true, true);
}"""
_TOO_SMALL = """() => app.graph._nodes.filter(node => node.size.some((size, i) => size < node.computeSize()[i] - 1))
    .map(node => `${node.type}: ${[...node.size]} is less than ${[...node.computeSize()]}`)"""

_ONLY_THE_GRAPH = "[aria-label='Show menu'] { visibility: hidden !important; }"


class LayoutError(Exception):
    """The editor needs more room for a node than the workflow gives it."""


def pretend_files(base: Path, named: Iterable[Workflow]) -> None:
    """Make empty files of the names that the workflows use: the editor marks a name in red that is not on its list."""
    for workflow in named:
        for node in workflow.values():
            for name, folder in _FOLDERS.items():
                if isinstance(node["inputs"].get(name), str):
                    path = base / "models" / folder / node["inputs"][name]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.touch()
    (base / "input").mkdir(parents=True, exist_ok=True)
    picture = Image.linear_gradient("L").resize((512, 512))
    Image.merge("RGB", (picture, picture.rotate(90), picture.rotate(180))).save(base / "input" / "example.png")


def thumbnail(page: Page, workflow: Mapping[str, Any], name: str) -> Image.Image:
    """A square picture of a workflow (editor's form): title and gain, our nodes and what is near them, the whole graph.

    Raises:
        LayoutError: a node is smaller than what is on it.
    """
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
    page.wait_for_timeout(_SETTLE)
    too_small = page.evaluate(_TOO_SMALL)
    if too_small:
        raise LayoutError("; ".join(too_small))
    left, top, width, height = page.evaluate(_BOUNDS)
    # All of it at its full size, and made smaller afterwards: the editor leaves out the texts of small nodes.
    page.set_viewport_size({"width": int(width + 2 * _MARGIN), "height": int(height + 2 * _MARGIN)})
    page.wait_for_timeout(_SETTLE)
    page.evaluate(_FRAME, [left, top, _MARGIN])
    page.add_style_tag(content=_ONLY_THE_GRAPH)
    page.wait_for_timeout(_SETTLE)
    graph = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    ours = next(group for group in workflow["groups"] if group["title"].startswith("OneDiff"))["bounding"]
    picture = _composed(graph, ours[0] - left + _MARGIN, ours[1] - top + _MARGIN, ours[2])
    picture.paste(head(TITLES[name], gain_of(name)), (0, 0))
    return picture


def head(title: str, gain: Gain | None) -> Image.Image:
    """What stands above the graph: the title, and two bars whose lengths are milliseconds per step."""
    drawn = Image.new("RGB", (SIDE, _HEAD), _PAPER)
    draw = ImageDraw.Draw(drawn)

    def write(place: tuple[int, int], text: str, size: int, colour: tuple[int, int, int], anchor: str = "la") -> None:
        draw.text(place, text, fill=colour, font=ImageFont.load_default(size=size), anchor=anchor)

    first, _, rest = title.partition(", ")
    write((20, 12), first, 24, _GREY)
    write((20, 42), rest, 38, _INK)
    if gain is None:
        write((20, 128), "How much faster: the node shows it.", 28, _GREY)
        return drawn
    write((SIDE - 20, 104), str(gain), 64, _INK, "ra")
    for y, label, milliseconds, colour in (
        (104, "ComfyUI", gain.eager_ms, _GREY),
        (142, "OneDiff", gain.ours_ms, _RULE_COLOUR),
    ):
        length = round(_LONGEST_BAR * milliseconds / gain.eager_ms)
        draw.rounded_rectangle((20, y, 20 + length, y + 30), 5, fill=colour)
        write((30, y + 5), label, 18, _INK)
        write((28 + length, y + 5), f"{milliseconds:.1f} ms", 18, _INK)
    write((20, 182), f"per step: {gain.how}", 15, _GREY)
    return drawn


def _composed(graph: Image.Image, x: float, y: float, width: float) -> Image.Image:
    """The whole graph at the bottom, and above it the part of it around a group, larger; above that room for a head.

    Args:
        graph: the whole graph.
        x: of the group's left edge in ``graph``.
        y: of its top edge.
        width: of the group.
    """
    scale = min(SIDE / graph.width, _STRIP * SIDE / graph.height)
    strip = graph.resize((round(graph.width * scale), round(graph.height * scale)), Image.Resampling.LANCZOS)
    near_side = (SIDE, SIDE - _HEAD - strip.height - _RULE)
    near_width = min(graph.width, round(width * _NEAR))
    near_height = min(graph.height, round(near_width * near_side[1] / SIDE))
    left = round(min(max(0, x + width / 2 - near_width / 2), graph.width - near_width))
    top = round(min(max(0, y - _MARGIN), graph.height - near_height))
    near = graph.crop((left, top, left + near_width, top + near_height))
    picture = Image.new("RGB", (SIDE, SIDE), graph.getpixel((0, 0)))
    picture.paste(near.resize(near_side, Image.Resampling.LANCZOS), (0, _HEAD))
    rule = _HEAD + near_side[1]
    picture.paste(_RULE_COLOUR, (0, rule, SIDE, rule + _RULE))
    picture.paste(strip, ((SIDE - strip.width) // 2, SIDE - strip.height))
    return picture


def made_from(workflow: Path) -> str:
    """What a thumbnail's comment says about its workflow's file and its gain: another one means that it is stale."""
    (name,) = (name for name, title in TITLES.items() if title == workflow.stem)
    return hashlib.sha256(workflow.read_bytes() + repr(gain_of(name)).encode()).hexdigest()


def _jpeg(picture: Image.Image, comment: str) -> bytes:
    """At the best quality that is small enough."""
    for quality in range(90, 20, -5):
        data = io.BytesIO()
        picture.save(data, "JPEG", quality=quality, optimize=True, progressive=True, comment=comment)
        if data.tell() <= MAXIMUM_BYTES:
            return data.getvalue()
    raise LayoutError(f"a thumbnail of {picture.size} pixels does not fit into {MAXIMUM_BYTES} bytes")


def main(arguments: Sequence[str]) -> int:
    """Draw the named workflows, or all."""
    folder = repository() / "workflows"
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        pretend_files(base, workflows().values())
        with ComfyServer(comfyui_path(), base, cpu=True) as server, editor(server) as page:
            page.evaluate("() => app.extensionManager.command.execute('Workspace.ToggleFocusMode')")
            for name in arguments or workflows():
                workflow = folder / f"{TITLES[name]}.json"
                data = _jpeg(thumbnail(page, json.loads(workflow.read_text()), name), made_from(workflow))
                workflow.with_suffix(".jpg").write_bytes(data)
                print(f"{workflow.stem}.jpg: {len(data) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
