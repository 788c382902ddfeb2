"""Transforms, decompositions, sorting, other dtypes, images."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, stack_module_state, vmap
from torch.nn import functional as F

from plain_kinds.registry import floats, mlp, plain

ROWS, WIDTH = 4, 6


@plain(x=floats(2, 3, 8))
class FourierLayer(nn.Module):
    """A Fourier neural operator: complex weights of the lowest modes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, 4, dtype=torch.cfloat) / 3)
        self.skip = nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)
        out = torch.zeros_like(modes)
        out[..., :4] = torch.einsum("bim,iom->bom", modes[..., :4], self.weight.to(modes.dtype))
        return F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + self.skip(x))


@plain(x=floats(2, 4, WIDTH))
class FourierMixing(nn.Module):
    """FNet: the real part of a transform over both dims."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real
        return self.linear(self.norm(x + mixed))


@plain(x=floats(ROWS, WIDTH))
class ComplexLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.real, self.imag = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.complex(self.real(x), self.imag(x))
        z = z * z.conj() + z.exp()
        return z.abs(), z.angle()


@plain(x=floats(2, 64))
class Spectrogram(nn.Module):
    """stft, power, mel filters, logarithm, and istft of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(16))
        self.mask = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.stft(x, 16, 8, window=self.window.to(x.dtype), return_complex=True)
        power = z.abs().square().mT
        kept = self.mask((power + 1e-3).log()).sigmoid().mT
        return power, torch.istft(z * kept, 16, 8, window=self.window.to(x.dtype), length=64)


@plain(x=floats(3, 4, 4))
class Decompositions(nn.Module):
    """Cholesky, solve, inverse, logdet and a matrix exponential of small matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x)
        matrix = h @ h.mT + 2 * torch.eye(4, dtype=x.dtype)
        lower = torch.linalg.cholesky(matrix)
        solved = torch.linalg.solve(matrix, x)
        return solved + torch.linalg.inv(matrix), torch.logdet(matrix), torch.matrix_exp(lower / 4)


@plain(x=floats(3, 4, 4))
class Spectra(nn.Module):
    """Eigenvalues of symmetric matrices, singular values, QR and least squares."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.linear(x) + 2 * torch.diag(torch.arange(1.0, 5.0, dtype=x.dtype))
        r = torch.linalg.qr(h)[1]
        return torch.linalg.eigvalsh(h + h.mT), torch.linalg.svdvals(h), r.diagonal(dim1=1, dim2=2)


@plain(x=floats(ROWS, WIDTH))
class Scans(nn.Module):
    """cumsum, cumprod, cummax, logcumsumexp and diff."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        scanned = h.cumsum(-1) + h.sigmoid().cumprod(-1) + h.cummax(-1).values
        return scanned + h.logcumsumexp(0) + torch.diff(h, dim=-1, prepend=h[:, :1])


@plain(x=floats(ROWS, 9))
class OrderStatistics(nn.Module):
    """sort, topk, kthvalue, median, quantile and aminmax."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.linear(x)
        return {
            "sorted": h.sort(-1, descending=True).values[:, :4],
            "top": h.topk(3).values,
            "third": h.kthvalue(3).values,
            "median": h.median(-1).values,
            "quantile": torch.quantile(h, 0.3, dim=-1),
            "range": torch.stack(torch.aminmax(h, dim=-1)),
            "places": h.argmax(-1),
        }


@plain(x=floats(ROWS, WIDTH))
class DoublePart(nn.Module):
    """A part in float64, and a parameter that is float64."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.rand(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x).double()
        exact = (h * self.scale).logsumexp(-1)
        return exact.float(), exact


@plain(x=floats(ROWS, WIDTH))
class BFloat16Part(nn.Module):
    """A part in bfloat16 by casts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 8)
        self.narrow = nn.Linear(8, 8).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.linear(x).to(torch.bfloat16)).relu().to(x.dtype)


@plain(x=floats(ROWS, WIDTH))
class AutocastInside(nn.Module):
    """autocast around some layers, off around others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(x).relu()
            with torch.autocast("cpu", enabled=False):
                h = self.second(h.float())
        return h


@plain(x=floats(ROWS, WIDTH))
class PartsWithoutGradients(nn.Module):
    """BYOL: no_grad, detach, inference of a target, and set_grad_enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = mlp(WIDTH, 8, 4), mlp(WIDTH, 8, 4)
        self.predict = nn.Linear(4, 4)

    @torch.no_grad()
    def _target(self, x: Tensor) -> Tensor:
        return F.normalize(self.target(x), dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(False):
            scale = self.online(x).norm()
        out = F.normalize(self.predict(self.online(x)), dim=-1)
        return (2 - 2 * (out * self._target(x.flip(0))).sum(-1)) * scale.detach()


@plain(x=floats(ROWS, WIDTH))
class SpecialFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        positive = F.softplus(h) + 0.5
        smooth = (
            torch.erf(h) + torch.lgamma(positive) + torch.digamma(positive) + torch.expm1(h / 3)
        )
        return smooth + torch.special.i0(h) + torch.xlogy(positive, positive) + torch.sinc(h)


@plain(x=floats(ROWS, WIDTH), y=floats(ROWS, 5))
class BilinearFusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fuse, self.gate = nn.Bilinear(WIDTH, 5, 4), nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.glu(self.gate(x)) * self.fuse(x, y) + torch.einsum("bi,bj->b", x, y)[:, None]


@plain(x=floats(ROWS, WIDTH))
class VmappedEnsemble(nn.Module):
    """Members of an ensemble, stacked, over torch.vmap and functional_call."""

    def __init__(self) -> None:
        super().__init__()
        members = [mlp(WIDTH, 5, 2) for _ in range(3)]
        stacked, _ = stack_module_state(members)
        self.names = list(stacked)
        self.weights = nn.ParameterList(stacked[name].detach() for name in self.names)
        self.__dict__["base"] = members[0].to("meta")

    def forward(self, x: Tensor) -> Tensor:
        def member(weights: dict[str, Tensor], rows: Tensor) -> Tensor:
            return functional_call(self.base, weights, (rows,))

        return vmap(member, in_dims=(0, None))(dict(zip(self.names, self.weights, strict=True)), x)


@plain(x=floats(ROWS, WIDTH))
class VmappedRows(nn.Module):
    """A function of one row, for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        def of_row(row: Tensor) -> Tensor:
            return torch.outer(row, row @ self.weight).softmax(-1).sum(0)

        return torch.vmap(of_row)(x)


@plain(x=floats(ROWS, 3))
class JacobianPenalty(nn.Module):
    """The Jacobian of the outputs by the inputs, row by row, in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), vmap(jacrev(self.net))(x).square().sum((1, 2))


@plain(x=floats(ROWS, 3))
class ForwardMode(nn.Module):
    """A derivative along a direction by torch.func.jvp."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 5, 2)

    def forward(self, x: Tensor) -> Tensor:
        value, slope = jvp(self.net, (x,), (torch.ones_like(x),))[:2]
        return value + slope


@plain(x=floats(ROWS, WIDTH))
class Interpolation(nn.Module):
    """A spline layer: searchsorted, gather and trapezoids."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("knots", torch.linspace(-3, 3, 8))
        self.values = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        right = torch.searchsorted(self.knots, x.detach()).clamp(1, 7)
        left = right - 1
        share = (x - self.knots[left]) / (self.knots[right] - self.knots[left])
        out = torch.lerp(self.values[left], self.values[right], share)
        return out + torch.trapezoid(out, dim=-1).unsqueeze(-1)


@plain(x=floats(3, 5, 2), y=floats(3, 4, 2))
class OptimalTransport(nn.Module):
    """Sinkhorn's iterations of logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(self.embed(x), self.embed(y))
        f, g = torch.zeros_like(cost[..., 0]), torch.zeros_like(cost[..., 0, :])
        for _ in range(5):
            f = -torch.logsumexp(g.unsqueeze(-2) - cost, dim=-1)
            g = -torch.logsumexp(f.unsqueeze(-1) - cost, dim=-2)
        plan = (f.unsqueeze(-1) + g.unsqueeze(-2) - cost).exp()
        return (plan * cost).sum((-1, -2))
