"""What extensions replace in the host's own modules, however far from a layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dev.environment import comfyui_path


def test_a_replaced_function_of_the_host_is_noticed() -> None:
    script = Path(__file__).with_name("noticed.py")
    command = [sys.executable, str(script), str(comfyui_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[bool]] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 15
    assert [name for name, right in found.items() if not all(right)] == []
