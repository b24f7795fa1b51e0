"""The libraries that ComfyUI computes and plans memory by, in the versions that a release asks for: does ours run?

    python -m tools.host_libraries --checkpoint FILE --keep FOLDER [--with comfy-kitchen==X --with ...] COMFY_DIR...

Installs comfy-kitchen and comfy-aimdo as each folder's ``requirements.txt`` has them (of a range its least version), or
as ``--with`` says, in folders of their own under FOLDER, and has each ComfyUI make two pictures of a tiny Flux there on
the CPU: from a checkpoint as it is, and in scaled fp8, which comfy-kitchen computes. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dev.environment import repository

from .hosts import Source

LIBRARIES = ("comfy-kitchen", "comfy-aimdo")
_WORKER = repository() / "tests" / "host" / "with_libraries.py"
_MOST_S = 300.0


def asked_for(folder: Path) -> dict[str, str]:
    """Return the version that a release asks for of each library; of a range the least."""
    text = (folder / "requirements.txt").read_text(encoding="utf-8")
    found = {name: re.search(rf"^{name}[>=]=([\w.]+)", text, re.MULTILINE) for name in LIBRARIES}
    return {name: match[1] for name, match in found.items() if match is not None}


def installed(versions: Mapping[str, str], keep: Path) -> list[Path]:
    """Return the folders of libraries, each installed alone where it is not there yet.

    By its name a folder of libraries is known to hold code of a version, and not that of a pack.

    Raises:
        subprocess.CalledProcessError: one cannot be had.
    """
    folders = [keep / f"{name}-{version}" / "site-packages" for name, version in versions.items()]
    for (name, version), folder in zip(versions.items(), folders, strict=True):
        if not folder.is_dir():
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile"]
            subprocess.run([*command, "--target", str(folder), f"{name}=={version}"], check=True, capture_output=True)
    return folders


def tried(folder: Path, versions: Mapping[str, str], keep: Path, checkpoint: Path) -> str:
    """Return what came of a release with libraries, in few words."""
    try:
        paths = installed(versions, keep)
        on_path = os.pathsep.join(str(path.resolve()) for path in paths)
        environment = {**os.environ, "PYTHONPATH": on_path, "ONEDIFF_CACHE_DIR": str(keep.resolve() / "graphs")}
        command = [sys.executable, str(_WORKER), str(folder.resolve()), str(checkpoint.resolve())]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_MOST_S, check=False, cwd=keep
        )
    except subprocess.CalledProcessError:
        return "cannot be had"
    except subprocess.TimeoutExpired:
        return f"not done after {_MOST_S:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        return lines[-1].replace("|", "/")[:160]
    found = json.loads(done.stdout.splitlines()[-1])
    return "; ".join(f"{what}: {result}" for what, result in found.items())


def main(arguments: Sequence[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="COMFY_DIR")
    parser.add_argument("--checkpoint", type=Path, required=True, help="of a tiny Flux")
    parser.add_argument("--keep", type=Path, required=True, help="where the libraries are installed")
    parser.add_argument("--with", dest="others", action="append", default=[], help="NAME==VERSION in place of a pin")
    options = parser.parse_args(arguments)
    options.keep.mkdir(parents=True, exist_ok=True)
    others = dict(text.split("==") for text in options.others)
    print(f"| ComfyUI | {' | '.join(LIBRARIES)} | on the CPU |\n|---|{'---|' * (len(LIBRARIES) + 1)}")
    for folder in options.folders:
        versions = {**asked_for(folder), **others}
        result = tried(folder, versions, options.keep, options.checkpoint)
        print(f"| {Source(folder).version} | {' | '.join(versions.values())} | {result} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
