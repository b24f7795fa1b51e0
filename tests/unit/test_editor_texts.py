"""web/onediff/texts.js and locales/*/settings.json: every text in both languages, with the same values in it."""

from __future__ import annotations

import json
import re
from pathlib import Path


def _table(source: str, name: str) -> dict[str, str]:
    body = re.search(rf"export const {name} = \{{\n(.*?)\n\}};", source, re.DOTALL)
    assert body is not None
    return dict(re.findall(r'^  (\w+): "(.*)",$', body[1], re.MULTILINE))


def test_every_text_of_the_editor_is_in_both_languages(root: Path) -> None:
    source = (root / "web" / "onediff" / "texts.js").read_text(encoding="utf-8")
    english, chinese = _table(source, "ENGLISH"), _table(source, "CHINESE")
    assert len(english) > 20
    assert list(chinese) == list(english)
    for key, said in english.items():
        assert sorted(re.findall(r"\{\w+\}", said)) == sorted(re.findall(r"\{\w+\}", chinese[key])), key
        words = re.sub(r"\{\w+\}", "", said)
        if any(map(str.isalpha, words)):
            assert any("\u4e00" <= character <= "\u9fff" for character in chinese[key]), key


def test_every_text_is_used(root: Path) -> None:
    source = (root / "web" / "onediff" / "texts.js").read_text(encoding="utf-8")
    scripts = "".join(path.read_text(encoding="utf-8") for path in (root / "web").rglob("*.js") if path.stem != "texts")
    phases = {"capturing", "compiling", "loading", "waiting", "background"}  # the server names them
    unused = [key for key in _table(source, "ENGLISH") if f'"{key}"' not in scripts and key not in phases]
    assert unused == []


def test_every_setting_is_translated(root: Path) -> None:
    script = (root / "web" / "onediff.js").read_text(encoding="utf-8")
    settings = set(re.findall(r'"(OneDiff\.\w+)"', script))
    translated = json.loads((root / "locales" / "zh" / "settings.json").read_text(encoding="utf-8"))
    assert {setting.replace(".", "_") for setting in settings} == set(translated)
    assert len(settings) == 4


def test_every_heading_of_the_settings_is_translated(root: Path) -> None:
    script = (root / "web" / "onediff.js").read_text(encoding="utf-8")
    headings = {heading for heading, _ in re.findall(r'category: \["OneDiff", "([^"]+)", "([^"]+)"\]', script)}
    translated = json.loads((root / "locales" / "zh" / "main.json").read_text(encoding="utf-8"))["settingsCategories"]
    assert headings == set(translated) and len(headings) == 2


def test_the_settings_are_those_that_the_server_reads(root: Path) -> None:
    script = (root / "web" / "onediff.js").read_text(encoding="utf-8")
    reader = (root / "onediff_comfy" / "host" / "settings_file.py").read_text(encoding="utf-8")
    read = set(re.findall(r'"(OneDiff\.\w+)"', reader))
    assert len(read) == 2
    assert all(f'id: "{setting}"' in script for setting in read)
