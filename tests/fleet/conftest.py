"""Stores that a fleet shares, and fleets on them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import radosgw
from machines import StoreFleet
from stand_in import Bucket, serving
from stores import EVERY_STORE, FOLDER


@pytest.fixture(scope="session")
def s3() -> Iterator[Bucket]:
    """An S3 server, shared; take a prefix of your own."""
    with serving() as running:
        yield running


@pytest.fixture(scope="session")
def ceph() -> Iterator[Bucket]:
    """An S3 server that people run, shared; take a prefix of your own."""
    absent = radosgw.missing()
    if absent is not None:
        pytest.skip(absent)
    with radosgw.serving() as running:
        yield running


@pytest.fixture(params=EVERY_STORE)
def store_fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreFleet]:
    """A fleet on an empty store of each kind."""
    environment = {}
    url = (tmp_path / "shared store").as_uri()
    if request.param != FOLDER:
        bucket: Bucket = request.getfixturevalue(request.param)
        environment, url = bucket.environment, f"s3://{bucket.name}/{uuid.uuid4().hex}"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = StoreFleet(url, tmp_path, environment)
    yield made
    made.stop()


@pytest.fixture
def folder_fleet(tmp_path: Path) -> StoreFleet:
    """A fleet on an empty folder."""
    return StoreFleet((tmp_path / "shared store").as_uri(), tmp_path, {})


@pytest.fixture
def racy_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreFleet]:
    """A fleet on a store whose put-if-absent is not atomic."""
    with serving(racy=True) as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        made = StoreFleet(f"s3://{bucket.name}/racy", tmp_path, bucket.environment)
        yield made
        made.stop()
