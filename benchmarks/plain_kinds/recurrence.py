"""Cells in loops, recurrent layers, scans and fixed points."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from plain_kinds.registry import always, data, floats, ints, plain

ROWS, LENGTH, WIDTH = 3, 5, 6


@plain(x=floats(ROWS, LENGTH, WIDTH))
class LSTMCellLoop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTMCell(WIDTH, 7), nn.Linear(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 7)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(self.last(h))
        return torch.stack(outputs, dim=1)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class GRUCellLoop(nn.Module):
    """Two cells over each other, with the hidden states in a list that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, 4), nn.GRUCell(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros(len(x), 4, dtype=x.dtype) for _ in self.cells]
        for step in x.unbind(1):
            for number, cell in enumerate(self.cells):
                step = states[number] = cell(step, states[number])
        return torch.cat(states, dim=-1)


@plain(x=floats(LENGTH, ROWS, WIDTH))
class TanhRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.RNN(WIDTH, 4, num_layers=2, nonlinearity="tanh")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class BidirectionalLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, 4, batch_first=True, bidirectional=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layers(x)
        return self.last(hidden.mean(1))


@plain(x=floats(ROWS, LENGTH, WIDTH))
class ProjectedLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, 6, proj_size=3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.layers(x)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class TwoLayerGRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(WIDTH, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[1][-1]


@plain(ids=ints(10, ROWS, LENGTH), lengths=always(torch.tensor([5, 3, 2])))
class PackedGRU(nn.Module):
    """A classifier of texts of several lengths, from the tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.layers, self.last = nn.GRU(WIDTH, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
        _, hidden = self.layers(packed)
        return self.last(hidden[-1])


@plain(x=floats(ROWS, LENGTH, WIDTH), lengths=always(torch.tensor([2, 5, 3])))
class PackedLSTM(nn.Module):
    """Lengths in any order, unpacked again for a tagger."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, 4, batch_first=True, bidirectional=True)
        self.tags = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        return self.tags(hidden)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class OwnGRU(nn.Module):
    """Gates written by hand with one product for all."""

    def __init__(self) -> None:
        super().__init__()
        self.from_input = nn.Parameter(torch.randn(3 * 4, WIDTH) / 3)
        self.from_hidden = nn.Parameter(torch.randn(3 * 4, 4) / 3)
        self.bias = nn.Parameter(torch.zeros(3 * 4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.size(0), 4, dtype=x.dtype)
        inputs = F.linear(x, self.from_input, self.bias)
        for t in range(x.size(1)):
            a = inputs[:, t].chunk(3, dim=-1)
            b = F.linear(h, self.from_hidden).chunk(3, dim=-1)
            reset, update = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
            h = torch.lerp(torch.tanh(a[2] + reset * b[2]), h, update)
        return h


@plain(x=floats(ROWS, LENGTH, WIDTH))
class DecayingScan(nn.Module):
    """A linear recurrence by cumulative sums of logarithms, as state space models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        log_decay = F.logsigmoid(self.decay).expand_as(x).cumsum(dim=1)
        return torch.exp(log_decay) * torch.cumsum(self.inner(x) * torch.exp(-log_decay), dim=1)


@plain(x=floats(ROWS, LENGTH, WIDTH))
class IndependentRNN(nn.Module):
    """Parameters of layers in ParameterLists."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in "ab")
        self.hidden = nn.ParameterList(nn.Parameter(torch.rand(WIDTH)) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        for inputs, hidden in zip(self.inputs, self.hidden, strict=True):
            h, outputs = torch.zeros_like(x[:, 0]), []
            for t in range(x.shape[1]):
                h = torch.relu(x[:, t] @ inputs + h * hidden)
                outputs.append(h)
            x = torch.stack(outputs, 1)
        return x


@plain(x=floats(ROWS, LENGTH, WIDTH))
class StatefulLSTM(nn.Module):
    """The hidden state goes on from call to call, detached, as in truncated backpropagation through time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(WIDTH, 4, batch_first=True)
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.layers(x, self.state)
        self.state = (state[0].detach(), state[1].detach())
        return hidden


@plain(x=floats(ROWS, WIDTH))
class BufferedState(nn.Module):
    """The state is a buffer that is bound anew."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, 4)
        self.register_buffer("h", torch.zeros(ROWS, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.cell(x, self.h)
        self.h = h.detach()
        return h


@plain(x=floats(2, 3, 2, 6, 6))
class ConvLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(2 + 3, 4 * 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 3, *x.shape[-2:])
        c = torch.zeros_like(h)
        for t in range(x.shape[1]):
            i, f, o, g = self.gates(torch.cat([x[:, t], h], dim=1)).split(3, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h


@plain(source=ints(9, 2, 4), target=ints(9, 2, 3))
class AttentiveDecoder(nn.Module):
    """Sequence to sequence with Bahdanau's attention and the target's words as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.encoder = nn.GRU(WIDTH, 4, batch_first=True)
        self.cell = nn.GRUCell(WIDTH + 4, 4)
        self.query, self.key, self.score = nn.Linear(4, 5), nn.Linear(4, 5), nn.Linear(5, 1)
        self.words = nn.Linear(4, 9)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, h = self.encoder(self.embed(source))
        h, losses = h.squeeze(0), []
        for word in target.t():
            scores = self.score(torch.tanh(self.query(h)[:, None] + self.key(memory)))
            context = (scores.softmax(1) * memory).sum(1)
            h = self.cell(torch.cat([self.embed(word), context], -1), h)
            losses.append(F.cross_entropy(self.words(h), word))
        return torch.stack(losses).mean()


@plain(x=floats(6, ROWS, WIDTH), words=ints(4, ROWS, 2))
class SpeechToLetters(nn.Module):
    """A bidirectional GRU and the CTC loss in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(WIDTH, 4, bidirectional=True)
        self.letters = nn.Linear(8, 5)
        self.loss = nn.CTCLoss(blank=0, zero_infinity=True)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        log_probs = self.letters(self.layers(x)[0]).log_softmax(-1)
        lengths = torch.full((x.shape[1],), x.shape[0])
        return self.loss(log_probs, words + 1, lengths, torch.full_like(lengths, words.shape[1]))


@plain(x=floats(ROWS, WIDTH))
class FixedPoint(nn.Module):
    """A deep equilibrium: iterations without gradients until they stand still, then one with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.inner.weight.mul_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        injected, z = self.outer(x), torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(30):
                new = torch.tanh(self.inner(z) + injected)
                if (new - z).norm() < 1e-4:
                    break
                z = new
        return torch.tanh(self.inner(z) + injected)


@plain(x=floats(ROWS, WIDTH))
class UnrolledEquilibrium(nn.Module):
    """A fixed number of damped iterations, all with gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(8):
            z = 0.5 * z + 0.5 * self.layer(torch.cat([z, x], dim=-1))
        return z


@plain(x=floats(ROWS, 4), times=always(torch.linspace(0, 1, 5)))
class NeuralODE(nn.Module):
    """Runge and Kutta's steps of a small network's field."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 4))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        path = [x]
        for start, end in itertools.pairwise(times):
            h, y = end - start, path[-1]
            k1 = self.field(y)
            k2 = self.field(y + h / 2 * k1)
            k3 = self.field(y + h / 2 * k2)
            k4 = self.field(y + h * k3)
            path.append(y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
        return torch.stack(path)


@plain(x=floats(ROWS, WIDTH))
class EchoState(nn.Module):
    """A fixed reservoir in buffers; only the readout is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("reservoir", torch.randn(8, 8) / 4)
        self.register_buffer("inlet", torch.randn(WIDTH, 8), persistent=False)
        self.readout = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 8, dtype=x.dtype)
        for _ in range(4):
            h = torch.tanh(x @ self.inlet + h @ self.reservoir)
        return self.readout(h)


@plain(x=floats(ROWS, 4, WIDTH), start=data(ROWS, WIDTH))
class GatedDeltaMemory(nn.Module):
    """Fast weights: a matrix state that outer products change in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * 4 + 1)

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        memory = x.new_zeros(len(x), 4, 4)
        outputs = [start[:, :4]]
        for step in self.project(x).unbind(1):
            k, v, q, beta = step.split([4, 4, 4, 1], dim=-1)
            k = F.normalize(k, dim=-1)
            old = torch.einsum("bij,bj->bi", memory, k)
            change = beta.sigmoid() * (v - old)
            memory = memory + torch.einsum("bi,bj->bij", change, k)
            outputs.append(torch.bmm(memory, q.unsqueeze(-1)).squeeze(-1))
        return torch.stack(outputs, dim=1)
