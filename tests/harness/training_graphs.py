"""Small training graphs, written by hand or drawn at random, for tests of the planner."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from thunder_memsave.planner.graph import Op, Repeat, Storage, StorageKind, TrainingGraph


@dataclass
class GraphBuilder:
    """Operations one after the other; `backward()` is where backward begins."""

    storages: list[Storage] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    storage_of: dict[str, int] = field(default_factory=dict)
    inputs: set[int] = field(default_factory=set)
    cotangents: set[int] = field(default_factory=set)
    num_forward: int | None = None

    def storage(self, name: str, nbytes: int, kind: StorageKind) -> int:
        self.storages.append(Storage(nbytes=nbytes, kind=kind, name=name))
        self.storage_of[name] = len(self.storages) - 1
        return len(self.storages) - 1

    def input(self, name: str, nbytes: int = 10, kind: StorageKind = "parameter") -> str:
        self.inputs.add(self.storage(name, nbytes, kind))
        return name

    def backward(self, **cotangents: int) -> None:
        self.num_forward = len(self.ops)
        for name, nbytes in cotangents.items():
            self.cotangents.add(self.storage(name, nbytes, "cotangent"))

    def op(
        self,
        reads: str,
        makes: dict[str, int],
        *,
        inside: int = 0,
        kind: StorageKind | None = None,
        repeat: Repeat = "yes",
        **fields: Any,
    ) -> None:
        """`reads`: names with spaces between them; `makes`: bytes by name; `inside`: bytes of temporaries."""
        default: StorageKind = "activation" if self.num_forward is None else "temporary"
        made = tuple(self.storage(name, n, kind or default) for name, n in makes.items())
        self._append(reads, tuple(makes), made, repeat, sum(makes.values()) + inside, fields)

    def view(self, base: str, *names: str) -> None:
        for name in names:
            self.storage_of[name] = self.storage_of[base]
        self._append(base, names, (), "free", 0, {})

    def write(self, target: str, name: str, reads: str = "") -> None:
        """Overwrite `target`; it is called `name` from then on."""
        self.storage_of[name] = self.storage_of[target]
        self._append(f"{target} {reads}", (name,), (), "no", 0, {})

    def graph(self, *, outputs: str, gradients: str = "") -> TrainingGraph:
        return TrainingGraph(
            storages=tuple(self.storages),
            ops=tuple(self.ops),
            num_forward=len(self.ops) if self.num_forward is None else self.num_forward,
            storage_of=self.storage_of,
            inputs=frozenset(self.inputs),
            outputs=frozenset(self.storage_of[name] for name in outputs.split()),
            gradients=frozenset(self.storage_of[name] for name in gradients.split()),
            cotangents=frozenset(self.cotangents),
        )

    def _append(
        self,
        reads: str,
        results: tuple[str, ...],
        makes: tuple[int, ...],
        repeat: Repeat,
        peak_bytes: int,
        fields: dict[str, Any],
    ) -> None:
        arguments = tuple(reads.split())
        self.ops.append(
            Op(
                symbol=fields.pop("symbol", "op"),
                index=len(self.ops),
                arguments=arguments,
                results=results,
                reads=tuple(dict.fromkeys(self.storage_of[name] for name in arguments)),
                makes=makes,
                peak_bytes=peak_bytes,
                repeat=repeat,
                **fields,
            )
        )


def chain(num_ops: int = 4, nbytes: int = 100) -> TrainingGraph:
    """`x -> a1 -> a2 -> ...`, where the backward of each reads what it has read, and all weights get gradients."""
    b = GraphBuilder()
    b.input("a0", nbytes, "batch")
    for n in range(1, num_ops + 1):
        b.input(f"w{n}")
        b.op(f"a{n - 1} w{n}", {f"a{n}": nbytes})
    b.backward(**{f"g{num_ops}": nbytes})
    for n in range(num_ops, 0, -1):
        b.op(f"g{n} a{n - 1}", {f"dw{n}": 10}, kind="gradient")
        if n > 1:
            b.op(f"g{n} w{n}", {f"g{n - 1}": nbytes})
    return b.graph(
        outputs=f"a{num_ops}", gradients=" ".join(f"dw{n}" for n in range(1, num_ops + 1))
    )


def random_graph(seed: int, num_forward: int = 8) -> TrainingGraph:
    """With views, several results, writes in place, random operations, gathers, values read often and never."""
    draw = random.Random(seed)
    b = GraphBuilder()
    b.input("x", 40, "batch")
    b.input("w", 30)
    values = ["x"]
    fixed: set[str] = {"x"}
    for n in range(num_forward):
        name = f"v{n}"
        read = draw.sample(values[-4:], k=min(len(values), draw.choice([1, 1, 2])))
        nbytes = draw.choice([8, 16, 64, 100, 128])
        what = draw.random()
        if what < 0.15:
            b.view(read[0], name)
        elif what < 0.25:
            b.op(" ".join(read), {name: nbytes, f"{name}b": draw.choice([8, 50])})
            values.append(f"{name}b")
        elif what < 0.33 and n > 1 and (fresh := _never_read(b, values)) is not None:
            b.write(fresh, name, read[0] if read[0] != fresh else "")
            values.remove(fresh)
        elif what < 0.45:
            b.op(" ".join(read), {name: nbytes}, repeat="replay")
        elif what < 0.52:
            b.op("w", {name: nbytes}, kind="gathered", sent_bytes=nbytes)
        elif what < 0.58:
            b.op(" ".join(read), {name: nbytes}, repeat="no")
        else:
            b.op(" ".join(read), {name: nbytes}, inside=draw.choice([0, 0, 30, 90]))
        values.append(name)
    forward = [v for v in values if v not in fixed]
    b.op(forward[-1], {"out": 20})
    b.backward(g=20)
    gradient, gradients = "g", []
    for n, value in enumerate(reversed(forward)):
        if draw.random() < 0.3:
            continue
        others = draw.sample(values, k=draw.choice([0, 0, 1]))
        b.op(" ".join([gradient, value, *others]), {f"h{n}": draw.choice([8, 64, 100])})
        gradient = f"h{n}"
        if draw.random() < 0.3:
            b.op(gradient, {f"dw{n}": 12}, kind="gradient")
            gradients.append(f"dw{n}")
    return b.graph(outputs="out", gradients=" ".join(gradients))


def _never_read(b: GraphBuilder, values: list[str]) -> str | None:
    """The newest value whose memory nobody has read, nor shares."""
    newest = values[-1]
    storage = b.storage_of[newest]
    shared = sum(s == storage for s in b.storage_of.values()) > 1
    if storage in b.inputs or shared or any(newest in op.arguments for op in b.ops):
        return None
    return newest
