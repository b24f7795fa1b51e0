"""Capture: trace a target's forward, for one call signature or for all sizes.

The graph comes from ``torch.export`` (non-strict: the model's own Python runs on fake tensors, so no model family needs
code of its own).
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx.experimental._config as symbols
from torch.overrides import TorchFunctionMode

from ...messages import Message, first_line, message
from ..call import Call, NotCovered, TensorSpec
from ..export import Capture
from ..export_lock import capturing
from ..graph_text import AddressInText
from ..option_probe import OptionProbe, OptionRead
from ..rewrites.functionalize import replace_writing
from ..rewrites.op_substitutions import SIZELESS, Forms
from ..rewrites.size_conversions import keep_sizes_symbolic
from ..shape_range import Axis, batch_tensor, fold, fold_factors, representative, symbolic_axes, unfold
from ..target.target import Target
from ..target.tensor_parts import Wholes
from .exported_program import capture_of
from .trace_scopes import attributes_restored, no_gradients_wanted, other_threads_left_alone

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
    """

    options_name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None
    general: bool = False
    substitutions: Forms = field(default_factory=dict)
    multiple: int = 1
    prepare: Callable[[Sequence[torch.nn.Module]], None] = lambda _layers: None


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

    A forward that loops over its samples does not let a symbol be its batch. It is traced again, for this call's batch
    and all other sizes.

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
    batch = batch_tensor(specs, images=settings.multiple > 0)
    any_batch = batch is None or not _made_up(specs[batch].shape[0], call)
    captured = _traced(target, forward, call, options, settings, any_batch)
    if not settings.general or not any_batch or batch is None:
        return captured
    if _takes(captured.shapes.axes[batch][0], specs[batch].shape[0]):
        return captured
    return _traced(target, forward, call, options, settings, any_batch=False)


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
    inputs = _inputs(call.signature.tensors, settings, any_batch)
    bag = settings.options_name

    def arguments(tensors: list[torch.Tensor]) -> dict[str, Any]:
        rebuilt = call.rebuild([unfold(t) if i in inputs.folds else t for i, t in enumerate(tensors)])
        probes = {name: value if value is None else OptionProbe(name) for name, value in options.items()}
        if rebuilt.get(bag) is not None:
            rebuilt[bag] = {**settings.overrides, **probes, **rebuilt[bag]}
        return rebuilt

    wrapper = _Forward(target.module, forward, arguments)
    wrapper.training = target.module.training  # of the wrapper alone: train() would set every layer's
    with _tracing(target, settings):
        try:
            program = _exported(wrapper, target, inputs, settings)
            return capture_of(program, inputs.batch, inputs.folds)
        except (OptionRead, NotCovered):
            raise
        except AddressInText as error:
            raise NotCovered(_never_found_again(error)) from error
        except Exception as error:
            settings.check()  # what looks like a failure may be an interruption that torch has wrapped
            if call.probed:  # torch's own functions take a probe for a number as a mistake, not as a use
                raise OptionRead(call.probed[0]) from error
            raise NotCovered(
                message(
                    "the model cannot be captured ({kind}: {first_line})",
                    kind=type(error).__name__,
                    first_line=first_line(error),
                )
            ) from error


def _inputs(specs: Sequence[TensorSpec], settings: TraceSettings, any_batch: bool) -> _Inputs:
    multiple = settings.multiple
    batch = batch_tensor(specs, images=multiple > 0)
    shapes: Sequence[Sequence[int]] = [spec.shape for spec in specs]
    folds: Mapping[int, int] = {}
    if settings.general:
        shapes = representative(specs, batch if any_batch else None, multiple)
        folds = fold_factors(specs, multiple)
    # Fakes need only metadata, and a tensor made under inference_mode cannot be turned into one.
    examples = [torch.empty(n, dtype=s.dtype, device=s.device) for n, s in zip(shapes, specs, strict=True)]
    examples = [fold(example, folds[i]) if i in folds else example for i, example in enumerate(examples)]
    axes = (symbolic_axes(example.ndim, i in folds, multiple > 0) for i, example in enumerate(examples))
    sizes = [
        # A size of 1 cannot be a symbol, and torch.export warns of each that it was to be one.
        {axis: _AUTO for axis in open_axes if (any_batch or axis) and example.shape[axis] != 1}
        for example, open_axes in zip(examples, axes, strict=True)
    ]
    return _Inputs(examples, sizes, folds, batch)


@contextlib.contextmanager
def _tracing(target: Target, settings: TraceSettings) -> Iterator[None]:
    """Trace inside: alone, watched, and with nothing changed but what is traced."""
    substitutions = {**settings.substitutions, **SIZELESS} if settings.general else settings.substitutions
    with (
        capturing(),
        torch.inference_mode(False),
        torch.no_grad(),
        _Watch(settings.check, substitutions),
        no_gradients_wanted(target.module),
        other_threads_left_alone(),
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
    with attributes_restored(target.layers):
        settings.prepare(target.layers)
        if settings.general:
            wrapper.called = keep_sizes_symbolic(target.layers, wrapper.called)
        drawn = _numbers_drawn()
        wrapper.wholes = Wholes(target.layers, target.formats)
        program = torch.export.export(wrapper, (inputs.examples,), dynamic_shapes=sizes, strict=False)
        if _numbers_drawn() != drawn:  # a number of Python's is a constant in the graph
            raise NotCovered(message("the model's forward draws random numbers ({operator})", operator="Python"))
    # Tracing once more makes any graph functional. With symbols for sizes it takes twice as long as the export itself,
    # and most need nothing or little. Engines for static graphs also count on the fewer operators that come out of it.
    if settings.general and replace_writing(program.graph_module):
        return program
    return program.run_decompositions({})


class _Watch(TorchFunctionMode):
    """Sees every torch function of the traced forward.

    Calls ``check`` before each, so that a trace can be interrupted; and calls others in place of those
    that are not to be traced as they are.
    """

    def __init__(self, check: Callable[[], None], substitutions: Forms) -> None:
        super().__init__()
        self._check = check
        self._substitutions = substitutions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check()
        return self._substitutions.get(func, func)(*args, **(kwargs or {}))


class _Forward(torch.nn.Module):
    """The target's forward as a function of the call's tensors alone."""

    def __init__(
        self, module: torch.nn.Module, forward: Callable[..., Any], arguments: Callable[..., dict[str, Any]]
    ) -> None:
        super().__init__()
        self.target = module
        self.called = forward
        self._arguments = arguments
        self.wholes: Wholes | None = None

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        assert self.wholes is not None
        with self.wholes.in_place():
            return self.called(**self._arguments(tensors))


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


def _numbers_drawn() -> tuple[Any, str]:
    """Return how far the generators of Python and of numpy have come."""
    return random.getstate(), str(np.random.get_state())
