"""Runs one script of Lightning with another strategy: `python -m foreign.injected SPEC.json`, under torchrun for ranks.

Every `Fabric(...)` of the script gets the strategy, the accelerator and the number of processes of the specification.
What is recorded, on each rank: every loss that `fabric.backward` got, and every line that was printed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.fabric import _do_nothing

from foreign import stand_ins
from thunder_memsave import ThunderMemsaveStrategy


class Recorded:
    """What a script did with Fabric."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.strategies: set[str] = set()
        self.num_graphs = 0
        self.models: list[Any] = []

    def graphs(self) -> int:
        """The number of graphs that our strategy compiled."""
        forwards = [getattr(m, "_forward_module", None) for m in self.models]
        return sum(len(getattr(f, "captures", ())) for f in forwards)


def inject(
    strategy: str, num_ranks: int, recorded: Recorded, *, forward_methods: Sequence[str] = ()
) -> None:
    """Replace the strategy of every `Fabric` that is made, launch it, and record what it is asked."""
    init, backward, setup_module, setup = (
        Fabric.__init__,
        Fabric.backward,
        Fabric.setup_module,
        Fabric.setup,
    )
    launch = Fabric.launch

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        if recorded.strategies:  # such as that of litgpt's merge, which rank 0 makes alone
            return init(self, *args, **kwargs)
        kwargs |= {"accelerator": "cpu", "devices": num_ranks, "strategy": _made(strategy)}
        kwargs.pop("num_nodes", None)
        init(self, **kwargs)
        recorded.strategies.add(type(self.strategy).__name__)
        launch(self)
        return None

    def launched(self: Any, function: Callable[..., Any] = _do_nothing, *a: Any, **k: Any) -> Any:
        if not self._launched:
            return launch(self, function, *a, **k)
        return None if function is _do_nothing else function(self, *a, **k)

    def backwards(self: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        recorded.losses.append(tensor.detach().float().item())
        backward(self, tensor, *args, **kwargs)

    def noted(before: Callable[..., Any]) -> Callable[..., Any]:
        def runs(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = before(self, *args, **kwargs)
            model = result[0] if isinstance(result, tuple) else result
            recorded.models.append(model)
            for name in forward_methods:
                model.mark_forward_method(name)
            return result

        return runs

    Fabric.__init__, Fabric.launch, Fabric.backward = made, launched, backwards  # type: ignore[method-assign]
    Fabric.setup_module, Fabric.setup = noted(setup_module), noted(setup)  # type: ignore[method-assign]


def _made(strategy: str) -> Any:
    name, _, sharding = strategy.partition(":")
    return ThunderMemsaveStrategy(sharding=sharding) if sharding else name


def load(path: Path) -> ModuleType:
    """Import a script under a name that is not `__main__`, as it would see its own folder."""
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example"] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    given = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    folder = Path(given["folder"])
    from foreign import examples

    recorded, start, error = Recorded(), time.perf_counter(), ""
    try:
        for name in given["stand_ins"]:
            getattr(stand_ins, name)(folder)
        inject(
            given["strategy"],
            given["num_ranks"],
            recorded,
            forward_methods=given["forward_methods"],
        )
        os.chdir(folder)
        examples.RUNS[given["example"]](Path(given["checkout"]))
    except BaseException as raised:
        error = "".join(traceback.format_exception(raised))
    outcome = {
        "losses": recorded.losses,
        "strategies": sorted(recorded.strategies),
        "graphs": recorded.graphs(),
        "seconds": round(time.perf_counter() - start, 1),
        "error": error,
    }
    (folder / f"outcome_{rank}.json").write_text(json.dumps(outcome))
    print(error, file=sys.stderr)
    sys.stdout.flush()
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
