"""The guard: whether a module is what it was when its graphs were made, asked at every call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.utils._pytree as pytree
from torch.utils._device import DeviceContext

from ..cache.call_index import reader_of
from ..capture.call import Call, ChangesState, NotCovered, bind, split
from ..capture.handed_over import Functions
from ..capture.parameters import method_of
from ..capture.target.target import KeepsState, Target
from ..compilation.compile_graph import HostServices
from ..compilation.library import GraphLibrary
from ..messages import Message, message
from .decision import Invocation, Request
from .function_lifter import FunctionLifter
from .module_identities import MOST_CHANGES, Identities
from .run import RunContext

_LOOKS_IN_VAIN = 3  # in a run; then people are told
_MOST_MODULES = 256  # of one object: blocks, a text encoder's stacks, a GPU's copy each, a ControlLora's pool


@dataclass(frozen=True)
class _Read:
    """What a call with functions reads.

    Attributes:
        by_target: of it, what the target reads whatever it is handed over.
        code: of the functions.
        names: of all options that are read.
    """

    by_target: frozenset[str]
    code: str
    names: frozenset[str]


@dataclass
class _InRun:
    """What became of a module in this run, beside the first look at it.

    Attributes:
        changes: how often it had become another.
        in_vain: how often it seemed to be another, and was not.
    """

    changes: int = 0
    in_vain: int = 0


@dataclass
class _Guarded:
    """A module that was seen."""

    target: Target
    options_read: frozenset[str] = frozenset()  # as far as is known
    checked: bool = False  # in this run
    refused: Message | None = None  # why, since it was looked at
    accepted: bool = False  # by the host, with the attributes that its layers have
    method: Callable[..., Any] | None = None  # the function of a method that was called: it is the module's own
    watched: Sequence[Sized] = ()  # what the host is asked again for, once one of them is not empty
    read_with_functions: _Read | None = None  # by the call before, if it had some
    identities: Identities = field(default_factory=Identities)
    in_run: _InRun = field(default_factory=_InRun)


class ModuleGuard:
    """Turns the host's calls into requests, and notices modules that changed.

    Args:
        library: knows which options a target reads.
        host: what is needed of the host.
    """

    def __init__(self, library: GraphLibrary, host: HostServices) -> None:
        self._library, self._host = library, host
        self._guarded: OrderedDict[int, _Guarded] = OrderedDict()  # by id of the module, which the target holds
        self._lifter = FunctionLifter(library, host)

    def begin_run(self) -> None:
        """Have every module and function looked at again: extensions may have changed them since."""
        self._lifter.begin_run()
        for guarded in list(self._guarded.values()):  # a thread of another GPU may be late with a module of its own
            guarded.checked, guarded.method, guarded.in_run = False, None, _InRun()
            guarded.target.forget_addresses()

    def request(self, invocation: Invocation, run: RunContext, assume: bool = False) -> Request:
        """Return the request that an invocation is.

        A module that seems to be what it was, but has not been looked at in this run, is not looked at here: see
        ``Request.is_checked``.

        Args:
            assume: rather than wait for the device, assume that functions decide as in the call before: see
                ``Request.is_assumed``.

        Raises:
            NotCovered: no graph can stand for such a call, or for such a module.
        """
        if any(_SEES_ALL) or torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            refuse_what_sees_all()
        if _transforms() is not None or forward_ad._current_level >= 0 or torch._C._get_tracing_state() is not None:
            raise NotCovered(message("PyTorch differentiates or traces what runs here, and sees nothing of a graph"))
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # nothing may be read meanwhile
            raise NotCovered(message("ComfyUI records a CUDA graph of its own here"))
        guarded = self._guarded.get(id(invocation.module))
        if guarded is None or guarded.refused is not None or not guarded.target.guard_holds():
            guarded = self._checked(invocation)
            if guarded.in_run.in_vain == _LOOKS_IN_VAIN:
                run.report.note(_looked_at_in_vain())
        target = guarded.target
        called, own = invocation.method or invocation.forward, guarded.method
        if type(called) is not types.MethodType or called.__self__ is not target.module or called.__func__ is not own:
            guarded.method = _own_method(called, target.module)
        if not guarded.accepted or any(guarded.watched):
            self._host.refuse(target.layers)
            guarded.accepted, guarded.watched = True, self._host.watched(target.layers)
        arguments = bind(invocation.forward, invocation.args, invocation.kwargs)
        call, guarded.read_with_functions = self._split(
            invocation, arguments, guarded.options_read, target, guarded.read_with_functions, assume
        )
        if not call.tensors:
            raise NotCovered(message("the call has no tensors"))
        device = max(call.tensors, key=torch.Tensor.numel).device
        if torch.is_grad_enabled() and _want_gradients(arguments, target.module):
            raise NotCovered(message("gradients are wanted, and compiled graphs have none"))
        if torch.is_autocast_enabled(device.type):
            raise NotCovered(message("autocast is on, and graphs compute in the types that weights and inputs have"))
        if torch.get_default_dtype() != torch.float32:  # a graph holds what its code made of the usual one
            raise NotCovered(message("another extension has set PyTorch's default dtype"))
        key = target.fingerprint, call.signature, run.reusing
        return Request(invocation, target, arguments, call, device, key, guarded.checked)

    def confirms(self, request: Request) -> bool:
        """Look at the module of a request. Return True if it is what the request took it for.

        Raises:
            NotCovered: nothing that is captured of such a module could be relied on.
        """
        return self._checked(request.invocation).target is request.target

    def decided(self, request: Request, run: RunContext) -> Request:
        """Return the request as it is once it is known how its functions decide. Waits for the device.

        Raises:
            NotCovered: as of ``request``.
        """
        functions = request.call.functions
        if functions is None or not functions.are_as_assumed():
            return self.request(request.invocation, run)
        return replace(request, call=replace(request.call, functions=functions.decided()))

    def up_to_date(self, request: Request) -> Request:
        """Return the request as it is with all that is known by now of which options its target reads.

        Raises:
            NotCovered: an option that is read holds something that no graph can take.
        """
        target = request.target
        read = self._library.index.options_read(target.fingerprint)
        guarded = self._guarded.get(id(request.invocation.module))
        if guarded is not None and guarded.target is target:
            guarded.options_read = read
        call, _ = self._split(request.invocation, request.arguments, read, target)
        return replace(request, call=call, key=(target.fingerprint, call.signature, request.reusing))

    def give_up(self, functions: Functions) -> None:
        """Lift functions of this code no more: they change what they keep."""
        self._lifter.give_up(functions)

    def learn(self, request: Request, refusal: ChangesState) -> None:
        """Note what a trace has shown: functions change what they hold, or a module's own forward what it keeps."""
        guarded = self._guarded.get(id(request.invocation.module))
        if isinstance(refusal, KeepsState) and guarded is not None:
            guarded.identities.stateful.add(request.target.fingerprint)
        elif not isinstance(refusal, KeepsState) and request.call.functions is not None:
            self.give_up(request.call.functions)

    def end_run(self) -> None:
        """Hold no functions any more that this run did not have."""
        self._lifter.end_run()

    def _split(
        self,
        invocation: Invocation,
        arguments: Mapping[str, Any],
        options_read: frozenset[str],
        target: Target,
        last: _Read | None = None,
        assume: bool = False,
    ) -> tuple[Call, _Read | None]:
        """Return a call, and what it reads if it has functions: which they are shows where they were found.

        Args:
            options_read: by the target, whatever it is handed over.
            last: what the call before this one read, which most likely had the same functions.
            assume: that functions decide as in the call before.
        """
        forward = invocation.forward
        split_by = functools.partial(
            split,
            arguments,
            function=getattr(forward, "__qualname__", type(forward).__qualname__),
            options_name=self._host.options_name,
            lift=functools.partial(self._lifter.lift, target, assume=assume),
        )
        if last is not None and last.by_target == options_read:
            with contextlib.suppress(NotCovered):  # of an option that this call may not read
                call = split_by(options_read=last.names)
                if call.code == last.code and self._read_by(target, call) <= last.names:
                    return call, last
        names = options_read
        while True:
            call = split_by(options_read=names)
            if call.functions is None:
                return call, None
            # What functions read is no reason to tell calls without them apart.
            read = names | self._read_by(target, call)
            if read == names:
                return call, _Read(options_read, call.code, names)
            names = read

    def _read_by(self, target: Target, call: Call) -> frozenset[str]:
        return self._library.index.options_read(reader_of(target.fingerprint, call.code))

    def _checked(self, invocation: Invocation) -> _Guarded:
        """Return what is known of a call's module, after a look at it where it may be another than before.

        Raises:
            NotCovered: nothing that is captured of such a module could be relied on.
        """
        module = invocation.module
        guarded = self._guarded.get(id(module))
        if guarded is None:
            target = Target(module, self._host.code, self._host.formats)
            guarded = self._guarded[id(module)] = _Guarded(target)
            while len(self._guarded) > _MOST_MODULES:
                self._guarded.popitem(last=False)
        elif guarded.in_run.changes < MOST_CHANGES and not (guarded.checked and guarded.target.guard_holds()):
            in_run, guarded.accepted, guarded.checked = guarded.checked, False, False
            if guarded.target.is_current():
                guarded.in_run.in_vain += in_run
            else:
                guarded.target = Target(module, self._host.code, self._host.formats)
                guarded.in_run.changes += in_run
        if not guarded.checked:
            objection = guarded.target.refusal or guarded.identities.objection(guarded.target, guarded.in_run.changes)
            if objection is None and invocation.on_image and guarded.target.tells_objects_apart:
                objection = message("code of another extension may ask which object of the model it runs on")
            guarded.refused = objection
        guarded.checked = True
        if guarded.refused is not None:
            raise NotCovered(guarded.refused)
        guarded.options_read = self._library.index.options_read(guarded.target.fingerprint)
        return guarded


def _looked_at_in_vain() -> Message:
    return message(
        "another extension puts equal objects anew into the model, or into what its code reads, in each step: the "
        "model is looked at in each call, which can be slower"
    )


def _own_method(called: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
    """Return the function of the module's method that is called: its class's, or one that it has as an attribute.

    Then it is part of what the module's identity describes. Any other function may be called like one.

    Raises:
        NotCovered: it is another function.
    """
    forward = method_of(called)
    if type(forward) is types.MethodType and forward.__self__ is module:
        own = (held for held in vars(module).values() if type(held) is types.MethodType)
        by_name = inspect.getattr_static(type(module), forward.__name__, None)
        if by_name is forward.__func__ or any(held.__func__ is forward.__func__ for held in own):
            return forward.__func__
    raise NotCovered(message("another extension runs the model by a function of its own"))


_transforms = torch._C._functorch.peek_interpreter_stack  # of torch.func, the innermost that is open
_SEES_ALL = (torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks)
"""Hooks on all layers of this process."""


def refuse_what_sees_all() -> None:
    """Refuse every call while somebody has a hand in all that PyTorch does: no graph asks for that.

    Raises:
        NotCovered: there is a hook on all layers, or a mode for all functions.
    """
    if any(_SEES_ALL):
        raise NotCovered(message("another extension has set a forward hook on all layers"))
    if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
        modes = torch.overrides._get_current_function_mode_stack()
        if torch._C._len_torch_dispatch_stack() or any(type(mode) is not DeviceContext for mode in modes):
            raise NotCovered(message("another extension changes what all functions of PyTorch do"))


def _want_gradients(arguments: Mapping[str, Any], module: torch.nn.Module) -> bool:
    tensors = (value for value in pytree.tree_leaves(arguments) if isinstance(value, torch.Tensor))
    return any(tensor.requires_grad for tensor in itertools.chain(tensors, module.parameters()))
