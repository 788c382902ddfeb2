"""Random numbers in forward: dropout, samples, noise, masks."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from plain_kinds.registry import floats, plain

ROWS, WIDTH = 32, 16


class _With(nn.Module):
    """Layers around what is random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def noisy(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.noisy(self.first(x).tanh()))


@plain(draws=True, x=floats(ROWS, WIDTH))
class Dropout(_With):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def noisy(self, h: Tensor) -> Tensor:
        return self.drop(h) * F.dropout(h, 0.1, self.training)


@plain(draws=True, x=floats(ROWS, WIDTH))
class AlphaDropout(_With):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.features = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)

    def noisy(self, h: Tensor) -> Tensor:
        return self.features(self.drop(F.selu(h)).view(ROWS, 4, 4)).flatten(1)


@plain(draws=True, x=floats(ROWS, WIDTH))
class ChannelDropout(_With):
    """Dropout1d and Dropout2d."""

    def noisy(self, h: Tensor) -> Tensor:
        h = F.dropout2d(h.view(ROWS, 4, 2, 2), 0.3, self.training)
        return F.dropout1d(h.flatten(2), 0.2, self.training).flatten(1)


@plain(draws=True, x=floats(ROWS, WIDTH))
class InPlaceDropout(_With):
    def noisy(self, h: Tensor) -> Tensor:
        return F.dropout(h * 2, 0.3, self.training, inplace=True)


@plain(draws=True, x=floats(ROWS, WIDTH))
class RandomizedReLU(_With):
    def __init__(self) -> None:
        super().__init__()
        self.activate = nn.RReLU(0.1, 0.5)

    def noisy(self, h: Tensor) -> Tensor:
        return self.activate(h - 0.1)


@plain(draws=True, x=floats(ROWS, WIDTH))
class SoftGumbel(_With):
    def noisy(self, h: Tensor) -> Tensor:
        return F.gumbel_softmax(h, tau=0.7)


@plain(draws=True, is_smooth=False, x=floats(ROWS, WIDTH))
class HardGumbel(_With):
    """Categories with straight-through gradients."""

    def noisy(self, h: Tensor) -> Tensor:
        return F.gumbel_softmax(h.view(ROWS, 4, 4), tau=1.0, hard=True).flatten(1)


@plain(draws=True, x=floats(ROWS, WIDTH))
class VariationalAutoencoder(nn.Module):
    """randn_like, and the KL divergence beside the reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(-1)
        return self.decoder(z), kl


@plain(draws=True, x=floats(ROWS, WIDTH))
class StochasticDepth(_With):
    """DropPath: whole rows, by torch.rand and floor."""

    def noisy(self, h: Tensor) -> Tensor:
        if not self.training:
            return h
        keep = (0.8 + torch.rand(len(h), 1, dtype=h.dtype)).floor()
        return h + h.sin() * keep / 0.8


@plain(draws=True, x=floats(ROWS, WIDTH))
class NoisyLayer(nn.Module):
    """NoisyNet: factorised noise on weights, also in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.sigma = nn.Parameter(torch.full((WIDTH, WIDTH), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.randn(WIDTH, dtype=x.dtype), torch.randn(WIDTH, dtype=x.dtype)
        noise = torch.outer(a.sign() * a.abs().sqrt(), b.sign() * b.abs().sqrt())
        return F.linear(x, self.weight + self.sigma * noise)


@plain(draws=True, is_smooth=False, x=floats(ROWS, WIDTH))
class BernoulliUnits(_With):
    """Stochastic binary units, straight through."""

    def noisy(self, h: Tensor) -> Tensor:
        p = torch.sigmoid(h)
        return p + (torch.bernoulli(p) - p).detach()


@plain(draws=True, x=floats(ROWS, WIDTH))
class DropConnect(_With):
    """A mask on weights by bernoulli_."""

    def noisy(self, h: Tensor) -> Tensor:
        mask = torch.empty_like(self.first.weight).bernoulli_(0.7)
        return F.linear(h, self.first.weight * mask) / 0.7


@plain(draws=True, x=floats(ROWS, WIDTH))
class Reparametrised(_With):
    """rsample of distributions, also where its derivative is implicit."""

    def noisy(self, h: Tensor) -> Tensor:
        normal = distributions.Normal(h, F.softplus(h) + 0.1).rsample()
        laplace = distributions.Laplace(h, h.exp()).rsample()
        return normal + 0.1 * laplace


@plain(draws=True, is_smooth=False, x=floats(ROWS, WIDTH))
class GammaSamples(_With):
    """Samples of a Dirichlet distribution; their derivatives are implicit, not those of the accepted numbers."""

    def noisy(self, h: Tensor) -> Tensor:
        shares = distributions.Dirichlet((h + 2).view(ROWS, 4, 4), validate_args=False).rsample()
        return shares.flatten(1) + h


@plain(draws=True, is_smooth=False, x=floats(ROWS, WIDTH))
class PolicyGradient(nn.Module):
    """REINFORCE: an action is sampled, and its log-probability returned."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = distributions.Categorical(logits=self.policy(x))
        action = chosen.sample()
        return chosen.log_prob(action), chosen.entropy()


@plain(draws=True, x=floats(ROWS, WIDTH))
class Mixup(_With):
    """Rows are mixed with permuted ones."""

    def noisy(self, h: Tensor) -> Tensor:
        share = torch.rand(len(h), 1, dtype=h.dtype)
        return share * h + (1 - share) * h[torch.randperm(len(h))]


@plain(draws=True, x=floats(ROWS, WIDTH))
class DiffusionStep(nn.Module):
    """A random time and noise for each row; the network's error is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.99, 0.1, 20).cumprod(0))
        self.time, self.net = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time = torch.randint(0, 20, (len(x),))
        noise = torch.randn_like(x)
        kept = self.kept[time].unsqueeze(-1).to(x.dtype)
        noised = kept.sqrt() * x + (1 - kept).sqrt() * noise
        return F.mse_loss(self.net(noised + self.time(time)), noise, reduction="none")


@plain(draws=True, x=floats(ROWS, 8, WIDTH))
class AttentionDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x, x, need_weights=False)[0]


@plain(draws=True, x=floats(ROWS, 6, 4))
class RecurrentDropout(nn.Module):
    """Dropout between the layers of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(4, 8, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


@plain(draws=True, x=floats(ROWS, WIDTH))
class OwnGenerator(_With):
    """A generator of the module's own, seeded in each call."""

    def noisy(self, h: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        return h * torch.rand(h.shape, generator=generator, dtype=torch.float32)


@plain(draws=True, is_smooth=False, x=floats(ROWS, WIDTH))
class PythonsRandom(_With):
    """LayerDrop by a generator of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(5)

    def noisy(self, h: Tensor) -> Tensor:
        return h if self.training and self.random.random() < 0.5 else h + self.first(h)


@plain(draws=True, is_smooth=False, x=floats(ROWS, WIDTH))
class NumpysRandom(_With):
    """A number of a generator of numpy's."""

    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.RandomState(5)

    def noisy(self, h: Tensor) -> Tensor:
        return h * float(self.random.uniform(0.5, 1.5))


@plain(draws=True, x=floats(ROWS, 3, 6, 6))
class RandomCrop(nn.Module):
    """A place to crop at is drawn and read as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        top = int(torch.randint(0, 3, (1,)))
        return self.convolve(x[:, :, top : top + 4])


@plain(draws=True, x=floats(ROWS, WIDTH))
class NoiseInPlace(_With):
    """normal_, uniform_ and exponential_ of fresh tensors."""

    def noisy(self, h: Tensor) -> Tensor:
        noise = torch.empty_like(h).normal_(0.0, 0.1) + h.new_empty(WIDTH).uniform_(-0.1, 0.1)
        return (h + noise) * torch.empty(h.shape, dtype=h.dtype).exponential_(2.0)


@plain(draws=True, is_smooth=False, x=floats(ROWS, WIDTH))
class SampledRows(_With):
    """multinomial chooses rows by their scores, without replacement."""

    def noisy(self, h: Tensor) -> Tensor:
        chosen = torch.multinomial(h.detach().exp().sum(-1), 8)
        return h + h[chosen].mean(0)
