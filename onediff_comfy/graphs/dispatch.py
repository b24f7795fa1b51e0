"""Dispatch: which compiled graph serves this call, and what happens when none can.

call → split → (route known?) → graph(current weights, call's tensors) → output
             → otherwise: the most specialised graph there is, from memory or disk
             → otherwise: capture for all sizes → graph key → compile → route
first output of a graph at each set of sizes → compared with eager's
anything not covered → the host's own forward, with the reason counted and logged once
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from ..capture.call import Call, NotCovered, Signature, bind, split
from ..capture.target import Target
from ..capture.trace import Capture, capture
from ..capture.withheld import OptionRead
from ..engines import choose
from ..engines.base import CompiledGraph, Engine, EngineError
from . import proof
from .key import CallKey, Compiler, GraphKey, compiler
from .library import GraphLibrary
from .persist import Origin

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostServices:
    """What dispatch needs of the host, so that it need not import it.

    Attributes:
        identity: the host's code and the settings that steer a capture, for the call key.
        options_name: the name of the forward's open-ended bag of options.
        capture_options: entries put into that bag while capturing.
        check_interrupted: raises when the person wants the run to end; cheap.
        refuse: raises NotCovered when a layer would not simply use its weights as they are.
        side_multiple: what a module likes the sides of its images to be multiples of (its patch, or what
            its levels shrink them by). A hint: general graphs are better where it holds.
    """

    identity: str
    options_name: str
    capture_options: Mapping[str, Any]
    check_interrupted: Callable[[], None]
    refuse: Callable[[Iterable[torch.nn.Module]], None]
    side_multiple: Callable[[torch.nn.Module], int] = lambda _module: 1


@dataclass(frozen=True)
class _Served:
    graph_key: str
    sizes: tuple[int, ...]  # what the graph's symbols stand for


@dataclass(frozen=True)
class _Refused:
    reason: str


class Dispatcher:
    """Serves the calls of one accelerated model.

    Its routes are the node's graph cache, keyed on the call's signature: latent shape, dtype and
    batch size among the rest. The graphs themselves live in the library, shared by all.

    Args:
        engine: one of ``ENGINE_NAMES``.
        library: where graphs are kept.
        host: what is needed of the host.
        show: shows a short status text to the person, on the node.
        specialise: whether calls of this signature are to have a graph of their own, for their sizes
            alone, where a general graph would serve them too.
    """

    def __init__(
        self,
        engine: str,
        library: GraphLibrary,
        host: HostServices,
        show: Callable[[str], None] = lambda _text: None,
        specialise: Callable[[Signature], bool] = lambda _signature: False,
    ) -> None:
        self._engine = engine
        self._library = library
        self._host = host
        self._show = show
        self._specialise = specialise
        self._targets: dict[int, Target] = {}
        self._unchecked: set[int] = set()
        self._routes: dict[tuple[str, Signature], _Served | _Refused] = {}
        self._not_general: set[tuple[str, Signature]] = set()
        self._preparing = threading.RLock()
        self._warned: set[str] = set()
        self._run_served = 0
        self._run_fallbacks = 0

    def begin_run(self) -> None:
        """A sampling run begins: modules are looked at again, for extensions may have changed them since."""
        self._unchecked = set(self._targets)
        self._run_served = self._run_fallbacks = 0

    def end_run(self, module: torch.nn.Module) -> None:
        """A sampling run over ``module`` ended: one line on what served it."""
        calls = self._run_served + self._run_fallbacks
        if not calls:
            self._fall_back(module, "this model family never hands its calls to diffusion-model wrappers")
        else:
            log.info("OneDiff: %d of %d model calls served by compiled graphs", self._run_served, calls)

    def graph_keys(self) -> list[str]:
        """The keys of the compiled graphs that serve this model so far."""
        return list(dict.fromkeys(r.graph_key for r in self._routes.values() if isinstance(r, _Served)))

    def refusals(self) -> list[str]:
        """Why calls of this model are not served, as far as that is settled."""
        return list(dict.fromkeys(r.reason for r in self._routes.values() if isinstance(r, _Refused)))

    def __call__(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """``forward(*args, **kwargs)``, from a compiled graph where one can serve it.

        Args:
            module: whose weights ``forward`` uses.
            forward: the host's own code; also the fallback and the reference.
        """
        try:
            found = self._find(module, forward, args, kwargs)
            output = self._run(found, forward, args, kwargs)
        except NotCovered as refusal:
            self._fall_back(module, refusal.reason)
            return forward(*args, **kwargs)
        self._run_served += 1
        self._library.metrics.count("served")
        return output

    # -- finding the graph ---------------------------------------------------------------------

    def _find(
        self, module: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Found:
        target = self._target(module)
        self._host.refuse(target.layers)
        arguments = bind(forward, args, kwargs)
        call = self._split(target, forward, arguments)
        if not call.tensors:
            raise NotCovered("the call has no tensors")
        if torch.is_grad_enabled() and any(t.requires_grad for t in pytree.tree_leaves(arguments) if _is_tensor(t)):
            raise NotCovered("gradients are wanted, and compiled graphs have none")
        route = self._routes.get((target.fingerprint, call.signature))
        graph = self._library.cache.get(route.graph_key) if isinstance(route, _Served) else None
        if graph is None and not isinstance(route, _Refused):
            with self._preparing:
                call, route, graph = self._prepare(target, forward, arguments, call)
        if isinstance(route, _Refused):
            raise NotCovered(route.reason)
        assert isinstance(route, _Served) and graph is not None
        weights = target.weights(graph.binding.weight_names, _device_of(call))
        return _Found(target, call, route, graph, weights)

    def _target(self, module: torch.nn.Module) -> Target:
        key = id(module)
        target = self._targets.get(key)
        if target is None or (key in self._unchecked and not target.is_current()):
            target = self._targets[key] = Target(module)
        self._unchecked.discard(key)
        if target.refusal is not None:
            raise NotCovered(target.refusal)
        return target

    def _split(self, target: Target, forward: Callable[..., Any], arguments: Mapping[str, Any]) -> Call:
        return split(
            arguments,
            function=getattr(forward, "__qualname__", type(forward).__qualname__),
            options_name=self._host.options_name,
            options_read=self._library.options_read(target.fingerprint),
        )

    def _prepare(
        self, target: Target, forward: Callable[..., Any], arguments: Mapping[str, Any], call: Call
    ) -> tuple[Call, _Served | _Refused, CompiledGraph | None]:
        """Find or make the graph for a signature that has no route yet, and remember the route."""
        device = _device_of(call)
        # Before minutes of work: are the weights where the graph would need them? They may be back
        # for the next call, so a refusal for this reason is not remembered.
        target.weights(tuple(target.specs), device)
        try:
            engine = choose(self._engine, device)
            code = compiler(engine, device)
            exact = self._exact(engine, target, call)
            found = self._kept(target, call, engine, code, device, exact)
            if found is None and not exact:
                call, found = self._made(target, forward, arguments, call, engine, code, device, general=True)
            if found is None:
                call, found = self._made(target, forward, arguments, call, engine, code, device, general=False)
            if found is None:
                raise NotCovered("a graph was compiled for these sizes that does not take them")
            self._show("compiled graph ready")
        except NotCovered as refusal:
            return call, self._refuse(target, call, refusal.reason), None
        except EngineError as error:
            return call, self._refuse(target, call, str(error)), None
        except Exception as error:
            # A compiler's own bug, a full disk, ...: nothing that eager could not do without.
            log.debug("preparing a graph failed", exc_info=True)
            reason = f"compiling failed ({type(error).__name__}: {_first_line(error)})"
            return call, self._refuse(target, call, reason), None
        route, graph = found
        self._routes[target.fingerprint, call.signature] = route
        return call, route, graph

    def _exact(self, engine: Engine, target: Target, call: Call) -> bool:
        """Whether this call is to have a graph for its sizes alone."""
        family = (target.fingerprint, call.signature.any_sizes())
        return not engine.general or family in self._not_general or self._specialise(call.signature)

    def _kept(
        self, target: Target, call: Call, engine: Engine, code: Compiler, device: torch.device, exact: bool
    ) -> tuple[_Served, CompiledGraph] | None:
        """The most specialised graph that exists for a call, in memory or on disk."""
        signatures = (call.signature,) if exact else (call.signature, call.signature.any_sizes())
        for signature in signatures:
            for candidate in self._library.candidates(self._call_key(target, signature, code)):
                sizes = candidate.shapes.values(call.signature.tensors)
                if sizes is not None and self._library.retired(candidate.graph_key) is None:
                    graph = self._library.loaded(candidate.graph_key, engine, device, self._while_loading)
                    if graph is not None:
                        return _Served(candidate.graph_key, tuple(sizes.values())), graph
        return None

    def _made(
        self,
        target: Target,
        forward: Callable[..., Any],
        arguments: Mapping[str, Any],
        call: Call,
        engine: Engine,
        code: Compiler,
        device: torch.device,
        general: bool,
    ) -> tuple[Call, tuple[_Served, CompiledGraph] | None]:
        """A graph made for this call, or for calls like it of all sizes; None if it does not serve this one.

        Raises:
            NotCovered: it cannot be captured for these sizes, or its graph was found wrong before.
        """
        try:
            call, captured = self._capture(target, forward, arguments, call, general)
            key = GraphKey(captured.digest, code)
            wrong = self._library.retired(key.digest)
            if wrong is not None:
                raise NotCovered(wrong)
        except NotCovered as refusal:
            if not general:
                raise
            log.info("OneDiff: no graph for all sizes (%s); one for these sizes is made", refusal.reason)
            self._not_general.add((target.fingerprint, call.signature.any_sizes()))
            return call, None
        signature = call.signature.any_sizes() if general else call.signature
        origin = self._origin(target, call, signature, code)
        graph = self._library.compiled(key, captured, engine, device, origin, self._while_compiling)
        self._library.serve_with(origin.call_key, key.digest, graph.shapes)
        sizes = graph.shapes.values(call.signature.tensors)
        return call, None if sizes is None else (_Served(key.digest, tuple(sizes.values())), graph)

    def _refuse(self, target: Target, call: Call, reason: str) -> _Refused:
        route = _Refused(reason)
        self._routes[target.fingerprint, call.signature] = route
        return route

    def _call_key(self, target: Target, signature: Signature, code: Compiler) -> str:
        return CallKey(target.fingerprint, signature, self._host.identity, code).digest

    def _origin(self, target: Target, call: Call, signature: Signature, code: Compiler) -> Origin:
        return Origin(
            target=f"{type(target.module).__name__} {describe(call) if signature == call.signature else 'all sizes'}",
            fingerprint=target.fingerprint,
            signature=signature.lines(),
            call_key=self._call_key(target, signature, code),
            options_read=sorted(self._library.options_read(target.fingerprint)),
        )

    def _capture(
        self, target: Target, forward: Callable[..., Any], arguments: Mapping[str, Any], call: Call, general: bool
    ) -> tuple[Call, Capture]:
        """Capture ``forward``, revealing one option after another until it reads no withheld one."""
        options = arguments.get(self._host.options_name) or {}
        multiple = self._host.side_multiple(target.module)
        with self._library.while_no_graph_is_made(self._while_compiling):
            self._show("capturing")
            start = time.monotonic()
            while True:
                try:
                    captured = capture(
                        target,
                        forward,
                        call,
                        options_name=self._host.options_name,
                        options=options,
                        overrides=self._host.capture_options,
                        check=self._host.check_interrupted,
                        general=general,
                        multiple=multiple,
                    )
                except OptionRead as read:
                    self._library.learn_option(target.fingerprint, read.name)
                    call = self._split(target, forward, arguments)
                    continue
                self._library.metrics.count("captured")
                log.debug("captured %s in %.1f s", type(target.module).__name__, time.monotonic() - start)
                return call, captured

    def _while_compiling(self, seconds: float) -> None:
        self._host.check_interrupted()
        self._show(f"compiling, {seconds:.0f} s")

    def _while_loading(self, seconds: float) -> None:
        self._host.check_interrupted()
        self._show(f"loading the compiled graph, {seconds:.0f} s")

    # -- running it ----------------------------------------------------------------------------

    def _run(self, found: _Found, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        graph, call = found.graph, found.call
        try:
            flat = self._call(graph, found.weights, call.tensors)
        except torch.OutOfMemoryError as error:
            raise NotCovered("the compiled graph ran out of memory") from error
        except Exception as error:
            log.debug("compiled graph failed", exc_info=True)
            reason = f"the compiled graph failed ({type(error).__name__}: {_first_line(error)})"
            self._refuse(found.target, call, reason)
            raise NotCovered(reason) from error
        output = pytree.tree_unflatten(flat, graph.binding.output)
        if not self._library.is_proved(found.route.graph_key, found.route.sizes):
            self._prove(found, output, forward(*args, **kwargs))
        return output

    def _call(
        self, graph: CompiledGraph, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run a graph; where memory runs out, give back all that recordings hold and run it once more."""
        try:
            return graph(weights, tensors)
        except torch.OutOfMemoryError:
            released = self._library.recordings.release()
            log.warning(
                "OneDiff: out of memory; released %d MB of CUDA graph recordings and tried again", released >> 20
            )
        torch.cuda.empty_cache()
        return graph(weights, tensors)

    def _prove(self, found: _Found, actual: Any, expected: Any) -> None:
        """Compare a new graph's first output with eager's; retire the graph if rounding cannot explain it.

        Raises:
            NotCovered: the graph is wrong.
        """
        dtypes = {tensor.dtype for tensor in (*found.weights, *found.call.tensors)}
        allowed = proof.limit(dtypes, _device_of(found.call))
        left, left_spec = pytree.tree_flatten(actual)
        right, right_spec = pytree.tree_flatten(expected)
        error = (
            max(map(proof.relative_error, left, right), default=0.0)
            if left_spec == right_spec and len(left) == len(right)
            else float("inf")
        )
        if not error <= allowed:
            reason = f"a compiled graph differed from eager by {error:.2g} (at most {allowed:.2g}) and was retired"
            self._library.retire(found.route.graph_key, reason)
            self._refuse(found.target, found.call, reason)
            raise NotCovered(reason)
        self._library.proved(found.route.graph_key, found.route.sizes)
        log.info("OneDiff: new graph proved against eager, relative error %.1e (at most %.1e)", error, allowed)

    def _fall_back(self, module: torch.nn.Module, reason: str) -> None:
        self._run_fallbacks += 1
        self._library.metrics.fell_back(reason)
        if reason not in self._warned:
            self._warned.add(reason)
            self._show(f"not accelerated: {reason}")
            log.warning(
                "OneDiff: %s runs without acceleration: %s. The image is right, only not faster.",
                type(module).__name__,
                reason,
            )


@dataclass(frozen=True)
class _Found:
    """A call with the graph that serves it and the weights that are in place for it."""

    target: Target
    call: Call
    route: _Served
    graph: CompiledGraph
    weights: Sequence[torch.Tensor]


def _device_of(call: Call) -> torch.device:
    """Where the call computes: the device of its largest tensor (scalars may be elsewhere)."""
    return max(call.tensors, key=torch.Tensor.numel).device


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


def describe(call: Call) -> str:
    """The call's largest tensor for people: ``float16[2x4x128x128]@cuda:0``."""
    return str(max(call.signature.tensors, key=lambda spec: (len(spec.shape), spec.shape)))
