"""What stands in for a module's forward, for one accelerated object: its runs, its routes and its counters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..compilation.compile_graph import HostServices, largest_tensor
from ..compilation.library import GraphLibrary
from ..engines.eager import EagerEngine
from ..messages import message
from ..metrics import Metrics
from ..runtime.step_cache import StepCache
from .call_server import CallServer
from .decision import Eager, Invocation, Served
from .executor import CallTimes, Executor
from .module_guard import ModuleGuard
from .options import DEFAULTS, Options, Speed
from .resolution.batch_split import BatchSplitter
from .resolution.graph_provider import GraphProvider
from .resolution.pending import Awaited, CompileDelay
from .resolution.resolver import Resolver, Sources
from .resolution.specialization import Specializer
from .resolution.variant_policy import VariantPolicy
from .run import RunContext, RunReport, Teller
from .verification.eager_times import EagerTimes
from .verification.verifier import Verifier

log = logging.getLogger(__name__)


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
            CompileDelay(library, options.compile_delay_s),
        )
        self._resolver = Resolver(library, host, sources)
        self._eager_times = EagerTimes(library, self.times, gains=engine != EagerEngine.name)
        self._server = CallServer(
            library,
            host,
            guard,
            self._resolver,
            Executor(library, self.times, sources.policy, options.record_only_launch_bound),
            Verifier(library, self.times, self._eager_times, host.unplanned),
            Teller(self.metrics, show),
        )
        self._run = RunContext(self._new_report(), wait=not options.in_background)

    def begin_run(self, step_cache: StepCache | None = None) -> None:
        """Begin a sampling run: modules are looked at again, for extensions may have changed them since.

        Args:
            step_cache: decides in each step of this run whether deep layers are computed; without one they always are.
        """
        self.runs += 1
        self._resolver.put_off()
        self._server.guard.begin_run()
        self._server.verifier.begin_run()
        self._run = replace(self._run, report=self._new_report(), reusing=step_cache is not None, step_cache=step_cache)

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
        put_off = self._resolver.put_off()
        if put_off is not None:
            self._server.decide(put_off, self._run)
        self._server.guard.end_run()
        self._server.library.recordings.release_if_short()
        report = self._run.report
        if not report.calls:
            uncalled = message("the model was not called in this run")
            log.warning("OneDiff: %s (%s)", uncalled, type(module).__name__)
            self._server.teller.show(uncalled)
            return
        log.info("OneDiff: %d of %d model calls served by compiled graphs", report.served, report.calls)
        self._server.teller.show(report.status(what))

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
        view._run = RunContext(self._new_report(), wait=True, exact=exact)
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
        return self._server.answer(Invocation(module, forward, args, kwargs), self._run)

    @property
    def calls(self) -> int:
        """Return how many calls this run has had so far, served or not."""
        return self._run.report.calls

    def passed_by(self, module: torch.nn.Module, reason: str) -> None:
        """Count a call of ``module`` that was answered without this dispatcher being asked, for this reason."""
        self._server.teller.fell_back(module, Eager(reason), self._run)

    def _new_report(self) -> RunReport:
        return RunReport(self.metrics, self._server.library.metrics, self._eager_times.gain)
