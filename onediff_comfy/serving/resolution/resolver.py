"""Requests become decisions: serve by this graph, serve in parts, or leave it to the host's own code."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace

from ...cache.keys import LOSSLESS, Variant, same_widths
from ...capture.call import ChangesState, NotCovered, Signature
from ...compilation.compile_graph import HostServices, Maker
from ...compilation.graph_builder import Pending
from ...compilation.library import GraphLibrary
from ...engines.base import EngineError
from ...messages import message
from ..decision import Eager, Invocation, Refused, Request, Serve
from ..executor import CallTimes
from ..run import RunContext
from .batch_split import BatchSplit, BatchSplitter
from .graph_provider import GraphProvider, Provided, compiling_failed
from .pending import Awaited, CompileDelay
from .route_table import RouteTable
from .specialization import Specializer
from .variant_policy import VariantPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sources:
    """Where graphs come from, and who decides which are wanted."""

    policy: VariantPolicy
    provider: GraphProvider
    specializer: Specializer
    splitter: BatchSplitter
    awaited: Awaited
    delay: CompileDelay


class Resolver:
    """Decides what answers a request. Owns the routes.

    Args:
        library: where graphs are kept.
        host: what is needed of the host.
        sources: of graphs.
    """

    def __init__(self, library: GraphLibrary, host: HostServices, sources: Sources) -> None:
        self._library, self._host, self.sources = library, host, sources
        self.routes = RouteTable()
        # Calls of targets that have no graph for all sizes: by their widths, or by all sizes where it is for others.
        self._only_exact: set[tuple[str, Signature]] = set()
        self._preparing = threading.RLock()

    def resolve(self, request: Request, run: RunContext) -> Provided | BatchSplit | Eager:
        """Return what answers a request that no graph in memory is known for: what can be found or made for it.

        Raises:
            NotCovered: the target's weights are not where a graph needs them.
        """
        route = self.routes.get(request.key)
        if isinstance(route, BatchSplit):
            return route
        if isinstance(route, Refused):
            return Eager(route.reason)
        with self._preparing:
            pending = None if run.compile == "wait" else self.sources.awaited.current()
            found = pending or self._prepared(request, run)
        if isinstance(found, Pending):
            self.sources.awaited.expect(found)
            return Eager(found.reason, expected=True)
        return Eager(found.reason) if isinstance(found, Refused) else found

    def take_delayed(self) -> Invocation | None:
        """Take out the invocation that had to wait for a run's end, and whose graph is to be looked for now."""
        return self.sources.delay.end_first_image()

    def pending(self, invocation: Invocation, reusing: bool) -> Pending | None:
        """Return the graph that is on its way, where calls of runs of this kind have no other.

        Only for runs that do not wait.
        """
        if self.routes.has_routes(reusing):
            return None
        return self.sources.delay.holds_back(invocation) or self.sources.awaited.current()

    def prefer_better(self, serve: Serve, times: CallTimes) -> None:
        """Have the next call find a better graph than the one that serves this, if there is one. Ask once a run."""
        specializer, request = self.sources.specializer, serve.request
        try:
            with self._host.unplanned():
                if serve.graph.shapes.general:
                    better = specializer.is_ready(request, serve.route.graph_key, lambda: self._maker(request))
                else:
                    better = specializer.is_regression(request, serve.route.graph_key, times)
        except Exception:  # the call is answered, and the next one will be as well
            log.debug("looking for a better graph failed", exc_info=True)
            return
        if better:
            self.routes.pop(request.key, None)

    def failed(self, serve: Serve, reason: str) -> None:
        """Note that a graph failed when it ran: it is not tried again, at least not in this variant."""
        functions = serve.request.call.functions
        if functions is not None and serve.options is not None:
            self.sources.provider.give_up(functions)
        if not (serve.route.variant.fp8 and self._dropped(serve.request, Variant(fp8=True), reason)):
            self.routes[serve.request.key] = Refused(reason)

    def disproved(self, serve: Serve, reason: str) -> None:
        """Note that a graph's output was wrong, and that it was retired."""
        functions = serve.request.call.functions
        if functions is not None:
            self.sources.provider.give_up(functions)
        if functions is not None and not serve.route.variant.fp8:
            self.routes[serve.request.key] = Refused(reason)
        elif serve.route.variant.fp8:
            self._dropped(serve.request, Variant(fp8=True), message("fp8 was too far off for this model"))
        elif serve.graph.shapes.general:
            self.routes[serve.request.key] = Refused(reason)
        else:  # the general graph may be right where this one was not
            self.routes.pop(serve.request.key, None)

    def no_reuse(self, serve: Serve, reason: str) -> None:
        """Serve this target by graphs that are not cut in two from now on."""
        self._dropped(serve.request, Variant(reusable=True), reason)

    def never_split(self) -> None:
        """Note that calls cannot be cut, since samples of a batch see each other."""
        self.routes.forget(lambda _key, route: isinstance(route, BatchSplit))

    # -- preparing -----------------------------------------------------------------------------

    def _prepared(self, request: Request, run: RunContext) -> Provided | Refused | BatchSplit | Pending:
        """Find or make the graph for a request whose route leads to none in memory, and remember the route.

        Raises:
            NotCovered: weights are not where a graph needs them. They may be back for the next call.
        """
        # Before minutes of work.
        request.target.weights(tuple(request.target.specs), request.device)
        variant, dropped = LOSSLESS, list[Variant]()
        while True:
            try:
                maker = self._maker(request)
                variant = maker.variant
                found = self._found(request, maker, run)
            except self._host.interruption:
                raise
            except NotCovered as refusal:
                reason = refusal.reason
            except EngineError as error:
                reason = str(error)
            except Exception as error:
                # A compiler's own bug, a full disk, ...: nothing that eager could not do without.
                log.debug("preparing a graph failed", exc_info=True)
                reason = compiling_failed(error)
            else:
                if isinstance(found, Provided):  # with what the person should know of it
                    route = replace(found.route, note=self.sources.policy.note(request.target, maker))
                    self.routes[found.request.key] = route
                    return replace(found, route=route)
                return found
            if not self._dropped(request, variant, reason):
                for each in dropped:  # what fails without them too is not their fault
                    self.sources.policy.allow(request.target, each)
                refused = self.routes[request.key] = Refused(reason)
                return refused
            dropped.append(variant)

    def _found(self, request: Request, maker: Maker, run: RunContext) -> Provided | BatchSplit | Pending:
        """Find or make a graph in one variant.

        Raises:
            NotCovered, EngineError: there is none, and none can be made.
        """
        provider, exact = self.sources.provider, self._wants_exact(request, maker, run)
        found: Provided | BatchSplit | Pending | None = provider.kept(request, maker, exact)
        if found is None and not maker.engine.general:
            served = self.routes.served_of(request.target, request.reusing)
            split = self.sources.splitter.plan(request.target.fingerprint, request.call, served)
            if split is not None:
                self.routes[request.key] = split
                return split
        if found is None and not exact:
            found = self._made_for_all_sizes(request, maker, run)
        if found is None:
            found = provider.made(request, maker, False, run)
        if found is None:
            raise NotCovered(message("a graph was compiled for these sizes that does not take them"))
        if isinstance(found, Provided):
            self.sources.awaited.tell(message("compiled graph ready"))
        return found

    def _made_for_all_sizes(self, request: Request, maker: Maker, run: RunContext) -> Provided | Pending | None:
        """Make a general graph; None where one for these sizes alone is to be made instead.

        Raises:
            NotCovered: it cannot be made in this variant. The variant goes before the sizes do.
            EngineError: nothing can be compiled here.
        """
        fingerprint, signature = request.target.fingerprint, request.call.signature
        if not self._only_exact.isdisjoint({(fingerprint, signature), (fingerprint, same_widths(signature))}):
            return None
        if self._library.index.is_exact_only(maker.call_key(request.target, request.call, general=True)):
            return None
        try:
            made = self.sources.provider.made(request, maker, True, run)
        except NotCovered as refusal:
            if maker.variant != LOSSLESS or isinstance(refusal, ChangesState):  # nor is there one for these sizes
                raise
            log.info("OneDiff: no graph for all sizes (%s); one for these sizes is made", refusal.reason)
            self._only_exact.add((fingerprint, same_widths(signature)))
            return None
        if made is None:
            self._only_exact.add((fingerprint, signature))
        return made

    def _wants_exact(self, request: Request, maker: Maker, run: RunContext) -> bool:
        """Return True if this request waits for a graph for its sizes alone."""
        return not maker.engine.general or (run.exact and self.sources.specializer.wanted(request.call.signature))

    def _maker(self, request: Request) -> Maker:
        return self.sources.policy.maker(request.target, request.device, request.reusing, self._host)

    def _dropped(self, request: Request, variant: Variant, reason: str) -> bool:
        """Give up a variant for the target of a request. Return False if it was the last one."""
        if self.sources.policy.drop(request.target, variant, reason) is None:
            return False
        fingerprint = request.target.fingerprint
        self.routes.forget(lambda key, _route: key[0] == fingerprint)
        return True
