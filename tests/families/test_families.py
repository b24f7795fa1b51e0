"""Every model family is captured without code of its own, or runs eager for a reason that is known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dev.environment import comfyui_path, repository
from tools.models.encoders import ENCODERS
from tools.models.families import QUANTISED
from tools.supported import CAPTURED_AGAIN, COMPILED, EXCLUDED, NAMES, REFUSED, STREAMED, STREAMED_AGAIN

WORKER = Path(__file__).with_name("worker.py")
BOUND = 1e-4
"""Largest difference, as a share of the image's range, that is rounding: as pictures.assert_same_picture explains."""

TIMES_ITS_RESPONSE = 1.5
"""A model that rounds to 8 bits may be off by so much more than ComfyUI's own answer to noise that is hardly another,
as in serving/verification/numerics.py. (Tiny SDXL's answer to it is 8e-2 in its first step, of the norm.)"""

Report = Mapping[tuple[str, str], Mapping[str, Any]]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Report:
    """What workers, several at a time, measured of the families that tests were selected for: by family and engine."""
    folder = tmp_path_factory.mktemp("families")
    selected = [(item.originalname, item.callspec.params["name"]) for item in _tests_here(request)]
    apart = (
        test_a_family_is_compiled.__name__,
        test_a_family_has_the_same_keys_in_every_process.__name__,
        test_a_family_that_does_not_fit_is_served_block_by_block.__name__,
    )
    compiled = [name for test, name in selected if test == test_a_family_is_compiled.__name__]
    eager = [name for test, name in selected if test not in apart]
    shares = {"a": ("eager", eager[::2]), "b": ("eager", eager[1::2]), "c": ("inductor", compiled)}
    workers = [_worker(folder / share, engine, names) for share, (engine, names) in shares.items() if names]
    try:
        for process in workers:
            process.wait(timeout=1700)
    finally:
        for process in workers:
            process.kill()
    for file in folder.glob("*/errors"):
        assert (file.parent / "report").exists(), file.read_text()[-3000:]
    rows = [json.loads(line) for file in folder.glob("*/report") for line in file.read_text().splitlines()]
    return {(row["family"], row["engine"]): row for row in rows}


def _tests_here(request: pytest.FixtureRequest) -> list[pytest.Function]:
    return [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)]


@pytest.fixture(scope="module")
def keys(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By family, what two processes with different hash seeds, and other addresses, call the same things."""
    folder = tmp_path_factory.mktemp("keys")
    selected = [(item.originalname, item.callspec.params["name"]) for item in _tests_here(request)]
    names = [name for test, name in selected if test == test_a_family_has_the_same_keys_in_every_process.__name__]
    workers = [_worker(folder / seed, "eager", names, "--keys", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    try:
        for process in workers:
            process.wait(timeout=1700)
    finally:
        for process in workers:
            process.kill()
    reports = [(folder / seed / "report").read_text().splitlines() for seed in ("1", "2")]
    return [{row["family"]: row for row in map(json.loads, report)} for report in reports]


@pytest.fixture(scope="module")
def streamed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By family, what two workers measured whose host keeps no weight on the device."""
    folder, test = tmp_path_factory.mktemp("streamed"), test_a_family_that_does_not_fit_is_served_block_by_block
    names = [item.callspec.params["name"] for item in _tests_here(request) if item.originalname == test.__name__]
    shares = {"a": names[::2], "b": names[1::2]}
    workers = [_worker(folder / share, "eager", part, "--offloaded") for share, part in shares.items() if part]
    try:
        for process in workers:
            process.wait(timeout=1700)
    finally:
        for process in workers:
            process.kill()
    for file in folder.glob("*/errors"):
        assert (file.parent / "report").exists(), file.read_text()[-3000:]
    rows = [json.loads(line) for file in folder.glob("*/report") for line in file.read_text().splitlines()]
    return {row["family"]: row for row in rows}


def _worker(folder: Path, engine: str, names: list[str], *options: str, **environment: str) -> subprocess.Popen[bytes]:
    folder.mkdir()
    folders = {
        "ONEDIFF_CACHE_DIR": folder / "cache",
        "ONEDIFF_CONFIG_DIR": folder / "config",
        "TORCHINDUCTOR_CACHE_DIR": folder / "inductor",
        "PYTHONPATH": repository(),
    }
    return subprocess.Popen(
        [
            sys.executable,
            str(WORKER),
            str(comfyui_path()),
            str(folder / "report"),
            *names,
            "--engine",
            engine,
            *options,
        ],
        cwd=repository(),
        env={**os.environ, **{name: str(path) for name, path in folders.items()}, **environment},
        stdout=subprocess.DEVNULL,
        stderr=(folder / "errors").open("wb"),
    )


def _reasons(row: Mapping[str, Any]) -> set[str]:
    """Return why calls were ComfyUI's, besides the first, which shows how a model is to be served."""
    return row["fallbacks"].keys() - {"the first call of a model of this kind is ComfyUI's"}


@pytest.mark.parametrize("name", [*(name for name in NAMES if name not in REFUSED), *ENCODERS])
def test_a_family_is_served_at_all_sizes(report: Report, name: str, tally: Callable[[str], None]) -> None:
    row = report[name, "eager"]
    assert row["problem"] is None
    assert row["worst_difference"] <= (0.0 if name in QUANTISED or name in ENCODERS else BOUND)
    assert (_reasons(row), row["served"] > 0) == (set(), True)
    assert set(row["captured_later"]) <= CAPTURED_AGAIN.get(name, set())
    assert row["captures_of_a_change"] <= (2 if name in EXCLUDED else 1)
    tally(
        f"{name}: {row['images']} images, {row['served']} calls served, worst difference "
        f"{row['worst_difference']:.1e}, captured again for {', '.join(row['captured_later']) or 'nothing'}"
    )


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_cannot_be_captured_says_why(report: Report, name: str) -> None:
    """Fails when the family starts to work: then it belongs to the others."""
    row = report[name, "eager"]
    assert row["problem"] is None
    assert row["worst_difference"] == 0
    assert row["served"] == 0
    assert _reasons(row)
    assert all(REFUSED[name] in reason for reason in _reasons(row))


@pytest.mark.parametrize("name", COMPILED)
def test_a_family_is_compiled(report: Report, name: str) -> None:
    row = report[name, "inductor"]
    assert row["problem"] is None
    assert row["worst_difference"] <= max(BOUND, TIMES_ITS_RESPONSE * row["response"])
    assert (_reasons(row), row["served"] > 0, row["captured_later"]) == (set(), True, [])


@pytest.mark.parametrize("name", STREAMED)
def test_a_family_that_does_not_fit_is_served_block_by_block(streamed: dict[str, Any], name: str) -> None:
    row = streamed[name]
    assert row["problem"] is None
    assert row["worst_difference"] <= BOUND
    assert (_reasons(row), row["served"] > row["images"]) == (set(), True)
    assert set(row["captured_later"]) <= STREAMED_AGAIN.get(name, set())


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_the_same_keys_in_every_process(keys: list[dict[str, Any]], name: str) -> None:
    """A key that holds an address is another in each: everything would be compiled again."""
    one, other = (report[name] for report in keys)
    assert one == other
    assert one["refusal"] is None
    assert bool(one["graphs"]) == (name not in REFUSED)
