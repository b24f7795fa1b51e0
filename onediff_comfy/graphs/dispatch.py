"""Dispatch: which compiled graph serves this call, and what happens when none can.

call → split → (route known?) → graph(current weights, call's tensors) → output
             → otherwise: the most specialised graph there is, from memory or disk
             → otherwise: capture for all sizes → graph key → compile → route
first output of a graph at each set of sizes → compared with eager's
anything not covered → the host's own forward, with the reason counted and logged once
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..capture.alone import running
from ..capture.call import Call, NotCovered, Signature, bind, split
from ..capture.fp8 import fp8_unavailable
from ..capture.target import Target
from ..capture.withheld import OptionRead
from ..engines import choose
from ..engines.base import CompiledGraph, Engine, EngineError
from ..messages import Message, first_line, message
from ..metrics import Metrics
from . import proof, skeleton
from .background import Background
from .jobs import Waited
from .key import Manner, compiler
from .library import GraphLibrary, NotYet, waiting_for_turn
from .making import HostServices, Maker, describe
from .parted import Parted, PartedCalls
from .recorded import RecordedGraph
from .routes import Refused, Route, Routes, Served
from .run import Run
from .specialise import Specialiser
from .step_cache import ReusableGraph, StepCache
from .timing import EAGER, RunTimes

log = logging.getLogger(__name__)

_SHOW_AGAIN_S = 1.0
# Of one module, in one node: each is another capture, and some are another compilation. An extension that counts
# something in an attribute would have one made for every image.
_MOST_IDENTITIES = 16


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


_Call = tuple[torch.nn.Module, Callable[..., Any], Sequence[Any], Mapping[str, Any]]


def no_sizes(_signature: Signature) -> bool:
    """Calls of no size are to have a graph of their own."""
    return False


class Dispatcher:
    """Serves the calls of one accelerated model.

    Args:
        engine: one of ``ENGINE_NAMES``.
        library: where graphs are kept.
        host: what is needed of the host.
        show: shows a short status text to the person, on the node.
        specialise: whether calls of this signature are to have a graph of their own, for their sizes
            alone, though a general graph serves them too. It is made ahead (``waiting``) or in the background.
        in_background: nobody waits for a graph: it is made by another process, and until it is there
            calls run as the host would run them.
        precision: one of ``PRECISIONS``; with fp8, graphs are lossless where it cannot be had or is too far off.
        sparing: of the calls that could be replayed through CUDA graphs, only those are that are bound by launching. A
            recording keeps the memory of everything that is computed in it.
        alone_s: in the background, for how many seconds of the first run nothing but eager is at work, where no graph
            of any model is in memory yet. What was not begun then is begun when the run ends.

    Attributes:
        metrics: what served this model's calls, and what did not; part of the library's.
        run_times: how long its graphs ran.
    """

    def __init__(
        self,
        engine: str,
        library: GraphLibrary,
        host: HostServices,
        show: Callable[[str], None] = lambda _text: None,
        specialise: Callable[[Signature], bool] = no_sizes,
        in_background: bool = False,
        precision: str = "lossless",
        sparing: bool = False,
        alone_s: float = 0.0,
    ) -> None:
        self._engine = engine
        self._precision = precision
        self._not_in_fp8: dict[str, str] = {}  # fingerprints of targets, and why
        self._left_whole: dict[str, str] = {}  # likewise, of those that no step cache can use
        self._sparing = sparing
        self._library = library
        self._host = host
        self._show = show
        self._specialiser = Specialiser(library, specialise)
        self._in_background = in_background
        self._alone_s = alone_s
        self._first_call: tuple[float, _Call] | None = None  # when it came
        self._ahead = False
        self.metrics = Metrics(total=library.metrics)
        self.run_times = RunTimes()
        self._targets: dict[int, Target] = {}
        self._unchecked: set[int] = set()
        self._identities: dict[int, set[str]] = {}  # of a module, the fingerprints that it had
        self._last_known: dict[int, dict[tuple[str, str], str]] = {}  # of those that had the most, attributes
        self._changing: dict[int, tuple[Target, Message]] = {}  # what changed since
        self._routes = Routes()
        self._not_general: set[tuple[str, Signature]] = set()
        self._parted = PartedCalls(host.options_name)
        self._preparing = threading.RLock()
        self._warned: set[str] = set()
        self._on_its_way: tuple[str, Callable[[], str | None]] | None = None  # why not yet, and how far
        self._shown = 0.0
        self._run = Run(library, self.run_times)
        self._step_cache: StepCache | None = None
        self._eager_is_warm = False
        self._time_again: tuple[str, tuple[int, ...]] | None = None

    def begin_run(self, step_cache: StepCache | None = None) -> None:
        """A sampling run begins: modules are looked at again, for extensions may have changed them since.

        Args:
            step_cache: decides in each step of this run whether deep layers are computed; without one they always are.
        """
        self._forget_first_call()
        self._step_cache = step_cache
        self._routes.reusing = step_cache is not None
        self._unchecked = set(self._targets)
        for target in self._targets.values():
            target.look_at_weights_anew()
        self._specialiser.begin_run()
        self._run = Run(self._library, self.run_times)

    def begin_step(self) -> None:
        """A prediction is asked for; the calls for it follow. Unless this is said, no step cache reuses anything."""
        if self._step_cache is not None:
            self._step_cache.begin_step()

    def end_run(self, module: torch.nn.Module, what: str = "") -> None:
        """A sampling run over ``module`` ended: one line on what served it, in the log and on the node.

        Args:
            module: what was run.
            what: what it made, for people: ``1024×1024 b1``.
        """
        self.end_step_cache()
        self._look_for_the_first_call()
        self._library.recordings.release_if_short()
        if not self._run.calls:
            self._fall_back(module, message("this model family never hands its calls to diffusion-model wrappers"))
            return
        log.info("OneDiff: %d of %d model calls served by compiled graphs", self._run.served, self._run.calls)
        self._show(self._run.status(what))

    def end_step_cache(self) -> None:
        """The run is over, or has failed: nothing is reused any more, and nothing kept for it."""
        if self._step_cache is not None:
            self.metrics.count("reused", self._step_cache.reused)
            self._step_cache.forget()
            self._step_cache = None

    @contextlib.contextmanager
    def waiting(self, exact: bool = False) -> Iterator[None]:
        """Inside, calls wait for their graphs, whatever was chosen: to prepare them is what is wanted.

        Args:
            exact: also for those of their own that ``specialise`` wants them to have.
        """
        before, self._in_background, self._ahead, self._on_its_way = self._in_background, False, exact, None
        if exact:  # a general graph that serves is no reason not to make a better one
            self._routes.forget_all(Served)
        try:
            yield
        finally:
            self._in_background, self._ahead = before, False

    def graph_keys(self) -> list[str]:
        """The keys of the compiled graphs that serve this model so far."""
        return list(dict.fromkeys(route.graph_key for _, route in self._routes.served()))

    def chosen(self, device: torch.device) -> tuple[str, str]:
        """What makes graphs for ``device``: the engine's name, and one of ``PRECISIONS``.

        Raises:
            EngineError: no engine can.
        """
        engine = choose(self._engine, device)
        return engine.name, self._precision if self._fp8_refusal(engine, device) is None else "lossless"

    def refusals(self) -> list[str]:
        """Why calls of this model are not served, as far as that is settled."""
        return self._routes.refusals()

    def speeds(self) -> list[Speed]:
        """How fast calls of each size are, where eager's time is known."""
        found = []
        for signature, route in self._routes.served():
            eager = self._library.eager_seconds(route.graph_key, route.sizes)
            graph = self.run_times.usual(route.graph_key, signature)
            if eager and graph:
                found.append(Speed(route.graph_key, describe(signature), eager, graph))
        return found

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """``forward(*args, **kwargs)``, from a compiled graph where one can serve it.

        Args:
            module: whose weights ``forward`` uses.
            forward: the host's own code; also the fallback and the reference.
        """
        try:
            if not self._routes:
                self._put_off((module, forward, args, kwargs))
                self._look_later()
            answered = self._answered_ahead(module, forward, args, kwargs)
            if answered is None:
                route = self._find(module, forward, args, kwargs)
                if isinstance(route, Parted):
                    return self._run_in_parts(route, module, forward, args, kwargs)
                answered = route, self._answer(route, forward, args, kwargs)
            found, output = answered
        except NotCovered as error:
            refusal = error
        else:
            self._run.graph_answered(found.route, found.call.signature)
            self.metrics.served(found.route.graph_key)
            return output
        # Not in the except block: while an exception is being handled, every attribute that a module finds
        # only in its __getattr__ costs more, which made eager models a fifth slower.
        self._fall_back(module, refusal.reason, quiet=isinstance(refusal, NotYet))
        if isinstance(refusal, _Disproved):
            return refusal.expected
        del refusal  # its traceback holds the call's tensors
        return forward(*args, **kwargs)

    # -- finding the graph ---------------------------------------------------------------------

    def _find(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Found | Parted:
        """What serves a call.

        Raises:
            NotCovered: nothing does. Also for whatever is wrong with us or with what we are given: the host may well
                do without.
        """
        try:
            return self._looked_up(module, forward, args, kwargs)
        except (NotCovered, self._host.interruption):
            raise
        except Exception as error:
            log.debug("looking for a graph failed", exc_info=True)
            raise NotCovered(
                message(
                    "looking for its graph failed ({kind}: {first_line})",
                    kind=type(error).__name__,
                    first_line=first_line(error),
                )
            ) from error

    def _looked_up(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Found | Parted:
        target = self._target(module)
        arguments, call = self._call_of(target, forward, args, kwargs)
        route = self._routes.find(target, call.signature)
        graph = self._library.cache.get(route.graph_key) if isinstance(route, Served) else None
        if graph is None and not isinstance(route, Refused | Parted):
            with self._preparing:
                call, route, graph = self._prepare_unless_on_its_way(target, forward, arguments, call)
        if isinstance(route, Refused):
            raise NotCovered(route.reason)
        if isinstance(route, Parted):
            return route
        assert isinstance(route, Served) and graph is not None
        self._specialise(target, forward, call, route, graph)
        return self._found(target, module, arguments, call, route, graph)

    def _call_of(
        self, target: Target, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Call]:
        """The arguments by name, and the call that they are.

        Raises:
            NotCovered: no graph can stand for such a call.
        """
        self._host.refuse(target.layers)
        arguments = bind(forward, args, kwargs)
        call = self._split(target, forward, arguments)
        if not call.tensors:
            raise NotCovered(message("the call has no tensors"))
        if torch.is_grad_enabled() and any(t.requires_grad for t in pytree.tree_leaves(arguments) if _is_tensor(t)):
            raise NotCovered(message("gradients are wanted, and compiled graphs have none"))
        if torch.is_autocast_enabled(_device_of(call).type):
            raise NotCovered(message("autocast is on, and graphs compute in the types that weights and inputs have"))
        return arguments, call

    def _specialise(
        self, target: Target, forward: Callable[..., Any], call: Call, route: Served, graph: CompiledGraph
    ) -> None:
        """Have the next call find a better graph than the one that serves this, if there is one."""
        if graph.shapes.general:
            maker = functools.partial(self._maker, target, _device_of(call))
            better = self._specialiser.ready(maker, target, forward, call, route.graph_key)
        else:
            better = self._specialiser.regretted(call, route.graph_key, self.run_times)
        if better:
            self._routes.forget(target, call.signature)

    def _found(
        self,
        target: Target,
        module: torch.nn.Module,
        arguments: Mapping[str, Any],
        call: Call,
        route: Served,
        graph: CompiledGraph,
    ) -> _Found:
        weights = target.weights(graph.binding.weight_names, _device_of(call))
        prompts = self._host.stream(arguments.get(self._host.options_name) or {})
        stream = None if prompts is None else (route.graph_key, id(module), call.signature, prompts)
        return _Found(target, call, route, graph, weights, stream)

    def _answered_ahead(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[_Found, Any] | None:
        """The answer to the first call of a run, computed on a GPU while the module is looked at.

        Looking takes 26 ms for SDXL and 7 for its VAE, which no picture is to wait for. None where the module has to be
        looked at first, where it turned out to be another one, or where anything went wrong: nothing was made, compared
        or kept, and the call is answered as any other.
        """
        target = self._targets.get(id(module))
        if id(module) not in self._unchecked or target is None or target.refusal is not None:
            return None
        if not target.is_untouched():
            return None
        try:
            arguments, call = self._call_of(target, forward, args, kwargs)
            route = self._routes.find(target, call.signature)
            graph = self._library.cache.get(route.graph_key) if isinstance(route, Served) else None
            if graph is None or not isinstance(route, Served) or not _computes_meanwhile(_device_of(call)):
                return None
            kind = (route.graph_key, route.sizes)
            if not self._library.is_proved(*kind) or kind == self._time_again:
                return None
            found = self._found(target, module, arguments, call, route, graph)
            with self.run_times.measured(route.graph_key, call.signature, _device_of(call)):
                flat = self._call(found, self._reuses(found))
            if self._target(module) is not target:
                self._start_over()
                return None
            self._specialise(target, forward, call, route, graph)
        except self._host.interruption:
            raise
        except Exception:
            log.debug("a call could not be answered before its model was looked at", exc_info=True)
            self._start_over()
            return None
        return found, pytree.tree_unflatten(flat, graph.binding.output)

    def _start_over(self) -> None:
        if self._step_cache is not None:
            self._step_cache.start_over()

    def _target(self, module: torch.nn.Module) -> Target:
        key = id(module)
        target = self._targets.get(key)
        if target is None or ((key in self._unchecked or not target.is_untouched()) and not target.is_current()):
            target = self._targets[key] = Target(module, self._host.code, self._host.formats)
        self._unchecked.discard(key)
        if target.refusal is not None:
            raise NotCovered(target.refusal)
        identities = self._identities.setdefault(key, set())
        if target.fingerprint not in identities:
            if len(identities) >= _MOST_IDENTITIES:
                raise NotCovered(self._what_changes(key, target))
            identities.add(target.fingerprint)
            if len(identities) == _MOST_IDENTITIES:
                self._last_known[key] = target.attributes()
        return target

    def _what_changes(self, key: int, target: Target) -> Message:
        """Why a module that had the most identities has another one again."""
        if key not in self._changing or self._changing[key][0] is not target:
            before, now = self._last_known[key], target.attributes()
            changed = [place for place in now | before if now.get(place) != before.get(place)]
            reason = message("its code, layers or weights change again and again")
            if changed:
                layer, name = changed[0]
                reason = message("attribute {name} of layer {layer} changes again and again", name=name, layer=layer)
            self._changing[key] = target, reason
        return self._changing[key][1]

    def _split(self, target: Target, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Call:
        return split(
            arguments,
            function=getattr(forward, "__qualname__", type(forward).__qualname__),
            options_name=self._host.options_name,
            options_read=self._library.options_read(target.fingerprint),
        )

    def _put_off(self, call: _Call) -> None:
        """Leave the first moments in the background to eager: looking takes 0.2 s, and who compiles disturbs.

        Raises:
            NotYet: these are the first moments.
        """
        if not (self._alone_s and self._in_background and self._library.background) or len(self._library.cache):
            return  # nobody is to be spared, or its graph may be there
        if self._first_call is None:
            self._first_call = time.monotonic(), call
        if time.monotonic() - self._first_call[0] < self._alone_s:
            raise NotYet(message("a graph is made in the background once the first image is there"))
        self._forget_first_call()

    def _look_for_the_first_call(self) -> None:
        """The run is over: look for the graph that was not looked for in its first moments."""
        if self._first_call is None:
            return
        _, call = self._first_call
        self._forget_first_call()
        with contextlib.suppress(NotCovered):  # most of all, not yet; whatever else it is, the next call is told again
            self._find(*call)

    def _forget_first_call(self) -> None:
        if self._first_call is not None:  # nor does another one count as the first
            self._first_call, self._alone_s = None, 0.0

    def _look_later(self) -> None:
        """While a graph is on its way, looking for it must not slow every call down.

        Raises:
            NotYet: it is not worth looking yet.
        """
        if self._on_its_way is None:
            return
        reason, how_far = self._on_its_way
        progress = how_far()
        if progress is None:
            self._on_its_way = None
            return
        if time.monotonic() - self._shown > _SHOW_AGAIN_S:
            self._shown = time.monotonic()
            self._show(progress)
        raise NotYet(reason, how_far)

    def _prepare_unless_on_its_way(
        self, target: Target, forward: Callable[..., Any], arguments: Mapping[str, Any], call: Call
    ) -> tuple[Call, Route, CompiledGraph | None]:
        self._look_later()
        try:
            return self._prepare(target, forward, arguments, call)
        except NotYet as answer:
            self._on_its_way = (answer.reason, answer.progress)  # the exception itself would keep the call's tensors
            raise

    def _prepare(
        self, target: Target, forward: Callable[..., Any], arguments: Mapping[str, Any], call: Call
    ) -> tuple[Call, Route, CompiledGraph | None]:
        """Find or make the graph for a signature that has no route yet, and remember the route."""
        device = _device_of(call)
        manner = Manner()
        # Before minutes of work: are the weights where the graph would need them? They may be back
        # for the next call, so a refusal for this reason is not remembered.
        target.weights(tuple(target.specs), device)
        try:
            maker = self._maker(target, device)
            manner = maker.manner
            exact = self._exact(maker.engine, target, call)
            found = self._kept(maker, target, call, exact)
            if found is None and not maker.engine.general:
                parted = self._parted.plan(target.fingerprint, call, self._routes.served_of(target))
                if parted is not None:
                    self._routes.remember(target, call.signature, parted)
                    return call, parted, None
            if found is None:
                call, found = self._made(maker, target, forward, arguments, call, general=not exact)
            if found is None and not exact:
                call, found = self._made(maker, target, forward, arguments, call, general=False)
            if found is None:
                raise NotCovered(message("a graph was compiled for these sizes that does not take them"))
            self._show(message("compiled graph ready"))
        except (NotYet, self._host.interruption):
            raise
        except NotCovered as refusal:
            reason = refusal.reason
        except EngineError as error:
            reason = str(error)
        except Exception as error:
            # A compiler's own bug, a full disk, ...: nothing that eager could not do without.
            log.debug("preparing a graph failed", exc_info=True)
            reason = _failed(error)
        else:
            route, graph = replace(found[0], note=self._note(target, maker)), found[1]
            self._routes.remember(target, call.signature, route)
            return call, route, graph
        if manner.reusable:
            self._leave_whole(target, reason)
            return self._prepare(target, forward, arguments, call)
        if manner.fp8:
            self._leave_fp8(target, reason)
            return self._prepare(target, forward, arguments, call)
        return call, self._refuse(target, call, reason), None

    def _serves_in_fp8(self, found: _Found) -> bool:
        device = _device_of(found.call)
        return self._in_fp8(found.target, choose(self._engine, device), device)

    def _leave_whole(self, target: Target, reason: str) -> None:
        """Serve this target with graphs that are not cut in two from now on."""
        self._left_whole[target.fingerprint] = reason
        self._routes.forget_target(target)

    def _leave_fp8(self, target: Target, reason: str) -> None:
        """Serve this target with lossless graphs from now on."""
        self._not_in_fp8[target.fingerprint] = reason
        self._routes.forget_target(target)

    def _refuse(self, target: Target, call: Call, reason: str) -> Refused:
        route = Refused(reason)
        self._routes.remember(target, call.signature, route)
        return route

    def _maker(self, target: Target, device: torch.device) -> Maker:
        engine = choose(self._engine, device)
        reusable = self._routes.reusing and target.fingerprint not in self._left_whole
        manner = Manner(reusable, self._in_fp8(target, engine, device))
        return Maker(engine, device, compiler(engine, device, manner), self._host)

    def _in_fp8(self, target: Target, engine: Engine, device: torch.device) -> bool:
        """Whether graphs of this target are to compute in fp8."""
        return self._precision == "fp8" and self._fp8_refusal(engine, device, target) is None

    def _fp8_refusal(self, engine: Engine, device: torch.device, target: Target | None = None) -> str | None:
        """Why graphs, of this target, cannot compute in fp8."""
        if not engine.fp8:
            return message("the {engine} engine does not compute in fp8", engine=engine.name)
        return fp8_unavailable(device) or (self._not_in_fp8.get(target.fingerprint) if target is not None else None)

    def _note(self, target: Target, maker: Maker) -> str:
        """What the person should know of a graph that this maker gives: that it is not in fp8 although it should be."""
        reason = self._fp8_refusal(maker.engine, maker.device, target) if self._precision == "fp8" else None
        if reason is None:
            return ""
        note = message("lossless instead of fp8: {reason}", reason=reason)
        if note not in self._warned:
            self._warned.add(note)
            log.warning("OneDiff: %s", note)
        return note

    def _exact(self, engine: Engine, target: Target, call: Call) -> bool:
        """Whether this call waits for a graph for its sizes alone."""
        family = (target.fingerprint, call.signature.any_sizes())
        return (
            not engine.general
            or family in self._not_general
            or (self._ahead and self._specialiser.wanted(call.signature))
        )

    def _kept(self, maker: Maker, target: Target, call: Call, exact: bool) -> tuple[Served, CompiledGraph] | None:
        """The most specialised graph that exists for a call, in memory or on disk."""
        for general in (False,) if exact else (False, True):
            for candidate in self._library.candidates(maker.call_key(target, call, general)):
                sizes = candidate.shapes.values(call.signature.tensors)
                if sizes is not None and self._library.useful(candidate.graph_key):
                    graph = self._loaded(candidate.graph_key, maker)
                    if graph is not None:
                        return Served(candidate.graph_key, tuple(sizes.values())), graph
        return None

    def _loaded(self, graph_key: str, maker: Maker) -> CompiledGraph | None:
        if not self._in_background:
            return self._library.loaded(graph_key, maker.engine, maker.device, self._while_loading)
        return self._library.loaded_soon(graph_key, maker.engine, maker.device)

    def _made(
        self,
        maker: Maker,
        target: Target,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        call: Call,
        general: bool,
    ) -> tuple[Call, tuple[Served, CompiledGraph] | None]:
        """A graph made for this call, or for calls like it of all sizes; None if it does not serve this one.

        Raises:
            NotYet: it is being made in the background.
            NotCovered, EngineError: it cannot be made.
        """
        options = arguments.get(self._host.options_name) or {}
        while True:
            names = maker.call_key(target, call, general=True), maker.call_key(target, call, general)
            known = self._library.failures.reason(*names)
            try:
                if known is not None:
                    raise NotCovered(known)
                if self._in_background:
                    self._make_in_background(maker, target, forward, call, general)
                with self._failures_noted(*names):
                    key, graph = maker.make(self._library, target, forward, call, options, general, self._show)
            except OptionRead as read:
                self._library.learn_option(target.fingerprint, read.name)
                call = self._split(target, forward, arguments)
            except NotCovered as refusal:
                if not general or isinstance(refusal, NotYet) or maker.manner != Manner():  # that goes before all sizes
                    raise
                log.info("OneDiff: no graph for all sizes (%s); one for these sizes is made", refusal.reason)
                self._not_general.add((target.fingerprint, call.signature.any_sizes()))
                return call, None
            else:
                sizes = graph.shapes.values(call.signature.tensors)
                return call, None if sizes is None else (Served(key, tuple(sizes.values())), graph)

    @contextlib.contextmanager
    def _failures_noted(self, family: str, key: str) -> Iterator[None]:
        """What fails inside would fail in the same way for the next node; not what a person can mend meanwhile."""
        try:
            yield
        except (NotYet, EngineError, MemoryError, torch.OutOfMemoryError, OSError, self._host.interruption):
            raise
        except NotCovered as refusal:
            self._library.failures.add(family, key, refusal.reason)
            raise
        except Exception as error:
            log.debug("making a graph failed", exc_info=True)
            self._library.failures.add(family, key, _failed(error))
            raise NotCovered(_failed(error)) from error

    def _make_in_background(
        self, maker: Maker, target: Target, forward: Callable[..., Any], call: Call, general: bool
    ) -> None:
        """See to it that another process makes a graph; returns only where there is no such process.

        Raises:
            NotYet: the other process is at work, or what it made is being loaded.
            NotCovered, EngineError: it cannot make it. To make it here is not what was chosen: somebody would wait.
            OptionRead: it found that the target reads an option that is not part of the call.
        """
        background = self._library.background
        if background is None:
            return
        if type(maker.engine).to_parts is Engine.to_parts:
            unkept = message("graphs of the {engine} engine are not kept in files", engine=maker.engine.name)
            raise EngineError(_not_in_background(unkept))
        key = maker.call_key(target, call, general)
        outcome = background.outcome(key)
        if outcome is None:
            if background.seconds(key) is None:
                try:
                    background.start(key, maker.job(target, forward, call, general))
                except (skeleton.Unpicklable, AttributeError) as error:
                    raise EngineError(_not_in_background(error)) from error
            raise NotYet(message("a graph is being compiled in the background"), lambda: _progress(background, key))
        if outcome.option is not None:
            raise OptionRead(outcome.option)
        self._library.forget_candidates(key)
        if outcome.failure is not None:
            raise NotCovered(_not_in_background(outcome.failure))
        if self._kept(maker, target, call, exact=not general) is None:
            raise EngineError(_not_in_background(message("its graph is not in the cache folder")))
        raise NotYet(message("a graph was compiled in the background"))

    def _while_loading(self, waited: Waited) -> None:
        self._host.check_interrupted()
        loading = message("loading the compiled graph, {seconds:.0f} s", seconds=waited)
        self._show(waiting_for_turn(waited) if waited.for_turn else loading)

    # -- running it ----------------------------------------------------------------------------

    def _answer(
        self, found: _Found, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        graph, call = found.graph, found.call
        kind = (found.route.graph_key, found.route.sizes)
        compared = not self._library.is_proved(*kind) or kind == self._time_again
        reuse = self._reuses(found) and not compared
        try:
            with self.run_times.measured(kind[0], None if reuse else call.signature, _device_of(call)):
                flat = self._call(found, reuse)
        except torch.OutOfMemoryError as error:
            raise NotCovered(message("the compiled graph ran out of memory")) from error
        except Exception as error:
            log.debug("compiled graph failed", exc_info=True)
            reason = message(
                "the compiled graph failed ({kind}: {first_line})",
                kind=type(error).__name__,
                first_line=first_line(error),
            )
            if self._serves_in_fp8(found):
                self._leave_fp8(found.target, reason)
            else:
                self._refuse(found.target, call, reason)
            raise NotCovered(reason) from error
        output = pytree.tree_unflatten(flat, graph.binding.output)
        if compared:
            again = proof.again(forward, args, kwargs, found.weights)
            with self.run_times.measured(EAGER, call.signature, _device_of(call)):
                expected = forward(*args, **kwargs)
            self._prove(found, output, expected, again)
        return output

    def _run_in_parts(
        self,
        parted: Parted,
        module: torch.nn.Module,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        step_cache, self._step_cache = self._step_cache, None  # one part is no earlier step of another
        try:
            output, separable = self._parted.run(
                parted,
                bind(forward, args, kwargs),
                serve=lambda part: self(module, forward, (), part),
                eager=lambda: forward(*args, **kwargs),
            )
        finally:
            self._step_cache = step_cache
        if not separable:
            self._routes.forget_all(Parted)
        return output

    def _reuses(self, found: _Found) -> bool:
        """Whether the step cache wants this call to reuse what an earlier step found."""
        if self._step_cache is None:
            return False
        if found.stream is None:
            self._step_cache.cannot_reuse(message("a call does not say which prompt it is for"))
            return False
        if not isinstance(found.graph, ReusableGraph):
            no_blocks = message("this model has no blocks that could be left out")
            self._step_cache.cannot_reuse(self._left_whole.get(found.target.fingerprint, no_blocks))
            return False
        return self._step_cache.reuses(found.stream)

    def _call(self, found: _Found, reuse: bool) -> Sequence[torch.Tensor]:
        """Run a graph; where memory runs out, give back all that recordings hold and run it once more.

        Args:
            reuse: of a graph that can, take the deep layers' work from an earlier step.
        """
        graph, step_cache = found.graph, self._step_cache

        def run(reuse: bool) -> Sequence[torch.Tensor]:
            with running():
                if step_cache is None or found.stream is None or not isinstance(graph, ReusableGraph):
                    if isinstance(graph, RecordedGraph):
                        return graph.run(found.weights, found.call.tensors, self._sparing)
                    return graph(found.weights, found.call.tensors)
                return step_cache.call(graph, found.stream, found.weights, found.call.tensors, reuse)

        try:
            return run(reuse)
        except torch.OutOfMemoryError:
            if step_cache is not None:
                step_cache.forget()
            released = self._library.recordings.release()
            log.warning(
                "OneDiff: out of memory; released %d MB of CUDA graph recordings and tried again", released >> 20
            )
        torch.cuda.empty_cache()
        return run(reuse=False)

    def _prove(self, found: _Found, actual: Any, expected: Any, again: proof.Again | None = None) -> None:
        """Compare a new graph's first output with eager's; retire the graph if rounding cannot explain it.

        Args:
            found: the call and its graph.
            actual: the graph's output.
            expected: eager's.
            again: tells how far off a graph may be that is off by more than rounding to 16 bits or more explains.

        Raises:
            _Disproved: the graph is wrong.
        """
        dtypes = {tensor.dtype for tensor in (*found.weights, *found.call.tensors)}
        in_fp8 = self._serves_in_fp8(found)
        allowed = proof.limit(dtypes, _device_of(found.call), in_fp8)
        error = proof.difference(actual, expected)
        if again is not None and not error <= allowed:
            allowed = max(allowed, again(expected))
        if error <= allowed and not self._brief_difference(found, expected) <= allowed:
            reason = message("a graph that reuses steps differed from eager")
            self._leave_whole(found.target, reason)
            raise _Disproved(reason, expected)
        if not error <= allowed:
            reason = message(
                "a compiled graph differed from eager by {error:.2g} (at most {allowed:.2g}) and was retired",
                error=error,
                allowed=allowed,
            )
            self._library.retire(found.route.graph_key, reason)
            if in_fp8:
                self._leave_fp8(found.target, message("fp8 was too far off for this model"))
            elif found.graph.shapes.general:
                self._refuse(found.target, found.call, reason)
            else:  # the general graph may be right where this one was not
                self._routes.forget(found.target, found.call.signature)
            raise _Disproved(reason, expected)
        kind = (found.route.graph_key, found.route.sizes)
        seconds = self.run_times.usual(EAGER, found.call.signature) or 0.0
        if kind == self._time_again and self._library.is_proved(*kind):
            self._time_again = None
            self._library.eager_took(*kind, seconds)
            return
        if self._eager_is_warm:
            self._library.eager_took(*kind, seconds)
        else:  # its first call loads kernels and says nothing of its speed: once more, at the next call
            self._eager_is_warm, self._time_again = True, kind
        self._library.proved(*kind)
        log.info("OneDiff: new graph proved against eager, relative error %.1e (at most %.1e)", error, allowed)

    def _brief_difference(self, found: _Found, expected: Any) -> float:
        """How far the graph is off that reuses what a call found for that very call, where it differs by rounding."""
        graph, weights, tensors = found.graph, found.weights, found.call.tensors
        if not isinstance(graph, ReusableGraph):
            return 0.0
        features = self._step_cache.features(found.stream) if self._step_cache is not None else None
        try:
            with running():
                if features is None:  # nothing is reused in this run, but it may be in the next
                    _, features = graph.compute(weights, tensors)
                flat, _ = graph.reuse(weights, tensors, features)
        except Exception as error:  # most of all, no memory: eager's result is there, and the run goes on
            log.info("OneDiff: steps cannot be reused (%s: %s)", type(error).__name__, first_line(error))
            log.debug("the brief graph failed", exc_info=True)
            return float("inf")
        return proof.difference(pytree.tree_unflatten(flat, graph.binding.output), expected)

    def _fall_back(self, module: torch.nn.Module, reason: str, quiet: bool = False) -> None:
        self._run.eager_answered(reason)
        self.metrics.fell_back(reason)
        if quiet:
            return
        if reason not in self._warned:
            self._warned.add(reason)
            self._show(message("not accelerated: {reason}", reason=reason))
            log.warning(
                "OneDiff: %s runs without acceleration: %s. The image is right, only not faster.",
                type(module).__name__,
                reason,
            )


class _Disproved(NotCovered):
    """A graph was wrong; eager's output is there. A forward may use its arguments up, and cannot be asked again."""

    def __init__(self, reason: str, expected: Any) -> None:
        super().__init__(reason)
        self.expected = expected


@dataclass(frozen=True)
class _Found:
    """A call with the graph that serves it and the weights that are in place for it."""

    target: Target
    call: Call
    route: Served
    graph: CompiledGraph
    weights: Sequence[torch.Tensor]
    stream: Hashable  # what it shares with the same call in other steps of a run


def _not_in_background(why: object) -> str:
    return message("it cannot be compiled in the background ({why}); choose compile: wait", why=why)


def _progress(background: Background, key: str) -> str | None:
    seconds = background.seconds(key)
    if seconds is not None:
        return message("compiling in the background, {seconds:.0f} s", seconds=seconds)
    return message("waiting for another compilation in the background") if background.busy() else None


def _failed(error: Exception) -> str:
    return message("compiling failed ({kind}: {first_line})", kind=type(error).__name__, first_line=first_line(error))


def _computes_meanwhile(device: torch.device) -> bool:
    """Whether a call returns before ``device`` has computed what it gives."""
    return device.type == "cuda"


def _device_of(call: Call) -> torch.device:
    """Where the call computes: the device of its largest tensor (scalars may be elsewhere)."""
    return max(call.tensors, key=torch.Tensor.numel).device


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
