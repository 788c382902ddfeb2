"""Lets a plan choose between keeping a value, keeping it in fp8, and recomputing it.

Of a trace with choices (`passes/stored/compress.py`):

    t1 = aten_mm(x, w)
    t1_same, t1_fp8, t1_scale = compress_to_fp8(t1)
    t1_again = decompress_from_fp8(t1_fp8, t1_scale, ...)

a plan sees a product that makes `t1_fp8` and its scales as one storage, and of which `t1_again` is made: to keep
neither is to run the product again. What it takes to store the value counts where it is made again of that, for a plan
that keeps `t1_again`, or neither, stores nothing.

Of rounded numbers only smooth functions are recomputed. What else reads them in forward, such as the next product, is
an operation that cannot be recomputed, so that what a plan recomputes of its results begins with exact ones.
"""

from __future__ import annotations

from dataclasses import replace

from thunder_memsave.budget.ways.compressible import is_smooth
from thunder_memsave.planner.graph import COMPRESS, DECOMPRESS, THEN, Op, TrainingGraph


def with_choices_as_one(graph: TrainingGraph) -> TrainingGraph:
    """Return the graph of a joint trace with its choices as a plan sees them."""
    stores = {op.makes[0]: op for op in graph.ops if op.symbol == COMPRESS}
    if not stores:
        return graph
    storages, storage_of = list(graph.storages), dict(graph.storage_of)
    by_value: dict[int, Op] = {}
    scales: set[int] = set()
    for op in stores.values():
        (value,), (numbers, scale) = op.reads, op.makes
        by_value[value] = op
        scales.add(scale)
        nbytes = storages[numbers].nbytes + storages[scale].nbytes
        storages[numbers] = replace(storages[numbers], nbytes=nbytes)
        storage_of[storages[scale].name] = numbers
        storages[scale] = replace(storages[scale], nbytes=0)
    ops: list[Op] = []
    rounded: set[int] = set()
    """Storages of other numbers in backward than in forward, where their values are stored in fp8."""
    for number, op in enumerate(graph.ops):
        if op.symbol == COMPRESS:
            continue
        is_of_rounded = not rounded.isdisjoint(op.reads)
        if op.symbol == DECOMPRESS or (is_of_rounded and is_smooth(op.symbol, op.dtype)):
            rounded.update(op.makes)
        elif number < graph.num_forward and is_of_rounded:
            op = op if op.repeat == "free" else replace(op, repeat="no")
        if op.symbol == DECOMPRESS:
            stored = stores[next(s for s in op.reads if s in stores)]
            op = replace(
                op,
                reads=tuple(s for s in op.reads if s not in scales),
                moved_bytes=op.moved_bytes + stored.moved_bytes,
                key=f"{stored.key}{THEN}{op.key}",
            )
        made = [by_value[s] for s in op.makes if s in by_value]
        ops.append(op if not made else _with_stored(op, made[0]))
    return replace(
        graph,
        storages=tuple(storages),
        ops=tuple(ops),
        num_forward=graph.num_forward - len(stores),
        storage_of=storage_of,
    )


def _with_stored(producer: Op, stores: Op) -> Op:
    numbers, _ = stores.makes
    return replace(
        producer,
        makes=(*producer.makes, numbers),
        results=(*producer.results, *stores.results),
        peak_bytes=producer.peak_bytes + stores.peak_bytes,
    )
