"""How fast the processor is, and how much of it others took: eager code waits for it, and machines differ."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_CPUINFO, _STAT = Path("/proc/cpuinfo"), Path("/proc/stat")
_ADDITIONS = 1_000_000
_ROUNDS = 5
_AT_A_LOOK = 10_000  # additions: a third of a millisecond
_LOOKS = 1000  # at first
_SLOWER = 1.2  # times the fastest look, on average: from there on it is not the same processor
_IDLE, _STOLEN = (3, 4), 7  # fields of a core's line in /proc/stat, see proc(5): idle and iowait; steal


def processor_facts() -> dict[str, object]:
    """Return the processor's name, None where Linux does not say, and the ms that Python takes for a fixed loop."""
    return {"processor": _name(), "python_loop_ms": 1000 * min(_timed(_loop) for _ in range(_ROUNDS))}


def _name() -> str | None:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _loop(additions: int = _ADDITIONS) -> int:
    found = 0
    for number in range(additions):
        found += number
    return found


class PythonSpeed:
    """Looks at how long Python takes for a short loop, and knows the fastest look.

    Where two machines share a core's halves, the work of one makes the other's take up to 1.75 times as long, for some
    tenths of a second or for seconds. No system says so: nothing is stolen.
    """

    def __init__(self) -> None:
        self._fastest = min(self._once() for _ in range(_LOOKS))

    def look(self) -> float:
        """Return the ms that the loop takes now."""
        found = self._once()
        self._fastest = min(self._fastest, found)
        return found

    def was_slow(self, looks: Sequence[float]) -> bool:
        """Return True if Python was slower in these looks, on average, than a processor of its own would make it."""
        return statistics.fmean(looks) > _SLOWER * self._fastest

    def _once(self) -> float:
        return 1000 * _timed(lambda: _loop(_AT_A_LOOK))


@contextlib.contextmanager
def collector_seconds() -> Iterator[list[float]]:
    """Yield a list to which is added how long each run of Python's collector takes inside.

    It goes through all objects of a process once in a while, which takes a third of a second and more.
    """
    begun, found = [0.0], list[float]()

    def note(phase: str, _run: dict[str, int]) -> None:
        if phase == "start":
            begun[0] = time.perf_counter()
        else:
            found.append(time.perf_counter() - begun[0])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


class CoreTime(NamedTuple):
    """What cores have done since the machine started, in ticks of the kernel's clock.

    Attributes:
        wanted: in which they computed or would have.
        stolen: of these, in which the hypervisor had another machine compute.
    """

    wanted: int
    stolen: int

    @classmethod
    def of(cls, cores: Sequence[int]) -> CoreTime | None:
        """Return that of these cores, all where there are none; None where Linux does not say."""
        if not _STAT.exists():
            return None
        names = {f"cpu{core}" for core in cores} or {"cpu"}
        rows = [[int(field) for field in rest] for name, *rest in map(str.split, _lines_of_cores()) if name in names]
        # What guests took is in the user's time already, and comes after what was stolen.
        idle = sum(row[field] for row in rows for field in _IDLE)
        return cls(sum(sum(row[: _STOLEN + 1]) for row in rows) - idle, sum(row[_STOLEN] for row in rows))

    def stolen_since(self, before: CoreTime) -> float:
        """Return the share of the time that cores wanted since then in which they had to wait for others."""
        wanted = self.wanted - before.wanted
        return (self.stolen - before.stolen) / wanted if wanted else 0.0


def _lines_of_cores() -> list[str]:
    return [line for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
