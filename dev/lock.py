"""The locks of the developer environment and of the fleet's: every package but torch's, with version and hashes.

    python -m dev.lock     # writes dev/*.lock; needs uv on the PATH and the network

Run it after a change of ``dev/*requirements.txt`` or of the pinned ComfyUI. torch, torchvision and torchaudio are not
in it: which build of them is installed depends on the machine, and what they need comes with them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .environment import (
    MINIMUM_PYTHON,
    SetupError,
    comfyui_path,
    comfyui_requirements,
    developer_requirements,
    lock_file,
)
from .fleet_environment import fleet_lock, fleet_requirements

LEFT_OUT = ("torch", "torchvision", "torchaudio", "triton")

_HEADER = """\
# Written by python -m dev.lock: what {wanted} need, for every Python and system.
# Installed with pip install --require-hashes --no-deps. Do not edit.
"""


def write_lock() -> None:
    """Resolve everything anew and write the locks.

    Raises:
        SetupError: there is no uv, or it found no solution.
    """
    if shutil.which("uv") is None:
        raise SetupError("uv is needed to write the lock; install it (pip install uv) and try again")
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.in")
        wanted.write_text("\n".join(comfyui_requirements((comfyui_path() / "requirements.txt").read_text())))
        words = "dev/requirements.txt and ComfyUI's requirements"
        _resolve([wanted, developer_requirements()], lock_file(), words)
    _resolve([fleet_requirements()], fleet_lock(), "dev/fleet-requirements.txt")


def _resolve(wanted: list[Path], lock: Path, words: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        left_out, resolved = (Path(folder, name) for name in ("left_out.txt", "resolved.txt"))
        left_out.write_text("\n".join(LEFT_OUT))
        command = ["uv", "pip", "compile", "--universal", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--python-version", ".".join(map(str, MINIMUM_PYTHON)), "--excludes", str(left_out)]
        command += ["--output-file", str(resolved), *map(str, wanted)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SetupError(f"uv found no solution:\n{done.stderr}")
        lock.write_text(_HEADER.format(wanted=words) + resolved.read_text())


def main() -> int:
    """The command line: 0 when the lock is written, else 1 after what went wrong."""
    try:
        write_lock()
    except SetupError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    print(f"wrote {lock_file()} and {fleet_lock()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
