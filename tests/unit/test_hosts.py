"""The table of what each release of ComfyUI has of what we rely on, from source alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.environment import comfyui_path
from onediff_comfy.host.use import Use
from tools.hosts import EVERYTHING, Source, main, table

SOURCE = {
    "comfyui_version.py": '__version__ = "9.1"\n',
    "main.py": "",
    "comfy/base.py": "class Base:\n    def inherited(self, a, b=1):\n        return a.noted\n",
    "comfy/thing.py": (
        "from comfy.base import Base\n"
        "from comfy.base import Base as Renamed\n"
        "try:\n    limit = 3\nexcept ValueError:\n    other: int = 4\n"
        "class Thing(Base):\n    def __init__(self, model, *, device=None):\n        self.kept = model\n"
        "    @staticmethod\n    def plain(x):\n        return 'text'\n"
        "def function(a, *rest, key, **more): pass\n"
    ),
}


@pytest.fixture
def source(tmp_path: Path) -> Source:
    for name, text in SOURCE.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return Source(tmp_path)


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (Use("comfy.thing", "limit"), None),
        (Use("comfy.thing", "other"), None),
        (Use("comfy.thing", "gone"), "no"),
        (Use("comfy.nowhere", "limit"), "no"),
        (Use("comfy.thing", "limit.inside"), "no"),
        (Use("comfy.thing", "Thing.inherited", ("self", "a")), None),
        (Use("comfy.thing", "Thing.inherited", ("self", "a", "b", "c")), "takes (self, a, b)"),
        (Use("comfy.thing", "Renamed.inherited", ("self", "a", "b")), None),
        (Use("comfy.thing", "Thing", ("model",), ("device",)), None),
        (Use("comfy.thing", "Thing", ("model", "device")), "takes (self, model)"),
        (Use("comfy.thing", "Thing", (), ("model", "size")), "takes (self, model)"),
        (Use("comfy.thing", "Thing.plain", ("x",)), None),
        (Use("comfy.thing", "function", ("a", "b", "c"), ("key", "anything")), None),
        (Use("comfy.thing", "function", ("a",)), "takes (a)"),
        (Use("comfy.thing", "Thing.__init__", mentions=("kept", "model")), None),
        (Use("comfy.thing", "Thing.__init__", mentions=("kept", "dropped")), "without dropped"),
        (Use("comfy.thing", "Thing.inherited", mentions=("noted",)), None),
        (Use("comfy.thing", "Thing.plain", mentions=("text",)), None),
    ],
)
def test_what_is_missing_is_found_by_reading(source: Source, use: Use, problem: str | None) -> None:
    assert source.problem(use) == problem


def test_the_table_has_a_row_for_each_difference(source: Source) -> None:
    text = table([source], {"MODEL": (Use("comfy.thing", "limit"), Use("comfy.thing", "gone"))})
    assert text.splitlines() == [
        "| for | what | 9.1 |",
        "|---|---|---|",
        "| MODEL | `comfy.thing.gone` | no |",
        "| all | as it is used | 1 of 2 |",
    ]


def test_the_host_of_the_tests_has_everything() -> None:
    total = sum(map(len, EVERYTHING.values()))
    assert table([Source(comfyui_path())]).splitlines()[-1].endswith(f"{total} of {total} |")


def test_a_folder_that_is_not_comfyui_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"{tmp_path} has no main.py" in capsys.readouterr().err
