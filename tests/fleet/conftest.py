"""Stores that a fleet shares, and fleets on them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import StoreFleet
from stand_in import Bucket, serving


@pytest.fixture(scope="session")
def bucket() -> Iterator[Bucket]:
    """An S3 server, shared; take a prefix of your own."""
    with serving() as running:
        yield running


@pytest.fixture(params=["folder", "s3"])
def store_fleet(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StoreFleet]:
    """A fleet on an empty store: a folder, and S3."""
    environment = {}
    url = (tmp_path / "shared store").as_uri()
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("bucket")
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
