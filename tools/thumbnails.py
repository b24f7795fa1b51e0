"""The pictures of the workflows that ComfyUI's template browser shows: each graph as the editor draws it.

    python -m tools.thumbnails [NAME...]     # writes workflows/NAME.jpg; all of them without a name

For a pack's template NAME the editor asks for NAME.jpg and shows it in a square.
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

from PIL import Image
from playwright.sync_api import Page

from dev.editor import editor
from dev.environment import comfyui_path, repository
from dev.host import ComfyServer

from .workflow_files import workflows
from .workflows import Workflow

SIDE = 640
"""Width and height of a thumbnail in pixels."""

MAXIMUM_BYTES = 60_000

_MARGIN = 30  # around the graph, in the editor's pixels
_NEAR = 2.4  # how wide the enlarged part is, in widths of our nodes' group
_STRIP = 0.38  # how much of the picture's height the whole graph may take
_RULE, _RULE_COLOUR = 4, (78, 122, 53)  # the line between the two
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


def thumbnail(page: Page, workflow: Mapping[str, Any]) -> Image.Image:
    """A square picture of a workflow (editor's form): our nodes and what is near them, and below the whole graph.

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
    return _composed(graph, ours[0] - left + _MARGIN, ours[1] - top + _MARGIN, ours[2])


def _composed(graph: Image.Image, x: float, y: float, width: float) -> Image.Image:
    """The whole graph at the bottom, and above it the part of it around a group, larger.

    Args:
        graph: the whole graph.
        x: of the group's left edge in ``graph``.
        y: of its top edge.
        width: of the group.
    """
    scale = min(SIDE / graph.width, _STRIP * SIDE / graph.height)
    strip = graph.resize((round(graph.width * scale), round(graph.height * scale)), Image.Resampling.LANCZOS)
    near_side = (SIDE, SIDE - strip.height - _RULE)
    near_width = min(graph.width, round(width * _NEAR))
    near_height = min(graph.height, round(near_width * near_side[1] / SIDE))
    left = round(min(max(0, x + width / 2 - near_width / 2), graph.width - near_width))
    top = round(min(max(0, y - _MARGIN), graph.height - near_height))
    near = graph.crop((left, top, left + near_width, top + near_height))
    picture = Image.new("RGB", (SIDE, SIDE), graph.getpixel((0, 0)))
    picture.paste(near.resize(near_side, Image.Resampling.LANCZOS), (0, 0))
    picture.paste(_RULE_COLOUR, (0, near_side[1], SIDE, near_side[1] + _RULE))
    picture.paste(strip, ((SIDE - strip.width) // 2, SIDE - strip.height))
    return picture


def made_from(workflow: Path) -> str:
    """What a thumbnail's comment says about its workflow's file: another one means that the thumbnail is stale."""
    return hashlib.sha256(workflow.read_bytes()).hexdigest()


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
                workflow = folder / f"{name}.json"
                data = _jpeg(thumbnail(page, json.loads(workflow.read_text())), made_from(workflow))
                (folder / f"{name}.jpg").write_bytes(data)
                print(f"{name}.jpg: {len(data) / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
