"""Tests of the OneFlow engine, in a Python that has OneFlow's wheel: ``make test-oneflow``."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
if importlib.util.find_spec("oneflow") is not None:  # elsewhere all are skipped, and their names are for others
    sys.path.insert(0, str(HERE))


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., object]:
    """Makes a real ComfyUI with the tiny checkpoints; given the ``base`` of an earlier one, that installation again."""
    from pictures import FAMILIES, OTHER

    from dev.environment import comfyui_path, repository
    from dev.host import ComfyServer
    from tools.models.checkpoints import ensure_checkpoints

    checkpoints = repository() / ".cache" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    names = [FAMILIES[name].checkpoint for name in ("sd15", "sdxl", "flux")]
    ensure_checkpoints(comfyui_path(), checkpoints, [*names, OTHER["sdxl"]])

    def make(base: Path | None = None) -> ComfyServer:
        nodes = HERE.parent / "host" / "tiny_nodes"
        base = base or tmp_path_factory.mktemp("host")
        server = ComfyServer(comfyui_path(), base, cpu=True, packs=[("tiny_nodes", nodes)])
        server.log_file = tmp_path_factory.mktemp("log") / "server.log"
        if not server.checkpoints.exists():
            server.checkpoints.parent.mkdir(parents=True, exist_ok=True)
            server.checkpoints.symlink_to(checkpoints, target_is_directory=True)
        return server

    return make


@pytest.fixture(scope="session")
def server(start_server: Callable[..., object]) -> Iterator[object]:
    """The server that the tests share."""
    with start_server() as running:  # type: ignore[attr-defined]
        yield running
