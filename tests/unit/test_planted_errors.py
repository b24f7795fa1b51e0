"""tools/planted_errors.py: each error can still be planted."""

from __future__ import annotations

import ast

import pytest

from dev.environment import repository
from tools.planted_errors import ERRORS, Error, planted


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.what)
def test_an_error_can_be_planted(error: Error) -> None:
    source = (repository() / "onediff_comfy" / error.file).read_text()
    assert ast.dump(ast.parse(planted(error, source))) != ast.dump(ast.parse(source))
    assert (repository() / "tests" / "unit" / error.tests.split()[0]).is_file()


def test_an_error_that_has_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="0 times, not once"):
        planted(ERRORS[0], "")
    with pytest.raises(ValueError, match="2 times, not once"):
        planted(ERRORS[0], ERRORS[0].right * 2)
