"""Prints every identity that must be the same in all processes, as JSON. Run by ``conftest.identities``."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import sys
from typing import Any

import torch

from onediff_comfy.cache.keys import CallKey, GraphKey, compiler
from onediff_comfy.capture.call import bind, split
from onediff_comfy.capture.target.target import Target
from onediff_comfy.capture.tracing.trace_forward import TraceSettings, capture
from onediff_comfy.engines.eager import EagerEngine

OPTIONS = "transformer_options"


class Kind(enum.Enum):
    FIRST = "first"


@dataclasses.dataclass
class Config:
    width: int = 4
    names: frozenset[str] = frozenset({"alpha", "beta", "gamma", "delta"})


class Plain:
    """An object with a default repr, which holds its address."""

    def __init__(self) -> None:
        self.inner = [object(), {"x": 1.5}]


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4), persistent=False)
        self.config = Config()
        self.kind = Kind.FIRST
        self.plain = Plain()
        self.names = {"one", "two", "three", "four", "five"}
        self.activation = lambda value: torch.tanh(value) * 0.5
        self.table = torch.arange(3.0)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any] | None = None) -> torch.Tensor:
        if transformer_options and "two" in transformer_options["wanted"]:
            x = x * 2
        return self.activation(self.layer(x)) + self.shift + torch.tensor([1.0, 2.0, 3.0, 4.0])


class ChoosesByName(torch.nn.Module):
    """Holds a function whose code has a set as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted = lambda name: name in {"one", "two", "three", "four", "five"}


class Images(torch.nn.Module):
    """Takes images of all sizes, with attention between their pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.qkv = torch.nn.Conv2d(4, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(self.conv(x)).flatten(2).transpose(1, 2)
        tokens = tokens + torch.linspace(0, 1, steps=tokens.shape[1])[:, None]
        tokens = torch.nn.functional.pad(tokens, (0, 0, 0, torch.sym_max(x.shape[-1], 64)))  # a Python function
        query, key, value = self.qkv(tokens).chunk(3, dim=-1)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def general_digest() -> str:
    """Of a capture for all sizes, from an image of another size in each process."""
    module, side = Images(), 16 * int(os.environ.get("PYTHONHASHSEED", "1"))
    call = split(bind(module.forward, (torch.randn(1, 4, side, side + 32),), {}))
    captured = capture(Target(module), module.forward, call, {}, TraceSettings(OPTIONS, general=True, multiple=8))
    assert captured.shapes.general
    return captured.digest


def main() -> None:
    torch.manual_seed(int(torch.randint(1 << 30, ()).item()))
    module = Net()
    options = {name: name for name in {"a", "b", "c", "d", "e"}} | {"wanted": ["one", "two"]}
    arguments = bind(module.forward, (torch.randn(2, 4), options), {})
    call = split(arguments, options_name=OPTIONS, options_read={"wanted", "b"})
    target = Target(module)
    captured = capture(target, module.forward, call, options, TraceSettings(OPTIONS))
    code = compiler(EagerEngine(), torch.device("cpu"))
    json.dump(
        {
            "fingerprint": target.fingerprint,
            "signature": call.signature.lines(),
            "capture": captured.digest,
            "general": general_digest(),
            "call_key": CallKey(target.fingerprint, call.signature, "host", code).digest,
            "graph_key": GraphKey(captured.digest, code).digest,
            "set_in_code": Target(ChoosesByName()).fingerprint,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
