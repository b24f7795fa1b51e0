"""README.md: short, every figure from one file of results, every link, command and choice one that is there."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.files import results_folder
from onediff_comfy.__main__ import main
from onediff_comfy.host_version import MINIMUM_COMFYUI
from onediff_comfy.settings import DISK_LIMIT_BYTES, ENGINE_NAMES, GOALS, MINIMUM_TORCH
from tools.readme import PLOT, RESULTS, block, plot, report, rows, with_block
from tools.templates import TITLES
from tools.workflow_files import workflows

MOST_WORDS, MOST_TABLES = 900, 3
_FIGURE = re.compile(r"\d+(?:\.\d+)?(?:x\b| ?(?:ms|s|GB|MB|%)(?!\w))")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`]+)`")
_COMMAND = re.compile(r"^    (\S*python\S*) (\S*onediff_comfy) (.*)$", re.MULTILINE)

# Cards of readers, of which nothing was measured.
_OF_THE_READER = {"12 GB"}
_VIDEO = "5 s"  # how long Wan's is


@pytest.fixture(params=["README.md", "README.zh.md"])
def page(root: Path, request: pytest.FixtureRequest) -> str:
    return (root / request.param).read_text(encoding="utf-8")


@pytest.fixture
def english(root: Path) -> str:
    return (root / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_minutes(english: str) -> None:
    words = [word for word in english.split() if any(map(str.isalnum, word))]
    assert len(words) < MOST_WORDS


def test_it_has_few_tables(page: str) -> None:
    assert 0 < len(re.findall(r"^\|---", page, re.MULTILINE)) <= MOST_TABLES


def test_its_table_is_what_one_file_says(root: Path) -> None:
    """Run ``python -m tools.readme --write`` after a change."""
    for name, language in (("README.md", "en"), ("README.zh.md", "zh")):
        text = (root / name).read_text(encoding="utf-8")
        assert with_block(text, block(report(), language)) == text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the last matplotlib for this Python draws otherwise")
def test_its_plot_is_what_that_file_says() -> None:
    assert PLOT.read_text(encoding="utf-8") == plot(report())


def test_every_figure_is_in_the_file_that_it_cites(page: str) -> None:
    assert set(re.findall(r"\d{4}-\d\d-\d\d-[\w-]+\.json", page)) == {RESULTS}
    said = set(_FIGURE.findall("\n".join(cell for row in rows(report()) for cell in row.cells(0))))
    said |= {f"{DISK_LIMIT_BYTES >> 30} GB", *_OF_THE_READER, _VIDEO, *_FIGURE.findall(report()["environment"]["gpu"])}
    found = set(_FIGURE.findall(page))
    assert len(found) > 10
    assert found - said == set()


def test_the_files_medians_are_what_the_rows_say() -> None:
    """By another way than ``tools.readme`` takes: from each round."""
    jobs = json.loads((results_folder() / RESULTS).read_text())["jobs"]
    assert len(rows(report())) > 5
    for row in rows(report()):
        measured = jobs[row.kind]["report"]
        seconds = []
        for name in ("eager", "onediff-inductor"):
            of = measured["variants"][name]
            times = of.get("whole_s_all") or [ms * row.steps / 1000 for ms in of["step_ms_all"]]
            seconds.append(statistics.median(times))
        assert seconds == pytest.approx([row.eager_s, row.ours_s], rel=1e-6)


def test_every_link_leads_somewhere(root: Path, page: str) -> None:
    links = _LINK.findall(page)
    assert len(links) > 10
    assert [link for link in links if "://" not in link and not (root / link).exists()] == []


def test_every_command_runs_where_the_page_says(root: Path, page: str, tmp_path: Path) -> None:
    pack = tmp_path / "ComfyUI" / "custom_nodes" / "onediff-comfy"
    pack.parent.mkdir(parents=True)
    pack.symlink_to(root)
    commands = _COMMAND.findall(page)
    blocks = re.findall(r"^    (.+)$", page, re.MULTILINE)
    assert len(commands) == len(blocks) == 2
    for _, package, arguments in commands:
        command = [sys.executable, package.replace("\\", "/"), *arguments.split(), "--help"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_command_line_page_names_commands_that_are_there(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (root / "docs" / "command-line.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `onediff-comfy ((?:graphs )?\w+)", text, re.MULTILINE)
    assert len(named) >= 10
    for command in named:
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--help"])
        assert ended.value.code == 0
        if command.startswith("graphs "):
            assert "--json" in capsys.readouterr().out


def test_what_it_names_is_there(root: Path, page: str) -> None:
    """Choices on nodes, environment variables, folders, templates, texts on the node."""
    inline = set(_INLINE.findall(page))
    source = "".join(path.read_text(encoding="utf-8") for path in (root / "onediff_comfy").rglob("*.py"))
    for name in (name for name in inline if re.fullmatch(r"[A-Z_]{8,}", name)):
        assert f'"{name}"' in source, name
    assert {f"engine: {name}" for name in ENGINE_NAMES} & inline == {"engine: cudagraph"}
    assert "compile: background" in inline
    assert all(f"*{goal}*" in page for goal in GOALS)
    assert f"*{TITLES['optimize']}*" in page and "optimize" in workflows()
    assert f"torch {'.'.join(map(str, MINIMUM_TORCH))} " in page.replace("。", " 。").replace("\n", " ")
    assert f"ComfyUI {'.'.join(map(str, MINIMUM_COMFYUI))} " in page


def test_what_a_node_shows_is_what_the_page_says(root: Path) -> None:
    chinese = json.loads((root / "locales" / "zh" / "messages.json").read_text(encoding="utf-8"))
    for name, translate in (("README.md", str), ("README.zh.md", chinese.__getitem__)):
        parts = (translate("compiled graph"), translate("0 recompiles"))
        assert f"`{parts[0]} · 1024×1024 b1 · {parts[1]}`" in (root / name).read_text(encoding="utf-8")


def test_both_languages_have_the_same_parts(root: Path) -> None:
    english, chinese = ((root / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    for pattern in (r"^#+ ", r"^\|", r"^- ", r"^\d\. ", r"^\*\*", r"^    "):
        counts = [len(re.findall(pattern, text, re.MULTILINE)) for text in (english, chinese)]
        assert counts[0] == counts[1], pattern
    assert set(_LINK.findall(english)) - {"README.zh.md"} == set(_LINK.findall(chinese)) - {"README.md"}
