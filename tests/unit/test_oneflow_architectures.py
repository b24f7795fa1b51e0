"""engines/oneflow: a GPU that OneFlow has no kernels for is refused before anything else, and without importing it.

On any machine, with a library made by hand. tests/oneflow reads the real wheel's, and
tests/host/test_oneflow_refusal.py is the refusal on a real card.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dev.environment import repository
from onediff_comfy.engines import choose
from onediff_comfy.engines.base import EngineError
from onediff_comfy.engines.oneflow import install
from onediff_comfy.engines.oneflow.architectures import RELEASE, Kernels, kernels_in_library, runs_on

GPU = torch.device("cuda", 0)
HERE = {"without": "OneFlow 0.9.0, the release that pip installs,", "with": "the installed OneFlow"}


pytestmark = pytest.mark.usefixtures("anew")  # each test has another OneFlow


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Makes this machine's GPU one of a compute capability."""

    def make(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
        monkeypatch.setattr(torch.version, "hip", None)

    return make


def write_wheel(folder: Path, *fat_binaries: tuple[Kernels, ...]) -> Path:
    """A OneFlow that cannot be imported and has a library with these kernels; its library."""
    package, library = folder / "oneflow" / "__init__.py", folder / "oneflow.libs" / "liboneflow-0.so"
    for file in (package, library):
        file.parent.mkdir()
    package.write_text("raise AssertionError('it was imported')")
    library.write_bytes(_elf(b"".join(map(_fat_binary, fat_binaries))))
    return library


def _fat_binary(kernels: tuple[Kernels, ...]) -> bytes:
    entries = b""
    for one in kernels:
        code = b"\x50\xed\x55\xba" * 4  # what a fat binary starts with is nothing special inside of one
        entries += struct.pack("<HHIQ", 1 if one.ptx else 2, 0x101, 64, len(code))
        entries += struct.pack("<12xI32x", one.architecture) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries + bytes(8)


def _elf(section: bytes) -> bytes:
    names = b"\0.nv_fatbin\0.names\0"
    start = 64  # of the section, behind the file's header; the table of sections is last
    table = start + len(section) + len(names)
    header = struct.pack("<5s35xQ10xHHH", b"\x7fELF\x02", table, 64, 3, 2)
    rows = ((0, 0, 0), (1, start, len(section)), (names.index(b".names"), start + len(section), len(names)))
    return (
        header.ljust(start, b"\0")
        + section
        + names
        + b"".join(struct.pack("<IIQQQQ24x", name, 0, 0, 0, offset, size) for name, offset, size in rows)
    )


@pytest.mark.parametrize(
    ("kernels", "capability", "runs"),
    [
        (Kernels(86), (8, 6), True),
        (Kernels(86), (8, 9), True),
        (Kernels(86), (8, 0), False),
        (Kernels(86), (9, 0), False),
        (Kernels(60), (6, 1), True),
        (Kernels(80, ptx=True), (9, 0), True),
        (Kernels(80, ptx=True), (7, 5), False),
    ],
)
def test_which_gpus_run_which_kernels(kernels: Kernels, capability: tuple[int, int], runs: bool) -> None:
    assert runs_on(kernels, capability) is runs


def test_the_architectures_of_all_fat_binaries_are_read(tmp_path: Path) -> None:
    library = write_wheel(tmp_path, (Kernels(70), Kernels(80)), (Kernels(86), Kernels(86, ptx=True)))
    assert {str(kernels) for kernels in kernels_in_library(library)} == {"sm_70", "sm_80", "sm_86", "compute_86"}


@pytest.mark.parametrize("capability", [(5, 2), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("oneflow", ["without", "with"])
def test_a_card_without_kernels_is_told_so_whether_or_not_oneflow_is_there(
    oneflow: str,
    capability: tuple[int, int],
    card: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Not how to install it, which a person would do in vain."""
    card(*capability)
    if oneflow == "without":
        request.getfixturevalue("no_oneflow")
    else:
        write_wheel(tmp_path, (Kernels(60), Kernels(61), Kernels(70)), (Kernels(75), Kernels(80), Kernels(86)))
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineError) as refusal:
        choose("oneflow", GPU)
    assert str(refusal.value) == (
        f"the oneflow engine is not available: this GPU is sm_{capability[0]}{capability[1]}, and {HERE[oneflow]} "
        "holds kernels for sm_60, sm_61, sm_70, sm_75, sm_80, sm_86 only; inductor is the engine for this card"
    )


def test_a_newer_wheel_counts_for_what_it_holds(
    card: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path, (Kernels(80), Kernels(90)))
    monkeypatch.syspath_prepend(tmp_path)
    card(9, 0)
    assert "holds kernels" not in (install.problem(GPU) or ""), "it may serve, and is asked for what else is missing"
    card(12, 0)
    assert "holds kernels for sm_80, sm_90 only" in (install.problem(GPU) or "")


def test_a_wheel_without_any_kernels_is_for_the_cpu(
    card: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    card(8, 6)
    assert (
        install.problem(GPU) == "the installed OneFlow holds no kernels for GPUs; inductor is the engine for this card"
    )


@pytest.mark.usefixtures("no_oneflow")
def test_a_card_with_kernels_is_told_how_to_install_it(card: Callable[..., None]) -> None:
    card(8, 9)
    assert "onediff-comfy[oneflow]" in (install.problem(GPU) or "")


def test_an_amd_card_is_not_taken_for_one_of_nvidias(
    card: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card(9, 4)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    reason = install.problem(GPU) or ""
    assert "NVIDIA GPUs" in reason and "sm_" not in reason


def test_the_release_that_is_known_is_the_one_that_the_extra_installs() -> None:
    assert f'"oneflow=={RELEASE}"' in (repository() / "pyproject.toml").read_text()
