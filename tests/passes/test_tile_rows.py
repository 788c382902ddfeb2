"""Wide values in tiles have the numbers of the whole, and regions that others read into stay whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from thunder.core.trace import TraceCtx
from torch import Tensor, nn

from harness.joint_passes import JOINT_PASSES, joint_passes
from harness.row_mlps import INNER, KINDS, WIDTH, Kind, build
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.ops import row_tiles
from thunder_memsave.passes.tiles.tile_rows import tile_rows

BATCH = (2, 40, WIDTH)
NUM_ROWS = 80


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 rows are several tiles, the last of them smaller."""
    monkeypatch.setattr(row_tiles, "LEAST_ROWS", 32)
    monkeypatch.setattr(row_tiles, "TILE_BYTES", 1)
    monkeypatch.setattr(row_tiles, "_ROUND_ROWS", 1)


class Tiled:
    """Compiles a module with its wide values in tiles."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.traces: list[TraceCtx] = []

    def __call__(self, x: Tensor) -> Tensor:
        def change(trace: TraceCtx) -> TraceCtx:
            weights = [a.name for a in trace.args if "l_x" not in a.name]
            self.traces += [trace, tile_rows(trace, weights=weights)]
            return self.traces[-1]

        with joint_passes(change, *JOINT_PASSES):
            result: Tensor = CompiledModule(self.module)(x)[0]
        return result

    def widest(self) -> int:
        """Return the most elements of a row among all values of tokens that exist whole."""
        return max(
            o.numel // NUM_ROWS
            for b in self.traces[-1].bound_symbols
            for o in b.flat_proxy_outs
            if NUM_ROWS in (o.shape[:1] or ()) or tuple(o.shape[:2]) == BATCH[:2]
        )

    def in_tiles(self) -> Iterator[str]:
        """Yield the names of what runs in tiles."""
        for bsym in self.traces[-1].bound_symbols:
            if bsym.sym.name.startswith("rows_in_tiles"):
                yield bsym.sym.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]
)
def test_tiles_have_the_gradients_of_the_whole(
    kind: Kind, dtype: torch.dtype, tolerance: float
) -> None:
    model, x = build(kind, dtype), torch.randn(BATCH, dtype=dtype)
    eager = copy.deepcopy(model)
    tiled = Tiled(model)

    loss, expected = tiled(x), eager(x)[0]
    loss.backward()
    expected.backward()

    assert tiled.widest() <= WIDTH < INNER
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for (name, ours), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            error = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
            assert error <= tolerance, f"{name}: {error}"


def test_equal_layers_are_one_operation() -> None:
    tiled = Tiled(build("gated", num_blocks=4))
    tiled(torch.randn(BATCH))
    names = list(tiled.in_tiles())
    assert (len(names), len(set(names))) == (8, 2)


class Leaking(nn.Module):
    """Something else reads a wide value: a maximum over tokens, or a draw."""

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.draws = draws

    def forward(self, x: Tensor) -> tuple[Tensor]:
        up = self.up(x)
        if self.draws:
            up = nn.functional.dropout(up, 0.5)
        extra = 0.0 if self.draws else up.cumsum(1).mean()
        return (self.down(up.relu()).mean() + extra,)


@pytest.mark.parametrize("draws", [False, True])
def test_values_that_others_read_stay_whole(draws: bool) -> None:
    tiled = Tiled(Leaking(draws=draws))
    tiled(torch.randn(BATCH))
    before, after = tiled.traces
    assert after is before


def test_without_gradients_nothing_is_in_tiles() -> None:
    tiled = Tiled(build("gated"))
    with torch.no_grad():
        tiled(torch.randn(BATCH))
    before, after = tiled.traces
    assert after is before


def test_rows_of_a_tile_fit_and_tiles_are_of_about_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_tiles, "TILE_BYTES", 1000)
    monkeypatch.setattr(row_tiles, "LEAST_ROWS", 8)
    monkeypatch.setattr(row_tiles, "_ROUND_ROWS", 4)
    assert row_tiles.rows_per_tile(100, row_bytes=10) == 100
    assert row_tiles.rows_per_tile(101, row_bytes=10) == 52
    assert row_tiles.rows_per_tile(100, row_bytes=10**6) == 8
    assert row_tiles.rows_per_tile(3, row_bytes=10**6) == 3
