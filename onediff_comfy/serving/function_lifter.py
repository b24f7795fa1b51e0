"""Where the guard meets functions in a call's options: lifted once, and compared by identity at every call.

In each run all code that they run is compared, too. What they decide by, as the noise level, is on the device, behind
the kernels of the step before. Meanwhile they may be assumed to decide as they did in the call before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cache.call_index import reader_of
from ..capture.functions.lifted import LiftedFunctions, code_of, lift
from ..capture.functions.readings import Values
from ..capture.handed_over import Functions, Unliftable
from ..capture.target.target import Target
from ..compilation.compile_graph import HostServices
from ..compilation.library import GraphLibrary
from ..messages import Message, message
from ..settings import MOST_IDENTITIES

_MOST_KEPT = 16  # of one run: a batch's positive and negative prompt, each with other functions, on each GPU

Key = tuple[str, tuple[int, ...]]


@dataclass
class _Kept:
    """Functions that were lifted.

    Attributes:
        target: whose layers they may hold.
        read: what such functions were known to read.
        looked_at: in this run.
        lifted_twice: and alike, the second time after it was noted down what they were at the first. While functions
            are lifted another thread may change something.
        values: that the last call of them was answered by.
    """

    lifted: LiftedFunctions
    target: Target
    read: frozenset[str]
    looked_at: bool = True
    lifted_twice: bool = False
    values: Values | None = None

    def is_like(self, lifted: LiftedFunctions, target: Target, read: frozenset[str]) -> bool:
        """Return True if these functions, lifted anew, are those that were kept, of which nothing has changed."""
        same = self.target is target and self.read == read and self.lifted.digest == lifted.digest
        return same and self.lifted.holds_with_its_code()

    def at(self, options: Mapping[str, Any], assume: bool) -> LiftedFunctions:
        functions = self.lifted.at(options, self.values if assume else None)
        self.values = functions.values
        return functions


class FunctionLifter:
    """Lifts functions, and keeps what came of it while runs have them.

    Args:
        library: knows what functions read.
        host: what is needed of the host.
    """

    def __init__(self, library: GraphLibrary, host: HostServices) -> None:
        self._index, self._host = library.index, host
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        # Which, and why; not the exception, which would keep all that runs here, an image's latents among it.
        self._refused: OrderedDict[Key, tuple[Sequence[Any], int, Message]] = OrderedDict()
        self._given_up: set[str] = set()
        self._digests: dict[str, set[str]] = {}
        library.functions.add(self)

    def begin_run(self) -> None:
        """Have all functions looked at again."""
        self._refused.clear()
        for kept in self._kept.values():
            kept.looked_at, kept.values = False, None

    def end_run(self) -> None:
        """Hold no functions any more that this run did not have, nor what they hold."""
        self._refused.clear()
        for key in [key for key, kept in self._kept.items() if not kept.looked_at]:
            del self._kept[key]

    def forget(self) -> None:
        """Hold no functions any more."""
        self._refused.clear()
        self._kept.clear()

    def lift(
        self, target: Target, functions: Sequence[Any], options: Mapping[str, Any], assume: bool = False
    ) -> LiftedFunctions:
        """Return functions that a call of ``target`` with these options hands over, lifted.

        Args:
            assume: rather than wait for the device, assume that they decide as in the call before.

        Raises:
            Unliftable: no graph can take one of them.
            NotCovered: they hold layers that would not simply use their weights.
        """
        key = reader_of(target.fingerprint, code_of(functions)), tuple(map(id, functions))
        read = self._index.options_read(key[0])
        kept = self._kept.get(key)
        if kept is not None and self._stands(kept, target, read):
            return kept.at(options, assume)
        refused = self._refused.get(key)
        if refused is not None:
            _, index, reason = refused
            raise Unliftable(index, reason)
        try:
            lifted = self._lifted(target, functions, read)
        except Unliftable as refusal:
            _keep(self._refused, key, (tuple(functions), refusal.index, refusal.reason))
            raise
        if kept is not None and kept.is_like(lifted, target, read):
            kept.looked_at = kept.lifted_twice = True
        else:
            kept = _Kept(lifted, target, read)
        _keep(self._kept, key, kept)
        return kept.at(options, assume)

    def give_up(self, functions: Functions) -> None:
        """Lift functions of this code no more, whatever they hold: they change it."""
        self._given_up.add(functions.code)

    def _stands(self, kept: _Kept, target: Target, read: frozenset[str]) -> bool:
        """Return True if functions would be lifted as they were.

        Raises:
            NotCovered: they hold layers that would not simply use their weights.
        """
        if kept.target is not target or kept.read != read or kept.lifted.code in self._given_up:
            return False
        if kept.looked_at:
            return kept.lifted.holds()
        if not (kept.lifted_twice and kept.lifted.holds_with_its_code()):
            return False
        self._host.refuse(kept.lifted.modules)
        kept.looked_at = True
        return True

    def _lifted(self, target: Target, functions: Sequence[Any], read: frozenset[str]) -> LiftedFunctions:
        layers = {id(layer): path for path, layer in target.module.named_modules()}
        lifted = lift(functions, layers, self._host.code, read)
        self._host.refuse(lifted.modules)
        if lifted.code in self._given_up:
            raise Unliftable(0, message("it, or another function beside it, changes what it keeps"))
        digests = self._digests.setdefault(lifted.code, set())
        if lifted.digest not in digests and len(digests) >= MOST_IDENTITIES:
            raise Unliftable(0, message("what it holds changes again and again"))
        digests.add(lifted.digest)
        return lifted


def _keep(kept: OrderedDict[Key, Any], key: Key, value: Any) -> None:
    kept[key] = value
    while len(kept) > _MOST_KEPT:
        kept.popitem(last=False)
