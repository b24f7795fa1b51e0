"""A real ComfyUI server with the pack in it, shared by all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pictures import FAMILIES, OTHER

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer
from tools.models.checkpoints import ensure_checkpoints

TINY_NODES = Path(__file__).with_name("tiny_nodes")


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ComfyServer]:
    """Makes a server with the tiny checkpoints and test nodes; compilers start from an empty cache.

    Given the ``base`` of an earlier server it is that installation, started again; given ``comfy``, another host.
    """
    comfy = comfyui_path()
    checkpoints = repository() / ".cache" / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    ensure_checkpoints(comfy, checkpoints, [*(family.checkpoint for family in FAMILIES.values()), *OTHER.values()])

    def make(base: Path | None = None, comfy: Path = comfy, **environment: str) -> ComfyServer:
        base = base or tmp_path_factory.mktemp("host")
        environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        server = ComfyServer(
            comfy,
            base,
            cpu=not torch.cuda.is_available(),
            packs=[("tiny_nodes", TINY_NODES)],
            env=environment,
        )
        if not server.checkpoints.exists():
            server.checkpoints.parent.mkdir(parents=True, exist_ok=True)
            server.checkpoints.symlink_to(checkpoints, target_is_directory=True)
        return server

    return make


@pytest.fixture(scope="session")
def start_process(
    start_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[ComfyServer], ComfyServer]:
    """Makes another process of a server's installation: what it kept is there, what it knew is not.

    The server itself may go on; the two share every folder but the compiler's cache, and have logs of their own.
    """

    def make(server: ComfyServer) -> ComfyServer:
        other = start_server(server.base_dir)
        other.log_file = tmp_path_factory.mktemp("log") / "server.log"
        return other

    return make


@pytest.fixture(scope="session")
def restarted(server: ComfyServer, start_process: Callable[[ComfyServer], ComfyServer]) -> Iterator[ComfyServer]:
    """Another process of the shared server's installation, for tests of what it finds there. Each has its own graphs.

    What is kept while it runs it finds too: it asks the disk for every graph that it does not have.
    """
    with start_process(server) as other:
        yield other


@pytest.fixture(scope="session")
def emptied(server: ComfyServer, start_process: Callable[[ComfyServer], ComfyServer]) -> Iterator[ComfyServer]:
    """A third process of the installation, for tests that take graphs and models out of memory; each expects none."""
    with start_process(server) as other:
        yield other


@pytest.fixture(scope="session")
def elsewhere(start_server: Callable[..., ComfyServer]) -> Iterator[ComfyServer]:
    """Another installation: other folders, another signing key. Saved graphs in it are test_compile_once.py's alone."""
    with start_server() as other:
        yield other


# On the CPU PyTorch's convolutions keep what they prepared for each of up to 1024 shapes, and malloc what was
# freed: 200 MB for tiny SDXL in 100 shapes without our node, 20 with these. Tests of memory want to see our own.
_NO_HOARDING = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


MOST_SERVERS = 1
"""Shared ones at a time: that of tests/host (``spreading.ByWhatIsShared``). tests/browser has its own."""


@pytest.fixture(scope="session")
def server(start_server: Callable[..., ComfyServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """The server that most tests share. Its counters only grow: compare before and after."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        of_all = tmp_path_factory.getbasetemp().parent
        (of_all / f"server of {worker}").touch()
        assert len(list(of_all.glob("server of *"))) <= MOST_SERVERS, "tests that share a server are spread wrongly"
    with start_server(**_NO_HOARDING) as running:
        yield running
