"""Real ComfyUI processes that share nothing but a store: what one compiles serves in all."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from encoders import encoded
from pictures import FAMILIES, Counters, assert_same_picture, latent_of

from dev.host import ComfyServer
from onediff_comfy.store.signing.key_ring import KeyRing
from tools.workflows import Workflow

A_PROMPT = functools.partial(encoded, "a lighthouse")
AN_IMAGE = functools.partial(FAMILIES["sd15"].workflow, 1)


@pytest.mark.parametrize(
    ("builders", "workers", "workflow"),
    [
        pytest.param(2, 0, A_PROMPT, id="two"),
        # test_once.py says the same of four machines that are library and store without a ComfyUI.
        pytest.param(4, 1, AN_IMAGE, id="four, one worker", marks=pytest.mark.slow),
    ],
)
def test_of_cold_builders_one_compiles_and_a_worker_does_not(
    builders: int,
    workers: int,
    workflow: Callable[[str | None], Workflow],
    start_server: Callable[..., ComfyServer],
    tmp_path: Path,
) -> None:
    url = (tmp_path / "shared store").as_uri()
    KeyRing(tmp_path / "keys").make("the fleet's")

    def machine(role: str) -> ComfyServer:
        server = start_server(ONEDIFF_STORE_URL=url, ONEDIFF_STORE_ROLE=role)
        config = server.base_dir / "onediff-config"
        config.mkdir()
        for name in ("store_keys.json", *(["store_builder.key"] if role == "builder" else [])):
            (config / name).write_bytes((tmp_path / "keys" / name).read_bytes())
            (config / name).chmod(0o600)
        return server

    def picture(server: ComfyServer) -> torch.Tensor:
        return latent_of(server.run(workflow("inductor")))

    roles = ["builder"] * builders + ["worker"] * workers
    with contextlib.ExitStack() as running, ThreadPoolExecutor() as threads:
        servers = list(threads.map(lambda role: running.enter_context(machine(role)), roles))
        counted = [Counters(server) for server in servers]
        expected = latent_of(servers[-1].run(workflow(None)))
        pictures = list(threads.map(picture, servers[:builders]))  # at once
        pictures += map(picture, servers[builders:])  # afterwards
        reports = [server.get_json("/onediff/report")["fleet"] for server in servers]
        assert sorted((each.compiled, each.loaded) for each in counted) == [*[(0, 1)] * (len(servers) - 1), (1, 0)]
        assert [each.captured for each in counted[builders:]] == [0] * workers
    total = {name: sum(report[name] for report in reports) for name in reports[0]}
    assert (total["compiles"], total["published"], total["fetched"]) == (1, 1, len(servers) - 1)
    assert total["alone"] + total["refusals"] + total["unreachable"] == 0
    assert len(list((tmp_path / "shared store" / "v1" / "graphs").iterdir())) == 1
    for each in pictures:
        assert_same_picture(each, expected)
