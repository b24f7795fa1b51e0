"""Routes: what answers a node's calls, found once for each signature and then looked up.

This is the node's graph cache, keyed on the call's signature: latent shape, dtype and batch size among the rest. The
graphs themselves live in the library, shared by all nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..capture.call import Signature
from ..capture.target import Target
from .parted import Parted


@dataclass(frozen=True)
class Served:
    """A graph answers.

    Attributes:
        graph_key: of the graph.
        sizes: what its symbols stand for.
        note: what the person should know of it: that it is not what was asked for, and why. Mostly nothing.
    """

    graph_key: str
    sizes: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Refused:
    """No graph can answer, for this reason."""

    reason: str


Route = Served | Refused | Parted


class Routes:
    """What answers calls, by the fingerprint of their target and their signature.

    Runs that may reuse steps are served by other graphs than those that compute everything. Both kinds are kept, so
    that neither is looked for again when a person goes to and fro.

    Attributes:
        reusing: whether the calls at present belong to a run that may reuse steps.
    """

    def __init__(self) -> None:
        self.reusing = False
        self._by_kind: dict[bool, dict[tuple[str, Signature], Route]] = {False: {}, True: {}}

    def __bool__(self) -> bool:
        return bool(self._here)

    def find(self, target: Target, signature: Signature) -> Route | None:
        """What answers such a call of a run of this kind; None if that is not known yet."""
        return self._here.get((target.fingerprint, signature))

    def remember(self, target: Target, signature: Signature, route: Route) -> None:
        """From now on ``route`` answers such calls."""
        self._here[target.fingerprint, signature] = route

    def forget(self, target: Target, signature: Signature) -> None:
        """Another route may answer such calls: the next one looks for it."""
        self._here.pop((target.fingerprint, signature), None)

    def forget_target(self, target: Target) -> None:
        """As ``forget``, for all calls of a target."""
        for kind, routes in self._by_kind.items():
            self._by_kind[kind] = {call: route for call, route in routes.items() if call[0] != target.fingerprint}

    def forget_all(self, kind: type[Route]) -> None:
        """As ``forget``, for all calls that have a route of this type."""
        kept = {call: route for call, route in self._here.items() if not isinstance(route, kind)}
        self._by_kind[self.reusing] = kept

    def served(self) -> list[tuple[Signature, Served]]:
        """The calls that graphs answer, in runs of either kind."""
        return [
            (signature, route)
            for routes in self._by_kind.values()
            for (_, signature), route in list(routes.items())
            if isinstance(route, Served)
        ]

    def served_of(self, target: Target) -> list[Signature]:
        """The calls of a target that graphs answer in runs of this kind."""
        return [
            signature
            for (fingerprint, signature), route in self._here.items()
            if fingerprint == target.fingerprint and isinstance(route, Served)
        ]

    def refusals(self) -> list[str]:
        """Why calls of runs of this kind are not served, as far as that is settled."""
        return list(dict.fromkeys(route.reason for route in self._here.values() if isinstance(route, Refused)))

    @property
    def _here(self) -> dict[tuple[str, Signature], Route]:
        return self._by_kind[self.reusing]
