"""The smallest budget of a step, which the error of one that is too small names."""

from __future__ import annotations

from collections.abc import Callable

from lightning.fabric import Fabric

from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.errors import BudgetError


def smallest_budget(fabric: Fabric, step: Callable[[], object]) -> int:
    """Return what the error of a step without room names, which only rank 0 knows. A collective."""
    smallest = None
    try:
        step()
    except BudgetError as error:
        smallest = error.smallest_bytes
    except OtherRankError:
        pass
    found: int | None = fabric.broadcast(smallest)
    assert found is not None
    return found
