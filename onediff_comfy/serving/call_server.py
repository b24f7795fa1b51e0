"""Answering one call: by a right graph, or by the host's own code.

invocation → ModuleGuard → request → routes, or Resolver → Serve → Executor → output
                                                                   first time: Verifier
whatever is not covered → the host's own forward, with the reason counted, and logged once
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ..capture.call import NotCovered, bind
from ..compilation.compile_graph import HostServices
from ..compilation.library import GraphLibrary
from ..engines.base import CompiledGraph
from ..messages import first_line, message
from .decision import Eager, Invocation, Output, Request, Serve, Served
from .executor import Executor, Failed
from .module_guard import ModuleGuard
from .resolution.batch_split import BatchSplit
from .resolution.graph_provider import Provided
from .resolution.resolver import Resolver
from .run import RunContext, Teller
from .verification.verifier import Verifier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CallServer:
    """Answers calls. Has no state of its own.

    Attributes:
        library: where graphs are kept.
        host: what is needed of the host.
        guard: turns calls into requests.
        resolver: decides what answers those that no graph in memory is known for.
        executor: runs graphs.
        verifier: compares them with eager.
        teller: told of calls that the host answers.
    """

    library: GraphLibrary
    host: HostServices
    guard: ModuleGuard
    resolver: Resolver
    executor: Executor
    verifier: Verifier
    teller: Teller

    def answer(self, invocation: Invocation, run: RunContext) -> Any:
        """Return what the host's call gives."""
        decision = self.decide(invocation, run)
        if isinstance(decision, Serve):
            decision = self._serve(decision, run)
        if isinstance(decision, Output):
            return decision.value
        if isinstance(decision, BatchSplit):
            return self._serve_in_parts(decision, invocation, run)
        # Nothing is being handled here: while an exception is, every attribute that a module finds only in its
        # __getattr__ costs more, which made eager models a fifth slower.
        self.teller.fell_back(invocation.module, decision, run)
        return invocation.eager()

    def decide(self, invocation: Invocation, run: RunContext) -> Serve | BatchSplit | Eager | Output:
        """Return what answers an invocation, or the answer. Whatever goes wrong with us, the host can do without."""
        try:
            with self.host.unplanned():
                return self._decided(invocation, run)
        except self.host.interruption:
            raise
        except NotCovered as refusal:
            return Eager(refusal.reason)
        except Exception as error:
            log.debug("looking for a graph failed", exc_info=True)
            kind, line = type(error).__name__, first_line(error)
            return Eager(message("looking for its graph failed ({kind}: {first_line})", kind=kind, first_line=line))

    def _decided(self, invocation: Invocation, run: RunContext) -> Serve | BatchSplit | Eager | Output:
        """Return what answers an invocation, or the answer.

        Raises:
            Exception: no graph can answer. NotCovered says why.
        """
        pending = None if run.wait else self.resolver.pending(invocation, run.reusing)
        if pending is not None:
            return Eager(pending.reason, expected=True)
        request = self.guard.request(invocation, run)
        if not request.is_checked:
            output = self._served_ahead(request, run)
            if output is not None:
                return output
            if not self.guard.confirms(request):
                request = self.guard.request(invocation, run)
        return self._known(request, run) or self._resolved(request, run)

    def _known(self, request: Request, run: RunContext, found: Provided | None = None) -> Serve | None:
        """Return what serves a request: the graph that was found, or the one in memory that a route leads to.

        Raises:
            NotCovered: weights are not where the graph needs them.
        """
        route = self.resolver.routes.get(request.key) if found is None else found.route
        if not isinstance(route, Served):
            return None
        graph: CompiledGraph | None = self.library.cache.get(route.graph_key) if found is None else found.graph
        if graph is None:
            return None
        weights = request.target.placed_weights(graph.binding.weight_names, request.device)
        stream = None
        if run.step_cache is not None:
            prompts = self.host.stream(request.arguments.get(self.host.options_name) or {})
            if prompts is not None:
                stream = route.graph_key, id(request.invocation.module), request.call.signature, prompts
        proof_key, functions = route.proof_key, request.call.functions
        if functions is not None:  # a trace may mistake them for others that give this graph, which is proved of these
            proof_key = proof_key[0], (*proof_key[1], *functions.facts)
        return Serve(request, route, graph, weights, proof_key, stream)

    def _resolved(self, request: Request, run: RunContext) -> Serve | BatchSplit | Eager:
        """Return what answers a request that no graph in memory is known for."""
        if request.key not in self.resolver.routes:  # another object may have found what the target reads
            request = self.guard.up_to_date(request)
        found = self.resolver.resolve(request, run)
        if not isinstance(found, Provided):
            return found
        serve = self._known(found.request, run, found)
        assert serve is not None
        return serve

    def _serve(self, serve: Serve, run: RunContext) -> Output | Eager:
        """Run the graph of a decision, and compare it with eager where that is due."""
        settled = self.verifier.settled.get(serve.proof_key)
        due = (settled is None or settled() is not serve.graph) and self.verifier.is_due(serve, run)
        reuse = run.step_cache is not None and self.executor.reuses(serve, run) and not due
        with self.host.unplanned():
            output = self.executor.run(serve, run, reuse)
        if isinstance(output, Failed):
            if output.for_good:
                self.resolver.failed(serve, output.reason)
            return Eager(output.reason)
        if due:
            verdict = self.verifier.judge(serve, output.value, run)
            if verdict.reason is not None:
                settle = self.resolver.no_reuse if verdict.only_when_reusing else self.resolver.disproved
                settle(serve, verdict.reason)
                self.teller.fell_back(serve.request.invocation.module, Eager(verdict.reason), run)
                return Output(verdict.output)
            output = Output(verdict.output)
        if run.report.graph_answered(serve.route, serve.request.call.signature):  # the first of its kind in this run
            with self.host.unplanned():
                self.resolver.prefer_better(serve, self.executor.times)
        return output

    def _served_ahead(self, request: Request, run: RunContext) -> Output | None:
        """Answer the first call of a run on a GPU, and look at the module while the GPU computes.

        Looking takes 26 ms for SDXL and 7 for its VAE, which no picture is to wait for. None where the module has to be
        looked at first, where it turned out to be another one, or where anything went wrong: nothing was made, compared
        or kept, and the call is answered as any other.
        """
        try:
            serve = self._known(request, run)
            if serve is None or not serve.graph.returns_early(request.device) or self.verifier.is_due(serve, run):
                return None
            output = self.executor.run(serve, run, self.executor.reuses(serve, run))
            if isinstance(output, Output) and self.guard.confirms(request):
                if run.report.graph_answered(serve.route, request.call.signature):
                    self.resolver.prefer_better(serve, self.executor.times)
                return output
        except self.host.interruption:
            raise
        except Exception:
            log.debug("a call could not be answered before its model was looked at", exc_info=True)
        if run.step_cache is not None:
            run.step_cache.start_over()
        return None

    def _serve_in_parts(self, split: BatchSplit, invocation: Invocation, run: RunContext) -> Any:
        module, forward = invocation.module, invocation.forward
        output, separable = self.resolver.sources.splitter.run(
            split,
            bind(forward, invocation.args, invocation.kwargs),
            serve=lambda part: self.answer(Invocation(module, forward, (), part), run.of_part()),
            eager=invocation.eager,
        )
        if not separable:
            self.resolver.never_split()
        return output
