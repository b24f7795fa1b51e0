"""Small models of the two kinds that a forward is cut in, for the tests of reuse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 16


class Block(nn.Module):
    """One of a transformer's, told the time."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.time, self.wide, self.narrow = nn.Linear(1, width), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, tokens: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        scale = self.time(time[:, None])[:, None]
        return tokens + self.narrow(F.gelu(self.wide(tokens) * scale.mean()))


class Transformer(nn.Module):
    """Patches in, blocks, patches out. Only the blocks' way leads from the image to the output."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        tokens = self.enter(x.flatten(2).transpose(1, 2))
        many = torch.cat([context, tokens], 1)  # prompt and image together, as Flux's single blocks have them
        for block in self.blocks:
            many = block(many, timestep)
        return self.leave(many[:, context.shape[1] :]).transpose(1, 2).unflatten(2, x.shape[2:])


class Level(nn.Module):
    def __init__(self, taken: int, given: int, time: bool = True) -> None:
        super().__init__()
        self.conv, self.time = nn.Conv2d(taken, given, 3, padding=1), nn.Linear(1, given) if time else None

    def forward(self, image: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        image = F.silu(self.conv(image))
        return image if self.time is None else image + self.time(time[:, None])[:, :, None, None]


class UNet(nn.Module):
    """Down, middle, up, with a skip connection at each level; its first block does not know the time."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Level(4, 16, time=False), Level(16, 16), Level(16, 48), Level(48, 48)])
        self.up = nn.ModuleList([Level(96, 48), Level(96, 16), Level(32, 16), Level(32, 16)])
        self.out = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        skips, image = [], x
        for block in self.down:
            image = block(image, timestep)
            skips.append(image)
        for block in self.up:
            image = block(torch.cat([image, skips.pop()], 1), timestep)
        return self.out(image)


def transformer_call(batch: int = 2, height: int = 8, width: int = 12, tokens: int = 5) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 4, height, width), torch.rand(batch), torch.randn(batch, tokens, WIDTH)


def unet_call(batch: int = 2, height: int = 8, width: int = 12) -> tuple[torch.Tensor, ...]:
    return torch.randn(batch, 4, height, width), torch.rand(batch)
