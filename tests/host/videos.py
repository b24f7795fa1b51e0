"""Videos that are decoded and encoded piece by piece, with and without graphs.

    python videos.py [2.2] COMFY_DIR

Prints as JSON: of videos of several sizes and lengths how far ours is off and how many pieces were served; and of
parts that change lists and tensors in all kinds of ways, whether a functional call of them is the call itself. With
2.2, only the videos, by Wan 2.2's VAE, which takes one frame at a time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [sys.argv.pop(), str(Path(__file__).resolve().parents[2])]
from comfy.cli_args import args  # noqa: E402 - the host's path first

args.cpu = True
import torch  # noqa: E402
from comfy.ldm.wan import vae2_2  # noqa: E402
from comfy.ldm.wan.vae import WanVAE  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

from onediff_comfy.capture.call import NotCovered  # noqa: E402
from onediff_comfy.host.adapters.attach import dispatcher_for  # noqa: E402
from onediff_comfy.host.adapters.blocks import BlockServer  # noqa: E402
from onediff_comfy.host.adapters.functional_call import FunctionalCall  # noqa: E402
from onediff_comfy.host.adapters.part import DiffusionModel  # noqa: E402
from onediff_comfy.host.adapters.vae import ADAPTER, accelerate_vae  # noqa: E402
from onediff_comfy.host.process.process import metrics  # noqa: E402
from onediff_comfy.serving.dispatcher import Dispatcher  # noqa: E402
from onediff_comfy.serving.options import DEFAULTS  # noqa: E402

VIDEOS = {
    "first": (7, 6, 8),
    "again": (7, 6, 8),
    "of another size": (9, 10, 4),
    "with half a piece in the end": (8, 6, 8),
    "short": (2, 6, 8),
}
"""Frames, height and width of latents, in this order."""


class VAE:
    """What the host's VAE is to whoever accelerates it."""

    vae_dtype = torch.float32

    def __init__(self, module: torch.nn.Module) -> None:
        self.first_stage_model: Any = module
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=max(1, weight[0].numel()) ** -0.5)
        cpu = torch.device("cpu")
        self.patcher = ModelPatcher(module, cpu, cpu)

    @classmethod
    def of(cls, blocks: int) -> VAE:
        """As Wan 2.1's, with so many blocks a level: a decoder can have none, an encoder needs one."""
        # One level with frames in place of two: the decoder cuts a piece into two there, where Wan's has four of them.
        return cls(WanVAE(dim=8, z_dim=4, num_res_blocks=blocks, temperal_downsample=[True, False, False]))

    @classmethod
    def of_wan_22(cls) -> VAE:
        levels = [False, True, True]
        return cls(vae2_2.WanVAE(dim=16, dec_dim=16, z_dim=4, num_res_blocks=1, temperal_downsample=levels))

    def decode(self, latent: torch.Tensor) -> torch.Tensor:
        return self.first_stage_model.decode(latent)  # type: ignore[no-any-return]

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.first_stage_model.encode(pixels)  # type: ignore[no-any-return]


def counted() -> dict[str, int]:
    found = metrics().snapshot()
    return {name: found[name] for name in ("served", "captured")} | {"eager": sum(found["fallbacks"].values())}


def decoded(vae: VAE) -> dict[str, Any]:
    fast = accelerate_vae(vae, "eager")
    return {
        name: compared(vae.decode, fast.decode, torch.randn(1, 4, frames, height, width))
        for name, (frames, height, width) in VIDEOS.items()
    }


def encoded(vae: VAE) -> dict[str, Any]:
    return compared(vae.encode, accelerate_vae(vae, "eager").encode, torch.rand(1, 3, 17, 48, 64))


def modules() -> list[str]:
    """Return the modules that a graph in a file may be for."""
    return [module.__class__.__name__ for module in ADAPTER.modules(accelerate_vae(VAE.of(0), "eager"))]


def compared(by_host: Callable[..., Any], by_us: Callable[..., Any], given: torch.Tensor) -> dict[str, Any]:
    expected, before = by_host(given), counted()
    actual, after = by_us(given), counted()
    off = (actual - expected).abs().max() / (expected.max() - expected.min())
    return {"off": float(off), **{name: after[name] - before[name] for name in after}}


class Block(torch.nn.Module):
    """One that leaves something in the list that it is given."""

    def __init__(self, left: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.left = torch.nn.Linear(4, 4), left

    def forward(self, x: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        before = kept[0]
        kept[0] = self.left(x)
        return self.layer(x) + (before if isinstance(before, torch.Tensor) else 0)  # type: ignore[no-any-return]


class Blocks(torch.nn.Module):
    def __init__(self, left: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(left) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        kept: list[Any] = [x]
        for block in self.blocks:
            x = block(x, kept)
        return x


class Model:
    """What the host's model object is to whoever serves its blocks."""

    device = torch.device("cpu")

    def get_dtype_inference(self) -> torch.dtype:
        return torch.float32


def _doubled(x: torch.Tensor) -> Any:
    return x * 2


def _written(x: torch.Tensor) -> Any:
    """The first block is given ``x`` in the list, too."""
    return x.mul_(2)


def _object(_x: torch.Tensor) -> Any:
    return object()


def blocks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for left in (_doubled, _written, _object):
        module, model = Blocks(left), Model()
        server = BlockServer(DiffusionModel(model), dispatcher_for("MODEL", "eager", None, DEFAULTS, Dispatcher))
        given = torch.randn(2, 4)
        found[left.__name__] = compared(module, lambda x, m=module, s=server: s(m, m.forward, (x,), {}), given)
    return found


def _replaces(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[0] = x[:1]
    return x + 1


def _moves(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[0], kept[1] = kept[1], x
    return kept[0]


def _grows(x: torch.Tensor, kept: list[Any]) -> Any:
    kept += [x * 2, None, "Rep", 3, 2.5, True]
    return x


def _empties(x: torch.Tensor, kept: list[Any]) -> Any:
    kept.clear()
    return None


def _writes(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[1] += x
    x.mul_(2)
    return x, kept[1], kept[0] + 1


def _writes_and_moves(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[0].add_(1)
    kept[1], kept[0] = kept[0], None
    return [x, None, 7, "text"]


def _leaves_alone(x: torch.Tensor, kept: list[Any]) -> Any:
    return x.sum(), len(kept)


def _nested(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[2]["inner"][0] = x
    return x


def _changes_a_dict(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[2]["more"] = 1
    return x


def _keeps_a_list(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[0] = [x]
    return x


def _keeps_an_object(x: torch.Tensor, kept: list[Any]) -> Any:
    kept[0] = object()
    return x


PARTS = (
    *(_replaces, _moves, _grows, _empties, _writes, _writes_and_moves, _leaves_alone, _nested),
    *(_changes_a_dict, _keeps_a_list, _keeps_an_object),
)


def functional() -> dict[str, str]:
    found = {part.__name__: outcome(part, lambda: [torch.ones(2), torch.zeros(2), {"inner": [None]}]) for part in PARTS}
    found["what is kept holds nothing else"] = held_by_what_is_kept()
    found["writes to what is given twice"] = outcome(_writes, lambda: 2 * [torch.ones(2)])
    found["writes to a part of what is given"] = outcome(_writes, lambda: [(whole := torch.ones(4))[:2], whole[1:3]])
    found["writes to what is next to another"] = outcome(_writes, lambda: [(whole := torch.ones(4))[:2], whole[2:]])
    found["replaces what is given twice"] = outcome(_replaces, lambda: 2 * [torch.ones(2)])
    found["a list that is given twice"] = outcome(lambda _x, kept: kept[0].append(kept[1][0]), lambda: 2 * [[1]])
    return found


def held_by_what_is_kept() -> str:
    """Return "same" if what a part keeps of something is all that stays in memory."""
    kept: list[Any] = [None]
    call = FunctionalCall(_replaces, (torch.arange(8.0), kept), {})
    call.completed(call.telling(_replaces)(**call.arguments))
    (one,) = kept
    return "same" if one.untyped_storage().nbytes() == one.nbytes else "another"


def outcome(part: Callable[..., Any], keep: Callable[[], list[Any]]) -> str:
    """Return "same" if a functional call gives and leaves what the call itself does, "refused" if it says that it
    cannot; else "another".
    """
    x, kept, expected_x, expected_kept = torch.arange(2.0), keep(), torch.arange(2.0), keep()
    expected = part(expected_x, expected_kept)
    try:
        call = FunctionalCall(part, (x, kept), {})
        output = call.completed(call.telling(part)(**call.arguments))
    except NotCovered:
        return "refused"
    ours, theirs = shape((output, x, kept), x, kept), shape((expected, expected_x, expected_kept), expected_x, [])
    return "same" if ours == theirs else f"another: {ours} {theirs}"


def shape(value: Any, x: torch.Tensor, _kept: list[Any]) -> Any:
    """Return values, and which of them are the very tensor that was given."""
    if isinstance(value, torch.Tensor):
        return "x" if value is x else value.tolist(), value.tolist()
    if isinstance(value, dict):
        return {key: shape(part, x, _kept) for key, part in value.items()}
    return [type(value).__name__, *(shape(part, x, _kept) for part in value)] if type(value) in (list, tuple) else value


with torch.inference_mode():
    torch.manual_seed(0)
    if sys.argv[1:] == ["2.2"]:
        found: dict[str, Any] = decoded(VAE.of_wan_22())
    else:
        found = {"videos": decoded(VAE.of(0)), "encoded": encoded(VAE.of(1)), "modules": modules()}
        found |= {"blocks": blocks(), "functional": functional()}
    sys.stdout.write(json.dumps(found) + "\n")
