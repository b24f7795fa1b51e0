"""Capture: a target's forward as an FX graph of ATen operators, for one call signature or for all sizes.

The graph comes from ``torch.export`` (non-strict: the model's own Python runs on fake tensors, so
no model family needs code of its own). Every parameter and buffer becomes an input, so that no
weight value is in the graph. The text of the graph, hashed, is the capture's digest: the identity
of *what is computed*, whatever model object, file or process it came from.
"""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
import torch.fx.experimental._config as symbols
import torch.fx.experimental.proxy_tensor as proxy_tensor
import torch.utils._pytree as pytree
from torch.overrides import TorchFunctionMode

from ..messages import Message, first_line, message
from .call import Call, NotCovered
from .export_lock import capturing
from .fingerprint.value_text import tensor_digest
from .graph_text import AddressInText, argument_text, target_text, text_digest
from .option_probe import OptionProbe, OptionRead
from .rewrites.functionalize import replace_writing
from .rewrites.op_substitutions import SIZELESS, Forms
from .shape_range import (
    Axis,
    ShapeRange,
    batch_tensor,
    fold,
    fold_factors,
    range_of,
    representative,
    symbolic_axes,
    unfold,
)
from .target.target import Target
from .target.tensor_parts import Wholes

_AUTO = torch.export.Dim.AUTO  # symbolic, unless the forward insists on this very size


@dataclass(frozen=True)
class GraphInput:
    """Where a graph's placeholder gets its value: a weight or a constant by name, or a call's tensor by index.

    A *feature* is a tensor that comes from another graph of the same forward, after the call's own.
    """

    kind: Literal["weight", "constant", "tensor", "feature"]
    name: str
    index: int = -1


@dataclass(frozen=True)
class Binding:
    """How to call a captured graph: where every input comes from, and what its outputs mean.

    Attributes:
        inputs: what each placeholder stands for, in order.
        constants: tensors that the forward made out of plain numbers; part of the code.
        output: how to put the flat outputs together again.
        folds: which of the call's tensors are handed over folded (see ``shape_range.fold``), and by what.
        waits: whether it waits for the device in its middle, for values that decide on sizes, or calls another
            library's operator that may. Such a graph is not replayed as a CUDA graph.
    """

    inputs: tuple[GraphInput, ...]
    constants: Mapping[str, torch.Tensor]
    output: pytree.TreeSpec
    folds: Mapping[int, int] = field(default_factory=dict)
    waits: bool = False

    @cached_property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(item.name for item in self.inputs if item.kind == "weight")

    def feed(self, weights: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The graph's inputs in order, from weights (in ``weight_names`` order) and a call's tensors."""
        remaining = iter(weights)
        return [
            next(remaining)
            if item.kind == "weight"
            else self._tensor(tensors, item.index)
            if item.kind in ("tensor", "feature")
            else self.constants[item.name]
            for item in self.inputs
        ]

    def _tensor(self, tensors: Sequence[torch.Tensor], index: int) -> torch.Tensor:
        return fold(tensors[index], self.folds[index]) if index in self.folds else tensors[index]


@dataclass(frozen=True)
class Capture:
    """A forward as a graph.

    Attributes:
        graph: functional ATen operators; called with one tensor per entry of ``binding.inputs``,
            returns a flat tuple of tensors.
        digest: sha256 of the graph's canonical text, binding, constants and range of sizes.
        batch: which of the call's tensors has the batch as its first axis.
        brief: the same forward with most of its work left out (see ``rewrites.step_cache_split``), if there is such.
    """

    graph: torch.fx.GraphModule
    binding: Binding
    digest: str
    batch: int | None = None
    brief: Capture | None = None

    @property
    def shapes(self) -> ShapeRange:
        """The sizes it holds for. Compiling may narrow them: ask again afterwards."""
        return _shapes(self.graph, self.binding, self.batch)

    def examples(self) -> list[Any]:
        """A fake tensor for every input: shapes, dtypes, strides and devices without memory."""
        return [node.meta["val"] for node in self.graph.graph.nodes if node.op == "placeholder"]


class _Watch(TorchFunctionMode):
    """Sees every torch function of the traced forward.

    Calls ``check`` before each, so that a trace can be interrupted; and calls others in place of those
    that are not to be traced as they are.
    """

    def __init__(self, check: Callable[[], None], forms: Forms) -> None:
        super().__init__()
        self._check = check
        self._forms = forms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check()
        return self._forms.get(func, func)(*args, **(kwargs or {}))


class _Forward(torch.nn.Module):
    """The target's forward as a function of the call's tensors alone."""

    def __init__(
        self, module: torch.nn.Module, forward: Callable[..., Any], arguments: Callable[..., dict[str, Any]]
    ) -> None:
        super().__init__()
        self.target = module
        self._forward = forward
        self._arguments = arguments
        self.wholes: Wholes | None = None

    def forward(self, tensors: list[torch.Tensor]) -> Any:
        assert self.wholes is not None
        with self.wholes.in_place():
            return self._forward(**self._arguments(tensors))


def capture(
    target: Target,
    forward: Callable[..., Any],
    call: Call,
    *,
    options_name: str,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any],
    check: Callable[[], None],
    general: bool = False,
    forms: Forms = MappingProxyType({}),
    multiple: int = 1,
    prepare: Callable[[Sequence[torch.nn.Module]], None] = lambda _layers: None,
    any_batch: bool = True,
) -> Capture:
    """Trace ``forward`` for the signature of ``call``.

    Args:
        target: the module that ``forward`` runs and whose weights become inputs.
        forward: called with arguments by name.
        call: gives argument structure and tensor shapes; tensor values are not used.
        options_name: the argument that is the open-ended bag of options.
        options: that bag, as the call had it. Entries that are not part of the call's structure
            are replaced by probes.
        overrides: entries put into the bag for the trace, unless the call has such an entry itself:
            what a person's node put there must not be lost.
        check: called often during the trace; what it raises ends the trace and comes out.
        general: keep every size symbolic that the forward lets be, instead of tracing for these sizes.
        forms: functions that are traced in the place of others.
        multiple: of a general capture, what the sides of images are multiples of.
        prepare: given the target's layers; may set attributes of theirs, which are put back afterwards.
        any_batch: whether the batch, too, is to be symbolic in a general capture. A forward that loops over its
            samples does not let it be, and is captured for this call's batch and all other sizes.

    Raises:
        OptionRead: the forward uses an option that ``call`` does not have in its structure.
        NotCovered: the forward cannot be captured; the reason says why.
    """

    def arguments(tensors: list[torch.Tensor]) -> dict[str, Any]:
        rebuilt = call.rebuild([unfold(t) if i in folds else t for i, t in enumerate(tensors)])
        probes = {name: value if value is None else OptionProbe(name) for name, value in options.items()}
        if rebuilt.get(options_name) is not None:
            rebuilt[options_name] = {**overrides, **probes, **rebuilt[options_name]}
        return rebuilt

    wrapper = _Forward(target.module, forward, arguments)
    wrapper.training = target.module.training  # of the wrapper alone: train() would set every layer's
    specs = call.signature.tensors
    batch = batch_tensor(specs)
    any_batch = any_batch and (batch is None or not _made_up(specs[batch].shape[0], call))
    shapes = (
        representative(specs, batch if any_batch else None, multiple) if general else [spec.shape for spec in specs]
    )
    folds = fold_factors(specs, multiple) if general else {}
    # Fakes need only metadata, and a tensor made under inference_mode cannot be turned into one.
    examples = [torch.empty(n, dtype=s.dtype, device=s.device) for n, s in zip(shapes, specs, strict=True)]
    examples = [fold(example, folds[i]) if i in folds else example for i, example in enumerate(examples)]
    axes = (symbolic_axes(example.ndim, i in folds) for i, example in enumerate(examples))
    sizes = ([{axis: _AUTO for axis in open_axes if any_batch or axis} for open_axes in axes],)
    with (
        capturing(),
        torch.inference_mode(False),
        torch.no_grad(),
        _Watch(check, {**forms, **SIZELESS} if general else forms),
        _no_gradients_wanted(target.module),
        _other_threads_left_alone(),
        symbols.patch(use_duck_shape=False),  # type: ignore[attr-defined]  # equal sizes in an example are not one size
        warnings.catch_warnings(),
    ):
        # torch.export warns about its own use of its own deprecated classes.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            with _attributes_restored(target.layers):
                prepare(target.layers)
                drawn = _numbers_drawn()
                wrapper.wholes = Wholes(target.layers, target.formats)
                program = torch.export.export(
                    wrapper, (examples,), dynamic_shapes=sizes if general else None, strict=False
                )
                if _numbers_drawn() != drawn:  # a number of Python's is a constant in the graph
                    raise NotCovered(
                        message("the model's forward draws random numbers ({operator})", operator="Python")
                    )
            # Tracing once more makes any graph functional. With symbols for sizes it takes twice as long as the
            # export itself, and most need nothing or little. Engines for static graphs also count on the fewer
            # operators that come out of it.
            if not general or not replace_writing(program.graph_module):
                program = program.run_decompositions({})
            captured = _capture_from(program, batch, folds)
        except (OptionRead, NotCovered):
            raise
        except AddressInText as error:
            raise NotCovered(_never_found_again(error)) from error
        except Exception as error:
            check()  # what looks like a failure may be an interruption that torch has wrapped
            if call.probed:  # torch's own functions take a stand-in for a number as a mistake, not as a use
                raise OptionRead(call.probed[0]) from error
            raise NotCovered(
                message(
                    "the model cannot be captured ({kind}: {first_line})",
                    kind=type(error).__name__,
                    first_line=first_line(error),
                )
            ) from error
    if not general or not any_batch or batch is None or _takes(captured.shapes.axes[batch][0], specs[batch].shape[0]):
        return captured
    return capture(
        target,
        forward,
        call,
        options_name=options_name,
        options=options,
        overrides=overrides,
        check=check,
        general=True,
        forms=forms,
        multiple=multiple,
        prepare=prepare,
        any_batch=False,
    )


def _made_up(batch: int, call: Call) -> bool:
    """Whether an argument says what a batch is made up of: the frames of a video.

    A forward takes such a batch apart, and what is known of a symbol divided by a number grows with every layer
    until tracing takes minutes. Such an argument is part of the signature, so the batch is all but given by it.
    """
    numbers = [child for _, child in call.signature.structure[1] if child[:2] == ("value", "int")]
    return any(int(text) > 1 and batch % int(text) == 0 for *_, text in numbers)


def _takes(axis: Axis, size: int) -> bool:
    return not isinstance(axis, int) or axis == size


@contextlib.contextmanager
def _attributes_restored(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Put every attribute of the layers back as the same object.

    torch.export leaves copies in place of a module's own lists and dicts, and others may hold those.
    """
    before = [dict(layer.__dict__) for layer in layers]
    try:
        yield
    finally:
        for layer, attributes in zip(layers, before, strict=True):
            for name in layer.__dict__.keys() - attributes.keys():
                del layer.__dict__[name]
            layer.__dict__.update(attributes)


@contextlib.contextmanager
def _no_gradients_wanted(module: torch.nn.Module) -> Iterator[None]:
    """Weights made under inference_mode say that they want no gradients, which they cannot have anyway.

    torch.export sets on its stand-in for a weight what the weight says, and fails where that is impossible.
    """
    weights = (*module.parameters(), *module.buffers())
    wanting = [weight for weight in weights if weight.requires_grad and weight.is_inference()]
    for weight in wanting:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        with torch.inference_mode():
            for weight in wanting:
                weight.requires_grad_(True)


@contextlib.contextmanager
def _other_threads_left_alone() -> Iterator[None]:
    """Have torch.export follow the modules of this thread alone.

    It follows every call and attribute of every module in the process. ComfyUI's MultiGPU CFG Split runs a model in a
    thread for each GPU, and the other one's image failed: "Unexpected key …, expected …".
    """
    tracer = getattr(proxy_tensor, "_ModuleStackTracer", None)
    if tracer is None:  # a PyTorch that does it in another way
        yield
        return
    tracing, call_module, getattribute = threading.get_ident(), tracer.call_module, tracer.getattr

    def call(self: Any, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != tracing:
            return forward(*args, **kwargs)
        return call_module(self, module, forward, args, kwargs)

    def attribute(self: Any, name: str, value: Any, known: Any) -> Any:
        return value if threading.get_ident() != tracing else getattribute(self, name, value, known)

    tracer.call_module, tracer.getattr = call, attribute
    try:
        yield
    finally:
        tracer.call_module, tracer.getattr = call_module, getattribute


def _capture_from(program: torch.export.ExportedProgram, batch: int | None, folds: Mapping[int, int]) -> Capture:
    kinds = torch.export.graph_signature.InputKind
    inputs: list[GraphInput] = []
    constants: dict[str, torch.Tensor] = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind in (kinds.PARAMETER, kinds.BUFFER):
            assert spec.target is not None
            inputs.append(GraphInput("weight", spec.target.removeprefix("target.")))
        elif spec.kind is kinds.CONSTANT_TENSOR:
            assert spec.target is not None
            value = program.constants[spec.target]
            assert isinstance(value, torch.Tensor)
            name = f"constant_{len(constants)}"
            constants[name] = value.detach().clone()
            inputs.append(GraphInput("constant", name))
        elif spec.kind is kinds.USER_INPUT:
            inputs.append(GraphInput("tensor", spec.arg.name, sum(i.kind == "tensor" for i in inputs)))
        else:
            raise NotCovered(message("the model's forward needs an input of kind {kind}", kind=spec.kind.name.lower()))
    for spec in program.graph_signature.output_specs:
        if spec.kind is not torch.export.graph_signature.OutputKind.USER_OUTPUT:
            raise NotCovered(message("the model's forward writes to its inputs ({kind})", kind=spec.kind.name.lower()))
    out_spec = program.call_spec.out_spec
    assert out_spec is not None
    graph = program.graph_module
    drawing = next(filter(_draws_random_numbers, graph.graph.nodes), None)
    if drawing is not None:  # others than eager would draw: a compiler has a generator of its own
        raise NotCovered(message("the model's forward draws random numbers ({operator})", operator=drawing.target))
    lines = [f"{item.kind} {item.name if item.kind != 'tensor' else item.index}" for item in inputs]
    lines += [f"{name} {tensor_digest(value)}" for name, value in constants.items()]
    lines += _graph_lines(graph)
    lines.append(str(out_spec))
    binding = Binding(tuple(inputs), constants, out_spec, folds, any(map(_waits_for_values, graph.graph.nodes)))
    shapes = _shapes(graph, binding, batch)
    if shapes.general:
        lines.append(repr(shapes))
    return Capture(graph, binding, text_digest(lines), batch)


def foreign_operators(capture: Capture) -> frozenset[str]:
    """Return the operators in a capture, ``library::operator``, that are neither PyTorch's nor our own."""
    operators = (node.target for node in capture.graph.graph.nodes)
    return frozenset(
        operator._schema.name
        for operator in operators
        if isinstance(operator, torch._ops.OpOverload) and operator.namespace not in _KNOWN_LIBRARIES
    )


_KNOWN_LIBRARIES = ("aten", "prims", "onediff_comfy")


def _never_found_again(error: AddressInText) -> Message:
    return message(
        "the captured graph names {what} by its address in memory, by which no other process could find it again",
        what=str(error),
    )


def _numbers_drawn() -> tuple[Any, str]:
    """How far the generators of Python and of numpy have come."""
    return random.getstate(), str(np.random.get_state())


def _draws_random_numbers(node: torch.fx.Node) -> bool:
    """Whether an operator does; dropout, in itself or in attention, is off outside of training."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return not any(part in operator.name() for part in ("dropout", "attention"))


def _waits_for_values(node: torch.fx.Node) -> bool:
    """Whether an operator's result has a size, or is a number, that only its arguments' values tell."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return False
    if operator is torch.ops.aten.index.Tensor:  # by a mask, not by positions
        indices = [index.meta["val"] for index in node.args[1] if index is not None]  # type: ignore[union-attr]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if operator is torch.ops.aten.repeat_interleave.Tensor and node.kwargs.get("output_size") is not None:
        return False
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(operator.tags)


def _shapes(graph: torch.fx.GraphModule, binding: Binding, batch: int | None) -> ShapeRange:
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    pairs = zip(binding.inputs, placeholders, strict=True)
    return range_of([node.meta["val"] for item, node in pairs if item.kind == "tensor"], batch, binding.folds)


def _graph_lines(graph: torch.fx.GraphModule) -> Iterator[str]:
    """The graph's canonical text: nodes by position, no names, no addresses."""
    positions: dict[torch.fx.Node, int] = {}

    def numbers(sizes: Sequence[Any]) -> tuple[Any, ...]:
        # Symbols and their ranges are in the digest by themselves, under names that are the same everywhere.
        return tuple("*" if isinstance(size, torch.SymInt) else size for size in sizes)

    def name(node: torch.fx.Node) -> str:
        return f"%{positions[node]}"

    for position, node in enumerate(graph.graph.nodes):
        positions[node] = position
        if node.op == "placeholder":
            value = node.meta.get("val")
            described = (
                f"{value.dtype} {numbers(value.shape)} {numbers(value.stride())} {value.device}"
                if isinstance(value, torch.Tensor)
                else repr(value)
            )
            yield f"%{position} = input {described}"
        elif node.op == "get_attr":
            attribute = graph.get_submodule(str(node.target)) if hasattr(graph, str(node.target)) else None
            yield f"%{position} = graph"
            if isinstance(attribute, torch.fx.GraphModule):
                yield from (f"  {line}" for line in _graph_lines(attribute))
        else:
            arguments = f"{argument_text(node.args, name)} {argument_text(node.kwargs, name)}"
            yield f"%{position} = {node.op} {target_text(node.target)} {arguments}"
