"""Capture: trace a target's forward, for one call signature or for all sizes.

The graph comes from ``torch.export`` (non-strict: the model's own Python runs on fake tensors, so no model family needs
code of its own).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ...messages import Message, first_line, message
from ..call import Call, ChangesState, NotCovered
from ..export import Capture
from ..graph_text import AddressInText
from ..handed_over import ChangedState, changes_state, source_of
from ..option_probe import OptionProbe, OptionRead
from ..rewrites.functionalize import replace_writing
from ..rewrites.op_substitutions import Forms
from ..rewrites.size_conversions import keep_sizes_symbolic
from ..shape_range import Axis, batch_tensor, fold, unfold
from ..target.target import KeepsState, Target
from ..target.tensor_parts import Wholes
from .example_sizes import first_tensor, fold_factors, representative, symbolic_axes
from .export_lock import capturing
from .exported_program import capture_of
from .opaque_function import put_stand_ins
from .trace_scopes import (
    attributes_restored,
    failures_not_printed,
    generators_restored,
    leftovers_removed,
    lines_of_code_forgotten,
    no_gradients_wanted,
    numbers_drawn,
    other_threads_left_alone,
)
from .watch import SizesGrow, Watch

_AUTO = torch.export.Dim.AUTO  # symbolic, unless the forward insists on this very size


@dataclass(frozen=True)
class TraceSettings:
    """How forwards are traced.

    Attributes:
        options_name: the argument that is the open-ended bag of options.
        overrides: entries put into the bag for the trace, unless the call has such an entry itself: what a person's
            node put there must not be lost.
        check: called often during the trace; what it raises ends the trace and comes out.
        general: keep every size symbolic that the forward lets be, instead of tracing for these sizes.
        substitutions: functions that are traced in the place of others.
        multiple: of a general capture, what the sides of images are multiples of; 0 if no tensor is an image.
        prepare: given the target's layers; may set attributes of theirs, which are put back afterwards.
        around: what a forward has begun outside of its module ends with this context.
        opaque: of ``overrides``, the names of those in whose place the graph calls a function: the call's own, where it
            has one, else the host's. What that gives looks like what the override gives.
    """

    options_name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    general: bool = False
    substitutions: Forms = field(default_factory=dict)
    multiple: int = 1
    prepare: Callable[[Sequence[torch.nn.Module]], None] = lambda _layers: None
    around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    opaque: Collection[str] = ()


@dataclass(frozen=True)
class _Inputs:
    """What a forward is traced with.

    Attributes:
        examples: a tensor for each of the call's, of representative sizes and folded.
        sizes: of each, which axes are symbols.
        folds: which are folded, and by what.
        batch: which has the batch as its first axis.
    """

    examples: list[torch.Tensor]
    sizes: list[dict[int, Any]]
    folds: Mapping[int, int]
    batch: int | None


def capture(
    target: Target, forward: Callable[..., Any], call: Call, options: Mapping[str, Any], settings: TraceSettings
) -> Capture:
    """Trace ``forward`` for the signature of ``call``.

    A forward that loops over its samples does not let a symbol be its batch, and one that divides it into frames again
    and again makes it ever longer. It is traced again, for this call's batch and all other sizes.

    Args:
        target: the module that ``forward`` runs and whose weights become inputs.
        forward: called with arguments by name.
        call: gives argument structure and tensor shapes; tensor values are not used.
        options: the bag of options, as the call had it. Probes take the places of entries that are not part of the
            call's structure.

    Raises:
        OptionRead: the forward uses an option that ``call`` does not have in its structure.
        NotCovered: the forward cannot be captured; the reason says why.
    """
    specs = call.signature.tensors
    batch = batch_tensor(specs[: call.own_tensors], images=settings.multiple > 0)
    any_batch = batch is None or not _made_up(specs[batch].shape[0], call)
    if settings.general and any_batch and batch is not None:
        with contextlib.suppress(SizesGrow):
            captured = _traced(target, forward, call, options, settings, any_batch)
            if _takes(captured.shapes.axes[batch][0], specs[batch].shape[0]):
                return captured
        any_batch = False
    return _traced(target, forward, call, options, settings, any_batch)


def _traced(
    target: Target,
    forward: Callable[..., Any],
    call: Call,
    options: Mapping[str, Any],
    settings: TraceSettings,
    any_batch: bool,
) -> Capture:
    """Return a capture.

    Args:
        any_batch: keep the batch symbolic too, in a general capture.
    """
    inputs = _inputs(call, first_tensor(call.signature, forward), settings, any_batch)
    bag, functions = settings.options_name, call.functions
    watch = Watch(settings.check, settings.substitutions, settings.general, wary=functions is not None)

    def arguments(tensors: list[torch.Tensor]) -> dict[str, Any]:
        given = [unfold(t) if i in inputs.folds else t for i, t in enumerate(tensors)]
        held = given[call.own_tensors :]
        copies = functions.copies(held, watch.raised) if functions is not None else None
        rebuilt = call.rebuild(given, copies.functions if copies is not None else ())
        if copies is not None:
            rebuilt[bag] = copies.hand_over(rebuilt[bag])
            watch.copies, watch.held = copies, held
        if rebuilt.get(bag) is not None:
            rebuilt[bag] = watch.handing(_options(settings, options, rebuilt[bag], watch.raised))
        return rebuilt

    with settings.around(), _tracing(target, watch):
        try:
            with functions.unchanged() if functions is not None else contextlib.nullcontext():
                program = _exported(_Forward(target, forward, arguments, watch.forward_ended), target, inputs, settings)
            return capture_of(program, inputs.batch, inputs.folds)
        except NotCovered:
            raise
        except OptionRead as read:
            # PyTorch words this error by what stands in variables around it: then nothing of the model's has read it.
            if not isinstance(read.__context__, GuardOnDataDependentSymNode):
                raise
            raise _told(read.__context__, call) from read.__context__
        except ChangedState as error:
            raise (KeepsState() if functions is None else ChangesState(changes_state(functions))) from error
        except AddressInText as error:
            raise NotCovered(_never_found_again(error)) from error
        except Exception as raised:
            settings.check()  # what looks like a failure may be an interruption that torch has wrapped
            cause = (raised.__cause__ if isinstance(raised, _ForwardFailed) else None) or raised
            raise _told(cause, call) from cause


def _options(
    settings: TraceSettings, options: Mapping[str, Any], own: Mapping[str, Any], raised: list[BaseException]
) -> dict[str, Any]:
    """Return what a forward is handed as its options.

    Args:
        options: of the call.
        own: those that are part of the call's structure, as they are traced.
        raised: takes in what stand-ins raise.
    """
    probes = {name: v if v is None else OptionProbe(name, raised) for name, v in options.items()}
    handed = {**settings.overrides, **probes, **own}
    put_stand_ins(handed, settings.options_name, {name: settings.overrides[name] for name in settings.opaque})
    return handed


def _inputs(call: Call, first: int | None, settings: TraceSettings, any_batch: bool) -> _Inputs:
    """Return what to trace with. Tensors that functions hold are traced at the sizes that they have."""
    every = call.signature.tensors
    specs, held = every[: call.own_tensors], every[call.own_tensors :]
    multiple = settings.multiple
    batch = batch_tensor(specs, images=multiple > 0)
    shapes: Sequence[Sequence[int]] = [spec.shape for spec in specs]
    folds: Mapping[int, int] = {}
    if settings.general:
        shapes = representative(specs, batch if any_batch else None, multiple, first)
        folds = fold_factors(specs, multiple, first)
    # Fakes need only metadata, and a tensor made under inference_mode cannot be turned into one.
    shapes = [*shapes, *(spec.shape for spec in held)]
    examples = [torch.empty(n, dtype=s.dtype, device=s.device) for n, s in zip(shapes, every, strict=True)]
    examples = [fold(example, folds[i]) if i in folds else example for i, example in enumerate(examples)]
    own, images = call.own_tensors, multiple > 0
    axes = [symbolic_axes(t.ndim, i in folds, images) if i < own else () for i, t in enumerate(examples)]
    sizes = [
        # A size of 1 cannot be a symbol, and torch.export warns of each that it was to be one.
        {axis: _AUTO for axis in open_axes if (any_batch or axis) and example.shape[axis] != 1}
        for example, open_axes in zip(examples, axes, strict=True)
    ]
    return _Inputs(examples, sizes, folds, batch)


@contextlib.contextmanager
def _tracing(target: Target, watch: Watch) -> Iterator[None]:
    """Trace inside: alone, watched, and with nothing changed but what is traced."""
    with (
        capturing(),
        leftovers_removed(target.module),
        torch.inference_mode(False),
        torch.no_grad(),
        watch,
        generators_restored(),
        no_gradients_wanted(target.module),
        other_threads_left_alone(),
        lines_of_code_forgotten(),
        failures_not_printed(),
        symbols.patch(use_duck_shape=False),  # type: ignore[attr-defined]  # equal sizes in an example are not one size
        warnings.catch_warnings(),
    ):
        # torch.export warns about its own use of its own deprecated classes.
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _exported(
    wrapper: _Forward, target: Target, inputs: _Inputs, settings: TraceSettings
) -> torch.export.ExportedProgram:
    """Return the forward as a functional program.

    Raises:
        NotCovered: it draws random numbers.
    """
    sizes = (inputs.sizes,) if settings.general else None
    with target.unchanged(), attributes_restored(target.layers):
        settings.prepare(target.layers)
        if settings.general:
            wrapper.called = keep_sizes_symbolic(target.layers, wrapper.called)
        drawn = numbers_drawn()
        wrapper.wholes = Wholes(target.layers, target.formats)
        program = torch.export.export(wrapper, (inputs.examples,), dynamic_shapes=sizes, strict=False)
        if numbers_drawn() != drawn:  # a number of Python's is a constant in the graph
            raise NotCovered(message("the model's forward draws random numbers ({operator})", operator="Python"))
    # Tracing once more makes any graph functional. With symbols for sizes it takes twice as long as the export itself,
    # and most need nothing or little. Engines for static graphs also count on the fewer operators that come out of it.
    if settings.general and replace_writing(program.graph_module):
        return program
    return program.run_decompositions({})


class _ForwardFailed(Exception):
    """The forward raised. torch.export finds nothing to print with it: else it prints the graph so far, in pages."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


class _Forward(torch.nn.Module):
    """The target's forward as a function of the call's tensors alone."""

    def __init__(
        self,
        target: Target,
        forward: Callable[..., Any],
        arguments: Callable[..., dict[str, Any]],
        ended: Callable[[], None],
    ) -> None:
        super().__init__()
        self.target = target.module
        self.training = target.module.training  # of the wrapper alone: train() would set every layer's
        self._unchanged = target.attributes_unchanged
        self.called = forward
        self._arguments = arguments
        self.wholes: Wholes | None = None
        self._ended = ended

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        assert self.wholes is not None
        with self.wholes.in_place(), self._unchanged():
            try:
                output = self.called(**self._arguments(tensors))
                self._ended()
            except NotCovered:
                raise
            except Exception as error:
                raise _ForwardFailed from error
            return output


def _told(error: BaseException, call: Call) -> OptionRead | NotCovered:
    """Return what is to be raised for an error in a trace."""
    if call.probed:  # torch's own functions take a probe for a number as a mistake, not as a use
        return OptionRead(call.probed[0])
    if call.functions is not None and (learned := call.functions.learned_from(error)) is not None:
        return OptionRead(learned)
    return NotCovered(_cannot_be_captured(error, call))


def _cannot_be_captured(error: BaseException, call: Call) -> Message:
    kind, line = type(error).__name__, first_line(error)
    if call.functions is None:
        return message("the model cannot be captured ({kind}: {first_line})", kind=kind, first_line=line)
    source = source_of(call.functions.functions[0])
    return message(
        "the model cannot be captured with {name}, which the options hold ({kind}: {first_line})",
        name=source.partition(":")[2],
        source=source,
        kind=kind,
        first_line=line,
    )


def _made_up(batch: int, call: Call) -> bool:
    """Return True if an argument says what a batch is made up of: the frames of a video.

    A forward takes such a batch apart, and what is known of a symbol divided by a number grows with every layer
    until tracing takes minutes. Such an argument is part of the signature, so the batch is all but given by it.
    """
    numbers = [child for _, child in call.signature.structure[1] if child[:2] == ("value", "int")]
    return any(int(text) > 1 and batch % int(text) == 0 for *_, text in numbers)


def _takes(axis: Axis, size: int) -> bool:
    return not isinstance(axis, int) or axis == size


def _never_found_again(error: AddressInText) -> Message:
    return message(
        "the captured graph names {what} by its address in memory, by which no other process could find it again",
        what=str(error),
    )
