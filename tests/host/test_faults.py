"""What goes wrong while compiling never costs a picture: interruptions, no compiler, no room to write."""

from __future__ import annotations

import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pictures import FAMILIES, Counters, assert_same_picture, latent_of

from dev.host import ComfyServer

FLUX = FAMILIES["flux"]
SD15 = FAMILIES["sd15"]
WAIT = 120.0  # seconds after which a test is broken, not slow


def _interrupt_when(server: ComfyServer, said: str) -> threading.Thread:
    """Presses the editor's stop button as soon as ``said`` appears in the server's log."""

    def watch() -> None:
        for _ in range(1200):
            if said in server.log_text():
                server.post("/interrupt")
                return
            time.sleep(0.1)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


@pytest.fixture(scope="module")
def inductor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's cache folder in ``own_server``."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While there is this file, the C++ compiler of ``own_server`` waits. (A GPU's kernels are not made by it.)"""
    return tmp_path_factory.mktemp("compiler") / "gate"


@pytest.fixture(scope="module")
def own_server(start_server: Callable[..., ComfyServer], inductor_folder: Path, gate: Path) -> Iterator[ComfyServer]:
    compiler = gate.with_name("gated-g++")
    real = shlex.quote(os.environ.get("CXX", "g++"))
    compiler.write_text(f'#!/bin/sh\nwhile [ -e {shlex.quote(str(gate))} ]; do sleep 0.1; done\nexec {real} "$@"\n')
    compiler.chmod(0o755)
    with start_server(CXX=str(compiler), TORCHINDUCTOR_CACHE_DIR=str(inductor_folder)) as running:
        yield running


def test_interrupting_a_compilation_works_and_loses_nothing(own_server: ComfyServer, gate: Path) -> None:
    expected = latent_of(own_server.run(FLUX.workflow(1)))
    counters = Counters(own_server)
    gate.touch()
    opens_late = threading.Timer(WAIT, gate.unlink)  # for whoever waits for the compiler after all
    opens_late.start()
    try:
        watcher = _interrupt_when(own_server, "OneDiff: compiling")
        result = own_server.run(FLUX.workflow(1, "inductor"))
        watcher.join()
        assert gate.exists(), "it came back only when the compiler was done"
        assert result.interrupted
        assert counters.compiled == 0
    finally:
        opens_late.cancel()
        gate.unlink(missing_ok=True)

    # The compilation went on behind the scenes; the next image uses it.
    assert_same_picture(latent_of(own_server.run(FLUX.workflow(1, "inductor"))), expected)
    assert counters.fallbacks == {}
    assert (counters.compiled, counters.served) == (1, FLUX.steps)
    assert own_server.log_text().count("OneDiff: compiling Flux") == 1


@pytest.mark.slow
def test_without_a_compiler_the_picture_is_made_and_the_remedy_is_said(
    start_server: Callable[..., ComfyServer],
) -> None:
    if torch.cuda.is_available():
        pytest.skip("on a GPU Inductor writes Triton, which needs no C++ compiler")
    with start_server(CXX="/nonexistent/g++") as server:
        expected = latent_of(server.run(FLUX.workflow(1)))
        counters = Counters(server)
        for _ in range(2):
            result = server.run(FLUX.workflow(1, "inductor"))
            assert torch.equal(latent_of(result), expected)
        (reason,) = counters.fallbacks
        assert "no working C++ compiler was found" in reason
        assert "/nonexistent/g++" in reason and "apt install g++" in reason
        assert counters.failed == 1  # not tried again at every step
        assert sum("WARNING" in line and "OneDiff" in line for line in server.log_text().splitlines()) == 1
        assert "Traceback" not in server.log_text()


def test_a_cache_folder_that_cannot_be_written_to_is_named(own_server: ComfyServer, inductor_folder: Path) -> None:
    """Of SD 1.5, for which no graph is there yet."""
    expected = latent_of(own_server.run(SD15.workflow(1)))
    # A file in its place stops everybody from writing there, root included.
    aside = inductor_folder.rename(inductor_folder.with_name("aside"))
    inductor_folder.write_text("")
    counters = Counters(own_server)
    try:
        assert torch.equal(latent_of(own_server.run(SD15.workflow(1, "inductor"))), expected)
    finally:
        inductor_folder.unlink()
        aside.rename(inductor_folder)
    (reason,) = counters.fallbacks
    assert str(inductor_folder) in reason and "TORCHINDUCTOR_CACHE_DIR" in reason
