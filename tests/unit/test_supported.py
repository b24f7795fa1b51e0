"""docs/models.md says what tests/families holds each family to."""

from __future__ import annotations

from tools.supported import CAPTURED_AGAIN, COMPILED, DOCUMENT, NAMES, REFUSED, document


def test_the_document_is_current() -> None:
    """Run ``python -m tools.supported --write`` after a change."""
    assert DOCUMENT.read_text(encoding="utf-8") == document()


def test_every_exception_is_of_a_family_that_is_tested() -> None:
    assert {*REFUSED, *CAPTURED_AGAIN, *COMPILED} <= set(NAMES)
