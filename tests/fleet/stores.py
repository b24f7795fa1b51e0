"""The kinds of stores that tests run on."""

from __future__ import annotations

import pytest

FOLDER, S3, CEPH = "folder", "s3", "ceph"
"""S3 is the stand-in; Ceph's radosgw a server that people run, in ``make test-all``, where it is installed."""

EVERY_STORE = [FOLDER, S3, pytest.param(CEPH, marks=pytest.mark.slow)]

on_one_store = pytest.mark.parametrize(
    "store_fleet", [FOLDER, *(pytest.param(name, marks=pytest.mark.slow) for name in (S3, CEPH))], indirect=True
)
"""For a test that mostly waits: what it asks of a store beyond others, other kinds are asked in ``make test-all``."""
