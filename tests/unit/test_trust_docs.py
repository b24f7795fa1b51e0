"""docs/trust.md: the few lines that it gives for looking into a file of graphs do it. And where graphs are."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from onediff_comfy.folders import cache_folder
from onediff_comfy.store.artifact import FORMAT, Artifact, Manifest, Part, pack
from onediff_comfy.store.store import _limit


def artifact_of(target: str) -> Artifact:
    """A graph that nobody sealed yet, of little bytes."""
    data = {"constants": b"", "engine/artifact": b"code"}
    parts = {name: Part.of(content) for name, content in data.items()}
    shapes: dict[str, Any] = {"axes": [], "limits": {}, "conditions": []}
    manifest = Manifest(
        key="5" * 64,
        capture="c" * 64,
        created="2026-11-23T10:00:00+00:00",
        options={},
        options_read={},
        shapes=shapes,
        binding={"inputs": [], "output": "", "folds": []},
        target=target,
        engine="inductor",
        environment={"device": "cpu"},
        signature=[],
        calls=[],
        parts=parts,
        compile_seconds=0.0,
    )
    return Artifact(manifest.to_json(), "0" * 64, data)


def test_the_lines_on_the_page_print_what_is_in_a_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (root / "docs" / "trust.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "sdxl 1024x1024.graph").write_bytes(pack([artifact_of("UNet"), artifact_of("Größe")]))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.splitlines() == [
        f"{target} inductor {{'device': 'cpu'}} ['constants', 'engine/artifact']" for target in ("UNet", "Größe")
    ]


def test_the_page_says_what_a_file_looks_like(root: Path) -> None:
    page = (root / "docs" / "trust.md").read_text()
    content = pack([artifact_of("UNet")])
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert f"`{header['__metadata__']['format']}`" in page
    assert {name for name in header if name != "__metadata__"} == {"0/constants", "0/engine/artifact"}
    assert {header[name]["dtype"] for name in header if name != "__metadata__"} == {"U8"}
    assert f"`format` in the manifest is {FORMAT}." in page


def test_a_person_reads_where_graphs_are_and_how_large_that_may_become(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "README.md").read_text()
    for variable in ("ONEDIFF_CACHE_DIR", "XDG_CACHE_HOME", "ONEDIFF_CACHE_LIMIT_MB"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/person")
    for platform in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        assert f"`{cache_folder()}`".replace("/home/person", "~") in page
    assert f"at most {_limit() / 2**30:.0f} GB" in page
    assert "`ONEDIFF_CACHE_DIR`" in page and "`ONEDIFF_CACHE_LIMIT_MB`" in page
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ONEDIFF_CACHE_LIMIT_MB", "3")
    assert (cache_folder(), _limit()) == (tmp_path, 3 << 20)
