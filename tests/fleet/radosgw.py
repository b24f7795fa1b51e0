"""Ceph's S3 server with the smallest Ceph behind it: one monitor, and one disk that is memory. Debian's package has it.

What it answers is its own: it is no stand-in. Of Debian 12's, 16.2, the tests found that it takes ETags for a
replacement without their quotes only.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from botocore.exceptions import BotoCoreError, ClientError
from stand_in import Bucket, make_bucket

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
_ANSWERS_WITHIN_S = 120.0

# Nobody but this machine reaches it, so nobody is asked who they are; radosgw by itself wants to, which needs "crc".
_CONFIGURATION = """
[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{monitor}/0]
public addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
ms bind msgr1 = false
ms mon client mode = crc
ms client mode = crc
osd objectstore = memstore
osd crush chooseleaf type = 0
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
mon allow pool size one = true
rgw frontends = beast endpoint=127.0.0.1:{gateway}
run dir = {folder}
pid file = {folder}/$name.pid
admin socket =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
mon data = {folder}/mon
osd data = {folder}/osd
rgw data = {folder}/rgw
"""


def missing() -> str | None:
    """Return why there is no such server here, or None."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    packages = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
    return f"{', '.join(absent)} not installed: {packages}" if absent else None


@contextlib.contextmanager
def serving() -> Iterator[Bucket]:
    """A server with an empty bucket, for as long as the block runs."""
    with tempfile.TemporaryDirectory(prefix="radosgw-") as name, contextlib.ExitStack() as ends:
        folder, monitor, gateway = Path(name), _free_port(), _free_port()
        for part in ("mon", "osd", "rgw"):
            (folder / part).mkdir()
        fsid, disk = str(uuid.uuid4()), str(uuid.uuid4())
        configuration = folder / "ceph.conf"
        configuration.write_text(_CONFIGURATION.format(folder=folder, fsid=fsid, monitor=monitor, gateway=gateway))

        def run(*command: str) -> None:
            done = subprocess.run(
                [command[0], "--conf", str(configuration), *command[1:]], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, (command, done.stderr[-2000:])

        def start(*command: str) -> None:
            with (folder / f"{command[0]}.out").open("wb") as output:
                process = subprocess.Popen(
                    [command[0], "--conf", str(configuration), *command[1:], "-f"], stdout=output, stderr=output
                )
            ends.callback(process.wait)
            ends.callback(process.kill)

        monitors = str(folder / "monmap")
        address = f"[v2:127.0.0.1:{monitor}/0]"
        run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, monitors)
        run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monitors)
        start("ceph-mon", "-i", "a")
        run("ceph", "osd", "new", disk)
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        start("ceph-osd", "-i", "0")
        bucket = Bucket(f"http://127.0.0.1:{gateway}", "fleet")
        key, secret = (bucket.environment[f"AWS_{name}"] for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        person = ("--uid", "tests", "--display-name", "tests", "--access-key", key, "--secret-key", secret)
        run("radosgw-admin", "user", "create", *person)
        start("radosgw", "-n", "client.admin")
        _make_bucket_once_it_answers(bucket)
        yield bucket


def _make_bucket_once_it_answers(bucket: Bucket) -> None:
    end = time.monotonic() + _ANSWERS_WITHIN_S
    while True:
        try:
            make_bucket(bucket)
            return
        except (BotoCoreError, ClientError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
