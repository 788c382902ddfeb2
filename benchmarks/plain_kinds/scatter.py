"""Graphs, segments, embeddings and routing: what is gathered and scattered by indices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.registry import bools, floats, ints, plain

NODES, EDGES, WIDTH = 6, 15, 8


@plain(x=floats(NODES, WIDTH), edges=ints(NODES, 2, EDGES))
class ScatterMean(nn.Module):
    """GraphSAGE: the mean of a node's neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        sums = torch.zeros_like(x).index_add(0, target, x[source])
        ones = torch.ones(edges.shape[1], 1, dtype=x.dtype)
        count = torch.zeros(len(x), 1, dtype=x.dtype).index_add_(0, target, ones)
        return self.own(x) + self.others(sums / count.clamp(min=1)).relu()


@plain(x=floats(NODES, WIDTH), edges=ints(NODES, 2, EDGES))
class GraphConvolution(nn.Module):
    """Kipf and Welling's, normalised by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(len(x)).expand(2, -1)
        source, target = torch.cat([edges, loops], dim=1)
        degree = torch.zeros(len(x), dtype=x.dtype).scatter_add_(
            0, target, torch.ones(len(target), dtype=x.dtype)
        )
        factor = degree.pow(-0.5)
        messages = self.linear(x)[source] * (factor[source] * factor[target]).unsqueeze(-1)
        out = x.new_zeros(len(x), WIDTH)
        out.index_add_(0, target, messages)
        return out + self.bias


@plain(x=floats(NODES, WIDTH), edges=ints(NODES, 2, EDGES))
class GraphAttention(nn.Module):
    """Softmax over the edges of each node, by scatter_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.score = nn.Parameter(torch.randn(2, WIDTH) / 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = self.linear(x)
        a, b = h @ self.score[0], h @ self.score[1]
        scores = F.leaky_relu(a[source] + b[target], 0.2)
        highest = scores.new_full((len(x),), float("-inf"))
        highest = highest.scatter_reduce(0, target, scores, "amax", include_self=False)
        weights = (scores - highest[target].detach()).exp()
        total = torch.zeros(len(x), dtype=x.dtype).scatter_add(0, target, weights)
        weights = weights / total[target]
        return torch.zeros_like(h).index_add(0, target, weights[:, None] * h[source])


class _Reduced(nn.Module):
    reduce = "sum"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.full_like(h, 0.5).scatter_reduce(0, index, h, self.reduce, include_self=True)


@plain(x=floats(NODES, WIDTH), index=ints(3, NODES, WIDTH))
class ScatterMax(_Reduced):
    reduce = "amax"


@plain(x=floats(NODES, WIDTH), index=ints(3, NODES, WIDTH))
class ScatterProduct(_Reduced):
    reduce = "prod"


@plain(x=floats(NODES, WIDTH), index=ints(3, NODES, WIDTH))
class ScatterAverage(_Reduced):
    reduce = "mean"


@plain(x=floats(EDGES, WIDTH), cells=ints(4, EDGES, 2))
class PointPillars(nn.Module):
    """Points of a cloud are added to the cells of a grid by index_put_ with accumulation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, 5)
        self.convolve = nn.Conv2d(5, 3, 3, padding=1)

    def forward(self, x: Tensor, cells: Tensor) -> Tensor:
        grid = torch.zeros(4, 4, 5, dtype=x.dtype)
        grid.index_put_((cells[:, 0], cells[:, 1]), self.embed(x), accumulate=True)
        return self.convolve(grid.permute(2, 0, 1).unsqueeze(0))


@plain(x=floats(5, WIDTH), classes=ints(4, 5))
class GatheredScores(nn.Module):
    """Log-probabilities of chosen actions, and the values beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = self.policy(x).log_softmax(-1)
        return log_probs.gather(1, classes[:, None]).squeeze(1), self.value(x).squeeze(-1)


@plain(x=floats(4, WIDTH))
class SortedAlong(nn.Module):
    """argsort, take_along_dim and its inverse permutation."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        order = self.keys(x).argsort(dim=-1)
        changed = self.linear(torch.take_along_dim(x, order, dim=-1))
        return torch.take_along_dim(changed, order.argsort(dim=-1), dim=-1) + x


@plain(x=floats(3, WIDTH), rows=ints(1, 0))
class ReplacedRows(nn.Module):
    """index_copy and index_fill of fixed rows; `rows` is an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(2, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("places", torch.tensor([2, 0]))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        h = x.index_copy(0, self.places, self.prompt)
        return self.linear(h).index_fill(1, torch.tensor([3]), 0.25) + h[rows].sum()


@plain(ids=ints(10, 12), weights=floats(12))
class WeightedBag(nn.Module):
    """EmbeddingBag with offsets, whose last bags are empty or short, and weights of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, WIDTH, mode="sum")
        self.last = nn.Linear(WIDTH, 2)
        self.register_buffer("offsets", torch.tensor([0, 5, 5, 9]))

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.last(self.bag(ids, self.offsets, per_sample_weights=weights))


@plain(ids=ints(10, 3, 4))
class MaxBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, WIDTH, mode="max", padding_idx=0)
        self.mean = nn.EmbeddingBag(10, WIDTH, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids) * self.mean(ids)


@plain(ids=ints(10, 3, 5))
class PaddedEmbedding(nn.Module):
    """padding_idx gets no gradient; the mean is over what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH, padding_idx=0, scale_grad_by_freq=False)
        self.place = nn.Embedding(5, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        mask = (ids != 0).unsqueeze(-1)
        return (h * mask).sum(1) / mask.sum(1).clamp_min(1)


@plain(ids=ints(10, 3, 5))
class FrequencyEmbedding(nn.Module):
    """Gradients of rows are divided by how often they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH, scale_grad_by_freq=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).tanh()


@plain(x=floats(4, 5, WIDTH), mask=bools(4, 5))
class MaskedPooling(nn.Module):
    """masked_fill before softmax, as in attention over words."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.score(x).squeeze(-1).masked_fill(~mask, -1e9)
        return torch.einsum("bt,btd->bd", scores.softmax(-1), x)


@plain(x=floats(4, 5), mask=bools(4, 5))
class MaskedInfill(nn.Module):
    """masked_scatter writes learned numbers where the mask is."""

    def __init__(self) -> None:
        super().__init__()
        self.fill = nn.Parameter(torch.randn(20))
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x.masked_scatter(mask, self.fill))


@plain(x=floats(4, 3))
class BucketEmbedding(nn.Module):
    """Numbers are cut into buckets, and each bucket has a vector; T5's positions are such."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.linspace(-2, 2, 7))
        self.embed = nn.Embedding(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.bucketize(x.detach(), self.edges)
        return self.embed(places).sum(1) * x.sum(1, keepdim=True)


@plain(x=floats(NODES, WIDTH), classes=ints(4, NODES))
class ClassMeans(nn.Module):
    """Prototypes of classes by a one-hot product, and distances to them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        h = self.linear(x)
        hot = F.one_hot(classes, 4).to(h.dtype)
        means = hot.t() @ h / hot.sum(0).clamp(min=1).unsqueeze(-1)
        return -torch.cdist(h, means).square()


@plain(x=floats(7, WIDTH))
class LoopedExperts(nn.Module):
    """Top-2 routing with a loop over experts that gathers by torch.where, as in Mixtral's first code."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            out.index_add_(0, rows, expert(x[rows]) * weights[rows, places, None])
        return out


@plain(x=floats(7, WIDTH))
class DenseExperts(nn.Module):
    """All experts see all tokens; weights of those not chosen are zeros, by scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 5) / 3)
        self.down = nn.Parameter(torch.randn(4, 5, WIDTH) / 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        best, chosen = scores.topk(2, dim=-1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        h = torch.einsum("nd,edf->nef", x, self.up).relu()
        out = torch.einsum("nef,efd,ne->nd", h, self.down, weights)
        balance = (scores.mean(0) * (weights > 0).to(scores.dtype).mean(0)).sum()
        return out, balance


@plain(x=floats(NODES, WIDTH), edges=ints(NODES, 2, EDGES))
class SparseAdjacency(nn.Module):
    """The adjacency matrix as a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        ones = torch.ones(edges.shape[1], dtype=x.dtype)
        adjacency = torch.sparse_coo_tensor(edges, ones, (len(x), len(x)))
        return torch.sparse.mm(adjacency, self.linear(x))


@plain(x=floats(9, WIDTH), labels=ints(5, 9))
class UniqueSegments(nn.Module):
    """Sums of the segments that are there: their number depends on the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        _, places = labels.unique(return_inverse=True)
        count = int(places.max()) + 1
        h = self.linear(x)
        return h.new_zeros(count, 3).index_add(0, places, h).logsumexp(0)


@plain(x=floats(4, 6), index=ints(24, 5))
class TakenAndPut(nn.Module):
    """take and put, by places in the flattened tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        taken = self.linear(torch.take(x, index))
        return x.put(index, taken, accumulate=True)


@plain(x=floats(12, WIDTH))
class BatchedGraphPool(nn.Module):
    """Sum, mean and maximum of each graph of a batch, side by side, as in PyTorch Geometric's readouts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.tensor([0] * 5 + [1] * 4 + [2] * 3))
        self.last = nn.Linear(3 * WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        index = self.graph.unsqueeze(-1).expand_as(x)
        sums = x.new_zeros(3, WIDTH).scatter_add_(0, index, x)
        means = sums / torch.bincount(self.graph, minlength=3).unsqueeze(-1)
        most = x.new_full((3, WIDTH), -1e9).scatter_reduce_(0, index, x, reduce="amax")
        return self.last(torch.cat([sums, means, most], dim=-1))
