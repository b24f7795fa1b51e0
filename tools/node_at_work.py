"""The README's picture of a node at work: OneDiff Optimize after two pictures of a tiny model, as the editor draws it.

python -m tools.node_at_work     # writes docs/images/node.jpg
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from dev.editor import editor
from dev.environment import comfyui_path, repository
from dev.host import ComfyServer

from .models.checkpoints import checkpoint_file, ensure_checkpoints
from .workflow_files import editor_form, workflows

PICTURE = repository() / "docs" / "images" / "node.jpg"

_NODE = "OneDiffOptimize"
_LONGEST_S = 900
_SAID = (
    """type => window.app.graph.nodes.find(node => node.type === type).widgets
    .find(widget => widget.name === "$$node-text-preview")?.value ?? """
    + '""'
)


def main() -> int:
    """Make two pictures in the editor, and keep what it shows around the node."""
    workflow = workflows()["optimize"]
    workflow["loader"]["inputs"]["ckpt_name"] = checkpoint_file("sd15_tiny")
    workflow["latent"]["inputs"] |= {"width": 256, "height": 256}
    workflow["sampler"]["inputs"]["steps"] = 8
    with tempfile.TemporaryDirectory() as temporary:
        server = ComfyServer(comfyui_path(), Path(temporary), cpu=True)
        ensure_checkpoints(comfyui_path(), server.checkpoints, ["sd15_tiny"])
        with server, editor(server) as page:
            form = editor_form(workflow, server.get_json("/object_info"), note="")
            page.set_viewport_size({"width": 1600, "height": 1000})
            page.evaluate("workflow => app.loadGraphData(workflow)", form)
            for _ in range(2):
                _run(page, server)
            print(page.evaluate(_SAID, _NODE))
            drawn = _around_node(page)
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    drawn.save(PICTURE, quality=88, optimize=True)
    return 0


def _run(page: Page, server: ComfyServer) -> None:
    """Press Run, with another seed than before, and wait until the picture is there."""
    before = len(server.get_json("/history"))
    page.evaluate(
        """() => { const sampler = window.app.graph.nodes.find(node => node.type === "KSampler");
            sampler.widgets.find(widget => widget.name === "seed").value += 1; }"""
    )
    page.evaluate("() => window.app.queuePrompt(0)")
    deadline = time.monotonic() + _LONGEST_S
    while len(server.get_json("/history")) == before:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no picture after {_LONGEST_S} s")
        page.wait_for_timeout(500)
    page.wait_for_timeout(2000)


def _around_node(page: Page) -> Image.Image:
    left, top, width, height = page.evaluate(
        """type => { const node = window.app.graph.nodes.find(node => node.type === type), view = app.canvas.ds;
            view.scale = 1; view.offset[0] = 420 - node.pos[0]; view.offset[1] = 220 - node.pos[1];
            app.canvas.setDirty(true, true);
            return [420, 220, node.size[0], node.size[1]]; }""",
        _NODE,
    )
    page.wait_for_timeout(1000)
    shown = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    return shown.crop((int(left) - 60, int(top) - 80, int(left + width) + 460, int(top + height) + 120))


if __name__ == "__main__":
    sys.exit(main())
