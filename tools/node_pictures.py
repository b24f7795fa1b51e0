"""The pictures on the nodes' help pages: each node as the editor draws it, where a workflow has it with its wires.

python -m tools.node_pictures [NODE...]     # writes web/docs/NODE/picture.jpg; all of them without a name
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Page

from dev.editor import editor
from dev.environment import comfyui_path, repository
from dev.host import ComfyServer

from .templates import TITLES
from .thumbnails import pretend_files
from .workflow_files import editor_form, workflows

HELP = repository() / "web" / "docs"

_AROUND = 130  # what of the neighbourhood is shown, in the editor's pixels
_SETTLE = 700  # milliseconds that the editor takes to draw
_LOOK_AT = """([type, around]) => {
    const node = app.graph._nodes.find(node => node.type === type), view = app.canvas.ds;
    view.scale = 1;
    view.offset[0] = around - node.pos[0];
    view.offset[1] = around - node.pos[1] + LiteGraph.NODE_TITLE_HEIGHT;
    app.canvas.setDirty(true, true);
    return [node.size[0], node.size[1] + LiteGraph.NODE_TITLE_HEIGHT];
}"""


def picture(page: Page, workflow: Mapping[str, Any], node_type: str) -> Image.Image:
    """A node of a workflow (editor's form) and what is around it."""
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)
    page.wait_for_timeout(_SETTLE)
    width, height = page.evaluate(_LOOK_AT, [node_type, _AROUND])
    page.set_viewport_size({"width": int(width) + 2 * _AROUND, "height": int(height) + 2 * _AROUND})
    page.wait_for_timeout(_SETTLE)
    page.evaluate(_LOOK_AT, [node_type, _AROUND])
    page.wait_for_timeout(_SETTLE)
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def main(names: Sequence[str]) -> int:
    """Draw these nodes, or every one that has a help page."""
    shipped = workflows()
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        pretend_files(base, shipped.values())
        with ComfyServer(comfyui_path(), base, cpu=True) as server, editor(server) as page:
            page.evaluate("() => app.extensionManager.command.execute('Workspace.ToggleFocusMode')")
            node_types = server.get_json("/object_info")
            for folder in sorted(folder for folder in HELP.iterdir() if not names or folder.name in names):
                name = next((name for name, nodes in shipped.items() if _has(nodes, folder.name)), None)
                if name is None:
                    form = editor_form({"node": {"class_type": folder.name, "inputs": {}}}, node_types, note="")
                else:
                    form = json.loads((repository() / "workflows" / f"{TITLES[name]}.json").read_text())
                picture(page, form, folder.name).save(folder / "picture.jpg", quality=88, optimize=True)
                print(f"{folder.name}: {name or 'by itself'}")
    return 0


def _has(workflow: Mapping[str, Any], node_type: str) -> bool:
    return any(node["class_type"] == node_type for node in workflow.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
