"""The pack in ComfyUI's editor, in a real browser: what a person sees from opening a workflow to the image."""

from __future__ import annotations

from collections.abc import Callable

from editor import Editor
from pictures import FAMILIES, Counters

from dev.host import ComfyServer

FLUX = FAMILIES["flux"]


def test_progress_appears_on_the_node_and_then_what_came_of_it(
    open_editor: Callable[..., Editor], server: ComfyServer
) -> None:
    editor = open_editor()
    counters = Counters(server)
    editor.open(FLUX.workflow(501, "inductor", size=(96, 160)))
    assert not any(node["missing"] for node in editor.nodes())
    editor.press_run()
    editor.wait_for_text("OneDiffModelSpeedup", "compil")
    editor.fit()
    status = editor.wait_for_text("OneDiffModelSpeedup", "96×160 b1")
    assert status.startswith("compiled graph · 96×160 b1 · ")
    assert counters.fallbacks == {}
