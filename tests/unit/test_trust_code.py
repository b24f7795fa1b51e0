"""Machine code: what was sealed runs, from a folder of ours, and nothing that anybody put there in its place."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onediff_comfy.engines.base import EngineError
from onediff_comfy.engines.inductor import code_folder
from onediff_comfy.engines.inductor.code_folder import (
    empty_own_folder,
    headers_are_ours,
    in_code_folder,
    in_new_code_folder,
    put_code,
    unusable,
)
from onediff_comfy.engines.inductor.engine import _KERNEL, InductorEngine, _compiled_headers

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
NAME = "hd/chdhnuztydj5hele2k3bjebhgtztdgreomgcoimgrfdkx2ywgiia.main.so"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody chose a folder; ours is ``cache/code``, PyTorch's own choice is below ``tmp``."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    code_folder._passing.cache_clear()
    return tmp_path


def environment() -> dict[str, str | None]:
    return {variable: os.environ.get(variable) for variable in VARIABLES}


# -- the folder ----------------------------------------------------------------------------------


def test_inductor_is_told_of_a_private_folder_for_a_while(folders: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    before = environment()
    with in_code_folder() as folder:
        assert folder == folders / "cache" / "onediff-machine-code" == Path(cache_dir())
        assert Path(triton_cache_dir(0)).is_relative_to(folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert environment() == before
    with in_new_code_folder() as passing:
        assert Path(cache_dir()) == passing != folder and Path(triton_cache_dir(0)).is_relative_to(passing)
        assert stat.S_IMODE(passing.stat().st_mode) == 0o700
    assert environment() == before and not passing.exists()


def test_a_folder_of_a_persons_beside_it_stays_as_it_is(folders: Path) -> None:
    """A person may have named the home folder, or a drive, as cache folder."""
    theirs = folders / "cache" / "code" / "thesis.tex"
    theirs.parent.mkdir(parents=True, mode=0o700)
    theirs.write_text("years of work")
    os.truncate(theirs, 5 << 30)
    with in_code_folder():
        pass
    empty_own_folder()
    assert theirs.exists()


def test_a_full_folder_is_emptied_of_files_too(folders: Path) -> None:
    with in_code_folder() as folder:
        (folder / "left").write_text("")
        (folder / "kernels").mkdir()
    empty_own_folder()
    assert list(folder.iterdir()) == []


def test_other_threads_use_the_folder_meanwhile(folders: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    with in_code_folder() as folder, ThreadPoolExecutor() as threads:
        assert threads.submit(cache_dir).result() == str(folder)


def test_a_folder_that_a_person_chose_is_taken(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folders / "chosen"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folders / "triton"))
    before = environment()
    with in_code_folder() as folder:
        assert folder == folders / "chosen" and environment() == before
    assert environment() == before


@pytest.mark.parametrize("choice", [None, "chosen"])
def test_what_a_job_sets_is_no_persons_choice(
    folders: Path, choice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``choose`` asks on the prompts' thread; its folder is gone a moment later, and then anybody can make it."""
    own = folders / "cache" / "onediff-machine-code"
    if choice:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folders / choice))
    with in_new_code_folder() as passing, ThreadPoolExecutor() as threads:
        passing.rmdir()
        assert threads.submit(unusable).result() is None
        assert not passing.exists()
    assert (folders / (choice or own)).is_dir() and own.is_dir() is not bool(choice)


def test_what_pytorch_chose_itself_was_chosen_by_nobody(folders: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

    os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(0)
    assert Path(cache_dir()).parent == folders / "tmp"  # which leaves it in the environment
    with in_code_folder() as folder:
        assert folder == folders / "cache" / "onediff-machine-code" == Path(os.environ["TRITON_CACHE_DIR"]).parent


@pytest.mark.parametrize("kind", ["link", "open", "file", "in an open one"])
def test_where_no_private_folder_can_be_there_is_one_for_this_process(
    folders: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = folders / "cache"
    cache.mkdir()
    if kind == "link":
        (folders / "elsewhere").mkdir()
        (cache / "onediff-machine-code").symlink_to(folders / "elsewhere")
    elif kind == "file":
        (cache / "onediff-machine-code").write_text("")
    else:
        (cache / "onediff-machine-code").mkdir(mode=0o700)
        (cache if kind == "in an open one" else cache / "onediff-machine-code").chmod(0o777)
    for _ in range(2):
        with in_code_folder() as folder:
            assert not folder.is_relative_to(cache)
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert unusable() is None
    assert caplog.text.count("machine code cannot be kept in") == 1


def test_a_folder_that_has_grown_too_large_is_emptied(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with in_code_folder() as folder:
        put_code(folder / NAME, b"x" * 100)
    code_folder._make_room.cache_clear()
    with in_code_folder():
        assert (folder / NAME).exists()
    monkeypatch.setattr(code_folder, "_LARGEST", 99)
    code_folder._make_room.cache_clear()
    with in_code_folder():
        assert not (folder / NAME).exists()


def test_headers_that_another_user_could_have_compiled_are_not_used(folders: Path) -> None:
    assert headers_are_ours() and _compiled_headers() == {}
    (folders / "tmp").chmod(0o777)
    assert not headers_are_ours() and _compiled_headers() == {"cpp_cache_precompile_headers": False}


# -- what is in it -------------------------------------------------------------------------------


@pytest.mark.parametrize("there", ["nothing", "another", "longer", "truncated", "link", "hard link", "pipe"])
@pytest.mark.timeout(20)
def test_what_lies_where_code_is_put_is_replaced(tmp_path: Path, there: str) -> None:
    code, path, other = b"\x7fELF" * 100, tmp_path / NAME, tmp_path / "other"
    path.parent.mkdir()
    other.write_bytes(code if there == "link" else b"evil")
    if there == "link":
        path.symlink_to(other)
    elif there == "hard link":
        os.link(other, path)
    elif there == "pipe":
        os.mkfifo(path)
    elif there != "nothing":
        path.write_bytes({"another": b"\x7fELE" * 100, "longer": code + b"x", "truncated": code[:-1]}[there])
    put_code(path, code)
    assert path.read_bytes() == code and not path.is_symlink()
    assert other.read_bytes() == (code if there == "link" else b"evil")
    inode = path.stat().st_ino
    put_code(path, code)
    assert path.stat().st_ino == inode, "what is right already is left alone: others have it open"


@pytest.mark.parametrize(
    "name",
    [
        "../escaped.so",
        "/tmp/escaped.so",
        "hd/../hd/chdhnuztydj5hele2k3bjebhgtztdgreomgcoimgrfdkx2ywgiia.so",
        "./" + NAME,
        "hd/./" + NAME[3:],
        "hd//" + NAME[3:],
        "xx/" + NAME[3:],
        NAME.upper(),
        NAME + "\n",
        NAME[:-3] + ".py",
        NAME.replace("main", "more"),
        NAME[3:],
        "hd/chd.so",
        "triton/0/evil.cubin",
    ],
)
def test_kernels_have_the_names_that_inductor_gives_or_are_refused(folders: Path, name: str) -> None:
    parts = {"artifact": b"", f"kernels/{name}": b"evil"}
    with pytest.raises(EngineError, match="names that Inductor does not give"):
        InductorEngine().from_parts(None, None, parts)  # type: ignore[arg-type]
    assert not (folders / "cache").exists()


@pytest.mark.parametrize("parts", [{}, {"kernels/" + NAME: b""}, {"artifact": b"", "more": b""}])
def test_an_artifact_of_other_parts_is_refused(folders: Path, parts: Mapping[str, bytes]) -> None:
    with pytest.raises(EngineError, match="does not give"):
        InductorEngine().from_parts(None, None, parts)  # type: ignore[arg-type]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x)) * 3


@pytest.fixture(scope="module")
def sealed(capture_of: Callable[..., Any]) -> tuple[Any, Mapping[str, bytes]]:
    """A capture, and the parts of what Inductor made of it."""
    with torch.no_grad():
        captured = capture_of(Net().requires_grad_(False), torch.randn(2, 4))
        engine = InductorEngine()
        parts = engine.to_parts(engine.compile(captured.capture))
    assert parts is not None
    return captured, parts


def loads_right(sealed: tuple[Any, Mapping[str, bytes]]) -> bool:
    """Whether the graph comes out of its parts, as in a process that has loaded nothing yet, and computes the same."""
    from torch._inductor.utils import clear_caches

    captured, parts = sealed
    clear_caches()
    graph = InductorEngine().from_parts(captured.capture.binding, captured.capture.shapes, parts)
    weights = captured.target.weights(captured.capture.binding.weight_names, torch.device("cpu"))
    with torch.no_grad():
        (output,) = graph(weights, captured.call.tensors)
        return torch.allclose(output, captured.run())


def test_kernels_that_inductor_made_are_named_as_we_expect(sealed: tuple[Any, Mapping[str, bytes]]) -> None:
    kernels = [name.removeprefix("kernels/") for name in sealed[1] if name.startswith("kernels/")]
    assert kernels and all(map(_KERNEL.fullmatch, kernels))
    assert _KERNEL.fullmatch(NAME)


def test_planted_code_does_not_run_and_code_cut_short_is_replaced(
    folders: Path, sealed: tuple[Any, Mapping[str, bytes]], tmp_path: Path
) -> None:
    """In PyTorch's own choice of folder lies everything that a graph needs, and it is somebody else's."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert loads_right(sealed)
    code, mark = folders / "cache" / "onediff-machine-code", tmp_path / "planted code has run"
    files = [path for path in code.rglob("*") if path.suffix in (".py", ".so")]
    assert {path.suffix for path in files} == {".py", ".so"}
    for path in files:
        planted = Path(default_cache_dir(), path.relative_to(code))
        planted.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".so":
            planted.write_bytes(b"\x7fELF, and not what was sealed")
        else:
            planted.write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n" + path.read_text())
    for path in files:
        path.unlink()
    assert loads_right(sealed)
    assert not mark.exists(), "what lay in the temporary folder has run"
    whole = {path: path.read_bytes() for path in files}
    for suffix in (".so", ".py"):
        for path in (path for path in files if path.suffix == suffix):
            path.write_bytes(whole[path][: len(whole[path]) // 2])
        assert loads_right(sealed), f"{suffix} files that are cut short"
    assert loads_right(sealed)
    for name, content in sealed[1].items():
        if name.startswith("kernels/") and (code / name.removeprefix("kernels/")).exists():
            assert (code / name.removeprefix("kernels/")).read_bytes() == content
