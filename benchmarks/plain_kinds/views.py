"""Views, layouts and shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.registry import floats, plain

WIDTH = 8


@plain(x=floats(2, 3, 6, 6))
class UnfoldedConvolution(nn.Module):
    """A convolution by unfold, a product and fold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 27) / 5)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.weight @ F.unfold(x, 3)
        return (
            F.fold(columns, (4, 4), 1) + x.unfold(2, 3, 1).unfold(3, 3, 1).sum((1, 4, 5))[:, None]
        )


@plain(x=floats(3, 10))
class StridedWindows(nn.Module):
    """Overlapping windows by as_strided."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        windows = x.as_strided((len(x), 4, 4), (10, 2, 1))
        return self.linear(windows)


@plain(x=floats(2, 4, WIDTH))
class ExpandedQueries(nn.Module):
    """expand and contiguous of learned queries, repeated keys of groups."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries.expand(len(x), -1, -1).contiguous()
        keys = x.repeat_interleave(2, dim=1)
        return q @ keys.mT + x.repeat(1, 2, 1).sum(-1)[:, None]


@plain(x=floats(2, 3, 6, 6))
class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)
        )
        self.layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(memory_format=torch.channels_last))


@plain(x=floats(2, 5, WIDTH))
class HeadsByViews(nn.Module):
    """Attention written with view, transpose, permute and flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / 2
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, WIDTH))


@plain(x=floats(2, 4, 3, 3))
class SuperResolution(nn.Module):
    """PixelShuffle and back, from the ONNX tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(F.pixel_shuffle(self.first(x), 2))
        return F.pixel_unshuffle(h, 2) + F.channel_shuffle(x, 2).repeat(1, 2, 1, 1)


@plain(x=floats(2, 5, WIDTH))
class ComplexRotary(nn.Module):
    """Llama's first rotary embedding, by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(5.0), 1.0 / 10 ** torch.arange(0, 1, 0.25))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).float().reshape(2, 5, 4, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2).type_as(x)


@plain(x=floats(2, 4, 4, 3))
class ShiftedWindows(nn.Module):
    """Swin: roll, windows, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.roll(x, shifts=(-1, -1), dims=(1, 2))
        windows = h.view(2, 2, 2, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 3)
        windows = self.linear(windows) + windows.mean(1, keepdim=True)
        h = windows.view(2, 2, 2, 2, 2, 3).permute(0, 1, 3, 2, 4, 5).contiguous().view(2, 4, 4, 3)
        return torch.roll(h, shifts=(1, 1), dims=(1, 2)).flip(1)


@plain(x=floats(3, WIDTH))
class ReturnedViews(nn.Module):
    """Views of one result, the input itself, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        h = self.linear(x)
        return h[:, :4], h.t(), x, h, h


@plain(x=floats(3, WIDTH))
class TriangularPairs(nn.Module):
    """DLRM's interaction: the lower triangle of products, by tril_indices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Linear(WIDTH, 4 * 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).unflatten(-1, (4, 3))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.last((h @ h.mT)[:, rows, columns])


@plain(x=floats(2, 6, WIDTH))
class SplitsAndStacks(nn.Module):
    """split, tensor_split, chunk, narrow, select, hsplit, stack, dstack, cat, movedim, swapaxes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.linear(x).split([2, 6], dim=-1)
        parts = [*b.tensor_split(3, dim=-1), a, *x.chunk(2, 1)[0].hsplit(3)[:1]]
        whole = torch.cat([parts[0], parts[3], torch.dstack([parts[1], parts[2]])], dim=-1)
        return whole.movedim(1, 2).narrow(1, 1, 6).swapaxes(0, 2) + parts[4].select(1, 0).sum()


@plain(x=floats(2, 4))
class Coordinates(nn.Module):
    """CoordConv: a grid beside the channels, by meshgrid and linspace."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.convolve = nn.Linear(4, 16), nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        axis = torch.linspace(-1, 1, 4, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij")).expand(len(x), -1, -1, -1)
        return self.convolve(torch.cat([self.make(x).view(-1, 1, 4, 4), grid], dim=1))


@plain(x=floats(3, 5))
class ToeplitzBias(nn.Module):
    """Relative positions: one table is read along diagonals, by indices of differences."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9))
        places = torch.arange(5)[:, None] - torch.arange(5)[None] + 4
        self.register_buffer("places", places, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table[self.places.view(-1)].view(5, 5)
        return torch.softmax(x[:, :, None] * x[:, None] + bias, -1).diagonal(dim1=1, dim2=2)


@plain(x=floats(4, 6))
class BlocksOnADiagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ParameterList(torch.randn(n, n) for n in (1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.block_diag(*self.blocks) + torch.diag(x[0]).sum(0)


@plain(x=floats(2, 7, 4))
class PaddedModes(nn.Module):
    """reflect, replicate, circular and constant padding, and strided slices."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv1d(7, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        h = F.pad(x, (2, 1), mode="reflect") + F.pad(x, (1, 2), mode="replicate")
        return self.convolve(F.pad(h, (0, 1), value=0.5)[..., ::2])


@plain(x=floats(2, 3, 8))
class NestedOutputs(nn.Module):
    """Lists and tuples in dictionaries, with numbers and strings and None among them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, object]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).tanh())
        return {
            "states": tuple(states),
            "last": {"h": states[-1][:, 0], "n": len(states)},
            "none": None,
            "name": "net",
        }
