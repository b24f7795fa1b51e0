"""Real ComfyUI processes that share nothing but a store: what one compiles serves in all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pictures import FAMILIES, Counters, assert_same_picture, latent_of

from dev.host import ComfyServer
from onediff_comfy.store.signing.key_ring import KeyRing

SD15 = FAMILIES["sd15"]


def test_two_cold_builders_compile_once_and_a_worker_not_at_all(
    start_server: Callable[..., ComfyServer], tmp_path: Path
) -> None:
    url = (tmp_path / "shared store").as_uri()

    def machine(role: str) -> ComfyServer:
        server = start_server(ONEDIFF_STORE_URL=url, ONEDIFF_STORE_ROLE=role)
        config = server.base_dir / "onediff-config"
        config.mkdir()
        for name in ("store_keys.json", *(["store_builder.key"] if role == "builder" else [])):
            (config / name).write_bytes((tmp_path / "keys" / name).read_bytes())
            (config / name).chmod(0o600)
        return server

    KeyRing(tmp_path / "keys").make("the fleet's")
    with machine("builder") as one, machine("builder") as two, ThreadPoolExecutor() as both:
        counters = [Counters(server) for server in (one, two)]
        pictures = list(both.map(lambda server: latent_of(server.run(SD15.workflow(1, "inductor"))), (one, two)))
        assert sorted((each.compiled, each.loaded) for each in counters) == [(0, 1), (1, 0)]
        counts = [server.get_json("/onediff/report")["fleet"] for server in (one, two)]
    assert sorted(count["compiles"] for count in counts) == [0, 1]
    assert sorted(count["published"] for count in counts) == [0, 1]
    assert sum(count["fetched"] for count in counts) == 1
    assert sum(count["alone"] + count["refusals"] + count["unreachable"] for count in counts) == 0

    with machine("worker") as worker:
        later = Counters(worker)
        pictures.append(latent_of(worker.run(SD15.workflow(1, "inductor"))))
        assert (later.compiled, later.captured, later.loaded) == (0, 0, 1)
        assert later.served == SD15.steps
        expected = latent_of(worker.run(SD15.workflow(1)))
    for picture in pictures:
        assert_same_picture(picture, expected)
