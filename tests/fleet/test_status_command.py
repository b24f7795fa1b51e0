"""``fleet status`` on a terminal, and where something else than a gateway answers."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseRequestHandler, TCPServer
from typing import Any

import pytest

from onediff_comfy.fleet.command import status


@contextmanager
def _answering(content: bytes) -> Iterator[str]:
    """Something that answers whatever it is asked with the same bytes. Gives its address."""

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            self.request.sendall(content)

    with TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body) + body


def _status(address: str, as_json: bool = False) -> int:
    return status(argparse.Namespace(gateway=address, json=as_json))


def _fleet(**worker: Any) -> bytes:
    shown = {"name": "w", "state": "ready", "prompts": [], "graphs": [], "report": {}, "checkpoint": []}
    return _http(json.dumps({"workers": [shown | worker], "queue": {"waiting": 0}, "counts": {}}).encode())


@pytest.mark.parametrize(
    "content",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"\x15\x03\x01\x00\x02\x02F",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{",
        *map(_http, (b"", b"[]", b"{}", b"5", b"[" * 100_000, b"\xff", b'{"workers": "text"}', b'{"workers": [{}]}')),
        _fleet(name=5),
        _fleet(report={"served": "many"}),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_no_gateway_is_said_in_one_line(
    content: bytes, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with _answering(content) as address:
        assert _status(address, as_json) == 1
    out, said = capsys.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    assert address in said and "--gateway" in said


@pytest.mark.parametrize("address", ["http://me:secret@127.0.0.1", "me:secret@127.0.0.1:1", "http://me:sec/ret@[bad"])
def test_a_password_in_an_address_is_not_printed(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _status(address) == 1
    out, said = capsys.readouterr()
    assert (out, said.count("\n")) == ("", 1) and "sec" not in said and "--gateway" in said


def test_an_address_needs_no_scheme() -> None:
    with _answering(_fleet()) as address:
        assert _status(address.removeprefix("http://")) == 0


def test_a_client_cannot_write_on_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    with _answering(_fleet(checkpoint=["\x1b]0;OWNED\x07model"], detail="\x1b[2J")) as address:
        assert _status(address) == 0
    shown = capsys.readouterr().out
    assert "model" in shown and "\u2502" in shown, "rich's table"
    assert "\x1b]" not in shown and "\x07" not in shown and "\x1b[2J" not in shown
