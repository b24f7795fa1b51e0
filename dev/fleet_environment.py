"""The environment of a fleet's gateway and of Ray, apart from ComfyUI's: what the tests in tests/fleet start.

python3 -m dev.fleet_environment
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path

from .environment import SetupError, repository, run, step


def fleet_python() -> Path:
    """Return the interpreter of the environment, whether or not it exists yet."""
    return _folder() / "bin" / "python"


def fleet_requirements() -> Path:
    """Return the packages by name and version."""
    return repository() / "dev" / "fleet-requirements.txt"


def fleet_lock() -> Path:
    """Return every package with its hashes; ``dev.lock`` writes it."""
    return repository() / "dev" / "fleet-requirements.lock"


def ensure() -> Path:
    """Make the environment if it is not there. Return its interpreter.

    Raises:
        SetupError: a step failed.
    """
    digest = hashlib.sha256(f"{sys.version}\0{fleet_lock().read_text()}".encode()).hexdigest()
    if fleet_python().is_file() and _stamp().is_file() and _stamp().read_text() == digest:
        return fleet_python()
    _folder().parent.mkdir(exist_ok=True)
    start = time.monotonic()
    print("Setting up .cache/fleet-venv, for the tests of a fleet", flush=True)
    command = [sys.executable, "-m", "venv", "--clear", str(_folder())]
    step("virtual environment", lambda: run(command, "look into the log", _log()))
    # With byte code, as pip makes it: Ray starts a dozen processes at once, and each would compile all that it imports.
    install = [str(fleet_python()), "-m", "pip", "install", "--require-hashes", "--no-deps"]
    install += ["--disable-pip-version-check", "--no-input", "--requirement", str(fleet_lock())]
    step("Ray, obstore, aiohttp", lambda: run(install, "check the network and try again", _log()))
    check = [str(fleet_python()), "-c", "import aiohttp, obstore, prometheus_client, ray.serve"]
    step("check: they can be imported", lambda: run(check, "delete .cache/fleet-venv and try again", _log()))
    _stamp().write_text(digest)
    print(f"Ready in {time.monotonic() - start:.0f} s", flush=True)
    return fleet_python()


def _folder() -> Path:
    return repository() / ".cache" / "fleet-venv"


def _log() -> Path:
    return repository() / ".cache" / "fleet-setup.log"


def _stamp() -> Path:
    return _folder() / "onediff-setup.sha256"


def main() -> int:
    """The command line: 0 when the environment is ready, else 1 after one line that says why."""
    try:
        ensure()
    except (SetupError, OSError) as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
