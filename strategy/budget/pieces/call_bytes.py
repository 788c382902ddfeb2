"""The bytes that the plan of a piece takes, beside what is live when the piece is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.planner.graph import Program


@dataclass(frozen=True, kw_only=True, slots=True)
class CallBytes:
    """The bytes that a call takes beside its arguments, in forward and in backward."""

    kept_bytes: int
    """Between forward and backward, without its results."""
    forward_bytes: int
    """The most during forward, its results included."""
    backward_bytes: int
    """The most during backward beside what is live when it begins, that which is kept and the gradients of the results
    included."""
    held_bytes: int
    """Its arguments."""
    ends_bytes: int
    """Its results, and their gradients."""
    also_kept: Mapping[str, int]
    """Bytes of the results and of the batch's tensors that backward reads, by name: eager code may hold them too."""

    @classmethod
    def of(cls, call: PlannedCall) -> CallBytes:
        """Return those of a call with a backward."""
        program, profile = call.program, call.profile
        live, num_forward = profile.live_bytes, program.num_forward
        made, read = _made_in_forward(program), _read_in_backward(program)
        kept = made - program.outputs
        batch = {s for s in program.held if program.storages[s].kind == "batch"}
        also = ((made & program.outputs) | batch) & read
        return cls(
            kept_bytes=_sum(program, kept),
            forward_bytes=profile.forward_peak_bytes - live[0],
            backward_bytes=profile.backward_peak_bytes - live[num_forward],
            held_bytes=_sum(program, program.held),
            ends_bytes=_sum(program, (made & program.outputs) | program.cotangents),
            also_kept={program.storages[s].name: program.storages[s].nbytes for s in also},
        )

    def kept_beside(self, measured: CallBytes) -> int:
        """Return what is kept by this plan, where another plan of the call ran when eager code was measured.

        A tensor that only this one keeps may have been freed then.
        """
        new = self.also_kept.keys() - measured.also_kept.keys()
        return self.kept_bytes + sum(self.also_kept[name] for name in new)


def _made_in_forward(program: Program) -> set[int]:
    """Return the storages that are made in forward and outlive it."""
    steps = program.steps[: program.num_forward]
    freed = {s for step in steps for s in step.frees}
    return {s for step in steps for s in step.makes} - freed


def _read_in_backward(program: Program) -> set[int]:
    return {s for step in program.steps[program.num_forward :] for s in step.op.reads}


def _sum(program: Program, storages: set[int] | frozenset[int]) -> int:
    return sum(program.storages[s].nbytes for s in storages)
