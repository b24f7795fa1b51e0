"""dev/host.py: how a server is started."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dev import host
from dev.host import ComfyServer, HostError

# Stands in for ComfyUI: it answers, or has no use for anything.
MAIN = """
import http.server, sys

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

if "--broken" in sys.argv:
    sys.exit("broken")
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody has."""
    with socket.socket() as somebody:
        somebody.bind(("127.0.0.1", 0))
        yield somebody.getsockname()[1]


def server(folder: Path, *arguments: str) -> ComfyServer:
    (folder / "main.py").write_text(MAIN)
    return ComfyServer(folder, folder / "base", cpu=True, args=arguments, install_pack=False)


def test_a_server_whose_port_is_taken_meanwhile_starts_on_another(
    tmp_path: Path, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = itertools.chain([taken, taken], iter(host._free_port, None))
    monkeypatch.setattr(host, "_free_port", lambda: next(ports))
    with server(tmp_path) as started:
        assert started.port != taken
        assert started.get_json("/system_stats") == {}


@pytest.mark.parametrize(("arguments", "said", "tries"), [((), host._PORT_IN_USE, 3), (("--broken",), "broken", 1)])
def test_one_that_cannot_be_started_says_why(
    tmp_path: Path,
    taken: int,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    said: str,
    tries: int,
) -> None:
    tried: list[int] = []
    monkeypatch.setattr(host, "_free_port", lambda: tried.append(taken) or taken)
    with pytest.raises(HostError, match=f"(?i){said}"):
        server(tmp_path, *arguments).start()
    assert len(tried) == tries
