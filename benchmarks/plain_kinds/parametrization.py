"""Weights that are computed: normalised, orthogonal, tied, generated, pruned, lazy."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from plain_kinds.registry import floats, mlp, plain

WIDTH = 6


@plain(x=floats(3, WIDTH))
class OldSpectralNorm(nn.Module):
    """By a hook before forward; power iterations change buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.utils.spectral_norm(nn.Linear(WIDTH, 8)),
            nn.LeakyReLU(0.1),
            nn.utils.spectral_norm(nn.Linear(8, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(2, 2, 5, 5))
class SpectralNormConv(nn.Module):
    """The critic of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Conv2d(2, 3, 3), n_power_iterations=2)
        self.last = parametrizations.spectral_norm(nn.Linear(27, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.leaky_relu(self.first(x), 0.2).flatten(1))


@plain(x=floats(2, 3, 9))
class OldWeightNorm(nn.Module):
    """Causal dilated convolutions, as in WaveNet and TCN."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.weight_norm(nn.Conv1d(3, 4, 3, dilation=1))
        self.second = nn.utils.weight_norm(nn.Conv1d(4, 3, 3, dilation=2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(F.pad(x, (2, 0))).relu()
        return self.second(F.pad(h, (4, 0))) + x


@plain(x=floats(3, WIDTH))
class WeightNorm(nn.Module):
    """DINO's head: normalised features, and a last layer whose norms are fixed at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(WIDTH, 8, 4)
        self.last = parametrizations.weight_norm(nn.Linear(4, 7, bias=False))
        norms = self.last.parametrizations.weight.original0
        norms.data.fill_(1.0)
        norms.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.normalize(self.mlp(x), dim=-1))


class _Orthogonal(nn.Module):
    kind = "matrix_exp"

    def __init__(self) -> None:
        super().__init__()
        self.turn = parametrizations.orthogonal(
            nn.Linear(WIDTH, WIDTH, bias=False), orthogonal_map=self.kind
        )
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.turn(x).tanh())


@plain(x=floats(3, WIDTH))
class OrthogonalByExponential(_Orthogonal):
    kind = "matrix_exp"


@plain(x=floats(3, WIDTH))
class OrthogonalByCayley(_Orthogonal):
    kind = "cayley"


@plain(x=floats(3, WIDTH))
class OrthogonalByHouseholder(_Orthogonal):
    kind = "householder"


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


@plain(x=floats(3, WIDTH))
class SymmetricWeight(nn.Module):
    """The parametrization of the tutorial; the weight is read twice, once cached."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.layer, "weight", _Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.layer(self.layer(x).relu())


class _Skew(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        upper = weight.triu(1)
        return upper - upper.mT


class _Exponential(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return torch.matrix_exp(weight)


@plain(x=floats(3, WIDTH))
class ChainOfParametrizations(nn.Module):
    """Skew, then its exponential: two parametrizations of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.layer, "weight", _Skew())
        parametrize.register_parametrization(self.layer, "weight", _Exponential())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), self.layer.weight.square().mean()


class _LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(2, WIDTH) / 3)
        self.up = nn.Parameter(torch.randn(WIDTH, 2) / 3)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.up @ self.down


@plain(x=floats(3, WIDTH))
class LowRankParametrization(nn.Module):
    """LoRA as a parametrization of a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        parametrize.register_parametrization(self.layer, "weight", _LowRank())
        self.layer.parametrizations.weight.original.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh()


@plain(x=floats(3, WIDTH))
class FrozenBackbone(nn.Module):
    """A frozen, evaluated body under a trained head; `train` is overridden."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.body.requires_grad_(False)
        self.head = nn.Linear(8, 2)

    def train(self, mode: bool = True) -> FrozenBackbone:
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.body(x)
        return self.head(features) + x.mean()


@plain(x=floats(3, WIDTH))
class HyperNetwork(nn.Module):
    """Each row has weights of its own, which a network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = mlp(WIDTH, 8, 4 * WIDTH + 4)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.maker(x).split([4 * WIDTH, 4], dim=-1)
        return torch.baddbmm(bias.unsqueeze(-1), weight.view(-1, 4, WIDTH), x.unsqueeze(-1))


@plain(x=floats(3, WIDTH))
class FunctionalLayer(nn.Module):
    """torch.func.functional_call with changed weights, as meta-learning does it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        weights = {n: p * self.scale for n, p in self.layer.named_parameters()}
        return functional_call(self.layer, weights, (x,))


@plain(x=floats(3, WIDTH))
class TiedAutoencoder(nn.Module):
    """The decoder reads the encoder's weight; the same layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, 4)
        self.middle = nn.Linear(4, 4)
        self.again = self.middle
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.again(self.middle(self.encoder(x)).relu())
        return F.linear(h, self.encoder.weight.t(), self.bias)


@plain(ids=lambda g: torch.randint(0, 9, (2, 4), generator=g))
class TiedEmbedding(nn.Module):
    """The words' embedding is the output layer's weight: one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.body = mlp(WIDTH, 8, WIDTH)
        self.words = nn.Linear(WIDTH, 9, bias=False)
        self.words.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.words(self.body(self.embed(ids)))
        return F.cross_entropy(logits[:, :-1].reshape(-1, 9), ids[:, 1:].reshape(-1))


@plain(x=floats(3, WIDTH), task=lambda _: "b")
class ParametersByName(nn.Module):
    """ParameterDict and ModuleDict, chosen by a string."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({n: nn.Parameter(torch.rand(WIDTH)) for n in "abc"})
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, 2), "b": nn.Linear(WIDTH, 3)})

    def forward(self, x: Tensor, task: str) -> Tensor:
        for name, scale in self.scales.items():
            if name != task:
                x = x * scale
        return self.heads[task](x)


@plain(x=floats(4, 3))
class Covariance(nn.Module):
    """A Gaussian whose Cholesky factor has exponentials on its diagonal: the log-density of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(3))
        self.lower = nn.Parameter(torch.randn(3, 3) / 3)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.lower.tril(-1) + torch.diag_embed(self.lower.diagonal().exp())
        white = torch.linalg.solve_triangular(factor, (x - self.mean).t(), upper=False)
        return -0.5 * white.square().sum(0) - factor.diagonal().log().sum()


class _StandardisedConv(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(var + 1e-5)
        return F.conv2d(input, weight, self.bias, self.stride, self.padding)


@plain(x=floats(2, 2, 5, 5))
class StandardisedConv(nn.Module):
    """BiT's convolution and GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = _StandardisedConv(2, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolve(x)).relu()


@plain(x=floats(3, WIDTH))
class Pruned(nn.Module):
    """Masks by torch.nn.utils.prune, which hooks itself before forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(WIDTH, 8, 3)
        prune.l1_unstructured(self.layers[0], "weight", amount=0.5)
        prune.ln_structured(self.layers[2], "weight", amount=0.3, n=2, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(6, WIDTH))
class BatchEnsemble(nn.Module):
    """Members share one weight, each with vectors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 5)
        self.inner = nn.Parameter(torch.randn(3, 1, WIDTH))
        self.outer = nn.Parameter(torch.randn(3, 1, 5))

    def forward(self, x: Tensor) -> Tensor:
        members = x.view(3, 2, WIDTH)
        return (self.shared(members * self.inner) * self.outer).mean(0)


@plain(x=floats(3, 2, 5, 5))
class LazyLayers(nn.Module):
    """Lazy modules that a first batch has given their shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LazyConv2d(3, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
        )
        with torch.no_grad():
            self.layers(torch.randn(2, 2, 5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(3, WIDTH))
class EqualisedRate(nn.Module):
    """StyleGAN's: weights are scaled in each call, and styles modulate a weight per row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, WIDTH))
        self.style = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight * (2 / WIDTH) ** 0.5
        modulated = weight[None] * (self.style(x)[:, None] + 1)
        demodulated = modulated * torch.rsqrt(modulated.square().sum(-1, keepdim=True) + 1e-8)
        return torch.einsum("bof,bf->bo", demodulated, x)


@plain(x=floats(3, WIDTH))
class ScalarAndEmptyParameters(nn.Module):
    """Parameters without dimensions and without elements, and one that is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.nothing]) / self.temperature.exp()
