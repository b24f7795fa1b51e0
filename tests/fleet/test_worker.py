"""A fleet's worker with a server in ComfyUI's place, and with files that are no workflows."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from onediff_comfy.fleet.fleet_options import FleetOptions
from onediff_comfy.fleet.worker import _STANDS_S, Worker


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    """A worker whose process runs and answers nothing."""
    (tmp_path / "warm-up").mkdir()
    made = Worker(FleetOptions("", "", folder=str(tmp_path), warm_up=str(tmp_path / "warm-up")), "127.0.0.1")
    made._process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield made
    made.stop()


@pytest.fixture
def queue(worker: Worker) -> Iterator[dict[str, Any]]:
    """What its ``/queue`` answers."""
    answer: dict[str, Any] = {"queue_running": [], "queue_pending": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        worker.port = server.server_address[1]
        try:
            yield answer
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has time pass by the worker's clock, which stands otherwise."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    return passes


def test_a_worker_whose_prompts_wait_while_none_runs_counts_as_silent(
    worker: Worker, queue: dict[str, Any], wait: Callable[[float], None]
) -> None:
    queue["queue_pending"] = [[0, "a", {}, {}, []], [1, "b", {}, {}, []]]
    assert worker.unfinished() == 2
    wait(_STANDS_S)
    assert worker.unfinished() == 2
    wait(1)
    assert worker.unfinished() is None
    queue["queue_running"] = [queue["queue_pending"].pop(0)]
    assert worker.unfinished() == 2, "it goes on"


@pytest.mark.parametrize("what", ["one runs for long", "nothing to do", "they are done fast"])
def test_a_worker_that_does_what_it_can_is_alive(
    what: str, worker: Worker, queue: dict[str, Any], wait: Callable[[float], None]
) -> None:
    if what == "one runs for long":
        queue.update(queue_running=[[0, "a"]], queue_pending=[[1, "b"]])
    for number in range(4):
        if what == "they are done fast":
            queue["queue_pending"] = [[number, str(number)]]
        for _ in range(3):
            assert worker.unfinished() is not None
            wait(_STANDS_S / 4)


def test_a_worker_whose_queue_is_none_does_not_answer(worker: Worker, queue: dict[str, Any]) -> None:
    for wrong in ({"queue_running": 5}, {"queue_running": [], "queue_pending": [5]}, {"queue_pending": [[]]}):
        queue.clear()
        queue.update(wrong)
        assert worker.unfinished() is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[1]", "no workflow in API form"),
        (b"5", "no workflow in API form"),
        (b"[" * 100_000, "is no JSON"),
        (b"\xff", "is no JSON"),
        (b'{"1": {}}', "no workflow in API form"),
        (b'{"nodes": []}', "editor's form"),
        (b'{"1": {"class_type": 5, "inputs": {}}}', "ComfyUI"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_file_that_is_no_workflow_keeps_no_worker_from_starting(
    content: bytes, said: str, worker: Worker, queue: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "warm-up" / "a.json").write_bytes(content)
    (problem,) = worker.warm_up(lambda _: None)
    assert problem.startswith("a.json: ") and said in problem
