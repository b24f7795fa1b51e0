"""passes/norm_rope.py: norms and rotations are one operator where that is the same, and are left alone elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onediff_comfy.engines.inductor.passes.norm_rope import fuse_norm_and_rope, norm_rope

WIDTH, HEADS = 32, 3
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module", autouse=True)
def comfy_kitchen() -> Any:
    """The operators that the host rotates by; stand-ins of the same names where comfy-kitchen is not installed."""
    try:
        import comfy_kitchen  # noqa: F401  # type: ignore[import-not-found,unused-ignore]

        return None
    except ImportError:
        pass
    library = torch.library.Library("comfy_kitchen", "DEF")
    library.define("apply_rope(Tensor xq, Tensor xk, Tensor freqs_cis) -> (Tensor, Tensor)")
    library.impl("apply_rope", lambda q, k, r: (rotated(q, r), rotated(k, r)), "CompositeExplicitAutograd")
    library.define("apply_rope1(Tensor x, Tensor freqs_cis) -> Tensor")
    library.impl("apply_rope1", rotated, "CompositeExplicitAutograd")
    scaled = "Tensor q_scale, Tensor? k_scale=None, float epsilon=1e-06"
    library.define(f"rms_rope(Tensor q, Tensor k, Tensor freqs_cis, {scaled}) -> (Tensor, Tensor)")
    library.impl("rms_rope", normed_and_rotated, "CompositeExplicitAutograd")
    library.define("rms_rope1(Tensor x, Tensor freqs_cis, Tensor scale, float epsilon=1e-06) -> Tensor")
    library.impl("rms_rope1", lambda x, r, s, e=1e-6: rotated(normed(x, s, e), r), "CompositeExplicitAutograd")
    return library


def normed(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), scale, eps)


def normed_and_rotated(query: Any, key: Any, by: Any, of_query: Any, of_key: Any = None, eps: float = 1e-6) -> Any:
    of_key = of_query if of_key is None else of_key
    return rotated(normed(query, of_query, eps), by), rotated(normed(key, of_key, eps), by)


def rotated(x: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """As the host's own code rotates (comfy/ldm/flux/math.py)."""
    pairs = x.to(rotations.dtype).reshape(*x.shape[:-1], -1, 1, 2)
    out = rotations[..., 0] * pairs[..., 0] + rotations[..., 1] * pairs[..., 1]
    return out.reshape(x.shape).type_as(x)


def rotations(tokens: int, width: int = WIDTH, batch: int = 1, device: str = "cpu") -> torch.Tensor:
    angles = torch.rand(batch, 1, tokens, width // 2, device=device) * 6
    parts = (angles.cos(), -angles.sin(), angles.sin(), angles.cos())
    return torch.stack(parts, -1).unflatten(-1, (2, 2))


def attended(query: torch.Tensor, key: torch.Tensor, axis: int = 2) -> torch.Tensor:
    if axis == 1:
        query, key = query.transpose(1, 2), key.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, key)


class Block(nn.Module):
    """Query and key of text and image, normed by head, put together and rotated: Flux' double block."""

    def __init__(self, width: int = WIDTH, eps: float | None = None, axis: int = 2, norms: int = 2) -> None:
        super().__init__()
        self.axis, self.norms = axis, norms
        self.norm = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in range(4))
        for norm in self.norm:
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, text: torch.Tensor, image: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (3, HEADS, -1)).movedim(-3, 0) for part in (text, image)]
        if self.axis == 2:
            heads = [part.transpose(2, 3) for part in heads]
        normed = [
            [
                self.norm[2 * of + which](part[which]) if which < self.norms else part[which]
                for of, part in enumerate(heads)
            ]
            for which in (0, 1)
        ]
        query, key = (torch.cat(parts, self.axis) for parts in normed)
        return attended(*torch.ops.comfy_kitchen.apply_rope(query, key, rotations), self.axis)


def calls(width: int = WIDTH, batch: int = 2) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 5, 3 * HEADS * width), torch.randn(batch, 7, 3 * HEADS * width), rotations(12, width)


def captured(module: nn.Module, arguments: tuple[torch.Tensor, ...], dynamic: Any = None) -> torch.fx.GraphModule:
    program = torch.export.export(module.eval(), arguments, dynamic_shapes=dynamic, strict=False)
    graph = program.graph_module
    graph.state = list(program.state_dict.values())
    return graph


def fused(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [node for node in fuse_norm_and_rope(graph).graph.nodes if node.target is norm_rope()]


def _like(node: torch.fx.Node) -> Any:
    """Arguments of a node, of the sizes that it has."""
    return torch.fx.node.map_arg(node.args, lambda argument: torch.ones(argument.meta["val"].shape))


def same(graph: torch.fx.GraphModule, arguments: tuple[torch.Tensor, ...]) -> bool:
    weights = graph.state
    expected, found = (g(*weights, *arguments)[0] for g in (graph, fuse_norm_and_rope(graph)))
    torch.testing.assert_close(found, expected)
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-6, 0.1])
def test_norms_of_parts_and_their_rotation_are_one_operator(dtype: torch.dtype, eps: float | None) -> None:
    text, image, by = calls()
    arguments = text.to(dtype), image.to(dtype), by
    graph = captured(Block(eps=eps).to(dtype), arguments)
    query, key = fused(graph)
    assert [len(node.args[0]) for node in (query, key)] == [2, 2]
    assert query.meta["val"].stride() == norm_rope()(*_like(query)).stride()
    assert not [node for node in fuse_norm_and_rope(graph).graph.nodes if "apply_rope" in str(node.target)]
    assert same(graph, arguments)


class Placed(Block):
    """With rotations for text and for the image, as Flux makes them of the places of both."""

    def forward(self, text: torch.Tensor, image: torch.Tensor, of_text: torch.Tensor, of_image: Any) -> torch.Tensor:
        return super().forward(text, image, torch.cat([of_text, of_image], 2))


def test_sizes_may_be_symbols() -> None:
    batch, words, pixels = (torch.export.Dim(name, min=2) for name in ("batch", "words", "pixels"))
    dynamic = ({0: batch, 1: words}, {0: batch, 1: pixels}, {2: words}, {2: pixels})
    text, image, _ = calls()
    graph = captured(Placed(), (text, image, rotations(5), rotations(7)), dynamic)
    assert len(fused(graph)) == 2
    for tokens in (6, 9):
        text, image = torch.randn(3, 5, 9 * WIDTH), torch.randn(3, tokens, 9 * WIDTH)
        assert same(graph, (text, image, rotations(5), rotations(tokens)))


def test_a_block_does_not_say_how_many_rotations_it_is_handed() -> None:
    """It is traced by itself: their number is a symbol that has nothing to do with the tokens'."""
    words, pixels, places = (torch.export.Dim(name, min=2) for name in ("words", "pixels", "places"))
    text, image, _ = calls()
    graph = captured(Block(), (text, image, rotations(12)), ({1: words}, {1: pixels}, {2: places}))
    assert len(fused(graph)) == 2 and same(graph, (text, image, rotations(12)))
    more = torch.cat([text, text], 1)
    assert same(graph, (more, image, rotations(17))), "one for each of other tokens"


def test_of_more_rotations_the_first_are_taken_and_one_is_for_all() -> None:
    text, _image, by = calls()
    parts, scales = [text.view(2, 5, 3 * HEADS, WIDTH).transpose(1, 2)], [torch.ones(WIDTH)]
    expected = norm_rope()(parts, scales, [1e-6], by[:, :, :5], 2)
    assert torch.equal(norm_rope()(parts, scales, [1e-6], by, 2), expected)
    same_for_all = by[:, :, :1].expand(-1, -1, 5, -1, -1, -1)
    assert torch.equal(
        norm_rope()(parts, scales, [1e-6], by[:, :, :1], 2), norm_rope()(parts, scales, [1e-6], same_for_all, 2)
    )


def test_heads_may_come_after_tokens() -> None:
    text, image, by = calls()
    arguments = text, image, by.transpose(1, 2)
    graph = captured(Block(axis=1), arguments)
    assert len(fused(graph)) == 2 and same(graph, arguments)


class OneByOne(nn.Module):
    """Qwen-Image's: a query and its key are rotated each by itself."""

    def forward(self, x: torch.Tensor, by: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (2, HEADS, -1)).transpose(1, 3)
        query, key = (torch.ops.comfy_kitchen.apply_rope1(normed(part, scale, 1e-6), by) for part in heads.unbind(2))
        return attended(query, key)


class Together(nn.Module):
    """Z-Image's: one operator of the host norms and rotates; both scales, or the query's for both."""

    def __init__(self, scales: int = 2, eps: float = 0.1) -> None:
        super().__init__()
        self.scales, self.eps = scales, eps

    def forward(self, x: torch.Tensor, by: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        query, key = x.unflatten(-1, (2, HEADS, -1)).unbind(2)
        scales = (scale, 2 * scale)[: self.scales]
        if self.scales == 2:
            scales = (*scales, self.eps)
        return attended(*torch.ops.comfy_kitchen.rms_rope(query, key, by.transpose(1, 2), *scales), 1)


class TogetherOneByOne(nn.Module):
    def forward(self, x: torch.Tensor, by: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        query, key = x.unflatten(-1, (2, HEADS, -1)).unbind(2)
        by = by.transpose(1, 2)
        first = torch.ops.comfy_kitchen.rms_rope1(query, by, scale, 0.1)
        return attended(first, torch.ops.comfy_kitchen.rms_rope1(key, by, 2 * scale), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "module",
    [OneByOne(), Together(), Together(scales=1), TogetherOneByOne()],
    ids=["rope1", "rms_rope", "one scale", "rms_rope1"],
)
def test_every_operator_that_the_host_rotates_by_is_known(module: nn.Module, dtype: torch.dtype) -> None:
    scale = (torch.rand(WIDTH) + 0.5).to(dtype)
    arguments = torch.randn(2, 5, 2 * HEADS * WIDTH).to(dtype), rotations(5), scale
    graph = captured(module, arguments)
    assert len(fused(graph)) == 2 and same(graph, arguments)
    assert not [node for node in fuse_norm_and_rope(graph).graph.nodes if "comfy_kitchen" in str(node.target)]


class OtherScale(nn.Module):
    """The scale has more bits than what is normed."""

    def forward(self, x: torch.Tensor, by: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        query, key = x.unflatten(-1, (2, HEADS, -1)).unbind(2)
        return attended(*torch.ops.comfy_kitchen.rms_rope(query, key, by.transpose(1, 2), scale.float()), 1)


def test_a_scale_of_another_dtype_is_left_alone() -> None:
    x = torch.randn(2, 5, 2 * HEADS * WIDTH).bfloat16()
    graph = captured(OtherScale(), (x, rotations(5), torch.ones(WIDTH).bfloat16()))
    assert fuse_norm_and_rope(graph) is graph


class OfAllHeads(nn.Module):
    """Wan's: one norm over all heads together."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x, (HEADS * WIDTH,), torch.ones(HEADS * WIDTH)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return attended(*torch.ops.comfy_kitchen.apply_rope(normed, normed, by))


class Changed(nn.Module):
    """Between norm and rotation something else is done."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        normed = F.rms_norm(heads, (WIDTH,), torch.ones(WIDTH)) * 2
        return attended(*torch.ops.comfy_kitchen.apply_rope(normed, normed, by))


class Rounded(nn.Module):
    """The norm is of another dtype than what is rotated."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        normed = F.rms_norm(heads, (WIDTH,), torch.ones(WIDTH)).bfloat16()
        return attended(*torch.ops.comfy_kitchen.apply_rope(normed, normed, by))


class RoundedTwice(nn.Module):
    """It is rounded in between, and of one dtype all the same."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        normed = F.rms_norm(heads, (WIDTH,), torch.ones(WIDTH)).bfloat16().float()
        return attended(*torch.ops.comfy_kitchen.apply_rope(normed, normed, by))


class OfATokensHeads(nn.Module):
    """One norm over all heads of a token, which are apart already."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.unflatten(-1, (HEADS, -1)), (HEADS, WIDTH), torch.ones(HEADS, WIDTH))
        return attended(*torch.ops.comfy_kitchen.apply_rope(normed, normed, by.transpose(1, 2)), 1)


class PutTogetherByHeads(nn.Module):
    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        normed = torch.cat([F.rms_norm(part, (WIDTH,), torch.ones(WIDTH)) for part in heads.split(1, 1)], 1)
        return attended(*torch.ops.comfy_kitchen.apply_rope(normed, normed, by))


class Viewed(nn.Module):
    """Another attention than PyTorch's: it views heads as they lie, which is another way with ours."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.unflatten(-1, (HEADS, -1)).transpose(1, 2), (WIDTH,), torch.ones(WIDTH))
        query, key = torch.ops.comfy_kitchen.apply_rope(normed, normed, by)
        return query.flatten(0, 1) @ key.flatten(0, 1).transpose(1, 2)


class Unscaled(nn.Module):
    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.unflatten(-1, (HEADS, -1)).transpose(1, 2), (WIDTH,))
        return attended(*torch.ops.comfy_kitchen.apply_rope(normed, normed, by))


OTHERS = (OfAllHeads, OfATokensHeads, PutTogetherByHeads, Changed, Rounded, RoundedTwice, Viewed, Unscaled)


@pytest.mark.parametrize("module", [other() for other in OTHERS], ids=lambda module: type(module).__name__)
def test_what_is_something_else_is_left_alone(module: nn.Module) -> None:
    graph = captured(module, (torch.randn(2, 5, HEADS * WIDTH), rotations(5)))
    assert fuse_norm_and_rope(graph) is graph


@pytest.mark.parametrize(
    "by",
    [
        rotations(12, batch=2)[:1].double(),
        rotations(1),  # one for all tokens
        rotations(12)[..., :1].expand(-1, -1, -1, -1, -1, 2).reshape(1, 1, 12, 16, 2, 2)[:, :, :, :1],
    ],
    ids=["float64", "one rotation for all", "one matrix for all channels"],
)
def test_rotations_of_another_form_are_left_alone(by: torch.Tensor) -> None:
    text, image, _ = calls()
    graph = captured(Block(), (text, image, by))
    assert fuse_norm_and_rope(graph) is graph


def test_a_key_that_is_not_normed_leaves_the_query_alone() -> None:
    """They are rotated by one kernel, which would have to run for one of them anyway."""
    graph = captured(Block(norms=1), calls())
    assert fuse_norm_and_rope(graph) is graph


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("count", [1, 9, 14])
def test_the_kernel_reads_no_rotation_that_is_not_there(count: int) -> None:
    parts = [torch.randn(2, 3, 9, WIDTH, device="cuda")]
    scales, by = [torch.ones(WIDTH, device="cuda")], rotations(count, device="cuda")
    found = torch.compile(norm_rope(), fullgraph=True)(parts, scales, [1e-6], by, 2)
    expected = norm_rope()([part.cpu() for part in parts], [scales[0].cpu()], [1e-6], by.cpu(), 2)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "width", "axis"), [(3, 32, 2), (24, 128, 2), (40, 64, 1), (1, 256, 1)])
def test_the_kernel_is_as_exact_as_the_norm_and_the_rotation(
    dtype: torch.dtype, heads: int, width: int, axis: int
) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()  # or the sizes of the test before become symbols
    by = rotations(50, width, 2, "cuda")
    shape = (2, 50, heads, width) if axis == 1 else (2, heads, 50, width)
    whole = torch.randn(shape, device="cuda", dtype=dtype)
    text, image = whole.tensor_split((13,), axis)
    image = image.transpose(1, 2).contiguous().transpose(1, 2)
    scales = [(torch.rand(width, device="cuda") + 0.5).to(dtype) for _ in range(2)]
    if axis == 1:
        by = by.transpose(1, 2)
    parts, eps = (text, image), (1e-6, 0.5)
    found = torch.compile(norm_rope(), fullgraph=True)([*parts], scales, [*eps], by, axis)
    normed = [F.rms_norm(p.double(), (width,), s.double(), e) for p, s, e in zip(parts, scales, eps, strict=True)]
    exact = rotated(torch.cat(normed, axis), by.double())
    separately = rotated(
        torch.cat([F.rms_norm(p, (width,), s, e) for p, s, e in zip(parts, scales, eps, strict=True)], axis), by
    )
    assert found.dtype == dtype and found.shape == whole.shape
    error, allowed = (float((each.double() - exact).abs().max()) for each in (found, separately))
    assert error <= 1.5 * allowed + 1e-6


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_finds_tokens_beyond_what_32_bits_count() -> None:
    """As a video's, whose query, key and value are views of one tensor."""
    torch.manual_seed(0)
    torch.compiler.reset()
    apart = (1 << 30) + 64
    memory = torch.zeros(2 * apart + HEADS * WIDTH, device="cuda", dtype=torch.bfloat16)
    tokens = memory.as_strided((1, 3, HEADS, WIDTH), (WIDTH, apart, WIDTH, 1)).normal_()
    scale, by = torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16), rotations(3, device="cuda").transpose(1, 2)
    found = torch.compile(norm_rope(), fullgraph=True)([tokens], [scale], [1e-6], by, 1)
    expected = norm_rope()([tokens.cpu().contiguous()], [scale.cpu()], [1e-6], by.cpu(), 1)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-2, atol=1e-2)
