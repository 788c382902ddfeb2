"""Losses that forward computes."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from plain_kinds.registry import data, floats, ints, mlp, plain

ROWS, WIDTH, CLASSES = 5, 6, 4


class _Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 8, CLASSES)


@plain(x=floats(ROWS, WIDTH), labels=ints(CLASSES, ROWS))
class WeightedCrossEntropy(_Scored):
    """Weights of classes in a buffer, label smoothing, and labels that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss(torch.tensor([0.5, 1.0, 2.0, 1.5]), label_smoothing=0.1)
        self.ignoring = nn.CrossEntropyLoss(ignore_index=0, reduction="sum")

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.net(x)
        return self.loss(logits, labels), self.ignoring(logits, labels)


@plain(x=floats(ROWS, WIDTH), y=data(ROWS, CLASSES))
class RegressionLosses(_Scored):
    """Huber, smooth L1, L1, squares, and the Gaussian's and Poisson's likelihoods."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        return {
            "huber": F.huber_loss(out, y, delta=0.5),
            "smooth": F.smooth_l1_loss(out, y, beta=0.3),
            "l1": F.l1_loss(out, y, reduction="sum"),
            "mse": F.mse_loss(out, y),
            "gaussian": F.gaussian_nll_loss(out, y, F.softplus(out) + 0.1),
            "poisson": F.poisson_nll_loss(out, y.abs(), full=True),
        }


@plain(x=floats(ROWS, WIDTH), y=data(ROWS, CLASSES))
class BinaryLosses(_Scored):
    """BCE with logits and weights, BCE, soft margins, and the focal loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 3.0, 0.5, 2.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits, hot = self.net(x), (y > 0).to(x.dtype)
        plain = F.binary_cross_entropy_with_logits(logits, hot, pos_weight=self.weights)
        rows = F.binary_cross_entropy(logits.sigmoid(), hot, reduction="none")
        focal = ((1 - torch.exp(-rows)) ** 2 * rows).mean()
        margins = F.soft_margin_loss(logits, 2 * hot - 1) + F.multilabel_soft_margin_loss(
            logits, hot
        )
        return plain + focal + margins


@plain(x=floats(ROWS, WIDTH), y=data(ROWS, CLASSES))
class Distillation(_Scored):
    """KL divergence to a frozen teacher, at a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False).eval()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            target = ((self.teacher(x) + y) / 2).softmax(-1)
        found = (self.net(x) / 2).log_softmax(-1)
        log_target = target.log()
        return F.kl_div(found, target, reduction="batchmean") + F.kl_div(
            found, log_target, log_target=True
        )


@plain(x=floats(ROWS, WIDTH), positive=floats(ROWS, WIDTH), negative=floats(ROWS, WIDTH))
class MetricLosses(_Scored):
    """Triplets, cosine embeddings, ranking and hinges."""

    def forward(self, x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        a, p, n = self.net(x), self.net(positive), self.net(negative)
        signs = torch.tensor([1.0, -1, 1, -1, 1], dtype=x.dtype)
        loss = F.triplet_margin_loss(a, p, n) + F.cosine_embedding_loss(a, p, signs, margin=0.1)
        loss = loss + F.margin_ranking_loss(a[:, 0], p[:, 0], signs, margin=0.2)
        return loss + F.hinge_embedding_loss(F.pairwise_distance(a, n), signs)


@plain(x=floats(ROWS, WIDTH), y=floats(ROWS, WIDTH))
class ContrastivePairs(nn.Module):
    """CLIP's and SimCLR's loss, with a learned temperature that is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(WIDTH, 8, 4), mlp(WIDTH, 8, 4)
        self.scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1)
        logits = self.scale.exp().clamp(max=100) * a @ b.t()
        labels = torch.arange(len(x))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


@plain(x=floats(2, 3, 4, 4), labels=ints(3, 2, 4, 4))
class SegmentationLosses(nn.Module):
    """Cross entropy of pixels and Dice's."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.convolve(x)
        hot = F.one_hot(labels, 3).permute(0, 3, 1, 2).to(x.dtype)
        probs = logits.softmax(1)
        dice = 1 - 2 * (probs * hot).sum((2, 3)) / (probs + hot).sum((2, 3)).clamp_min(1e-6)
        return (
            F.nll_loss(logits.log_softmax(1), labels)
            + F.cross_entropy(logits, labels)
            + dice.mean()
        )


@plain(x=floats(ROWS, WIDTH), labels=ints(12, ROWS))
class AdaptiveSoftmax(nn.Module):
    """Rare classes in clusters: which rows they take depends on the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 12, cutoffs=[4, 8])

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(x, labels).loss


@plain(x=floats(ROWS, WIDTH), labels=ints(CLASSES, ROWS))
class UncertaintyWeights(_Scored):
    """Several tasks, each with a learned variance; margins of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.net(x)
        losses = torch.stack([F.multi_margin_loss(out, labels), F.cross_entropy(out, labels)])
        return {
            "loss": (losses * (-self.log_vars).exp() + self.log_vars).sum(),
            "each": losses.detach(),
        }


@plain(x=floats(ROWS, WIDTH), labels=ints(CLASSES, ROWS))
class AngularMargin(nn.Module):
    """ArcFace: a margin is added to the angle of the true class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, WIDTH))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(self.weight)).clamp(-0.999, 0.999)
        angle = torch.acos(cosine)
        hot = torch.zeros_like(cosine).scatter_(1, labels.view(-1, 1), 1.0)
        return F.cross_entropy(8 * torch.cos(angle + 0.3 * hot), labels)


@plain(x=floats(2, 3, 6, 6), y=data(2, 3, 6, 6))
class PerceptualLoss(nn.Module):
    """Features of a frozen network, and Gram matrices, of an image that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3))
        self.net.eval().requires_grad_(False)
        self.change = nn.Parameter(torch.zeros(3, 6, 6))

    @staticmethod
    def _gram(h: Tensor) -> Tensor:
        flat = h.flatten(2)
        return flat @ flat.mT / flat.shape[-1]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.net(y)
        h = self.net(x + self.change)
        return F.mse_loss(h, target) + F.mse_loss(self._gram(h), self._gram(target))
