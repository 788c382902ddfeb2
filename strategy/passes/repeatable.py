"""Finds the operations of forward that can be recomputed in backward with the same bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thunder.core import prims
from thunder.core.prims import OpTags
from thunder.core.symbol import BoundSymbol
from thunder.executors import torchex

from thunder_memsave.ops import aten_operators
from thunder_memsave.ops.families.collectives import is_all_gather, is_wait
from thunder_memsave.ops.kernel_calls import own_executor
from thunder_memsave.ops.random_ops import draws_random_numbers, is_replayable
from thunder_memsave.passes.symbols import is_tensor, written_in_place
from thunder_memsave.planner.graph import COMPRESS

# Parts of the names of collectives, the user's own among them.
_COMMUNICATES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "wait_tensor")
_OF_KERNELS = (
    own_executor.name,
    "thunder_memsave_fp8_torch",
    "thunder_memsave_fp8_transformer_engine",
    "thunder_memsave_stored",
)
_COPIES = ("clone", "mul", "sum", "to", "torch_pad_prim_impl")
"""Operations of Thunder's executor for PyTorch that make new memory."""


def why_not_repeatable(symbols: Sequence[BoundSymbol]) -> Mapping[int, str]:
    """Return why a symbol of a joint trace must not run again in backward, by the ids of those that must not.

    Gathers of parameters may: every rank runs the same trace. So may random operations that `random_ops` replays.
    """
    reasons: dict[int, str] = {}
    of_value: dict[str, str] = {}
    overwritten = _read_what_is_overwritten(symbols)
    for bsym in symbols:
        reason = _why_not(bsym)
        if reason is None and is_wait(bsym):
            reason = of_value.get(bsym.args[0].name)
        if reason is None and id(bsym) in overwritten:
            reason = f"reads {overwritten[id(bsym)]!r}, which is overwritten later"
        if reason is not None:
            reasons[id(bsym)] = reason
            of_value.update((o.name, reason) for o in bsym.flat_proxy_outs)
    return reasons


def _why_not(bsym: BoundSymbol) -> str | None:
    if (written := written_in_place(bsym)) is not None:
        return f"writes to {written!r}"
    if not is_all_gather(bsym) and communicates(bsym):
        return "communicates"
    if draws_random_numbers(bsym) and not is_replayable(bsym):
        return "draws random numbers from a generator that cannot be set back"
    if OpTags.DONT_DCE in (bsym.sym.tags or ()):
        return "has a side effect"
    return None


def communicates(bsym: BoundSymbol) -> bool:
    """Return whether a symbol is a collective."""
    return is_all_gather(bsym) or any(kind in bsym.sym.name for kind in _COMMUNICATES)


def _read_what_is_overwritten(symbols: Sequence[BoundSymbol]) -> Mapping[int, str]:
    """Return, by the ids of symbols that read a tensor before it is overwritten, the tensor's name."""
    if not any(written_in_place(b) is not None for b in symbols):
        return {}
    memory = roots(symbols)
    found: dict[int, str] = {}
    written: set[str] = set()
    for bsym in reversed(symbols):
        if (name := written_in_place(bsym)) is not None:
            written |= memory.get(name, {name})
        read = [a.name for a in bsym.flat_proxy_args if is_tensor(a)]
        overwritten = next((n for n in read if memory.get(n, {n}) & written), None)
        if overwritten is not None and bsym.sym is not prims.python_return:
            found[id(bsym)] = overwritten
    return found


def roots(symbols: Sequence[BoundSymbol]) -> Mapping[str, set[str]]:
    """Return, by name, the tensors whose memory a value may share, because it may be a view of them."""
    found: dict[str, set[str]] = {}
    for bsym in symbols:
        inputs = [a.name for a in bsym.flat_proxy_args if is_tensor(a)]
        shared = set() if makes_new_memory(bsym) else {r for n in inputs for r in found.get(n, {n})}
        if bsym.sym.name == COMPRESS:  # its first result is what it reads
            found[bsym.flat_proxy_outs[0].name] = found.get(inputs[0], {inputs[0]})
        for output in bsym.flat_proxy_outs:
            found.setdefault(output.name, set(shared) or {output.name})
    return found


def makes_new_memory(bsym: BoundSymbol) -> bool:
    """Return whether the result is certainly new memory."""
    executor = bsym.sym.executor
    is_kernel = executor is not None and executor.name in _OF_KERNELS
    is_copy = executor is torchex.ex and bsym.sym.name in _COPIES
    return is_kernel or is_copy or aten_operators.makes_new_memory(bsym)
