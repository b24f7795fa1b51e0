"""The project's own client of a ComfyUI, or of a fleet's gateway, that runs already."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tools.workflows import Workflow

from .environment import comfyui_path
from .host import ComfyServer


class RunningServer(ComfyServer):
    """A ComfyUI on a port of this machine, which is neither started nor stopped here.

    Args:
        port: that it listens on.
        folder: anything.
    """

    def __init__(self, port: int, folder: Path) -> None:
        super().__init__(comfyui_path(), folder, cpu=True)
        self.port = port

    def hand_in(self, workflow: Workflow, **more: Any) -> str:
        """Hand in a workflow and return its prompt's id."""
        return str(self.post("/prompt", {"prompt": workflow, **more})["prompt_id"])

    def result(self, prompt_id: str, timeout: float = 60) -> dict[str, Any]:
        """The history entry of a prompt once there is one; also while the gateway is away."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                found = self.get_json(f"/history/{prompt_id}")
                if prompt_id in found:
                    return dict(found[prompt_id])
            time.sleep(0.1)
        raise AssertionError(f"no result of {prompt_id} after {timeout:.0f} s")

    def content(self, shown: Mapping[str, Any]) -> bytes:
        """A file as ``/view`` gives it."""
        return self._request("GET", f"/view?{urlencode(shown)}")
