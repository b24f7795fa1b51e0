"""A forward cut in two, so that most of it can be left out where it would hardly give anything new.

From one step of a sampler to the next, what a diffusion model's deep layers compute changes little. A capture
is cut at two places that are found in its graph, whatever the family:

* *early*: what the first block that knows more than the image (the time, mostly) makes of it, a small part of the work.
* *late*: the last result that goes on to the output.

The **whole** graph computes everything, and hands out *early* and *deep* besides. The **brief** graph computes
*early* and the output alone, with *late* made up of what an earlier call handed out. Two forms of that are known:

* Where the image takes a short way around *late* (a UNet's outermost skip connection), *deep* is *late* itself:
  DeepCache (Ma, Fang, Wang 2023, arXiv:2312.00858).
* Elsewhere (transformers) *deep* is what the blocks between added, *late - early*, and is added to the new *early*:
  first-block caching, as in TeaCache (Liu et al. 2024, arXiv:2411.19108) and ParaAttention.

Called with the same tensors, the brief graph gives what the whole graph gives, up to rounding.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.fx import Graph, GraphModule, Node

from ..export import Binding, Capture, GraphInput
from ..graph_text import argument_text, target_text
from ..shape_range import IMAGE_AXES, hint

FEATURES = 2
"""How many outputs a whole graph has besides the forward's own: *early* and *deep*."""

# More than this share of the work in every call, and there is too little to gain for what is lost.
_MOST_WORK = 0.5
_BLOCK = re.compile(r"^[\w.]*?\.\d+(?=\.|$)")


def with_brief(capture: Capture, most_work: float = _MOST_WORK) -> Capture:
    """The whole capture, with a brief one; as it is where it has no blocks that could be left out.

    The last outputs of the whole capture are *early* and *deep*. The brief one takes *deep* as one more tensor,
    behind the call's, and its last output is *early*.

    Args:
        most_work: the largest share of the whole's work that the brief one may do.
    """
    return _Cutter(capture).cut(most_work) or capture


def work(capture: Capture) -> float:
    """Multiplications in one call of a capture, at the sizes that it was traced with."""
    return _work_of(capture.graph.graph.nodes)


class _Cutter:
    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        graph = capture.graph.graph
        self._nodes = list(graph.nodes)
        (self._output,) = (node for node in self._nodes if node.op == "output")
        self._block_of = {node: _block(node) for node in self._nodes}
        self._working = {self._block_of[node] for node in self._nodes if _work(node)}
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        tensors = [
            node for item, node in zip(capture.binding.inputs, placeholders, strict=True) if item.kind == "tensor"
        ]
        # Of what looks like an image, what most of the graph depends on: a ControlNet's results come in late.
        images = [node for node in tensors if node.meta["val"].ndim >= IMAGE_AXES]
        self._image = max(images, key=lambda node: len(self._reached_from([node])), default=None)
        self._from_image = self._reached_from([self._image] if self._image is not None else [])
        self._from_others = self._reached_from([node for node in tensors if node is not self._image])

    def cut(self, most_work: float) -> Capture | None:
        most = most_work * _work_of(self._nodes)
        for early in self._early():
            first = self._needed_for([early])
            if _work_of(first) > most:
                return None
            residual: tuple[Node, set[Node]] | None = None
            for late in self._late(early):
                kept = first | self._needed_for([self._output], without=late)
                if _work_of(kept) > most:
                    break
                if self._reaches_output(without=late):
                    return self._cut(early, late, kept, residual=False)
                residual = residual or (late, kept)
            if residual is not None:
                return self._cut(early, *residual, residual=True)
        return None

    def _reached_from(self, start: Iterable[Node], without: Node | None = None) -> set[Node]:
        """What depends on the values of these, if ``without`` is given; sizes are no values."""
        reached = set(start)
        for node in self._nodes:
            if node is not without and _has_values(node) and any(used in reached for used in node.all_input_nodes):
                reached.add(node)
        return reached

    def _reaches_output(self, without: Node) -> bool:
        """Whether the image has another way to the output than by ``without``."""
        assert self._image is not None
        return not self._reached_from([self._image], without).isdisjoint(_outputs(self._output))

    def _needed_for(self, wanted: Sequence[Node], without: Node | None = None) -> set[Node]:
        """What ``wanted`` depend on, sizes included, if ``without`` is given."""
        needed: set[Node] = set()
        stack = list(wanted)
        while stack:
            node = stack.pop()
            if node is not without and node not in needed:
                needed.add(node)
                stack.extend(node.all_input_nodes)
        return needed

    def _early(self) -> Iterator[Node]:
        """Results of blocks that know the image and more of the call, block by block, of each the largest first."""
        results: defaultdict[str, list[Node]] = defaultdict(list)
        for node in self._nodes:
            block = self._block_of[node]
            if block is not None and node in self._from_image and node in self._from_others and self._leaves(node):
                results[block].append(node)
        for found in results.values():
            yield from sorted(found, key=_numel, reverse=True)

    def _leaves(self, node: Node) -> bool:
        """Whether it is a result of a block that works, for something outside of it."""
        block = self._block_of[node]
        return block in self._working and _is_tensor(node) and any(self._block_of[user] != block for user in node.users)

    def _late(self, early: Node) -> Iterator[Node]:
        """Results of the size of ``early`` that depend on it, of blocks or what connects them; the last first."""
        reached, size = self._reached_from([early]), _size(early)
        for node in reversed(self._nodes):
            if node in reached and node is not early and _size(node) == size:
                part_of = node.args[0] if node.target is torch.ops.aten.slice.Tensor else node
                if _at_root(node) or (isinstance(part_of, Node) and self._leaves(part_of)):
                    yield node

    def _cut(self, early: Node, late: Node, kept: set[Node], residual: bool) -> Capture:
        whole, copies = Graph(), dict[Node, Node]()
        for node in self._nodes:
            if node is not self._output:
                copies[node] = whole.node_copy(node, copies.__getitem__)
        outputs = _outputs(self._output)
        deep = _deep(whole, copies[early], copies[late], residual)
        whole.output((*(copies[node] for node in outputs), copies[early], deep))

        binding, tensors = self._capture.binding, sum(i.kind == "tensor" for i in self._capture.binding.inputs)
        placeholders = [node for node in self._nodes if node.op == "placeholder"]
        inputs = [
            (item, node)
            for item, node in zip(binding.inputs, placeholders, strict=True)
            if item.kind == "tensor" or node in kept
        ]
        # In the order of the whole graph, *late* at its own place.
        brief = Graph()
        copies = {}
        for _, node in inputs:
            copies[node] = brief.node_copy(node)
        given = brief.placeholder("deep")
        given.meta["val"] = deep.meta["val"]
        for node in self._nodes:
            if node is late:
                copies[node] = _call(brief, torch.ops.aten.add.Tensor, copies[early], given) if residual else given
            elif node in kept and node.op not in ("placeholder", "output"):
                copies[node] = brief.node_copy(node, copies.__getitem__)
        brief.output((*(copies[node] for node in outputs), copies[early]))

        names = {item.name for item, _ in inputs if item.kind == "constant"}
        brief_binding = replace(
            binding,
            inputs=(*(item for item, _ in inputs), GraphInput("feature", "deep", tensors)),
            constants={name: value for name, value in binding.constants.items() if name in names},
        )
        return replace(self._captured("whole", whole, binding), brief=self._captured("brief", brief, brief_binding))

    def _captured(self, kind: str, graph: Graph, binding: Binding) -> Capture:
        graph.lint()
        positions = {node: index for index, node in enumerate(graph.nodes)}
        (output,) = (node for node in graph.nodes if node.op == "output")
        # The capture's digest says what is cut. Where, and in which form, is up to this module, which may change: the
        # whole graph's last node is *deep*.
        *_, last = (node for node in graph.nodes if node.op == "call_function")
        place = argument_text((output.args, target_text(last.target), last.args), lambda node: f"%{positions[node]}")
        text = f"{self._capture.digest} {kind} {place} {len(positions)}"
        return replace(
            self._capture,
            graph=GraphModule(self._capture.graph, graph),
            binding=binding,
            digest=hashlib.sha256(text.encode()).hexdigest(),
        )


def _outputs(output: Node) -> list[Node]:
    (results,) = output.args
    assert isinstance(results, (tuple, list))
    return [result for result in results if isinstance(result, Node)]


def _deep(graph: Graph, early: Node, late: Node, residual: bool) -> Node:
    if residual:
        return _call(graph, torch.ops.aten.sub.Tensor, late, early)
    return _call(graph, torch.ops.aten.clone.default, late, memory_format=torch.contiguous_format)


def _call(graph: Graph, operator: Callable[..., Any], *nodes: Node, **options: Any) -> Node:
    node = graph.call_function(operator, nodes, options)
    node.meta["val"] = operator(*(argument.meta["val"] for argument in nodes), **options)
    return node


def _block(node: Node) -> str | None:
    """The outermost numbered module that the node is in: ``target.double_blocks.3``."""
    for path, _ in node.meta.get("nn_module_stack", {}).values():
        match = _BLOCK.match(path)
        if match:
            return match.group()
    return None


def _at_root(node: Node) -> bool:
    """Whether the model's own forward computes it, rather than a module of it."""
    return all(path in ("", "target") for path, _ in node.meta.get("nn_module_stack", {}).values())


def _has_values(node: Node) -> bool:
    """Whether it is a tensor, or several, rather than a size."""
    return any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(node.meta.get("val")))


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _size(node: Node) -> tuple[Any, ...] | None:
    value = node.meta.get("val")
    return (tuple(map(str, value.shape)), value.dtype, value.device) if isinstance(value, torch.Tensor) else None


def _numel(node: Node) -> int:
    return math.prod(map(hint, node.meta["val"].shape))


def _work_of(nodes: Iterable[Node]) -> float:
    return sum(map(_work, nodes))


def _work(node: Node) -> float:
    """Multiplications in matrix products, convolutions and attention; everything else is small beside them."""
    if node.op != "call_function" or not _is_tensor(node):
        return 0.0
    name = getattr(node.target, "_opname", "")
    sizes = [
        tuple(map(hint, argument.meta["val"].shape))
        for argument in node.args
        if isinstance(argument, Node) and _is_tensor(argument)
    ]
    if "attention" in name:  # [..., n, width], [..., m, width]
        return 2.0 * math.prod(sizes[0]) * sizes[1][-2]
    if name in ("convolution", "conv1d", "conv2d", "conv3d"):  # a weight is [out, in / groups, ...]
        return float(_numel(node) * math.prod(sizes[1][1:]))
    if name in ("linear", "fp8_linear", "mm", "bmm", "matmul"):
        return float(_numel(node) * sizes[0][-1])
    if name in ("addmm", "baddbmm"):
        return float(_numel(node) * sizes[1][-1])
    return 0.0
