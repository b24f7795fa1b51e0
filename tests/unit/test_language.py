"""Which language a person is spoken to in, with the host's settings file and its modules faked."""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from onediff_comfy.messages import message

CHINESE = {"Comfy.Locale": "zh"}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file of the host's only user; it is not there yet."""
    folder_paths, cli_args = types.ModuleType("folder_paths"), types.ModuleType("comfy.cli_args")
    folder_paths.get_user_directory = lambda: str(tmp_path)  # type: ignore[attr-defined]
    cli_args.args = types.SimpleNamespace(multi_user=False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "folder_paths", folder_paths)
    monkeypatch.setitem(sys.modules, "comfy", types.ModuleType("comfy"))
    monkeypatch.setitem(sys.modules, "comfy.cli_args", cli_args)
    (tmp_path / "default").mkdir()
    return tmp_path / "default" / "comfy.settings.json"


@pytest.fixture
def spoken(settings: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module under test, over the fakes."""
    monkeypatch.delitem(sys.modules, "onediff_comfy.host.language", raising=False)
    yield importlib.import_module("onediff_comfy.host.language")
    sys.modules.pop("onediff_comfy.host.language", None)


@pytest.mark.parametrize(
    ("content", "language"),
    [
        (json.dumps(CHINESE), "zh"),
        (json.dumps({"Comfy.Locale": "zh-TW"}), "zh-TW"),
        (json.dumps({"Comfy.ColorPalette": "dark"}), "en"),
        (json.dumps({"Comfy.Locale": None}), "en"),
        ("[]", "en"),
        ("{half a fi", "en"),
        (None, "en"),
    ],
)
def test_it_is_the_hosts_setting(spoken: Any, settings: Path, content: str | None, language: str) -> None:
    if content is not None:
        settings.write_text(content)
    assert spoken.language() == language


def test_a_change_of_the_setting_counts_at_once(spoken: Any, settings: Path) -> None:
    ready = message("compiled graph ready")
    assert spoken.in_their_language(ready) == "compiled graph ready"
    settings.write_text(json.dumps(CHINESE))
    assert spoken.in_their_language(ready) == "编译图已就绪"
    settings.write_text(json.dumps({"Comfy.Locale": "en"}))
    assert spoken.in_their_language(ready) == "compiled graph ready"


def test_a_language_that_we_do_not_speak_is_english(spoken: Any, settings: Path) -> None:
    settings.write_text(json.dumps({"Comfy.Locale": "fr"}))
    assert spoken.in_their_language(message("compiled graph ready")) == "compiled graph ready"


def test_of_many_users_nobody_is_taken_for_the_one(spoken: Any, settings: Path) -> None:
    settings.write_text(json.dumps(CHINESE))
    sys.modules["comfy.cli_args"].args.multi_user = True
    assert spoken.language() == "en"


@pytest.mark.parametrize("module", ["folder_paths", "comfy.cli_args"])
def test_a_host_that_keeps_it_elsewhere_is_spoken_to_in_english(spoken: Any, settings: Path, module: str) -> None:
    settings.write_text(json.dumps(CHINESE))
    vars(sys.modules[module]).clear()
    assert spoken.in_their_language(message("compiled graph ready")) == "compiled graph ready"


def test_an_error_leaves_in_their_language(spoken: Any, settings: Path) -> None:
    settings.write_text(json.dumps(CHINESE))
    with pytest.raises(ValueError, match=r"^缺少部分 x$") as raised, spoken.errors_in_their_language():
        raise ValueError(message("part {name} is missing", name="x"))
    assert raised.type is ValueError
    with pytest.raises(OSError, match="No space") as raised, spoken.errors_in_their_language():
        raise OSError(28, "No space")
    assert raised.value.args == (28, "No space")
