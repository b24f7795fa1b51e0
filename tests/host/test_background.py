"""``compile: background``: images are made meanwhile, by eager, and nothing is lost when a process dies."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from pictures import FAMILIES, MEANWHILE, PATIENCE_S, Counters, assert_same_picture, assert_untouched, pair_of
from processes import compile_process_of, outlived, process_of
from vae_bench import BOUND, SD, UNTOUCHED, Bench

from dev.host import ComfyServer, RunResult

FLUX = FAMILIES["flux"]


def _image(server: ComfyServer, seed: int, size: int = 128) -> RunResult:
    return server.run(FLUX.compared(seed, compile="background", size=size))


def _until_served(server: ComfyServer, counters: Counters, seed: int) -> int:
    """Images with other seeds and sizes until one comes from a compiled graph, each as eager's; how many."""
    deadline = time.monotonic() + PATIENCE_S
    for number in range(1000):
        assert_same_picture(*pair_of(_image(server, seed + number, size=64 + 16 * (number % 5))))
        if counters.served:
            return number + 1
        assert time.monotonic() < deadline, f"no graph after {PATIENCE_S} s; {counters.fallbacks}"
        time.sleep(5)  # an image takes the compiling process' time
    raise AssertionError("unreachable")


def test_images_are_made_at_eager_speed_until_another_process_has_compiled(
    start_server: Callable[..., ComfyServer], tally: Callable[[str], None]
) -> None:
    with start_server() as server:
        counters, start = Counters(server), time.monotonic()
        first = _image(server, 1)
        assert_untouched(*pair_of(first))
        assert counters.served == 0 and set(counters.fallbacks) <= MEANWHILE
        assert sum(counters.fallbacks.values()) == FLUX.steps
        # Nobody makes another image, and the compilation begins.
        assert compile_process_of(server).is_running()
        second = _image(server, 100)
        assert_untouched(*pair_of(second))
        assert any(node == "speedup" and text.startswith("compiling in the background") for node, text in second.texts)

        images = _until_served(server, counters, seed=2)
        took = time.monotonic() - start
        assert set(counters.fallbacks) <= MEANWHILE

        # From now on every call is served, another size's too; and nothing was compiled in this process.
        settled = Counters(server)
        for seed, size in ((500, 128), (501, 160)):
            assert_same_picture(*pair_of(_image(server, seed, size)))
        assert (settled.served, settled.fallbacks) == (2 * FLUX.steps, {})
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 1)
        assert not [line for line in server.log_text().splitlines() if "WARNING" in line and "OneDiff" in line]
        assert outlived([*process_of(server).children()], 20) == []
        tally(f"tiny Flux in background mode: {images} images meanwhile, served after {took:.0f} s")


@pytest.mark.slow
def test_a_server_that_dies_takes_its_compilation_along_and_a_compilation_that_dies_costs_no_image(
    start_server: Callable[..., ComfyServer],
) -> None:
    with start_server() as first:
        assert_untouched(*pair_of(_image(first, 1)))
        worker = compile_process_of(first)
        time.sleep(8)  # so that it is at work, with processes of its own perhaps
        family = [worker, *worker.children(recursive=True)]
        assert worker.is_running()
        process_of(first).kill()
        assert outlived(family, 20) == []

    with start_server(first.base_dir) as second:
        counters = Counters(second)
        actual, expected = pair_of(_image(second, 2))
        assert torch.equal(actual, expected) and counters.served == 0
        compile_process_of(second).kill()
        _until_served(second, counters, seed=3)
        # Nothing was there from before, so it was compiled: in a process that took the place of the killed one.
        assert (counters.compiled, counters.loaded) == (0, 1)
        assert "it is started once more" in second.log_text()


@pytest.mark.slow
def test_a_vae_decodes_at_once_and_its_graph_comes_in(
    start_server: Callable[..., ComfyServer],
    start_process: Callable[[ComfyServer], ComfyServer],
    tally: Callable[[str], None],
) -> None:
    with start_server() as server:
        bench, counters = Bench(server, SD, compile="background", encode=False), Counters(server)
        start, images = time.monotonic(), 0
        assert bench.decoded(128, 96, 1, 1) <= UNTOUCHED  # the host's own code on the same weights
        assert counters.served == 0 and sum(counters.fallbacks.values()) == 1
        while not counters.served:
            assert time.monotonic() - start < PATIENCE_S, f"no graph after {PATIENCE_S} s; {counters.fallbacks}"
            time.sleep(2)
            images += 1
            assert bench.decoded(128 + 8 * (images % 3), 96, 1, 1 + images) <= BOUND
        assert set(counters.fallbacks) <= MEANWHILE
        tally(f"tiny VAE in background mode: {images} images meanwhile, served after {time.monotonic() - start:.0f} s")

        # From now on every call is served, another size's too; and nothing was compiled in this process.
        settled = Counters(server)
        assert bench.decoded(264, 120, 2, 500) <= BOUND
        assert (settled.served, settled.fallbacks) == (1, {})
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 1)
        assert not [line for line in server.log_text().splitlines() if "WARNING" in line and "OneDiff" in line]

    # In a new process the first tile waits for the graph to be loaded: eager beside it would take longer.
    with start_process(server) as second:
        bench, counters = Bench(second, SD, compile="background", encode=False), Counters(second)
        assert bench.decoded(384, 256, 1, 600, tile_size=64, overlap=32) <= BOUND
        assert counters.served > 0 and counters.fallbacks == {}
        assert (counters.captured, counters.compiled, counters.loaded) == (0, 0, 1)
        tally(f"tiny VAE in background mode, kept: {counters.served} tiles from the graph")
