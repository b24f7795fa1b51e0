"""Saved files of compiled graphs: where a server looks for them, the command line on them, and what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dev.environment import repository
from dev.host import ComfyServer, RunResult
from onediff_comfy.store.artifact import Artifact


def put(server: ComfyServer, name: str, content: bytes) -> str:
    """Drop a file into a running server's folder, as a person would; its name for the Load node."""
    file = server.base_dir / "models" / "onediff_graphs" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    options = server.get_json("/object_info/OneDiffLoadCompiledGraph")["OneDiffLoadCompiledGraph"]
    assert name in options["input"]["required"]["file"][1]["options"], "the list did not refresh"
    return name


def saved_graph(server: ComfyServer, name: str) -> Path:
    """Return the file of a graph that was saved as ``name``."""
    return server.base_dir / "models" / "onediff_graphs" / f"{name}.graph"


def command_line(server: ComfyServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m onediff_comfy`` with the folders of a server's installation."""
    folders = {"ONEDIFF_CACHE_DIR": "onediff-cache", "ONEDIFF_CONFIG_DIR": "onediff-config"}
    environment = {**os.environ, **{name: str(server.base_dir / folder) for name, folder in folders.items()}}
    command = [sys.executable, "-m", "onediff_comfy", *arguments]
    return subprocess.run(command, cwd=repository(), env=environment, capture_output=True, text=True, check=False)


def error_of(result: RunResult) -> str:
    """Why a workflow failed; it must have."""
    assert result.error is not None, "the workflow should have failed"
    return str(result.error["exception_message"])


def doctored(artifact: Artifact, change: Callable[[dict[str, Any]], None]) -> Artifact:
    """A graph whose manifest says something else, and which nobody vouches for yet."""
    fields = json.loads(artifact.manifest_text)
    change(fields)
    return Artifact(json.dumps(fields, sort_keys=True, separators=(",", ":")), "", artifact.data)
