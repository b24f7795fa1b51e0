"""``onediff-comfy doctor``: what this machine has of what compiling needs, and the command for what is missing.

Nothing here needs torch or the rest of the pack: what is missing is to be named, not to end in a traceback.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import __version__
from .folders import cache_folder, config_folder
from .host_version import MINIMUM_COMFYUI, find_comfyui, version_in
from .settings import MINIMUM_TORCH
from .terminal import counted, quoted, say, say_json

OK, NOTE, MISSING = "ok", "note", "MISSING"

_HOSTS_PACKAGES = ("safetensors", "filelock", "pydantic", "numpy")
_LEAST_CAPABILITY = (7, 0)  # of Triton; PyTorch refuses older GPUs by the same number (torch/_inductor/scheduler.py)
_HEADERS_PAGE = "https://github.com/woct0rdho/triton-windows#8-special-notes-for-comfyui-with-embeded-python"
_CPU_ONLY = "no GPU: graphs are compiled for the CPU, for trying things out; speed needs a GPU"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        state: ``OK``; ``NOTE`` of what is as it is and not needed; ``MISSING`` of what is needed.
        text: what was found.
        command: what to type where it is missing.
    """

    name: str
    state: str
    text: str
    command: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``doctor`` reads from its options."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--comfyui", type=Path, help="ComfyUI's folder, where it is not found by itself")


def doctor(options: argparse.Namespace) -> int:
    """Print what was found; return 1 if something that is needed is missing.

    Args:
        options: ``comfyui`` (a path or None) and ``json`` (whether to print JSON).
    """
    findings = list(examine(options.comfyui))
    missing = [finding for finding in findings if finding.state == MISSING]
    if options.json:
        say_json([asdict(finding) for finding in findings])
        return 1 if missing else 0
    for finding in findings:
        say(f"{finding.state:8} {finding.name:14} {finding.text}")
        if finding.command:
            say(f"{'':8} {'':14} run: {finding.command}")
    say(f"{counted(len(missing), 'thing')} missing" if missing else "nothing is missing")
    return 1 if missing else 0


def examine(comfyui: Path | None = None) -> Iterator[Finding]:
    """Look at everything, one after the other.

    Args:
        comfyui: the host's folder, where it is known.
    """
    yield Finding("onediff-comfy", OK, f"{__version__} in {Path(__file__).resolve().parent}")
    yield Finding("Python", OK, f"{platform.python_version()}, {platform.platform(terse=True)}, {sys.executable}")
    yield _host(comfyui)
    yield _packages()
    torch = _imported_torch()
    yield _torch(torch)
    if torch is not None:
        cuda = bool(torch.cuda.is_available())
        yield _gpu(torch)
        if cuda:
            yield _triton(torch)
        yield _compiler(cuda)
        yield _headers(cuda)
    for name, folder, variable in (
        ("cache folder", cache_folder(), "ONEDIFF_CACHE_DIR"),
        ("key folder", config_folder(), "ONEDIFF_CONFIG_DIR"),
    ):
        yield _folder(name, folder, variable)


def _host(given: Path | None) -> Finding:
    folder = given or find_comfyui()
    version = None if folder is None else version_in(folder)
    if folder is None or version is None:
        where = f"no ComfyUI in {folder}" if folder else "not found from here; name its folder with --comfyui"
        return Finding("ComfyUI", NOTE, where)
    wanted = ".".join(map(str, MINIMUM_COMFYUI))
    if _numbers(version) >= MINIMUM_COMFYUI:
        return Finding("ComfyUI", OK, f"{version} in {folder}")
    portable = folder.parent / "update" / "update_comfyui.bat"
    update = quoted(portable) if portable.exists() else f"git -C {quoted(folder)} pull"
    return Finding("ComfyUI", MISSING, f"{version} in {folder}; {wanted} or newer is needed", update)


def _packages() -> Finding:
    missing = [name for name in _HOSTS_PACKAGES if _version_of(name) is None]
    if not missing:
        return Finding("packages", OK, f"{', '.join(_HOSTS_PACKAGES)}, which ComfyUI brings")
    text = f"{', '.join(missing)} not installed in this Python; if it is not ComfyUI's, use that one"
    return Finding("packages", MISSING, text, _pip(*missing))


def _imported_torch() -> Any | None:
    try:
        import torch
    except (ImportError, OSError):  # a library of it may be missing too
        return None
    return torch


def _torch(torch: Any | None) -> Finding:
    wanted = ".".join(map(str, MINIMUM_TORCH))
    if torch is None:
        text = f"cannot be imported by this Python; {wanted} or newer is needed. If this is not ComfyUI's, use that one"
        return Finding("torch", MISSING, text, _install_torch(None))
    if _numbers(torch.__version__) < MINIMUM_TORCH:
        text = f"{torch.__version__}; {wanted} or newer is needed"
        return Finding("torch", MISSING, text, _install_torch(torch.version.cuda))
    return Finding("torch", OK, str(torch.__version__))


def _install_torch(cuda: str | None) -> str:
    """Return how to get PyTorch: built for the CUDA that there was; without an index, Windows gets one for the CPU."""
    if cuda is None and shutil.which("nvidia-smi") is None:
        return _pip("--upgrade", "torch", "torchvision", "torchaudio")
    build = "cu" + (cuda or "12.8").replace(".", "")
    return _pip(
        *("--upgrade", "torch", "torchvision", "torchaudio", "--index-url", f"https://download.pytorch.org/whl/{build}")
    )


def _gpu(torch: Any) -> Finding:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        capability = (properties.major, properties.minor)
        kind = "" if torch.version.hip is None else ", AMD: not tested"
        text = f"{properties.name}, {properties.total_memory / 2**30:.0f} GB, compute capability {_dotted(capability)}"
        if torch.version.hip is None and capability < _LEAST_CAPABILITY:
            least = _dotted(_LEAST_CAPABILITY)
            return Finding("GPU", NOTE, f"{text}: Inductor needs {least}; choose the engine cudagraph")
        return Finding("GPU", OK, text + kind)
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        text = f"there is an NVIDIA driver, and torch {torch.__version__} is built without CUDA"
        return Finding("GPU", MISSING, text, _install_torch("12.8"))
    if shutil.which("nvidia-smi"):
        return Finding("GPU", MISSING, "torch sees none, though there is an NVIDIA driver", "nvidia-smi")
    if getattr(torch, "xpu", None) is not None and torch.xpu.is_available():
        return Finding("GPU", NOTE, "Intel: not tested")
    if getattr(torch.backends, "mps", None) is not None and torch.backends.mps.is_available():
        return Finding("GPU", NOTE, "Apple: nothing is accelerated on it; images are made as without the pack")
    return Finding("GPU", NOTE, _CPU_ONLY)


def _triton(torch: Any) -> Finding:
    found = next((name for name in ("triton", "triton-windows") if _version_of(name)), None)
    if found:
        return Finding("Triton", OK, f"{_version_of(found)} ({found})")
    if os.name == "nt":
        # The package's page: Triton 3.3 is for PyTorch 2.7, 3.4 for 2.8, and so on.
        minor = _numbers(torch.__version__)[1] - 4
        return Finding("Triton", MISSING, "Inductor needs it", _pip("--upgrade", f"triton-windows<3.{minor + 1}"))
    wanted = next((text for text in importlib.metadata.requires("torch") or () if text.startswith("triton")), "triton")
    return Finding("Triton", MISSING, "Inductor needs it", _pip(wanted.partition(";")[0].strip().replace(" ", "")))


def _compiler(cuda: bool) -> Finding:
    """Return if kernels can be compiled: on a GPU what launches them is C, on the CPU they are C++."""
    name, variable, suffix = ("C compiler", "CC", ".c") if cuda else ("C++ compiler", "CXX", ".cpp")
    if cuda and os.name == "nt" and _version_of("triton-windows"):
        return Finding(name, OK, "triton-windows brings one")
    tried = (("gcc", "clang", "cc") if cuda else ("g++", "clang++", "c++")) if os.name != "nt" else ("cl",)
    chosen = os.environ.get(variable)
    for program in filter(None, (chosen, *tried)):
        found = shutil.which(program)
        if found and _compiles(found, suffix):
            return Finding(name, OK, found)
    text = f"{variable} is {chosen}, which compiles nothing" if chosen else f"none of {', '.join(tried)} works"
    return Finding(name, MISSING, text, _install_compiler(cuda))


def _compiles(program: str, suffix: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, f"empty{suffix}")
        source.write_text("int nothing(void) { return 0; }\n", encoding="ascii")
        try:
            done = subprocess.run([program, "-c", source.name], cwd=folder, capture_output=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0


def _install_compiler(cuda: bool) -> str:
    if os.name == "nt":
        tools = "--add Microsoft.VisualStudio.Workload.VCTools --passive"
        return f'winget install Microsoft.VisualStudio.2022.BuildTools --override "{tools}"'
    if sys.platform == "darwin":
        return "xcode-select --install"
    name = "gcc" if cuda else "g++"
    for manager, package in (("apt-get", name), ("dnf", "gcc" if cuda else "gcc-c++"), ("pacman", "gcc")):
        if shutil.which(manager):
            return f"sudo {manager} {'-S' if manager == 'pacman' else 'install'} {package}"
    return f"install {name} with your system's package manager"


def _headers(cuda: bool) -> Finding:
    """Return if Python's headers are there: the code that Triton compiles to launch a kernel includes them."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if header.is_file():
        return Finding("Python.h", OK, str(header))
    if not cuda:
        return Finding("Python.h", NOTE, f"not in {header.parent}; needed on a GPU")
    if os.name == "nt":
        return Finding("Python.h", MISSING, f"not in {header.parent}; see {_HEADERS_PAGE}")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    package = f"python{version}-dev" if shutil.which("apt-get") else "python3-devel"
    manager = next(filter(shutil.which, ("apt-get", "dnf")), "your package manager:")
    return Finding("Python.h", MISSING, f"not in {header.parent}", f"sudo {manager} install {package}")


def _folder(name: str, folder: Path, variable: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        text = f"{folder} cannot be written to ({error.strerror})"
        set_it = f'setx {variable} "D:\\onediff"' if os.name == "nt" else f"export {variable}=$HOME/onediff"
        return Finding(name, MISSING, text, set_it)
    return Finding(name, OK, f"{folder}, {shutil.disk_usage(folder).free / 2**30:.0f} GB free")


def _pip(*arguments: str) -> str:
    return f"{quoted(sys.executable)} -m pip install {' '.join(map(quoted, arguments))}"


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """Return ``(2, 10, 0)`` of ``2.10.0+cu128``; of ``0.19.0rc1``, what comes before the first that is no number."""
    numbers: list[int] = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
