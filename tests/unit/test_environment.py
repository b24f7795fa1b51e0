"""onediff_comfy/environment.py: what a job sets for a while is nobody's choice, and no other process inherits it."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import Iterator

import pytest

from onediff_comfy.environment import Environment, environment

NAME, OTHER = "ONEDIFF_TESTS_FIRST", "ONEDIFF_TESTS_SECOND"


def test_the_values_from_before_are_known_inside_and_are_back_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "a person's")
    monkeypatch.delenv(OTHER, raising=False)
    before = dict(os.environ)
    with environment().overridden({NAME: "a job's", OTHER: "a job's"}):
        assert (os.environ[NAME], os.environ[OTHER]) == ("a job's", "a job's")
        with environment().overridden({NAME: "one inside"}):
            assert os.environ[NAME] == "one inside"
            assert (environment().get(NAME), environment().get(OTHER)) == ("a person's", None)
            assert environment().copy() == before
        assert os.environ[NAME] == "a job's" and environment().copy() == before
    assert dict(os.environ) == before and environment().get(NAME) == "a person's"
    monkeypatch.setenv(NAME, "another")
    assert environment().get(NAME) == "another" == environment().copy()[NAME]


class Leaving(UserDict[str, str]):
    """Variables of which one is taken away while they are copied."""

    def __iter__(self) -> Iterator[str]:
        return iter([*self.data, "gone"])


def test_a_variable_that_somebody_takes_away_meanwhile_is_not_in_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", Leaving({"kept": "1"}))
    assert Environment().copy() == {"kept": "1"}
