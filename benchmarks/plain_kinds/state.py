"""State that forward keeps from call to call: buffers, caches, teachers, codebooks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.registry import floats, plain

ROWS, WIDTH = 4, 6


@plain(x=floats(ROWS, WIDTH))
class CountingBuffers(nn.Module):
    """Counters and a running mean, one changed in place, one bound anew, one a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.training:
            self.calls += 1  # type: ignore[assignment]
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean) / self.num_calls


@plain(x=floats(ROWS, WIDTH))
class AverageBatchNorm(nn.Module):
    """momentum=None: the plain average over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 5), nn.BatchNorm1d(5, momentum=None))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(2, 3, 4, 4))
class BatchNorms(nn.Module):
    """With and without affine parameters and statistics, in two and three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3, momentum=0.3)
        self.second = nn.BatchNorm2d(3, affine=False)
        self.third = nn.BatchNorm2d(3, track_running_stats=False)
        self.fourth = nn.BatchNorm3d(3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.third(self.second(self.first(x)).relu())
        return self.fourth(h.unsqueeze(2)).squeeze(2) + x


@plain(x=floats(3, 2, 4, 4))
class TwiceNormalised(nn.Module):
    """One BatchNorm is called twice in a forward, as in siamese networks."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) - self.body(x.flip(-1))


@plain(x=floats(3, 2, 4, 4))
class InstanceStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(2, affine=True, track_running_stats=True)
        self.plain = nn.InstanceNorm2d(2, affine=True)
        self.group = nn.GroupNorm(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.group(self.plain(x).relu())


@plain(x=floats(8, 4))
class CodebookVQ(nn.Module):
    """VQ-VAE whose codes are moving averages of what they stand for."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(5, 4))
        self.register_buffer("sizes", torch.ones(5))
        self.register_buffer("sums", torch.randn(5, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        quantised = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 5).to(z.dtype)
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.t() @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes.unsqueeze(-1).clamp_min(1e-3))
        commitment = F.mse_loss(z, quantised.detach())
        return self.decoder(z + (quantised - z).detach()), commitment


@plain(x=floats(2, 4))
class MomentumContrast(nn.Module):
    """MoCo: a teacher that follows the student's weights, and a queue of keys that is written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(4, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 3), dim=-1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        q = F.normalize(self.student(x), dim=-1)
        with torch.no_grad():
            for new, old in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                old.data.mul_(0.9).add_(new.data, alpha=0.1)
            k = F.normalize(self.teacher(x), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().t()], dim=-1)
        with torch.no_grad():
            place = int(self.place)
            self.queue[place : place + len(x)] = k
            self.place[0] = (place + len(x)) % len(self.queue)
        return F.cross_entropy(logits / 0.1, torch.zeros(len(x), dtype=torch.long))


@plain(x=floats(ROWS, WIDTH))
class CentredTeacher(nn.Module):
    """DINO's centre, a buffer that follows the outputs, and a temperature that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("center", torch.zeros(1, 3))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(x)
        probs = ((out - self.center) / self.temperature.clone()).softmax(-1)
        with torch.no_grad():
            self.center.lerp_(out.mean(0, keepdim=True), 0.1)
            self.temperature.mul_(0.95).clamp_(min=0.1)
        return probs


@plain(x=floats(2, 3, 4))
class KeyValueCache(nn.Module):
    """Keys and values are written into caches by slices; a step reads all that is there."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.length = nn.Linear(4, 12), 0
        self.register_buffer("keys", torch.zeros(2, 8, 4), persistent=False)
        self.register_buffer("values", torch.zeros(2, 8, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        start = self.length % 6
        with torch.no_grad():
            self.keys[:, start : start + 3] = k
            self.values[:, start : start + 3].copy_(v)
        self.length += 3
        past_k, past_v = self.keys[:, : start + 3].clone(), self.values[:, : start + 3].clone()
        return F.scaled_dot_product_attention(q, past_k, past_v) + v


@plain(x=floats(ROWS, WIDTH))
class DataOfWeights(nn.Module):
    """A frozen weight is changed through `.data`, and a clamp keeps another within bounds, both in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.mask.data.mul_(0.9).clamp_(0.1, 1.0)
        return self.linear(x * self.mask)


@plain(x=floats(ROWS, WIDTH))
class LazyBuffer(nn.Module):
    """A buffer and a cached tensor that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", None)
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std(0) + 0.1
        if self.cached is None or self.cached.shape[0] != len(x):
            self.cached = torch.arange(len(x), dtype=x.dtype)[:, None] / 10
        return self.linear(x / self.scale) + self.cached


@plain(x=floats(ROWS, WIDTH))
class ActNorm(nn.Module):
    """Glow's: the first batch sets the parameters' data."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.log_scale = (
            nn.Parameter(torch.zeros(WIDTH)),
            nn.Parameter(torch.zeros(WIDTH)),
        )
        self.register_buffer("is_set", torch.tensor(False))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.is_set:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.log_scale.data.copy_(-x.std(0).log())
                self.is_set.fill_(True)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()
