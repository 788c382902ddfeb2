"""Refuse a forward that writes to a sharded parameter: what is gathered would change, and the shards would not."""

from __future__ import annotations

from thunder_memsave import compat

compat.apply()

from thunder.core.trace import TraceCtx  # noqa: E402

from thunder_memsave.collectives import is_all_gather  # noqa: E402
from thunder_memsave.errors import CompileError  # noqa: E402
from thunder_memsave.passes.symbols import written_in_place  # noqa: E402


def refuse_lost_writes(trace: TraceCtx) -> None:
    """Check the copies in place of a joint or an inference trace, with operations claimed by executors.

    Raises:
        CompileError: one of them is into a gathered parameter, or a part of it.
    """
    shards: dict[str, str] = {}
    for bsym in trace.bound_symbols:
        if is_all_gather(bsym):
            shards[bsym.output.name] = bsym.args[0].name
        elif (written := written_in_place(bsym)) in shards:
            assert written is not None
            raise CompileError(
                f"The forward changes the parameter {shards[written]!r} in place, of which each rank holds "
                "only its rows; the change would be lost. Make it a buffer, or change it outside of the compiled "
                "forward, inside fabric.strategy.summon_full(module, writeback=True)."
            )
        elif len(bsym.flat_proxy_args) == 1 or "update_aliases" in bsym.sym.name:
            for before, after in zip(bsym.flat_proxy_args, bsym.flat_proxy_outs, strict=False):
                if before.name in shards:
                    shards[after.name] = shards[before.name]
