"""Routes: what answers an object's calls, found once for each signature and then looked up.

This is the node's routes, keyed on the call's signature: latent shape, dtype and batch size among the rest. The
graphs themselves live in the library, shared by all nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from ...capture.call import Signature
from ...capture.target.target import Target
from ..decision import Refused, RouteKey, Served
from .batch_split import BatchSplit

Route = Served | Refused | BatchSplit


class RouteTable(dict[RouteKey, Route]):
    """What answers calls.

    Runs that may reuse steps are served by other graphs than those that compute everything. Both kinds are kept, so
    that neither is looked for again when a person goes to and fro.
    """

    def has_routes(self, reusing: bool) -> bool:
        """Return True if a call of runs of this kind has a route."""
        return any(key[2] is reusing for key in self)

    def forget(self, doomed: Callable[[RouteKey, Route], bool]) -> None:
        """Forget every route that ``doomed`` is true of: the next call looks for another."""
        for key in [key for key, route in list(self.items()) if doomed(key, route)]:
            self.pop(key, None)

    def served(self) -> list[tuple[Signature, Served]]:
        """Return the calls that graphs answer, in runs of either kind."""
        return [(key[1], route) for key, route in list(self.items()) if isinstance(route, Served)]

    def served_of(self, target: Target, reusing: bool) -> list[Signature]:
        """Return the calls of a target that graphs answer in runs of one kind."""
        return [
            signature
            for (fingerprint, signature, kind), route in list(self.items())
            if (fingerprint, kind) == (target.fingerprint, reusing) and isinstance(route, Served)
        ]

    def refusals(self) -> list[str]:
        """Return why calls are not served, as far as that is settled."""
        return list(dict.fromkeys(route.reason for route in list(self.values()) if isinstance(route, Refused)))
