"""What stands in for a module's forward: each call is answered by a right graph, or by the host's own code.

invocation → ModuleGuard → request → routes, or Resolver → Serve → Executor → output
                                                                   first time: Verifier
whatever is not covered → the host's own forward, with the reason counted, and logged once
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..capture.call import NotCovered
from ..compilation.compile_graph import HostServices
from ..compilation.library import GraphLibrary
from ..engines import prepare
from ..engines.base import CompiledGraph
from ..engines.eager import EagerEngine
from ..metrics import Metrics
from ..runtime.step_cache import StepCache
from .decision import Eager, Invocation, Out, Output, Request, Serve, Served, search_failed
from .executor import CallTimes, Executor, Failed
from .module_guard import ModuleGuard
from .options import DEFAULTS, Options, Speed
from .resolution.batch_split import BatchSplit, BatchSplitter
from .resolution.graph_provider import GraphProvider, Provided
from .resolution.pending import Awaited, CompileDelay
from .resolution.resolver import Resolver, Sources
from .resolution.specialization import Specializer
from .resolution.variant_policy import VariantPolicy
from .run import RunContext, RunReport, Teller
from .verification.eager_times import EagerTimes
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

    def attempt(self, invocation: Invocation, run: RunContext, out: Out | None = None) -> Output | Eager:
        """Return what the host's call gives if a graph can answer it; else why the host has to, which is counted.

        What answers as it is, and is not compared with anything, may be left in the tensors that ``out`` gives.
        """
        self.host.check_interrupted()  # the host does before each layer, and a graph has none to be stopped at
        for assume in (True, False):
            decision = self.decide(invocation, run, assume)
            answer = self._serve(decision, run, out) if isinstance(decision, Serve) else decision
            if answer is not None:  # or its functions decide in another way than in the call before
                break
        assert answer is not None
        if isinstance(answer, BatchSplit):
            splitter = self.resolver.sources.splitter
            output, separable = splitter.run(answer, invocation, lambda part: self.attempt(part, run.of_part()))
            if not separable:
                self.resolver.never_split()
            answer = Output(output)
        if isinstance(answer, Eager):
            self.teller.fell_back(invocation.module, answer, run)
        return answer

    def decide(
        self, invocation: Invocation, run: RunContext, assume: bool = False
    ) -> Serve | BatchSplit | Eager | Output:
        """Return what answers an invocation, or the answer. Whatever goes wrong with us, the host can do without.

        Args:
            assume: a graph may be found for functions that are assumed to decide as in the call before.
        """
        try:
            with self.host.unplanned():
                if run.compile != "wait" and (pending := self.resolver.pending(invocation, run.reusing)) is not None:
                    return Eager(pending.reason, expected=True)
                request = self.guard.request(invocation, run, assume)
                if not request.is_checked:
                    output = self._served_ahead(request, run)
                    if output is not None:
                        return output
                    if not self.guard.confirms(request):
                        request = self.guard.request(invocation, run)
                known = self._known(request, run)
                if known is None and request.is_assumed:  # nothing is traced for a guess
                    request = self.guard.decided(request, run)
                    known = self._known(request, run)
                return known or self._resolved(request, run)
        except self.host.interruption:
            raise
        except NotCovered as refusal:
            return Eager(refusal.reason)
        except Exception as error:
            log.debug("looking for a graph failed", exc_info=True)
            return Eager(search_failed(error))

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
        moving = request.invocation.moving is not None
        weights = request.target.placed_weights(graph.binding.weight_names, request.device, moving)
        stream = None
        if run.step_cache is not None:
            prompts = self.host.stream(request.arguments.get(self.host.options_name) or {})
            if prompts is not None:
                stream = route.graph_key, id(request.invocation.module), request.call.signature, prompts
        functions = request.call.functions
        numbers = route.proved_for if functions is None else (*route.proved_for, functions.number)
        options = request.arguments.get(self.host.options_name) or {} if graph.binding.calls_option else None
        return Serve(request, route, graph, weights, (graph.compilation, numbers), stream, options, found is None)

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

    def _serve(self, serve: Serve, run: RunContext, out: Out | None) -> Output | Eager | None:
        """Run the graph of a decision, and compare it with eager where due; None if it was for a wrong assumption."""
        done = self.verifier.done.get(serve.proof_key)
        due = (done is None or done() is not serve.graph) and self.verifier.is_due(serve, run)
        with self.host.unplanned():
            output = self.executor.run(serve, run, due, None if due else out)
        if output is None:
            return None
        if isinstance(output, Failed):
            if output.for_good:
                self.resolver.failed(serve, output.reason)
            return Eager(output.reason, ran_out=not output.for_good)
        if due:
            verdict = self.verifier.judge(serve, output.value, run)
            if verdict.reason is not None:
                drop = self.resolver.no_reuse if verdict.only_when_reusing else self.resolver.disproved
                drop(serve, verdict.reason)
                self.teller.fell_back(serve.request.invocation.module, Eager(verdict.reason), run)
                return Output(verdict.output)
            output = Output(verdict.output)
        if run.report.graph_answered(serve.route, serve.request.call.signature):  # the first of its kind in this run
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
            output = self.executor.run(serve, run)
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


class Dispatcher:
    """Serves the calls of one accelerated object.

    Args:
        engine: one of ``ENGINE_NAMES``.
        library: where graphs are kept.
        host: what is needed of the host.
        show: shows a short status text to the person, on the node.
        options: what was chosen.

    Attributes:
        metrics: what served this object's calls, and what did not; part of the library's.
        times: how long its graphs ran.
        runs: how many have begun.
        run: the one that is going on; before the first, one that has no step cache.
    """

    def __init__(
        self,
        engine: str,
        library: GraphLibrary,
        host: HostServices,
        show: Callable[[str], None] = lambda _text: None,
        options: Options = DEFAULTS,
    ) -> None:
        self.metrics, self.times, self.runs = Metrics(total=library.metrics), CallTimes(), 0
        guard = ModuleGuard(library, host)
        sources = Sources(
            VariantPolicy(engine, options.precision),
            GraphProvider(library, host, guard, show),
            Specializer(library, options.specialize),
            BatchSplitter(host.options_name),
            Awaited(show),
            CompileDelay(library, options.compile_delay_s, lambda: prepare(engine)),
        )
        self._resolver = Resolver(library, host, sources)
        self._eager_times = EagerTimes(library, self.times, gains=engine != EagerEngine.name)
        self._server = CallServer(
            library,
            host,
            guard,
            self._resolver,
            Executor(library, self.times, sources.policy, options.record_only_launch_bound),
            Verifier(library, self.times, self._eager_times, host),
            Teller(self.metrics, show),
        )
        self.run = RunContext(self._new_report(), options.compile)

    def begin_run(self, step_cache: StepCache | None = None) -> None:
        """Begin a sampling run: modules are looked at again, for extensions may have changed them since.

        Args:
            step_cache: decides in each step of this run whether deep layers are computed; without one they always are.
        """
        self.runs += 1
        self._resolver.take_delayed()  # of a run that was broken off: no other counts as the first
        self._server.guard.begin_run()
        self._server.verifier.begin_run()
        self.run = replace(self.run, report=self._new_report(), reusing=step_cache is not None, step_cache=step_cache)

    def begin_step(self) -> None:
        """Note that a prediction is asked for; the calls for it follow. Without it no step cache reuses anything."""
        if self.run.step_cache is not None:
            self.run.step_cache.begin_step()

    def end_run(self, module: torch.nn.Module, what: str = "") -> None:
        """End a sampling run over ``module``: one line on what served it, in the log and on the node.

        Args:
            module: what was run.
            what: what it made, for people: ``1024×1024 b1``.
        """
        self.end_step_cache()
        if (delayed := self._resolver.take_delayed()) is not None:
            self._server.decide(delayed, replace(self.run, over=True))
        self._server.guard.end_run()
        self._server.executor.end_run()
        self._server.teller.ended(self.run.report, module, what)

    def end_step_cache(self) -> None:
        """Reuse nothing any more, and keep nothing for it: the run is over, or has failed."""
        step_cache = self.run.step_cache
        if step_cache is not None:
            self.metrics.count("reused", step_cache.reused)
            step_cache.forget()
            self.run = replace(self.run, step_cache=None)

    def preparing(self, exact: bool = False) -> Dispatcher:
        """Return a view of this dispatcher, with a run of its own, whose calls wait for graphs. All else is shared.

        Args:
            exact: also for those of their own that sizes are to have.
        """
        if exact:  # a general graph that serves is no reason not to make a better one
            self._resolver.routes.forget(lambda _key, route: isinstance(route, Served))
        view = copy.copy(self)
        view.run = RunContext(self._new_report(), exact=exact)
        return view

    def chosen(self, device: torch.device) -> tuple[str, str]:
        """Return what makes graphs for ``device``: the engine's name, and one of ``PRECISIONS``.

        Raises:
            EngineError: no engine can serve it.
        """
        return self._resolver.sources.policy.chosen(device)

    def refusals(self) -> list[str]:
        """Return why calls are not served, as far as that is settled."""
        return self._resolver.routes.refusals()

    def graph_keys(self) -> list[str]:
        """Return the keys of the compiled graphs that serve this object so far."""
        return list(dict.fromkeys(route.graph_key for _, route in self._resolver.routes.served()))

    def speeds(self) -> list[Speed]:
        """Return how fast calls of each size are, where eager's time is known."""
        return self._eager_times.speeds(self._resolver.routes.served())

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return ``forward(*args, **kwargs)``, from a compiled graph where one can serve it; see ``Invocation``."""
        # No exception is being handled here: meanwhile each attribute that only a __getattr__ finds costs more.
        outcome = self._server.attempt(invocation := Invocation(module, forward, args, kwargs), self.run)
        return outcome.value if isinstance(outcome, Output) else invocation.eager()

    def attempt(self, invocation: Invocation, out: Out | None = None) -> Output | Eager:
        """Return what an invocation gives from a compiled graph, or why none serves it.

        The caller has to, then, and the tensors that ``out`` gives are as they were.
        """
        return self._server.attempt(invocation, self.run.of_call(invocation), out)

    def is_held_back(self, invocation: Invocation) -> bool:
        """Return True if a call whose weights move, and need not be there, waits for its graph, and count it then."""
        if self.run.compile == "wait" or (pending := self._resolver.pending(invocation, reusing=False)) is None:
            return False
        self.passed_by(invocation.module, pending.reason, expected=True)
        return True

    def passed_by(self, module: torch.nn.Module, reason: str, expected: bool = False) -> None:
        """Count a call of ``module`` that was answered without this dispatcher being asked, for this reason."""
        self._server.teller.fell_back(module, Eager(reason, expected), self.run)

    def _new_report(self) -> RunReport:
        return RunReport(self.metrics, self._server.library.metrics, self._eager_times.gain)
