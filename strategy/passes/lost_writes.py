"""Refuses in-place writes that would be lost (to a gathered parameter) or late (to part of an argument)."""

from __future__ import annotations

from thunder.core.trace import TraceCtx

from thunder_memsave.errors import CompileError
from thunder_memsave.ops.families.collectives import is_all_gather
from thunder_memsave.passes.repeatable import roots
from thunder_memsave.passes.symbols import forward_symbols, written_in_place


def refuse_lost_writes(trace: TraceCtx) -> None:
    """Check the copies in place of a joint or an inference trace, with operations claimed by executors.

    Raises:
        CompileError: A copy writes to a gathered parameter or part of it, so the shards would not change; or to part of
            a buffer or of the batch that forward does not read afterwards, so Thunder's split would run it in backward.
    """
    _refuse_late_writes(trace)
    shards: dict[str, str] = {}
    for bsym in trace.bound_symbols:
        if is_all_gather(bsym):
            shards[bsym.output.name] = bsym.args[0].name
        elif (written := written_in_place(bsym)) in shards:
            assert written is not None
            raise CompileError(
                f"The forward changes the parameter {shards[written]!r} in place, but each rank holds "
                "only its rows, so the change would be lost. Make it a buffer, or change it outside of the compiled "
                "forward, inside fabric.strategy.summon_full(module, writeback=True)."
            )
        elif len(bsym.flat_proxy_args) == 1 or "update_aliases" in bsym.sym.name:
            for before, after in zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=False):
                if before.name in shards:
                    shards[after.name] = shards[before.name]


def _refuse_late_writes(trace: TraceCtx) -> None:
    symbols = trace.bound_symbols
    if not any(written_in_place(b) is not None for b in symbols):
        return
    forward, memory = forward_symbols(symbols), roots(symbols)
    arguments = {a.name for a in trace.args}
    for bsym in symbols:
        written = written_in_place(bsym)
        if written is not None and id(bsym) not in forward and memory[written] & arguments:
            name = min(memory[written] & arguments)
            raise CompileError(
                f"The forward changes a part of {name!r} in place (at {bsym.source_filename or 'an unknown line'}) and "
                "does not read it afterwards, so compiled code would run the write in backward. Write to all of it, "
                "such as by `copy_`, or outside of the compiled forward."
            )
