"""moto's S3 as a process of its own, with one request at a time: check and put cannot interleave.

    python stand_in.py PORT [racy]

``racy`` is a store whose put-if-absent is not atomic: it looks, takes a while, and writes. Many that call themselves
compatible with S3 are like that, and so is moto with threads. Here the while lasts until another has looked too.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ANSWERS_WITHIN_S = 120.0
_RACED = re.compile(r"/v1/(leases|graphs|probe/\w+/race)")
"""What several write at once: of it a first writer is held until there is a second one."""
_HELD_S = 60.0


@dataclass(frozen=True)
class Bucket:
    """An S3 server with a bucket, and the variables by which a process finds it."""

    endpoint: str
    name: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }


@contextmanager
def serving(racy: bool = False) -> Iterator[Bucket]:
    """A server with an empty bucket, for as long as the block runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__)), str(port), *(["racy"] if racy else [])]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        bucket = Bucket(f"http://127.0.0.1:{port}", "fleet")
        _wait_until_it_answers(port, process)
        make_bucket(bucket)
        yield bucket
    finally:
        process.kill()
        process.wait()


def make_bucket(bucket: Bucket) -> None:
    """Make the bucket: obstore makes none.

    Raises:
        BotoCoreError: the server does not answer.
        ClientError: it refuses.
    """
    client_of(bucket).create_bucket(Bucket=bucket.name)


def client_of(bucket: Bucket) -> Any:
    """The cloud's own client of a server: it takes every name of an object."""
    from botocore.config import Config
    from botocore.session import get_session

    once = Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=60)
    return get_session().create_client(
        "s3",
        region_name=bucket.environment["AWS_REGION"],
        endpoint_url=bucket.endpoint,
        aws_access_key_id=bucket.environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=bucket.environment["AWS_SECRET_ACCESS_KEY"],
        config=once,
    )


def _wait_until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _ANSWERS_WITHIN_S
    while time.monotonic() < end and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("the S3 stand-in did not start")


class Racy:
    """Answers put-if-absent from what was there when the request came, and writes once another such request came."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._written: set[str] = set()
        self._writers: Counter[str] = Counter()
        self._come = threading.Condition()
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and environ.get("HTTP_IF_NONE_MATCH") == "*":
            if path in self._written:
                start_response("412 Precondition Failed", [("Content-Length", "0")])
                return [b""]
            del environ["HTTP_IF_NONE_MATCH"]
            self._wait_for_another(path)
            self._written.add(path)
        with self._one_at_a_time:
            return list(self._application(environ, start_response))

    def _wait_for_another(self, path: str) -> None:
        with self._come:
            self._writers[path] += 1
            self._come.notify_all()
            if _RACED.search(path):
                self._come.wait_for(lambda: self._writers[path] > 1, _HELD_S)


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    racy = sys.argv[2:] == ["racy"]
    application = DomainDispatcherApplication(create_backend_app)
    wsgi = Racy(application) if racy else application
    make_server("127.0.0.1", int(sys.argv[1]), wsgi, threaded=racy).serve_forever()


if __name__ == "__main__":
    main()
