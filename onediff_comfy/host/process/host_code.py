"""The name of the host's model code: what a graph was traced from, beside the model's own."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from ...once import once


@once
def host_code() -> str:
    """Return the sha256 of the host's model code, so that any edit of what steers a capture gives another key.

    It is that of the files. Somebody may update them while the host runs, which goes on with the code that it has
    imported. So it is taken once, and early: see ``take_early``.
    """
    import comfy.model_management

    root = Path(comfy.model_management.__file__).parent
    digest = hashlib.sha256()
    for source in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        digest.update(source.relative_to(root).as_posix().encode())
        digest.update(source.read_bytes())
    return digest.hexdigest()


def take_early() -> None:
    """Have the name taken now, while the files are still those that the host was started from. Nobody waits for it."""
    threading.Thread(target=host_code, name="onediff-host-code", daemon=True).start()
