"""What code reads and sets is seen whatever release of Python has compiled it: each has words of its own for it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dev.interpreters import find_python
from dev.pythons import RELEASES
from onediff_comfy.capture.functions import writes
from onediff_comfy.capture.values import bytecode, global_reads

# By what the sample does: its code, and what is to be seen of it, where that is not nothing.
SAMPLES: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "keeps an import, and loads something else": (
        "def f(x):\n    import table; return x * table.SCALE",
        {"reads": ["table.SCALE"], "imports": ["table"], "locals": ["table", "x"]},
    ),
    "keeps something else, and loads an import": (
        "def f(x):\n    import table\n    y = x.abs()\n    return table.SCALE * y",
        {"reads": ["table.SCALE"], "imports": ["table"], "locals": ["table", "x", "y"]},
    ),
    "hands over two variables, of which one is an import": (
        "def f(x, g):\n    from table import SCALE\n    return g(x, SCALE)",
        {"reads": ["table.SCALE"], "imports": ["table"], "locals": ["SCALE", "g", "x"]},
    ),
    "keeps two imports": (
        "def f(x):\n    import a, b.c as d; e, g = x; return a.one[0] + d.two['key'] + e + g",
        {"reads": ["a.one[0]", "b.c.two['key']"], "imports": ["a", "b", "b.c"], "locals": ["a", "d", "e", "g", "x"]},
    ),
    "reads a parameter once, behind another variable that it keeps": (
        "def f(x, mask=None, unread=None):\n    y = x.abs()\n    mask = mask\n    z = y\n    return z, mask",
        {"locals": ["mask", "x", "y", "z"]},
    ),
    "reads a parameter in a function of its own": (
        "def f(x, mask=None):\n    def g():\n        return mask\n    return g",
        {"reads": ["mask"], "locals": ["g", "mask"]},
    ),
    "reads globals, by attributes and keys": (
        "def f(x):\n    return CONFIG.scale * TABLE['a'][1] + x.y + TABLE[x]",
        {"reads": ["CONFIG.scale", "TABLE", "TABLE['a'][1]"], "locals": ["x"]},
    ),
    "counts": (
        "def f(x):\n    COUNT.runs += 1; TABLE['runs'] += 1\n    return x",
        {"sets": ["runs"], "locals": ["x"]},
    ),
    "sets": (
        "def f(x):\n    global A, B\n    A = x\n    del B\n    C.d.e = x\n    import g\n    g.h = x",
        {"sets": ["A", "B", "C.d", "e", "h"], "imports": ["g"], "locals": ["g", "x"]},
    ),
    "compares types": (
        "def f(x):\n    return type(x) is A.b or type(x) == C or type(x)",
        {"reads": ["A.b", "C", "type"], "compares": ["A.b", "C", None], "locals": ["x"]},
    ),
    "a class that reads a global": (
        "class K:\n    scale = CONFIG.scale\n    def g(self):\n        return OTHER",
        {"reads": ["CONFIG.scale", "OTHER", "__name__"]},
    ),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The modules that read bytecode, in a package of which nothing else is there: other Pythons have no PyTorch."""
    folder = tmp_path_factory.mktemp("package")
    for module in (bytecode, global_reads, writes):
        file = Path(module.__file__)
        copy = folder / "capture" / file.parent.name / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    return folder


@pytest.mark.parametrize("release", sorted({*RELEASES, "{}.{}".format(*sys.version_info)}))
def test_what_code_reads_and_sets_is_the_same_for_each_release(package: Path, release: str) -> None:
    python = find_python(release)
    if python is None:
        pytest.skip(f"no Python {release} was found; make test-pythons needs it, too")
    script = Path(__file__).with_name("bytecode_of_this_python.py")
    texts = json.dumps({name: text for name, (text, _) in SAMPLES.items()})
    done = subprocess.run([python, str(script), str(package)], input=texts, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    nothing: dict[str, list[Any]] = {"reads": [], "sets": [], "imports": [], "compares": [], "locals": []}
    found = json.loads(done.stdout)
    for sample in found.values():
        sample["reads"] = sorted(set(sample["reads"]))
        assert sample.pop("names") == sample.pop("taken apart")
    assert found == {name: nothing | expected for name, (_, expected) in SAMPLES.items()}


def test_nobody_else_looks_at_bytecode_but_by_the_same_words(root: Path) -> None:
    found = {
        str(file.relative_to(root))
        for file in (root / "onediff_comfy").rglob("*.py")
        if re.search(r"^\s*(import dis|from dis import)", file.read_text(), re.MULTILINE)
    }
    # size_conversions asks one bit of one instruction, which is not there before 3.11, and says so.
    expected = {"onediff_comfy/capture/values/bytecode.py", "onediff_comfy/capture/rewrites/size_conversions.py"}
    assert found == expected
