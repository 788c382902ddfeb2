"""A view without numbers has a real view's strides, also in dims of one element, so a plan's bytes are the step's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from harness.memory import measured_peak_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compat import fake_views
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.devices import device

Layer = Callable[[Tensor], Tensor]

IMAGE = (1, 16, 8, 8)


def test_canary_pytorchs_rule_has_other_strides() -> None:
    rows = torch.randn(1, 8, 8, 16)
    image = rows.permute(0, 3, 1, 2)
    assert image.view(IMAGE).stride() == (16, 1, 128, 16)
    fake_views.remove()
    try:
        with FakeTensorMode() as mode:
            assert mode.from_tensor(image).view(IMAGE).stride() == (1024, 1, 128, 16)
    finally:
        fake_views.apply()


def test_strides_and_refusals_are_a_real_views() -> None:
    num_refused = num_views = 0
    for shape in itertools.product((1, 2, 3), repeat=3):
        for order in itertools.permutations(range(3)):
            source = torch.empty(shape).permute(order)
            for view in views(source.numel()):
                found, wanted = strides_of_fake(source, view), strides(source, view)
                assert found == wanted, (source.shape, source.stride(), view)
                num_refused += wanted is None
                num_views += 1
    assert 0 < num_refused < num_views


def views(numel: int) -> list[tuple[int, ...]]:
    """Return the shapes of up to three dims with this many elements."""
    sizes = [size for size in range(1, numel + 1) if numel % size == 0]
    pairs = [(a, numel // a) for a in sizes]
    return [(numel,), *pairs, *((a, b, -1) for a in sizes for b in sizes if numel % (a * b) == 0)]


def strides(source: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a view; None if it is refused."""
    try:
        return source.view(shape).stride()
    except RuntimeError as error:
        if "view size is not compatible" not in str(error):
            raise
        return None


def strides_of_fake(source: Tensor, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    with FakeTensorMode() as mode:
        return strides(mode.from_tensor(source), shape)


def test_a_view_shares_its_sources_storage() -> None:
    with FakeTensorMode():
        source = torch.empty(4, 6)
        view = source.view(24)
    assert isinstance(view, FakeTensor)
    assert view.fake_device == source.device
    assert view.untyped_storage()._cdata == source.untyped_storage()._cdata


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(16, 16, 3),
        nn.ConvTranspose2d(16, 16, 3),
        nn.MaxPool2d(2),
        nn.GroupNorm(4, 16),
        lambda image: F.max_pool2d(image, 2).view(1, 256),
        lambda image: F.interpolate(image, scale_factor=2).view(-1, 64),
    ],
    ids=["conv", "transposed conv", "pool", "group norm", "view of pool", "view of interpolate"],
)
def test_one_image_has_eagers_bits_and_the_predicted_peak(layer: Layer) -> None:
    torch.manual_seed(0)
    model, rows = OneImage(layer), torch.randn(1, 8, 8, 16, requires_grad=True)
    eager = torch.autograd.grad(model(rows), (rows, *model.parameters()))
    planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=None)
    compiled = CompiledModule(model, planner=planner)
    found = torch.autograd.grad(compiled(rows), (rows, *model.parameters()))

    measured = measured_peak_bytes(lambda: compiled(rows).backward())

    assert all(map(torch.equal, found, eager))
    held = sum(t.nbytes for t in (*model.parameters(), rows))
    (call,) = planner.calls
    assert call.profile.peak_bytes == measured + held


class OneImage(nn.Module):
    """A layer on an image of rows (1, height, width, channels); the result is a loss."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows.permute(0, 3, 1, 2).reshape(IMAGE)).square().mean()
