"""The pack always loads; what is missing is said when it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from node_ids import NODE_IDS

from onediff_comfy.host import versions

ROOT = Path(__file__).resolve().parents[2]
_LOADED_AT_START = {"buckets", "folders", "host", "messages", "once", "settings"}
"""Which take 0.04 s of CPU time, in a host that has imported torch. The core would take seconds."""


@pytest.mark.parametrize(
    ("installed", "fits"),
    [
        ("2.9.1", False),
        ("2.10.0", True),
        ("2.10.0+cu130", True),
        ("2.13.0+cpu", True),
        ("3.0.0", True),
        ("1.13", False),
    ],
)
def test_an_old_torch_is_named_with_the_one_that_is_needed(
    installed: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "version", lambda _: installed)
    reason = versions.torch_too_old()
    if fits:
        assert reason is None
    else:
        assert reason is not None and installed in reason and "2.10" in reason


def test_loading_the_pack_costs_little_and_imports_nothing_that_could_be_missing(tmp_path: Path) -> None:
    """As the host does it, with its API faked and torch and OneFlow out of reach. The core waits until it is used."""
    code = f"""
        import asyncio, importlib.util, json, sys, types
        from unittest.mock import MagicMock
        latest = types.ModuleType("comfy_api.latest")
        latest.io, latest.ui, latest.ComfyExtension = MagicMock(), MagicMock(), type("ComfyExtension", (), {{}})
        latest.io.ComfyNode = type("ComfyNode", (), {{}})
        server = types.ModuleType("server")
        sys.modules |= {{"comfy_api": types.ModuleType("comfy_api"), "comfy_api.latest": latest, "server": server,
                        "folder_paths": MagicMock()}}
        for name in ("torch", "oneflow", "comfy", "safetensors", "filelock"):
            sys.modules[name] = None
        before = set(sys.modules)
        spec = importlib.util.spec_from_file_location("pack", {str(ROOT / "__init__.py")!r})
        pack = sys.modules["pack"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(pack)
        async def load():
            extension = await pack.comfy_entrypoint()
            await extension.on_load()
            return [node.__name__ for node in await extension.get_node_list()]
        nodes = asyncio.run(load())
        print(json.dumps([nodes, sorted(set(sys.modules) - before)]))
    """
    folders = {f"ONEDIFF_{kind}_DIR": str(tmp_path / kind) for kind in ("CACHE", "CONFIG")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **folders},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    nodes, imported = json.loads(done.stdout)
    assert nodes == NODE_IDS
    assert list(tmp_path.iterdir()) == []
    ours = [name.removeprefix("pack.onediff_comfy.") for name in imported if name.startswith("pack.onediff_comfy.")]
    assert {name.partition(".")[0] for name in ours} == _LOADED_AT_START


def test_the_version_is_the_same_everywhere() -> None:
    import onediff_comfy

    text = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{onediff_comfy.__version__}"' in text
