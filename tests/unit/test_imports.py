"""What may import what: dependencies point one way, and importing costs nothing and needs no host."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HOST_MODULES = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "server", "nodes", "folder_paths", "execution"}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}


def sources(root: Path) -> list[Path]:
    return sorted([*root.glob("onediff_comfy/**/*.py"), *root.glob("nodes/**/*.py"), root / "__init__.py"])


def imported(source: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Name, ast.Attribute)):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def test_only_the_host_folder_imports_the_host(root: Path) -> None:
    host = root / "onediff_comfy" / "host"
    found = {
        f"{source.relative_to(root)}: {name}"
        for source in sources(root)
        if host not in source.parents
        for name in imported(source)
        if name.split(".")[0] in HOST_MODULES
    }
    assert found == set()


def test_the_host_folder_does_import_the_host(root: Path) -> None:
    """Guards the test above: the scan finds imports where there are some."""
    names = {name.split(".")[0] for source in root.glob("onediff_comfy/host/*.py") for name in imported(source)}
    assert {"comfy", "comfy_api", "server"} <= names


def relative_imports(source: Path, root: Path) -> Iterator[str]:
    """The dotted names, from ``onediff_comfy`` on, of what a file imports relatively."""
    package = source.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            yield ".".join((*base, node.module or ""))


def test_dependencies_point_one_way(root: Path) -> None:
    """capture ← engines ← runtime ← cache ← compilation ← serving ← host, and store beside them."""
    # The package itself, "", says its version and imports nothing.
    order = ("capture", "engines", "runtime", "cache", "compilation", "serving")
    beside = {"", "settings", "metrics", "environment", "files", "folders", "messages", "once", "terminal"}
    allowed = {layer: {*order[: number + 1], "store", *beside} for number, layer in enumerate(order)}
    allowed |= {"capture": {"capture", "messages"}, "store": {"store", *beside}}
    allowed["fleet"] = {"fleet", "warmup_command", "terminal", *beside}
    wrong = {
        f"{source.relative_to(root)} imports {name}"
        for folder, known in allowed.items()
        for source in root.glob(f"onediff_comfy/{folder}/**/*.py")
        for name in relative_imports(source, root)
        if name.split(".")[1] not in known
    }
    assert wrong == set()


def test_the_folders_of_capture_are_ordered(root: Path) -> None:
    """The files beside them ← values ← fingerprint ← target and functions, the files ← rewrites; tracing above all."""
    folder = root / "onediff_comfy" / "capture"
    below = {"": set(), "values": set(), "fingerprint": {"values"}, "rewrites": set()}
    below["target"] = below["functions"] = {"values", "fingerprint"}
    below["tracing"] = {"values", "fingerprint", "target", "rewrites"}
    folders = {path.name for path in folder.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == below.keys() - {""}
    wrong = {
        f"{source.relative_to(root)} imports {name}"
        for name_of_folder, known in below.items()
        for source in (folder / name_of_folder).glob("*.py")
        for name in relative_imports(source, root)
        if name.split(".")[1] == "capture"
        if {*name.split(".")[2:3]} & folders - known - {name_of_folder}
    }
    assert wrong == set()


def modules_imported(source: Path, root: Path, known: set[str]) -> set[str]:
    """The modules, of those that are ``known``, that a file imports when it is imported itself."""
    found = set()
    level = list(ast.parse(source.read_text(encoding="utf-8")).body)
    while level:
        node = level.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = source.relative_to(root).parent.parts
            base = ".".join((*parts[: len(parts) - node.level + 1], *filter(None, (node.module,))))
            of_package = {f"{base}.{alias.name}" for alias in node.names} & known
            found |= of_package or {base}  # a package is imported before what is in it, circle or not
        level += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return found & known


def test_no_modules_import_each_other_in_a_circle(root: Path) -> None:
    sources = sorted((root / "onediff_comfy").rglob("*.py"))
    names = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in sources}
    imports = {name: modules_imported(path, root, set(names)) for name, path in names.items()}
    assert sum(map(len, imports.values())) > 200
    while free := [name for name, needed in imports.items() if not needed & imports.keys() - {name}]:
        for name in free:
            del imports[name]
    assert imports == {}


def test_every_file_has_a_name_that_says_what_is_in_it(root: Path) -> None:
    parts = {part for source in sources(root) for part in (source.stem, *source.relative_to(root).parts[:-1])}
    assert not {part for part in parts if set(part.lower().split("_")) & FORBIDDEN_NAMES}


IMPORT_PACKAGE = """
import json, sys, time
start = time.process_time()  # not what others take of the machine meanwhile
import onediff_comfy, onediff_comfy.settings
seconds = time.process_time() - start
print(json.dumps({"seconds": seconds, "modules": sorted(sys.modules)}))
"""


def test_importing_the_package_costs_nothing(fresh_process: Callable[..., Any]) -> None:
    """The host imports all its extensions when it starts."""
    result = fresh_process(IMPORT_PACKAGE)
    assert result["seconds"] < 0.5
    assert not {name.split(".")[0] for name in result["modules"]} & (HOST_MODULES | {"torch", "numpy"})


IMPORT_ALL = """
import importlib, json, pkgutil, sys
for name in ("comfy", "comfy_api", "comfy_execution", "server", "nodes", "folder_paths", "execution",
             "oneflow", "triton"):
    sys.modules[name] = None
import onediff_comfy
names = [
    module.name
    for module in pkgutil.walk_packages(onediff_comfy.__path__, "onediff_comfy.", onerror=lambda name: None)
    if not module.name.startswith("onediff_comfy.host")
    # A kernel for GPUs, which a pass imports where Triton is.
    and module.name != "onediff_comfy.engines.inductor.kernels"
    # Behind an engine that makes sure of OneFlow first.
    and module.name.removeprefix("onediff_comfy.engines.oneflow.")
    not in ("lowering", "program", "running", "session", "sharing")
]
for name in names:
    importlib.import_module(name)
import torch
from onediff_comfy.engines import choose
from onediff_comfy.engines.base import EngineError
from onediff_comfy.settings import ENGINE_NAMES
reasons = {}
for name in ENGINE_NAMES:
    try:
        reasons[name] = choose(name, torch.device("cpu")).name
    except EngineError as error:
        reasons[name] = str(error)
print(json.dumps({"names": names, "reasons": reasons, "inductor": "torch._inductor.compile_fx" in sys.modules}))
"""


def test_the_core_imports_without_the_host_and_without_optional_packages(fresh_process: Callable[..., Any]) -> None:
    result = fresh_process(IMPORT_ALL)
    assert len(result["names"]) >= 20
    assert result["reasons"]["eager"] == "eager"
    assert "needs an NVIDIA GPU" in result["reasons"]["cudagraph"].replace("need an", "needs an")
    assert not result["inductor"], "the compiler is imported when something is compiled"
