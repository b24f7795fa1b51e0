"""The variables of this process's environment: what a person set, apart from what a job set for a while.

A compiler is told of its folders by variables, which every thread sees and every new process inherits. What a person
chose, and what another process is to be started with, are asked for here.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping

from .once import once


class Environment:
    """Sets variables for a while, and knows the values from before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # an RLock, for a finalizer may ask in the middle of it
        self._before: dict[str, str | None] = {}

    @contextlib.contextmanager
    def overridden(self, values: Mapping[str, str]) -> Iterator[None]:
        """Inside, these variables have these values for PyTorch; jobs run one at a time, so nobody else sets them."""
        with self._lock:
            outer, here = self._before, {name: os.environ.get(name) for name in values}
            self._before = here | outer
            os.environ.update(values)
        try:
            yield
        finally:
            with self._lock:
                _set(os.environ, here)
                self._before = outer

    def get(self, name: str) -> str | None:
        """Return what a variable was before any job set it; None if it was not set."""
        with self._lock:
            return self._before[name] if name in self._before else os.environ.get(name)

    def copy(self) -> dict[str, str]:
        """Return the environment for another process: without what a job of this one set."""
        with self._lock:
            # Whoever else takes a variable away meanwhile would make a plain copy fail.
            found = {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}
            _set(found, self._before)
            return found


def _set(variables: dict[str, str] | os._Environ[str], values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            variables.pop(name, None)
        else:
            variables[name] = value


@once
def environment() -> Environment:
    """Return the one of this process."""
    return Environment()
