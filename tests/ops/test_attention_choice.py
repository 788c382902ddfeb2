"""The choice between cuDNN's attention and flash is PyTorch's own: asked where the GPU is, by its rules in a plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.kernels_called import TORCHS_OWN, kernel_called
from thunder_memsave.ops import attention_choice
from thunder_memsave.ops.attention_choice import prefers_cudnn
from thunder_memsave.ops.cuda_device import Capability, planned_for
from thunder_memsave.ops.families.attention import scaled_dot_product_attention

HALF = torch.bfloat16
H200, B200, A100, L40S = (9, 0), (10, 0), (8, 0), (8, 9)


def heads(num: int, length: int, width: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(2, num, length, width, device="meta", dtype=dtype)


def planned(
    capability: Capability, *, width: int = 64, dtype: torch.dtype = HALF, key_length: int = 40
) -> bool:
    query, key = heads(4, 40, width, dtype), heads(2, key_length, width, dtype)
    with planned_for(torch.device("cuda:0"), capability):
        return prefers_cudnn(query, key, key, is_causal=key_length == 40)


def kernel_of(*, mask: bool = False, dropout_p: float = 0.0, num_keys: int = 2) -> str:
    query, key = heads(4, 40, 64), heads(num_keys, 40, 64)
    return kernel_called(
        scaled_dot_product_attention,
        *(query, key, key),
        torch.empty(40, 40, device="meta", dtype=torch.bool) if mask else None,
        *(dropout_p, not mask),
        enable_gqa=num_keys != 4,
        capability=H200,
    )


@pytest.mark.parametrize(
    ("capability", "is_preferred"), [(H200, True), (B200, True), (A100, False), (L40S, False)]
)
def test_in_a_plan_data_centre_gpus_from_hopper_on_attend_by_cudnn(
    capability: Capability, is_preferred: bool
) -> None:
    assert planned(capability) is is_preferred


@pytest.mark.parametrize(
    ("capability", "width", "is_taken"),
    [
        (H200, 128, True),
        (H200, 256, True),
        (H200, 264, False),
        (H200, 60, False),
        (B200, 128, True),
        (B200, 136, False),
    ],
)
def test_in_a_plan_cudnn_takes_the_widths_that_pytorch_gives_it(
    capability: Capability, width: int, is_taken: bool
) -> None:
    assert planned(capability, width=width) is is_taken


def test_in_a_plan_cudnn_takes_two_byte_floats_and_more_than_one_key() -> None:
    assert planned(H200, dtype=torch.float16)
    assert not planned(H200, dtype=torch.float32)
    assert not planned(H200, key_length=1)


def test_in_a_plan_the_settings_of_pytorch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    with sdpa_kernel(flash):
        assert not planned(H200)
    with sdpa_kernel([cudnn, flash], set_priority=True):
        assert planned(A100)
    with sdpa_kernel([flash, cudnn], set_priority=True):
        assert not planned(H200)
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    assert not planned(H200)


@pytest.mark.parametrize(("version", "is_preferred"), [(91900, True), (91500, False)])
def test_an_older_cudnn_comes_after_flash(
    version: int, is_preferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert planned(H200) is is_preferred


def test_where_bits_must_repeat_it_is_not_cudnn() -> None:
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert not planned(H200)
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        assert planned(H200)
    finally:
        torch.use_deterministic_algorithms(mode=False)


def test_masks_and_dropout_are_left_to_others() -> None:
    assert kernel_of() == "cuda_cudnn_attention"
    assert kernel_of(num_keys=4) == "cuda_cudnn_attention"
    assert kernel_of(mask=True) == "cuda_efficient_attention"
    assert kernel_of(dropout_p=0.1) == TORCHS_OWN


@pytest.mark.parametrize(
    ("allowed", "kernel"),
    [
        ([SDPBackend.FLASH_ATTENTION], "cuda_flash_attention"),
        ([SDPBackend.EFFICIENT_ATTENTION], "cuda_efficient_attention"),
        ([SDPBackend.MATH], TORCHS_OWN),
    ],
)
def test_kernels_that_the_user_turned_off_do_not_run(
    allowed: list[SDPBackend], kernel: str
) -> None:
    with sdpa_kernel(allowed):
        assert kernel_of() == kernel


@pytest.mark.parametrize("answer", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize("num_keys", [4, 2])
def test_where_the_gpu_is_pytorch_is_asked(
    answer: SDPBackend, num_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def choose(*args: Any, **options: Any) -> int:
        seen.append((args, options))
        return int(answer.value)

    monkeypatch.setattr(attention_choice, "is_here", lambda: True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
    query, key = heads(4, 40, 64), heads(num_keys, 40, 64)
    with FakeTensorMode():  # as while a graph is traced
        found = prefers_cudnn(query, key, key, is_causal=True)
    assert found is (answer == SDPBackend.CUDNN_ATTENTION)
    (((*small, mask, dropout_p, is_causal), options),) = seen
    assert all(
        type(t) is Tensor and t.requires_grad for t in small
    )  # FakeTensors get another answer
    assert [tuple(t.shape) for t in small] == [(1, n, 16, 64) for n in (4, num_keys, num_keys)]
    assert {(t.dtype, t.device) for t in small} == {(HALF, query.device)}
    assert (mask, dropout_p, is_causal) == (None, 0.0, True)
    assert options == {"enable_gqa": num_keys == 2}
