"""What fuses within a tile takes no more memory than what runs one by one, sums within products left out."""

from __future__ import annotations

import pytest
import torch
from thunder.core import prims
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.budget.extract import Values
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.region import Region
from thunder_memsave.fusion.row_programs import fused_in_tiles
from thunder_memsave.measure.layouts import Value, layout_of
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.ops import row_tiles
from thunder_memsave.ops.aten_operators import operator_symbol, proxy_like
from thunder_memsave.ops.row_tiles import RowOperand, RowProgram, RowResult, RowStep, Slot

NUM_ROWS, TILE, WIDTH, INNER = 4096, 1024, 2048, 4096
_ATEN = torch.ops.aten


def gradients_of_weights(*, is_on_cuda: bool) -> RowProgram:
    """Three wide values, products of them, and the sums over rows of those with the gradient in slot 4."""
    mm, mul, t = (
        str(operator_symbol(each).name)
        for each in (_ATEN.mm.default, _ATEN.mul.Tensor, _ATEN.t.default)
    )
    calls = [
        *((mm, (0, 1), 5), (mm, (0, 2), 6), (mm, (0, 3), 7)),
        *((mul, (5, 6), 8), (mul, (6, 7), 9), (mul, (7, 8), 10)),
        *((t, (8,), 11), (mm, (11, 4), 12), (t, (9,), 13), (mm, (13, 4), 14)),
        *((t, (10,), 15), (mm, (15, 4), 16)),
    ]
    rows, whole = RowOperand("rows", 1), RowOperand("whole")
    return RowProgram(
        operands=(rows, whole, whole, whole, rows),
        steps=(),
        results=tuple(RowResult(slot, "sum", torch.bfloat16) for slot in (12, 14, 16)),
        is_on_cuda=is_on_cuda,
    ).with_steps([RowStep(n, tuple(map(Slot, read)), (), (made,)) for n, read, made in calls])


@pytest.mark.parametrize("is_on_cuda", [True, False])
def test_sums_within_products_make_no_room_in_a_tile(is_on_cuda: bool) -> None:
    program, dtype = gradients_of_weights(is_on_cuda=is_on_cuda), torch.bfloat16
    with FakeTensorMode() as mode:
        weights = [torch.empty(WIDTH, INNER, dtype=dtype) for _ in range(3)]
        operands = [*(torch.empty(NUM_ROWS, WIDTH, dtype=dtype) for _ in range(2))]
        operands[1:1] = weights
    shapes, trace = [[INNER, WIDTH]] * 3, TraceCtx()
    with tracectx(trace):
        proxies = [proxy_like(each, torch.device("cpu")) for each in operands]
        trace.args, trace.kwargs = tuple(proxies), {}
        with mode:
            like = torch.empty(INNER, WIDTH, dtype=dtype)
        results = tuple(proxy_like(like, torch.device("cpu")) for _ in shapes)
        symbol = row_tiles.symbol_of(program)
        trace.bound_symbols.append(symbol.bind(TILE, shapes, *proxies, output=results))
        prims.python_return(results)
    values = Values(trace.args, {}, {}, OpProfiles())
    for number, (proxy, each) in enumerate(zip(proxies, operands, strict=True)):
        values.by_name[proxy.name] = Value(layout_of(each), number)

    found = fused_in_tiles(trace, values, compiles=False)

    peaks = []
    for tiles in (program, row_tiles.program_of(str(found.bound_symbols[0].sym.name))):
        assert tiles is not None
        with mode, AtenRecord(operands) as record:
            row_tiles.run_in_tiles(tiles, TILE, shapes, *operands)
        peaks.append(record.peak_bytes)
    assert peaks[1] <= peaks[0]
    leaves_room = not is_on_cuda and inductor.keeps_rounding("cpu")  # else nothing of 16 bits fuses
    assert (found is not trace) is leaves_room, "gradients of weights that are no totals do"


def test_a_region_that_is_traced_shows_its_operators() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x * y]

    x = torch.randn(4, 4)
    region = Region("fused_of_a_test", run, [layout_of(x), layout_of(x)])

    graph = make_fx(lambda *args: region(*args), tracing_mode="fake")(x, x)

    assert _ATEN.mul.Tensor in {node.target for node in graph.graph.nodes}
