"""Making one graph: capture, key, compile. The same here and in the process that compiles in the background."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..cache.call_index import reader_of
from ..cache.keys import CallKey, CompilerFingerprint, GraphKey, Variant
from ..cache.serialization import GraphOrigin
from ..capture.call import Call, ChangesState, NotCovered, Signature
from ..capture.export import Capture
from ..capture.fingerprint.code_ownership import NO_HOST, HostCode
from ..capture.parameters import method_of
from ..capture.rewrites.fp8_linear import IN_FP8
from ..capture.rewrites.op_substitutions import Forms
from ..capture.rewrites.step_cache_split import with_brief
from ..capture.target.target import Target
from ..capture.target.tensor_parts import TensorSubclasses, WeightFormat
from ..capture.tracing.operator_traits import foreign_operators, waits_unless_fused
from ..capture.tracing.trace_forward import TraceSettings, capture
from ..engines.base import CompiledGraph, Engine
from ..messages import Message, message
from . import weightless_pickle
from .background import Job, signature_fields
from .graph_builder import waiting_for_turn
from .job_queue import Waited
from .library import GraphLibrary

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostServices:
    """What the core needs of the host, so that it need not import it.

    Attributes:
        identity: the host's code and the settings that steer a capture, for the call key.
        options_name: the name of the forward's open-ended bag of options.
        capture_options: entries put into that bag while capturing.
        check_interrupted: raises when the person wants the run to end; cheap.
        refuse: raises NotCovered when a layer would not simply use its weights as they are. Asked in each run, and
            where a layer holds another object than before.
        watched: what layers hold that ``refuse`` is asked again for once one of it is not empty.
        side_multiple: what a function of a module likes the sides of its images to be multiples of (its patch,
            or what its levels shrink them by). A hint: general graphs are better where it holds. Given the module
            and the function's qualified name. 0 of a function that is given no images.
        prepare: makes layers fit to be traced, by setting attributes; they are put back after the capture.
        settings: what another process must take over to see the same host.
        stream: given the bag of options of a call, what it has in common with the same call in other steps of a run:
            which prompts it is for. None if that is not known; then nothing is reused.
        interruption: what ``check_interrupted`` raises.
        code: the host's own code, of which ``identity`` is made.
        recordable: operators of other libraries, ``library::operator``, that were seen to be replayed rightly from a
            CUDA graph. Graphs with any others are launched kernel by kernel.
        formats: the ways in which one weight of its models may be several tensors.
        layer_factory: makes classes of its models' layers.
        fused: operators that its models call, in the form that a compiler for a device fuses.
        unplanned: in this context the host's plan of what its models allocate takes no notice of what is allocated.
            Raises NotCovered where there is a plan that cannot be told so. The host's own forward runs outside of it.
        tracing: in this context its forwards are traced. What a trace has begun of such a plan ends with it.
        opaque: of ``capture_options``, those in whose place a graph calls what the host's own forward would call, for
            no trace can look into what the host was started with.
    """

    identity: str
    options_name: str
    capture_options: Mapping[str, Any]
    check_interrupted: Callable[[], None]
    refuse: Callable[[Iterable[torch.nn.Module]], None]
    watched: Callable[[Iterable[torch.nn.Module]], Sequence[Sized]] = lambda _layers: ()
    side_multiple: Callable[[torch.nn.Module, str], int] = lambda _module, _function: 1
    prepare: Callable[[Iterable[torch.nn.Module]], None] = lambda _layers: None
    settings: Callable[[], Mapping[str, Any]] = dict
    stream: Callable[[Mapping[str, Any]], Hashable] = lambda _options: ()
    interruption: type[BaseException] = KeyboardInterrupt
    code: HostCode = NO_HOST
    recordable: frozenset[str] = frozenset()
    formats: Sequence[WeightFormat] = (TensorSubclasses(),)
    layer_factory: weightless_pickle.LayerFactory = weightless_pickle.NO_FACTORY
    fused: Callable[[torch.device], Forms] = lambda _device: {}
    unplanned: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    tracing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    opaque: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class TargetCall:
    """A call that a graph is wanted for.

    Attributes:
        target: the module that ``forward`` runs.
        forward: called with arguments by name.
        call: its structure and tensors.
        options: its open-ended bag of options.
    """

    target: Target
    forward: Callable[..., Any]
    call: Call
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Maker:
    """An engine on a device, with what identifies the code that comes out of it."""

    engine: Engine
    device: torch.device
    compiler: CompilerFingerprint
    host: HostServices

    @property
    def variant(self) -> Variant:
        """Return what a person chose to give up for speed."""
        return Variant.of(self.compiler.options)

    def _substitutions(self) -> Forms:
        fused = self.host.fused(self.device) if self.engine.fuses else {}
        return {**self.engine.forms(), **fused, **(IN_FP8 if self.variant.fp8 else {})}

    def call_key(self, target: Target, call: Call, general: bool) -> str:
        """Return the name under which a graph for this call, or for calls like it of all sizes, is known."""
        return CallKey(target.fingerprint, _scope(call, general), self.host.identity, self.compiler).digest

    def job(self, target: Target, forward: Callable[..., Any], call: Call, general: bool) -> Job:
        """Return the same as ``make`` does, for another process to do.

        Raises:
            Unpicklable: the target cannot be sent to another process.
            AttributeError: the forward is not a method of the target's.
        """
        method = method_of(forward)
        name = method.__name__
        if getattr(target.module, name) != method:
            raise AttributeError(f"{name} is not a method of the model")
        return Job(
            module=weightless_pickle.to_bytes(
                target.module, self.host.formats, self.host.layer_factory, self.host.code.notes
            ),
            forward=name,
            on_copies=method is not forward,
            fingerprint=target.fingerprint,
            signature=signature_fields(call.signature),
            compiler=asdict(self.compiler),
            device=str(self.device),
            general=general,
            settings=self.host.settings(),
        )

    def make(
        self, library: GraphLibrary, what: TargetCall, general: bool, show: Callable[[str], None]
    ) -> tuple[str, CompiledGraph] | None:
        """Capture a forward and compile it, or find that what it computes was compiled before.

        Args:
            library: takes the graph.
            what: the call that the graph is for.
            general: for calls like it of all sizes.
            show: told what is going on.

        Returns:
            The graph's key and the graph. Compiling may have narrowed its range, which need not include ``call``.
            None if a capture for all sizes does not hold for those of ``call``: nothing is compiled of it.

        Raises:
            OptionRead: the forward reads an option that is not part of the call's structure.
            NotCovered: it cannot be captured, or its graph was found wrong before.
            EngineError: it cannot be compiled here.
        """
        captured, tensors = self._captured(library, what, general, show), what.call.signature.tensors
        if general and captured.shapes.values(tensors) is None:
            if captured.shapes.fixes_other_than(tensors):
                library.index.note_exact_only(self.call_key(what.target, what.call, general))
            return None
        origin = self._origin(library, what, general)
        key = GraphKey(captured.digest, self.compiler)
        graph = self._compiled(library, key, captured, origin, show)
        if graph.shapes.values(tensors) is None and graph.shapes != captured.shapes:
            # The same operators, of a call of other sizes, where the code has decided otherwise: how many tokens to add
            # to a multiple of 32, say. Its compiler has relied on that.
            key = replace(key, conditions=captured.shapes.conditions)
            graph = self._compiled(library, key, captured, origin, show)
        library.index.serve_with(origin.call_key, key.digest, graph.shapes)
        return key.digest, graph

    def _compiled(
        self,
        library: GraphLibrary,
        key: GraphKey,
        captured: Capture,
        origin: GraphOrigin,
        show: Callable[[str], None],
    ) -> CompiledGraph:
        """Return the graph of this key, compiled if there is none yet.

        Raises:
            NotCovered: it was found wrong before.
            EngineError: it cannot be compiled here.
        """
        wrong = library.verdicts.retired(key.digest)
        if wrong is not None:
            raise NotCovered(wrong)
        expected = library.builder.expected_seconds(self.engine, self.device, len(captured.graph.graph.nodes))
        while_waiting = self._telling(show, expected)
        return library.builder.compiled(key, captured, self.engine, self.device, origin, while_waiting)

    def _captured(self, library: GraphLibrary, what: TargetCall, general: bool, show: Callable[[str], None]) -> Capture:
        """Capture a forward while no graph is made.

        Raises:
            OptionRead, NotCovered: as for ``make``.
        """
        target, call, host = what.target, what.call, self.host
        settings = TraceSettings(
            host.options_name,
            host.capture_options,
            host.check_interrupted,
            general,
            self._substitutions(),
            host.side_multiple(target.module, call.signature.function),
            host.prepare,
            host.tracing,
        )
        with library.builder.while_no_graph_is_made(self._telling(show, None)):
            show(message("capturing"))
            start = time.monotonic()
            captured = _capture(what, settings, host.opaque)
            library.metrics.count("captured")
            if self._calls_what_may_not_be_recorded(captured):
                captured = replace(captured, binding=replace(captured.binding, waits=True))
            if self.variant.reusable:
                captured = with_brief(captured)
            log.debug("captured %s in %.1f s", type(target.module).__name__, time.monotonic() - start)
        return captured

    def _calls_what_may_not_be_recorded(self, captured: Capture) -> bool:
        """Return True if nobody has seen a recording of what a graph calls. One that fails may end the process."""
        if not self.engine.fuses and any(map(waits_unless_fused, captured.graph.graph.nodes)):
            return True
        if foreign_operators(captured.graph) <= self.host.recordable:
            return False
        return not foreign_operators(self.engine.rewritten(captured)) <= self.host.recordable

    def _origin(self, library: GraphLibrary, what: TargetCall, general: bool) -> GraphOrigin:
        target, signature = what.target, what.call.signature
        sizes = "all sizes" if general else largest_tensor(signature)
        readers = {reader_of(target.fingerprint, code) for code in ("", what.call.code)}
        return GraphOrigin(
            target=f"{_name_of(target, what.forward)} {sizes}{self.variant}",
            signature=_scope(what.call, general).lines(),
            call_key=self.call_key(target, what.call, general),
            options_read={reader: library.index.options_read(reader) for reader in readers},
        )

    def _telling(self, show: Callable[[str], None], expected: float | None) -> Callable[[Waited], None]:
        """Return what tells a waiting person how far their graph is, and raises where they want to stop."""

        def while_waiting(waited: Waited) -> None:
            self.host.check_interrupted()
            show(waiting_for_turn(waited) if waited.for_turn else _compiling(waited, expected))

        return while_waiting


def _capture(what: TargetCall, settings: TraceSettings, opaque: frozenset[str]) -> Capture:
    """Trace a forward. Where a function of the options stands in the way that the graph could call, have it do that.

    Args:
        opaque: options in whose place the graph calls what the host would call. Not those that this call has: whoever
            put them there must be looked at first.

    Raises:
        OptionRead, NotCovered: as for ``Maker.make``.
    """
    functions = {id(function) for function in what.call.functions.functions} if what.call.functions is not None else ()
    own = frozenset(name for name in settings.overrides if id(what.options.get(name)) in functions)
    opaque = frozenset(name for name in opaque if what.options.get(name) is None)
    settings = replace(settings, opaque=opaque)
    try:
        return capture(what.target, what.forward, what.call, what.options, settings)
    except ChangesState:
        raise
    except NotCovered:
        if not own:
            raise
        log.debug("tracing once more, with %s called by the graph", ", ".join(sorted(own)), exc_info=True)
        return capture(what.target, what.forward, what.call, what.options, replace(settings, opaque=opaque | own))


def _compiling(seconds: float, expected: float | None) -> Message:
    """Return what a waiting person is shown. Promise nothing that has proved wrong."""
    if expected is None or seconds > expected:
        return message("compiling, {seconds:.0f} s", seconds=seconds)
    return message("compiling, {seconds:.0f} s of about {expected:.0f} s", seconds=seconds, expected=expected)


def _name_of(target: Target, forward: Callable[..., Any]) -> str:
    """Return what is compiled, for people: the class, and the method where that is one of several."""
    name, method = type(target.module).__name__, getattr(forward, "__name__", "forward")
    return name if method.strip("_") == "forward" else f"{name} {method}"


def largest_tensor(signature: Signature) -> str:
    """Return the largest tensor of such calls, for people: ``float16[2x4x128x128]@cuda:0``."""
    return str(max(signature.tensors, key=lambda spec: (len(spec.shape), spec.shape)))


def _scope(call: Call, general: bool) -> Signature:
    return call.signature.any_sizes() if general else call.signature
