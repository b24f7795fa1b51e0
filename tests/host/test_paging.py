"""memory_pressure.py's ReturningWeights, with comfy-aimdo's own library: benchmarks/paging.py and its driver count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.files import read
from dev.environment import repository

WAITS_OF_HOST = 50  # in an image's first step, where something else has taken weights away before it
TIMES_OF_OURS = 20
PAGE_MIB = 32
WAITS = 12  # a page that has come may still have to go: comfy-aimdo knows what is free from every two seconds only


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Of bf16 weights with 16 GiB left, by who says how weights come back."""
    return _counted(tmp_path_factory.mktemp("paging") / "report.json", "--images", "7")


def _counted(file: Path, *options: str, between: str = "prompt") -> dict[str, list[Any]]:
    command = [sys.executable, "-m", "benchmarks.paging", "--steps", "2", "--between", between, "--output", str(file)]
    done = subprocess.run([*command, *options], cwd=repository(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(read(file)["cases"][between])


def test_the_device_is_waited_for_where_weights_come_back_as_the_host_has_it(images: dict[str, list[Any]]) -> None:
    """In an image's first step, and many times as often as where it is known how many weights there is room for."""
    for host, ours in zip(images["host"][1:], images["ours"][1:], strict=True):
        assert host["first"]["waits"] >= TIMES_OF_OURS * ours["first"]["waits"] > 0


def test_so_it_is_where_something_else_takes_weights_between_images(tmp_path: Path) -> None:
    counted = _counted(tmp_path / "report.json", "--images", "4", between="others")
    assert all(image["first"]["waits"] >= WAITS_OF_HOST for image in counted["host"])
    assert all(image["first"]["waits"] <= WAITS for image in counted["ours"][1:])


def test_the_device_is_hardly_waited_for_once_it_is_known_how_many_weights_there_is_room_for(
    images: dict[str, list[Any]],
) -> None:
    """From the second image on: the first shows what stays."""
    ours = images["ours"]
    assert all(image["first"]["waits"] <= WAITS for image in ours[1:])
    assert all(image["first"]["taken"] <= WAITS // 2 for image in ours[1:])


def test_as_many_weights_are_there_in_the_end(images: dict[str, list[Any]]) -> None:
    for host, ours in zip(images["host"], images["ours"], strict=True):
        assert ours["there_mib"] >= host["there_mib"] - PAGE_MIB


def test_weights_come_back_to_what_another_process_has_given_back(tmp_path: Path) -> None:
    """It has a GiB for so many images that none is known any more in which there was room for more."""
    counted = _counted(tmp_path / "report.json", "--images", "9", "--steps", "20", "--others", "3:7")
    host, ours = ([image["there_mib"] for image in counted[who]] for who in ("host", "ours"))
    assert ours[6] < ours[2] - 800
    # One image later than the device has it: so long comfy-aimdo takes what it has seen of the device to be true.
    assert ours[8] >= host[8] - PAGE_MIB and ours[8] > ours[6] + 800
