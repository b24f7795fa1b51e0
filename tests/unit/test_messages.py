"""Texts for people: a message is its English text, can be said in another language, and has its translation."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

from onediff_comfy.messages import Message, first_line, joined, message, reworded, translated

CATALOGUE = {"a {size} graph": "图 {size}", "not served: {reason}": "未提供: {reason}", "small": "小"}


def test_a_message_is_its_english_text() -> None:
    made = message("a {size:.1f} graph", size=2)
    assert made == "a 2.0 graph" and hash(made) == hash("a 2.0 graph")
    assert {made: 1}["a 2.0 graph"] == 1
    assert json.loads(json.dumps({made: made})) == {"a 2.0 graph": "a 2.0 graph"}
    assert f"{made}!" == "a 2.0 graph!" and "%s" % made == "a 2.0 graph"  # noqa: UP031 - as the log does it


def test_it_is_translated_with_everything_in_it() -> None:
    made = message("not served: {reason}", reason=message("a {size} graph", size=message("small")))
    assert made == "not served: a small graph"
    assert translated(made, CATALOGUE) == "未提供: 图 小"


def test_without_a_translation_it_stays_english_but_what_is_in_it_does_not() -> None:
    made = message("never {what}", what=message("small"))
    assert translated(made, CATALOGUE) == "never 小"
    assert translated("not served: {reason}", CATALOGUE) == "not served: {reason}"  # no message: as it is


def test_an_error_gives_the_message_back() -> None:
    made = message("not served: {reason}", reason=message("small"))
    said = str(ValueError(made))
    assert isinstance(said, Message) and translated(said, CATALOGUE) == "未提供: 小"
    # As a value too, without the error itself, whose traceback would hold what it was raised over.
    outer = message("a {size} graph", size=ValueError(made))
    assert translated(outer, CATALOGUE) == "图 未提供: 小"
    assert all(isinstance(value, str) for value in outer.values.values())


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError()) == "no message"
    assert first_line(ValueError(message("small"))) == "small"
    assert isinstance(first_line(ValueError(message("small"))), Message)


def test_texts_in_a_row_are_translated_one_by_one() -> None:
    row = joined("\n", ["{as it is}", message("small"), message("a {size} graph", size=3)])
    assert row == "{as it is}\nsmall\na 3 graph"
    assert translated(row, CATALOGUE) == "{as it is}\n小\n图 3"
    assert joined(", ", []) == ""


def test_messages_are_worded_otherwise_from_within() -> None:
    made = joined("\n", ["as it is", message("not served: {reason}", reason=message("small"))])
    worded = reworded(made, lambda said: message("large") if said == "small" else said)
    assert worded == "as it is\nnot served: large"
    assert made == "as it is\nnot served: small"
    assert translated(worded, CATALOGUE) == "as it is\n未提供: large"
    assert reworded("small", lambda _said: message("large")) == "small", "no message"


def test_a_copy_is_the_same_message() -> None:
    made = message("not served: {reason}", reason="small")
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert (other, other.template, other.values) == (made, made.template, made.values)


# -- the texts of the pack -----------------------------------------------------------------------

# Whose texts reach people: on the node, in the report, or through the host.
_ERRORS = {
    *("NotCovered", "NotYet", "_Disproved", "Indescribable", "EngineError"),
    *("BucketError", "ArtifactError", "Untrusted"),
}
# In the files of the host and of OneFlow's lowering these do too; elsewhere they tell a programmer of a mistake.
_PLAIN_ERRORS = {"ValueError", "RuntimeError", "OSError", "NotImplementedError"}
_PEOPLE_SEE_PLAIN_ERRORS = ("host", "lowering")
# Functions that show what they are given, or count a call by it.
_SHOWING = {"show", "_show", "fell_back", "_fall_back", "_refuse", "pass_through", "refuse", "cannot_reuse"}


def _sources(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((root / "onediff_comfy").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def _calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    """Every call with the name of what is called: ``message``, ``self._show``'s ``_show``, ``status_of(...)``'s too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func.func if isinstance(node.func, ast.Call) else node.func
            yield getattr(function, "attr", getattr(function, "id", "")), node


def _messages(root: Path) -> Iterator[tuple[str, ast.Call]]:
    for path, tree in _sources(root):
        for name, call in _calls(tree):
            if name == "message":
                yield f"{path.relative_to(root)}:{call.lineno}", call


def _templates(root: Path) -> set[str]:
    return {call.args[0].value for _, call in _messages(root) if isinstance(call.args[0], ast.Constant)}  # type: ignore[misc]


def _fields(template: str) -> list[tuple[str, str, str]]:
    """What is put into a template, with format and conversion, in alphabetical order."""
    parsed = string.Formatter().parse(template)
    return sorted({(name, form or "", conversion or "") for _, name, form, conversion in parsed if name is not None})


@pytest.fixture(scope="module")
def chinese(root: Path) -> dict[str, str]:
    return dict(json.loads((root / "locales" / "zh" / "messages.json").read_text(encoding="utf-8")))


def test_every_message_has_its_template_written_out(root: Path) -> None:
    found = list(_messages(root))
    assert len(found) > 100
    wrong = [
        place
        for place, call in found
        if len(call.args) != 1 or not isinstance(call.args[0], ast.Constant) or not isinstance(call.args[0].value, str)
    ]
    assert wrong == []


def test_every_message_gets_what_its_template_asks_for(root: Path) -> None:
    for place, call in _messages(root):
        given = [keyword.arg for keyword in call.keywords]
        if None not in given:  # one takes all its values from a table
            wanted = {name for name, *_ in _fields(call.args[0].value)}  # type: ignore[attr-defined]
            assert wanted <= set(given) <= wanted | {"source"}, place


def test_every_template_is_translated_and_no_translation_is_left_over(root: Path, chinese: dict[str, str]) -> None:
    templates = _templates(root)
    assert templates - chinese.keys() == set()
    assert chinese.keys() - templates == set()


def test_a_translation_has_the_same_fields_and_is_chinese(chinese: dict[str, str]) -> None:
    for template, translation in chinese.items():
        assert _fields(translation) == _fields(template), template
        words = "".join(literal for literal, *_ in string.Formatter().parse(template))
        if any(map(str.isalpha, words)):
            assert any("\u4e00" <= character <= "\u9fff" for character in translation), template


def test_no_message_has_pythons_repr_in_it(root: Path) -> None:
    """Quotes and escapes of Python's are for programmers."""
    assert [template for template in _templates(root) if any(how == "r" for *_, how in _fields(template))] == []


def test_what_people_read_is_a_message(root: Path) -> None:
    """No literal and no f-string goes where people read: it would stay English."""
    wrong = []
    checked = 0
    for path, tree in _sources(root):
        seen = _ERRORS | (_PLAIN_ERRORS if path.parent.name in _PEOPLE_SEE_PLAIN_ERRORS else set())
        for name, call in _calls(tree):
            if name in seen | _SHOWING | {"status_of"}:
                checked += 1
                if any(_is_plain_text(argument) for argument in call.args):
                    wrong.append(f"{path.relative_to(root)}:{call.lineno} {name}")
    assert checked > 80
    assert wrong == []


def _is_plain_text(argument: ast.expr) -> bool:
    if isinstance(argument, ast.IfExp):
        return _is_plain_text(argument.body) or _is_plain_text(argument.orelse)
    return isinstance(argument, ast.JoinedStr) or (
        isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )
