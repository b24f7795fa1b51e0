"""The nodes' texts in every language: nothing is missing, left over, or says less than the English."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest


def _definitions(root: Path, language: str) -> dict[str, Any]:
    return dict(json.loads((root / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8")))


def _flat(value: Any, path: str = "") -> dict[str, str]:
    """Texts by their dotted path."""
    if isinstance(value, str):
        return {path: value}
    return {key: text for name, child in value.items() for key, text in _flat(child, f"{path}.{name}").items()}


@pytest.fixture(params=["en", "zh"])
def texts(root: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    return _flat(_definitions(root, request.param))


def test_both_languages_have_the_same_texts_in_the_same_order(root: Path) -> None:
    english, chinese = (_flat(_definitions(root, language)) for language in ("en", "zh"))
    assert len(english) > 80
    assert list(chinese) == list(english)


def test_every_node_has_a_description_and_everything_on_it_a_tooltip(root: Path) -> None:
    for definition in _definitions(root, "en").values():
        assert definition.keys() == {"display_name", "description", "inputs", "outputs"}
        assert definition["outputs"]
        for slot in (*definition["inputs"].values(), *definition["outputs"].values()):
            assert "tooltip" in slot


def test_no_text_is_empty_or_has_a_character_that_the_editors_templates_read(texts: dict[str, str]) -> None:
    """vue-i18n takes {, }, @ and | for its own, in names and descriptions."""
    for path, text in texts.items():
        assert text.strip(), path
        assert not set(text) & set("{}@|"), path


def test_descriptions_and_tooltips_are_chinese(root: Path) -> None:
    for path, text in _flat(_definitions(root, "zh")).items():
        if path.endswith((".description", ".tooltip")):
            assert len(re.findall(r"[\u4e00-\u9fff]", text)) >= 2, path


def test_numbers_and_files_are_the_same_in_both(root: Path) -> None:
    """What a person has to type or look for."""
    english, chinese = (_flat(_definitions(root, language)) for language in ("en", "zh"))
    for path, text in english.items():
        for literal in re.findall(r"models/\w+|\d+x\d+(?: b\d+)?(?: f\d+)?|cfg \d", text):
            assert literal in chinese[path], (path, literal)
