"""A function's identity is what it was defined with, not what calls left in its defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onediff_comfy.capture.values.value_text import Describer


def _fills(x: int, options: dict[str, Any] = {}, *, seen: list[int] = []) -> int:  # noqa: B006 - as hosts write it
    options["last"] = x
    seen.append(x)
    return x


def _uses(x: int, sizes: list[int] = [1, 2]) -> int:  # noqa: B006
    return x + sizes[0]


def _describe(function: Callable[..., Any]) -> str:
    return Describer({}).describe(function)


def test_what_calls_leave_in_an_empty_default_is_no_part_of_a_function() -> None:
    before = _describe(_fills)
    _fills(1)
    assert _fills.__defaults__ == ({"last": 1},)
    assert _describe(_fills) == before
    _fills(2)
    assert _describe(_fills) == before


def test_a_default_that_is_written_with_something_in_it_is_part_of_a_function() -> None:
    before = _describe(_uses)
    assert _uses.__defaults__ is not None
    _uses.__defaults__[0].append(3)
    try:
        assert _describe(_uses) != before
    finally:
        _uses.__defaults__[0].pop()
    assert _describe(_uses) == before


def test_without_source_a_filled_default_is_part_of_a_function() -> None:
    space: dict[str, Any] = {}
    exec("def made(x, options={}):\n    options['last'] = x", space)
    before = _describe(space["made"])
    space["made"](1)
    assert _describe(space["made"]) != before
