"""Without a GPU, autocast casts as it does on one: by the lists of the installed torch, also in a captured GPT-2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from thunder_memsave.budget.target.autocast import (
    ALIKE_ON_THE_CPU,
    IN_FLOAT32,
    LOWER_PRECISION,
    NORMS,
    TO_FLOAT32,
    autocast_of_cuda,
    cpu_only,
)
from thunder_memsave.compiler.compile_call import CallCompiler
from thunder_memsave.config import CompileConfig
from thunder_memsave.frontend.calls import Call

HEADER = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
LISTED_ON_THE_CPU = {
    name.removeprefix("aten::")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
}


def listed(macro: str) -> set[str]:
    text = HEADER.read_text().replace("\\\n", " ")
    found = re.search(rf"#define {macro}\(_\)(.*)", text)
    assert found is not None
    pairs = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", found[1])
    return {f"{name}.{overload}" if overload else name for name, overload in pairs}


@pytest.mark.parametrize(
    ("macro", "ours"),
    [
        ("AT_FORALL_LOWER_PRECISION_FP", LOWER_PRECISION),
        ("AT_FORALL_FP32", IN_FLOAT32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", TO_FLOAT32),
    ],
)
def test_lists_are_those_of_the_installed_torch(macro: str, ours: tuple[str, ...]) -> None:
    assert set(ours) - LISTED_ON_THE_CPU == listed(macro) - LISTED_ON_THE_CPU


def test_every_norm_of_the_header_has_its_overload() -> None:
    assert set(re.findall(r'"(norm\.\w+)"', HEADER.read_text())) == set(NORMS)


def test_what_the_cpu_alone_lists_is_known() -> None:
    assert set(ALIKE_ON_THE_CPU) <= cpu_only()


def scaled(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


OPERATIONS: list[tuple[Callable[[Tensor], Tensor], torch.dtype]] = [
    (scaled, torch.float32),
    (lambda x: F.softmax(x, -1), torch.float32),
    (lambda x: F.softmax(x, -1, dtype=torch.bfloat16), torch.bfloat16),
    (lambda x: x.sum(), torch.float32),
    (lambda x: x.sum(-1, dtype=torch.float64), torch.float64),
    (lambda x: x**2, torch.float32),
    (lambda x: 2**x, torch.float32),
    (lambda x: x.norm(), torch.float32),
    (lambda x: x.norm(dim=1), torch.float32),
    (lambda x: x.double().norm(), torch.float64),
    (lambda x: x.cumsum(0), torch.float32),
    (lambda x: x.relu(), torch.bfloat16),
    (lambda x: x.float().mv(x.float()[0]), torch.bfloat16),
    (lambda x: F.gelu(x), torch.bfloat16),
    (lambda x: F.avg_pool3d(x[None, None, None], 1), torch.bfloat16),
    (lambda x: torch.cat([x, x.float()]), torch.float32),
]


@pytest.fixture
def values() -> Iterator[Tensor]:
    with FakeTensorMode():
        yield torch.ones(4, 4, dtype=torch.bfloat16)


def test_results_have_cudas_dtypes_inside_and_the_cpus_afterwards(values: Tensor) -> None:
    def dtypes() -> list[torch.dtype]:
        return [operation(values).dtype for operation, _ in OPERATIONS]

    with torch.autocast("cpu", torch.bfloat16):
        on_the_cpu = dtypes()
    with autocast_of_cuda(torch.bfloat16):
        assert dtypes() == [expected for _, expected in OPERATIONS]
    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes() == on_the_cpu != [expected for _, expected in OPERATIONS]


def test_numbers_are_those_of_explicit_casts() -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with autocast_of_cuda(torch.bfloat16):
        found = [scaled(x), x.norm(2.0, 1), x.softmax(0)]
    wide = x.float()
    assert (
        list(map(torch.equal, found, [scaled(wide), wide.norm(2.0, 1), wide.softmax(0)]))
        == [True] * 3
    )


def dtypes_of_powers(model: nn.Module) -> set[str]:
    ids = torch.ones(1, 16, dtype=torch.int64)
    compiled = CallCompiler(config=CompileConfig(), data_parallel=None).compile(
        model, Call.of(model, (), {"input_ids": ids}), name="forward", reason="test"
    )
    powers = [
        b
        for b in compiled.forward_traces[-1].bound_symbols
        if b.sym.name == "aten_pow_Tensor_Scalar"
    ]
    return {str(b.output.dtype) for b in powers}


def test_gpt2_is_captured_with_the_powers_of_its_activation_in_float32() -> None:
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=1,
            n_embd=32,
            n_head=2,
            vocab_size=64,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    with autocast_of_cuda(torch.bfloat16):
        on_cuda = dtypes_of_powers(model)
    with torch.autocast("cpu", torch.bfloat16):
        on_the_cpu = dtypes_of_powers(model)
    # What autocast makes of an operation stands beside what it would be without.
    assert on_cuda - on_the_cpu == {"thunder.dtypes.float32"}
