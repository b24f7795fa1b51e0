"""From torch.export's program to a capture: what its inputs and outputs are, and its digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.utils._pytree as pytree

from ...messages import message
from ..call import NotCovered
from ..export import Binding, Capture, GraphInput
from ..graph_text import graph_lines, text_digest
from ..values.tensors import tensor_digest
from .operator_traits import calls_option, draws_random_numbers, waits_for_values


def capture_of(program: torch.export.ExportedProgram, batch: int | None, folds: Mapping[int, int]) -> Capture:
    """Return the capture that an exported program is.

    Args:
        program: functional.
        batch: which of the call's tensors has the batch as its first axis.
        folds: which of them are handed over folded, and by what.

    Raises:
        NotCovered: it has inputs or outputs of other kinds, or draws random numbers.
        AddressInText: its text would be another in every process.
    """
    graph = program.graph_module
    inputs, constants = _inputs(program)
    output = _output(program)
    drawing = next(filter(draws_random_numbers, graph.graph.nodes), None)
    if drawing is not None:  # others than eager would draw: a compiler has a generator of its own
        raise NotCovered(message("the model's forward draws random numbers ({operator})", operator=drawing.target))
    calls = any(map(calls_option, graph.graph.nodes))
    waits = calls or any(map(waits_for_values, graph.graph.nodes))
    captured = Capture(graph, Binding(tuple(inputs), constants, output, folds, waits, calls), "", batch)
    return replace(captured, digest=text_digest(_lines(captured)))


def _inputs(program: torch.export.ExportedProgram) -> tuple[list[GraphInput], dict[str, torch.Tensor]]:
    """Return what each placeholder stands for, and the constants among them by name.

    Raises:
        NotCovered: one stands for something else.
    """
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
    return inputs, constants


def _output(program: torch.export.ExportedProgram) -> pytree.TreeSpec:
    """Return how the flat outputs are put together.

    Raises:
        NotCovered: the forward writes to its inputs.
    """
    for spec in program.graph_signature.output_specs:
        if spec.kind is not torch.export.graph_signature.OutputKind.USER_OUTPUT:
            raise NotCovered(message("the model's forward writes to its inputs ({kind})", kind=spec.kind.name.lower()))
    assert program.call_spec.out_spec is not None
    return program.call_spec.out_spec


def _lines(captured: Capture) -> list[str]:
    """Return what the digest is made of."""
    binding, shapes = captured.binding, captured.shapes
    lines = [f"{item.kind} {item.name if item.kind != 'tensor' else item.index}" for item in binding.inputs]
    lines += [f"{name} {tensor_digest(value)}" for name, value in binding.constants.items()]
    lines += graph_lines(captured.graph)
    lines.append(str(binding.output))
    if shapes.general:
        # Not its conditions: sympy writes one and the same in a way that depends on the process' hash seed (Cosmos
        # Predict2). Each compiled graph has those that it was compiled under, and is asked them before it serves.
        lines.append(repr(replace(shapes, conditions=())))
    return lines
