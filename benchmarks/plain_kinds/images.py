"""Convolutions, pools, grids and norms of images and volumes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.registry import floats, mlp, plain

ROWS, WIDTH = 4, 6


@plain(x=floats(2, 2, 4, 4, 4))
class VolumeUNet(nn.Module):
    """Conv3d, pooling, ConvTranspose3d and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv3d(2, 3, 3, padding=1), nn.ConvTranspose3d(3, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(F.max_pool3d(self.down(x), 2).relu()) + x


@plain(x=floats(2, 3, 8, 8))
class TransposedConvolutions(nn.Module):
    """DCGAN's generator: strides, output padding, groups and dilation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(6),
            nn.PReLU(6),
            nn.Conv2d(6, 6, 3, groups=6, dilation=2),
            nn.Conv2d(6, 2, 1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(2, 2, 6, 6))
class SpatialTransformer(nn.Module):
    """affine_grid and grid_sample, from the tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(72, 6)
        with torch.no_grad():
            self.place.weight.mul_(0.1)
            self.place.bias.copy_(torch.tensor([1.0, 0.1, 0, 0, 0.9, 0.05]))

    def forward(self, x: Tensor) -> Tensor:
        theta = self.place(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, align_corners=False, padding_mode="border")


@plain(x=floats(2, 2, 5, 5))
class Resized(nn.Module):
    """A pyramid: bilinear, bicubic, nearest and area."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.convolve(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False))
        h = h + F.interpolate(x, size=(10, 10), mode="bicubic") + F.interpolate(x, scale_factor=2)
        return F.interpolate(h, size=4, mode="area")


@plain(x=floats(2, 3, 8, 8))
class Pools(nn.Module):
    """Adaptive, maximal with places and back, power averages, and SE's gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = mlp(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        h, places = F.max_pool2d(x, 2, return_indices=True)
        back = F.max_unpool2d(h, places, 2)
        gate = self.gate(F.adaptive_avg_pool2d(x, 1).flatten(1)).sigmoid()
        coarse = F.adaptive_max_pool2d(x, 3).mean((2, 3)) + F.lp_pool2d(x.exp(), 2, 4).sum((2, 3))
        return back * gate[..., None, None] + coarse[..., None, None]


@plain(x=floats(2, 4, 5, 5))
class LocalNorms(nn.Module):
    """LocalResponseNorm, GroupNorm, LayerNorm over channels, RMSNorm and cosine similarity."""

    def __init__(self) -> None:
        super().__init__()
        self.response, self.group = nn.LocalResponseNorm(3), nn.GroupNorm(2, 4)
        self.layer, self.rms = nn.LayerNorm(4), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.response(self.group(x)).permute(0, 2, 3, 1)
        return F.cosine_similarity(self.layer(h), self.rms(h) + 0.1, dim=-1)
