"""What stands in for a module's forward: each call is answered by a right graph, or by the host's own code.

invocation → ModuleGuard → request → Resolver → decision → Executor → output
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

from ..capture.call import NotCovered, Signature, bind
from ..compilation.compile_graph import HostServices, largest_tensor
from ..compilation.library import GraphLibrary
from ..engines.eager import EagerEngine
from ..messages import first_line, message
from ..metrics import Metrics
from ..runtime.step_cache import StepCache
from .call_timing import CallTimes
from .decision import Eager, Invocation, Output, Request, Serve, Served
from .eager_times import EagerTimes
from .executor import Executor, Failed
from .module_guard import ModuleGuard
from .resolution.batch_split import BatchSplit, BatchSplitter
from .resolution.graph_provider import GraphProvider
from .resolution.pending import Awaited, CompileDelay
from .resolution.resolver import Resolver, Sources
from .resolution.specialization import Specializer
from .resolution.variant_policy import VariantPolicy
from .run import RunContext, RunReport, Teller
from .verifier import Verifier

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speed:
    """Calls of one size, timed.

    Attributes:
        graph_key: of the graph that answers them.
        call: their largest tensor, for people.
        eager_s: seconds of one call eager.
        graph_s: seconds of one answer of the graph.
    """

    graph_key: str
    call: str
    eager_s: float
    graph_s: float


def no_sizes(_signature: Signature) -> bool:
    """Return False: calls of no size are to have a graph of their own."""
    return False


@dataclass(frozen=True)
class Options:
    """What a person chose for an accelerated object, and what its kind asks for.

    Attributes:
        precision: one of ``PRECISIONS``; with fp8, graphs are lossless where it cannot be had or is too far off.
        specialize: returns True if calls of a signature are to have a graph for their sizes alone, though a general
            graph serves them too. It is made ahead (``preparing``) or in the background.
        in_background: compile in another process, and run calls as the host would until the graph is there.
        compile_delay_s: in the background, for how many seconds of a process's first image nothing but eager is at
            work, where no graph of any model is in memory yet.
        record_only_launch_bound: see ``Executor``.
    """

    precision: str = "lossless"
    specialize: Callable[[Signature], bool] = no_sizes
    in_background: bool = False
    compile_delay_s: float = 0.0
    record_only_launch_bound: bool = False


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
    """

    def __init__(
        self,
        engine: str,
        library: GraphLibrary,
        host: HostServices,
        show: Callable[[str], None] = lambda _text: None,
        options: Options = Options(),
    ) -> None:
        self.metrics, self.times, self.runs = Metrics(total=library.metrics), CallTimes(), 0
        self._library, self._host = library, host
        self._guard = ModuleGuard(library, host)
        sources = Sources(
            VariantPolicy(engine, options.precision),
            GraphProvider(library, host, self._guard, show),
            Specializer(library, options.specialize),
            BatchSplitter(host.options_name),
            Awaited(show),
            CompileDelay(library, options.compile_delay_s),
        )
        self._resolver = Resolver(library, host, sources)
        self._executor = Executor(library, self.times, sources.policy, options.record_only_launch_bound)
        self._eager_times = EagerTimes(library, self.times, gains=engine != EagerEngine.name)
        self._verifier = Verifier(library, self.times, self._eager_times)
        self._teller = Teller(self.metrics, show)
        self._run = RunContext(RunReport(library, self._eager_times), wait=not options.in_background)

    def begin_run(self, step_cache: StepCache | None = None) -> None:
        """Begin a sampling run: modules are looked at again, for extensions may have changed them since.

        Args:
            step_cache: decides in each step of this run whether deep layers are computed; without one they always are.
        """
        self.runs += 1
        self._resolver.begin_run()
        self._guard.begin_run()
        report = RunReport(self._library, self._eager_times)
        self._run = replace(self._run, report=report, reusing=step_cache is not None, step_cache=step_cache)

    def begin_step(self) -> None:
        """Note that a prediction is asked for; the calls for it follow. Without it no step cache reuses anything."""
        if self._run.step_cache is not None:
            self._run.step_cache.begin_step()

    def end_run(self, module: torch.nn.Module, what: str = "") -> None:
        """End a sampling run over ``module``: one line on what served it, in the log and on the node.

        Args:
            module: what was run.
            what: what it made, for people: ``1024×1024 b1``.
        """
        self.end_step_cache()
        put_off = self._resolver.end_run()
        if put_off is not None:
            self._decide(put_off, self._run)
        self._library.recordings.release_if_short()
        report = self._run.report
        if not report.calls:
            uncalled = message("the model was not called in this run")
            log.warning("OneDiff: %s (%s)", uncalled, type(module).__name__)
            self._teller.show(uncalled)
            return
        log.info("OneDiff: %d of %d model calls served by compiled graphs", report.served, report.calls)
        self._teller.show(report.status(what))

    def end_step_cache(self) -> None:
        """Reuse nothing any more, and keep nothing for it: the run is over, or has failed."""
        step_cache = self._run.step_cache
        if step_cache is not None:
            self.metrics.count("reused", step_cache.reused)
            step_cache.forget()
            self._run = replace(self._run, step_cache=None)

    def preparing(self, exact: bool = False) -> Dispatcher:
        """Return a view of this dispatcher whose calls wait for their graphs, whatever was chosen.

        Routes, graphs and counters are shared; the run is the view's own.

        Args:
            exact: also for those of their own that sizes are to have.
        """
        if exact:  # a general graph that serves is no reason not to make a better one
            self._resolver.routes.forget(lambda _key, route: isinstance(route, Served))
        view = copy.copy(self)
        view._run = RunContext(RunReport(self._library, self._eager_times), wait=True, exact=exact)
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
        found = []
        for signature, route in self._resolver.routes.served():
            eager = self._eager_times.seconds(route.proof_key, signature)
            graph = self.times.usual(route.graph_key, signature)
            if eager and graph:
                found.append(Speed(route.graph_key, largest_tensor(signature), eager, graph))
        return found

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return ``forward(*args, **kwargs)``, from a compiled graph where one can serve it.

        Args:
            module: whose weights ``forward`` uses.
            forward: the host's own code; also the fallback and the reference.
        """
        return self._answer(Invocation(module, forward, args, kwargs), self._run)

    @property
    def calls(self) -> int:
        """The calls of this run so far, served or not."""
        return self._run.report.calls

    def passed_by(self, module: torch.nn.Module, reason: str) -> None:
        """Count a call of ``module`` that was answered without this dispatcher being asked, for this reason."""
        self._teller.fell_back(module, Eager(reason), self._run)

    # -- one call ------------------------------------------------------------------------------

    def _answer(self, invocation: Invocation, run: RunContext) -> Any:
        decision = self._decide(invocation, run)
        if isinstance(decision, Serve):
            decision = self._serve(decision, run)
        if isinstance(decision, Output):
            return decision.value
        if isinstance(decision, BatchSplit):
            return self._serve_in_parts(decision, invocation, run)
        # Nothing is being handled here: while an exception is, every attribute that a module finds only in its
        # __getattr__ costs more, which made eager models a fifth slower.
        self._teller.fell_back(invocation.module, decision, run)
        return invocation.eager()

    def _decide(self, invocation: Invocation, run: RunContext) -> Serve | BatchSplit | Eager | Output:
        """Return what answers an invocation, or the answer. Whatever goes wrong with us, the host can do without."""
        try:
            pending = None if run.wait else self._resolver.pending(invocation, run)
            if pending is not None:
                return Eager(pending.reason, expected=True)
            request = self._guard.request(invocation, run)
            if request.is_checked:
                return self._resolver.resolve(request, run)
            output = self._served_ahead(request, run)
            if output is None and not self._guard.confirms(request):
                request = self._guard.request(invocation, run)
            return output or self._resolver.resolve(request, run)
        except self._host.interruption:
            raise
        except NotCovered as refusal:
            return Eager(refusal.reason)
        except Exception as error:
            log.debug("looking for a graph failed", exc_info=True)
            kind, line = type(error).__name__, first_line(error)
            return Eager(message("looking for its graph failed ({kind}: {first_line})", kind=kind, first_line=line))

    def _serve(self, serve: Serve, run: RunContext) -> Output | Eager:
        """Run the graph of a decision, and compare it with eager where that is due."""
        due = self._verifier.is_due(serve, run)
        reuse = run.step_cache is not None and self._executor.reuses(serve, run) and not due
        output = self._executor.run(serve, run, reuse)
        if isinstance(output, Failed):
            if output.for_good:
                self._resolver.failed(serve, output.reason)
            return Eager(output.reason)
        if due:
            verdict = self._verifier.judge(serve, output, run)
            if verdict.reason is not None:
                settle = self._resolver.no_reuse if verdict.only_when_reusing else self._resolver.disproved
                settle(serve, verdict.reason)
                self._teller.fell_back(serve.request.invocation.module, Eager(verdict.reason), run)
                return Output(verdict.output)
            output = verdict.output
        self._note_served(serve, run)
        return Output(output)

    def _served_ahead(self, request: Request, run: RunContext) -> Output | None:
        """Answer the first call of a run on a GPU, and look at the module while the GPU computes.

        Looking takes 26 ms for SDXL and 7 for its VAE, which no picture is to wait for. None where the module has to be
        looked at first, where it turned out to be another one, or where anything went wrong: nothing was made, compared
        or kept, and the call is answered as any other.
        """
        try:
            serve = self._resolver.known(request, run)
            if serve is None or not serve.graph.returns_early(request.device) or self._verifier.is_due(serve, run):
                return None
            output = self._executor.run(serve, run, self._executor.reuses(serve, run))
            if not isinstance(output, Failed) and self._guard.confirms(request):
                self._note_served(serve, run)
                return Output(output)
        except self._host.interruption:
            raise
        except Exception:
            log.debug("a call could not be answered before its model was looked at", exc_info=True)
        if run.step_cache is not None:
            run.step_cache.start_over()
        return None

    def _serve_in_parts(self, split: BatchSplit, invocation: Invocation, run: RunContext) -> Any:
        module, forward = invocation.module, invocation.forward
        output, separable = self._resolver.sources.splitter.run(
            split,
            bind(forward, invocation.args, invocation.kwargs),
            serve=lambda part: self._answer(Invocation(module, forward, (), part), run.of_part()),
            eager=invocation.eager,
        )
        if not separable:
            self._resolver.never_split()
        return output

    def _note_served(self, serve: Serve, run: RunContext) -> None:
        if run.report.graph_answered(serve.route, serve.request.call.signature):  # the first of its kind in this run
            self._resolver.prefer_better(serve, self.times)
        self.metrics.served(serve.route.graph_key)
