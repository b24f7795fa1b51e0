"""host/settings_file.py: what a person set in the editor holds from the next start on; the environment goes first."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VARIABLES = ("ONEDIFF_CACHE_DIR", "ONEDIFF_CACHE_LIMIT_MB")


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, str | None]]:
    """Starts with this file of settings, in a host of one user or of many; the variables afterwards."""
    import os

    def use(content: str, many: bool = False, **before: str) -> dict[str, str | None]:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in before.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "environ", dict(os.environ))  # what is set is gone after the test
        (tmp_path / "default").mkdir(exist_ok=True)
        (tmp_path / "default" / "comfy.settings.json").write_text(content)
        for name, module in _host(tmp_path, many).items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.delitem(sys.modules, "onediff_comfy.host.settings_file", raising=False)
        from onediff_comfy.host import settings_file

        monkeypatch.setattr(settings_file, "folder_paths", sys.modules["folder_paths"])
        settings_file.use_cache_settings()
        return {name: os.environ.get(name) for name in VARIABLES}

    return use


def _host(user: Path, many: bool) -> dict[str, Any]:
    paths, comfy, cli = (types.ModuleType(name) for name in ("folder_paths", "comfy", "comfy.cli_args"))
    paths.get_user_directory = lambda: str(user)  # type: ignore[attr-defined]
    cli.args = types.SimpleNamespace(multi_user=many)  # type: ignore[attr-defined]
    return {"folder_paths": paths, "comfy": comfy, "comfy.cli_args": cli}


def settings(folder: Any, megabytes: Any) -> str:
    return json.dumps({"OneDiff.CacheFolder": folder, "OneDiff.CacheLimitMB": megabytes})


def test_folder_and_limit_are_used(used: Callable[..., Any]) -> None:
    assert list(used(settings("/graphs", 700)).values()) == ["/graphs", "700"]


@pytest.mark.parametrize("content", ["", "[]", "{}", settings("", 0), settings(" ", None), settings(5, "7")])
def test_what_is_not_set_changes_nothing(used: Callable[..., Any], content: str) -> None:
    assert list(used(content).values()) == [None, None]


def test_the_environment_goes_first(used: Callable[..., Any]) -> None:
    assert used(settings("/graphs", 700), ONEDIFF_CACHE_DIR="/given")["ONEDIFF_CACHE_DIR"] == "/given"


def test_where_there_are_many_users_nobody_decides_for_all(used: Callable[..., Any]) -> None:
    assert list(used(settings("/graphs", 700), many=True).values()) == [None, None]


@pytest.mark.parametrize(
    ("folder", "megabytes", "left"),
    [("~nobody-of-this-name/graphs", 700, [None, "700"]), ("/graphs", float("inf"), ["/graphs", None])],
)
def test_one_that_is_of_no_use_leaves_the_other_and_the_pack(
    used: Callable[..., Any], folder: str, megabytes: float, left: list[str | None], caplog: pytest.LogCaptureFixture
) -> None:
    assert list(used(settings(folder, megabytes)).values()) == left
    assert "is of no use" in caplog.text
