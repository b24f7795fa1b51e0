"""Tests of the OneFlow engine, in a Python that has OneFlow's wheel: ``make test-oneflow``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

WITHOUT = "OneFlow is not in this Python; make test-oneflow runs these in one that has it"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("oneflow") is None:
        for item in items:
            if Path(__file__).parent in item.path.parents and not item.get_closest_marker("without_oneflow"):
                item.add_marker(pytest.mark.skip(reason=WITHOUT))
