"""Attach a dispatcher to a copy of a ComfyUI CONTROL_NET.

A ControlNet calls its network once a step and hands the result to the diffusion model. The copy holds a proxy of the
network. The patcher that manages the weights, the strength, the range of steps and the chain of several ControlNets
stay the host's. Nodes that apply a ControlNet copy it again, with the proxy.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from comfy.controlnet import ControlLora, ControlNet
from comfy.model_patcher import ModelPatcher

from ...capture.target.target import Target
from ...messages import message
from ...serving.dispatcher import Dispatcher
from ...serving.options import Options
from ..process.services import host_services
from ..weights.dynamic_vram import needs_resident_form
from ..weights.layer_images import OF_DYNAMIC_VRAM
from .adapter import Adapter, module_at
from .attach import StandsFor, dispatcher_for, pass_through, release_on_detach, unfit, with_methods_of
from .module_proxy import ModuleProxy, Serve, module_behind, server_behind
from .part import WholeModule
from .placement import ModelServer

log = logging.getLogger(__name__)

_LEAST_NEEDED, _NEEDED_FOR_EACH = 1 << 29, 160  # bytes: a guess, until calls have shown what they take


def accelerate_control(control: Any, engine: str, node_id: str | None = None, compile: str = "wait") -> Any:
    """Return a copy of ``control`` whose network is served by compiled graphs.

    Args:
        control: a ComfyUI CONTROL_NET.
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
        compile: one of ``settings.COMPILE_CHOICES``.

    Returns:
        The accelerated copy; or, where nothing can be captured, ``control`` itself, after a warning that
        says why.
    """
    lora = type(control) in (ControlLora, _ServedControlLora)
    if not lora and not (isinstance(control, ControlNet) and hasattr(control, "control_model_wrapped")):
        reason = unfit("control_net", control, message("a ControlNet whose own network runs at every step"))
        return pass_through(control, reason, node_id)
    dispatcher = dispatcher_for("CONTROL_NET", engine, node_id, Options(compile=compile))
    if lora:
        served = _ServedControlLora.of(control, _ControlNetServer(dispatcher, dispatcher))
    else:
        served = control.copy()
        served.control_model_wrapped = patcher = _patcher_to_serve(control)
        network = _Network(patcher.model, getattr(control, "manual_cast_dtype", None))
        server = _ControlNetServer(dispatcher, ModelServer(network, dispatcher, in_blocks=False))
        served.control_model = ModuleProxy(patcher.model, server, ["forward"])
        _begin_runs_of(served)
    served.previous_controlnet = control.previous_controlnet
    return served


def find_control_dispatcher(control: Any) -> Dispatcher | None:
    """Return what serves the network of an accelerated CONTROL_NET; None if it is not accelerated."""
    if isinstance(control, _ServedControlLora):
        return control.networks.server.dispatcher
    server = server_behind(getattr(control, "control_model", None))
    return server.dispatcher if isinstance(server, _ControlNetServer) else None


class _Network(WholeModule):
    """The network of a ControlNet.

    Args:
        network: this one.
        cast_to: what it computes in, where that is not the dtype of its weights.
    """

    def __init__(self, network: Any, cast_to: torch.dtype | None) -> None:
        super().__init__(network)
        self._cast_to = cast_to

    @property
    def compute_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype if self._cast_to is None else self._cast_to
        return dtype

    def memory_required(self, size: torch.Size) -> float:
        """Return a guess of the bytes: some for any call, and some for each number of a hint, the largest tensor."""
        return _LEAST_NEEDED + _NEEDED_FOR_EACH * size.numel()


class _ControlNetServer:
    """Hands the calls of a network on and its outputs back in the form that the host relies on.

    Args:
        dispatcher: of the ControlNet.
        serve: answers the calls: that dispatcher, or what has weights in place before.
    """

    def __init__(self, dispatcher: Dispatcher, serve: Serve) -> None:
        self.dispatcher, self._serve = dispatcher, serve

    def __call__(
        self, module: torch.nn.Module, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        hint = kwargs.get("hint")
        if isinstance(hint, torch.Tensor):
            kwargs = {**kwargs, "hint": _for_each_image(hint, kwargs.get("x"))}
        return _shared(self._serve(module, method, args, kwargs))


class _Runs:
    """Over a class of ControlNets: each sampling run is one of the dispatcher, for which networks are looked at."""

    control_model: Any
    control_model_wrapped: Any

    def pre_run(self, model: Any, percent_to_timestep_function: Callable[[float], float]) -> None:
        super().pre_run(model, percent_to_timestep_function)  # type: ignore[misc]
        _begin_run(self)

    def copy(self) -> Any:
        copied = super().copy()  # type: ignore[misc]
        _begin_runs_of(copied)
        return copied

    def copy_to(self, other: Any) -> None:
        """Have ``other`` be like this one: a copy, or what another extension makes of it."""
        super().copy_to(other)  # type: ignore[misc]
        if getattr(other, "control_model", None) is self.control_model:
            other.control_model_wrapped = self.control_model_wrapped
            _begin_runs_of(other)


def _begin_run(control: Any) -> None:
    server = server_behind(control.control_model)
    if isinstance(server, _ControlNetServer):
        server.dispatcher.begin_run()


def _begin_runs_of(control: Any) -> None:
    """Have the runs of ``control`` begin with its ``pre_run``: its class's, or what its constructor has set on it."""
    kind: type = type(control)
    control.__class__ = with_methods_of(_Runs, kind)
    own = vars(control).get("pre_run")
    if own is not None and not isinstance(own, _OwnPreRun):
        control.pre_run = _OwnPreRun(own, weakref.ref(control))


class _OwnPreRun:
    """The ``pre_run`` that an extension has set on a ControlNet itself, and the beginning of a run."""

    def __init__(self, pre_run: Callable[..., None], control: weakref.ref[Any]) -> None:
        self._pre_run, self._control = pre_run, control

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._pre_run(*args, **kwargs)
        if (control := self._control()) is not None:
            _begin_run(control)


def _for_each_image(hint: torch.Tensor, latent: Any) -> torch.Tensor:
    """Return a hint for each image of the batch, as the host itself makes of two hints or more.

    One hint for all is broadcast by the network, which makes it another computation for every graph.
    """
    batch = len(latent) if isinstance(latent, torch.Tensor) else 1
    return hint.expand(batch, *hint.shape[1:]) if len(hint) == 1 < batch else hint


def _shared(output: Any) -> Any:
    """Return ``output`` with one tensor object for each piece of memory.

    A network may give one tensor for several layers. The host multiplies each tensor *object* by the strength, in
    place and once; two objects over the same memory would have it twice.
    """
    first: dict[Any, torch.Tensor] = {}

    def same(tensor: torch.Tensor) -> torch.Tensor:
        place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        return first.setdefault(place, tensor)

    return pytree.tree_map_only(torch.Tensor, same, output)


def _patcher_to_serve(control: ControlNet) -> ModelPatcher:
    """Return a new patcher for the network of ``control``; where it cannot be served from Dynamic VRAM, of its copy."""
    patcher = control.control_model_wrapped.clone()
    if needs_resident_form(patcher):
        # The host makes resident forms from a loader, and keeps none for a ControlNet: so from the network itself.
        try:
            network = _own_network(patcher.model)
            patcher = ModelPatcher(network, load_device=patcher.load_device, offload_device=patcher.offload_device)
        except Exception as error:  # whatever another extension has put into the network
            log.warning("OneDiff: this ControlNet has no resident form (%s); it stays in Dynamic VRAM", error)
    release_on_detach(patcher)
    return patcher


# What Dynamic VRAM notes on a network and its layers. A copy of it would be of pages that may be gone by then.
_DYNAMIC = OF_DYNAMIC_VRAM | {"dynamic_vbars", "dynamic_pins", "dynamic_patchers"}


def _own_network(network: torch.nn.Module) -> torch.nn.Module:
    """Copy a network without what Dynamic VRAM noted on it. Weights are shared until one of the two moves."""
    shared: dict[int, Any] = {}
    for layer in network.modules():
        for holder in (layer._parameters, layer._buffers):
            for tensor in holder.values():
                if isinstance(tensor, torch.nn.Parameter):
                    shared[id(tensor)] = torch.nn.Parameter(tensor.data, requires_grad=False)
                elif tensor is not None:
                    shared[id(tensor)] = tensor.detach()
        shared |= {id(layer.__dict__[name]): layer.__dict__[name] for name in _DYNAMIC if name in layer.__dict__}
    own: torch.nn.Module = copy.deepcopy(network, shared)
    for layer in own.modules():
        for name in _DYNAMIC:
            layer.__dict__.pop(name, None)
    return own


class _ServedControlLora(ControlLora, metaclass=StandsFor):
    """A ControlLora, of which the host builds a network anew from the diffusion model's weights at each run."""

    _stands_for = ControlLora
    networks: _Networks
    control_model: Any

    @classmethod
    def of(cls, control: ControlLora, server: _ControlNetServer | _Networks) -> _ServedControlLora:
        """Return a copy of ``control`` that is served."""
        served = cls(control.control_weights, global_average_pooling=control.global_average_pooling)
        control.copy_to(served)
        served.networks = server if isinstance(server, _Networks) else _Networks(server)
        # A run that was stopped cleans nothing up.
        weakref.finalize(served, served.networks.give_back, id(served)).atexit = False
        return served

    def pre_run(self, model: Any, percent_to_timestep_function: Callable[[float], float]) -> None:
        super().pre_run(model, percent_to_timestep_function)
        self.control_model = self.networks.take(self, self.control_model)
        self.networks.server.dispatcher.begin_run()

    def copy(self) -> _ServedControlLora:
        return _ServedControlLora.of(self, self.networks)

    def copy_to(self, other: ControlLora) -> None:
        """Have ``other`` be like this one. What another extension makes of it builds its network by itself."""
        super().copy_to(other)
        if not isinstance(other, _ServedControlLora):
            reason = message("another extension runs the model by a function of its own")
            self.networks.server.dispatcher.metrics.fell_back(reason)
            log.warning("OneDiff: a Control LoRA is not accelerated: %s", reason)

    def cleanup(self) -> None:
        self.networks.give_back(id(self))
        super().cleanup()


class _Networks:
    """Keep proxies beyond a run, because a dispatcher knows and keeps the modules that it has served.

    Between runs they hold no weights.
    """

    def __init__(self, server: _ControlNetServer) -> None:
        self.server = server
        self._idle: dict[str, list[ModuleProxy]] = {}
        self._taken: dict[int, tuple[str, ModuleProxy]] = {}

    def take(self, control: ControlLora, built: torch.nn.Module) -> Any:
        """Return a proxy for ``built``, over a network like it that was served before if there is one."""
        self.give_back(id(control))
        host = host_services()
        target = Target(built, host.code, host.formats)
        if target.refusal is not None:
            self.server.dispatcher.metrics.fell_back(target.refusal)
            return built
        idle = self._idle.setdefault(target.fingerprint, [])
        stand_in = idle.pop() if idle else ModuleProxy(built, self.server, ["forward"])
        for layer, other in zip(module_behind(stand_in).modules(), built.modules(), strict=True):
            layer._parameters.update(other._parameters)
        self._taken[id(control)] = target.fingerprint, stand_in
        return stand_in

    def give_back(self, control: int) -> None:
        """Take back the proxy of the ControlLora with this ``id``, whose run is over."""
        if control not in self._taken:
            return
        fingerprint, stand_in = self._taken.pop(control)
        for layer in module_behind(stand_in).modules():
            for name, weight in layer._parameters.items():
                if weight is not None:
                    layer._parameters[name] = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        self._idle[fingerprint].append(stand_in)


ADAPTER = Adapter(
    node=message("OneDiff ControlNet Speedup"),
    accelerate=accelerate_control,
    find_dispatcher=find_control_dispatcher,
    modules=module_at("control_model"),
)
