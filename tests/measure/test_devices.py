"""The device that is here gets the rates of its name, as a word."""

from __future__ import annotations

import logging

import pytest
import torch

from thunder_memsave.measure.devices import available_bytes, device_at


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_a_known_device_is_found_by_its_name(
    name: str, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert device_at(torch.device("cuda")).name == known


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090"])
def test_another_one_is_named_and_gets_the_rates_of_an_h100(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    caplog.set_level(logging.WARNING, logger="thunder_memsave.measure.devices")
    assert device_at(torch.device("cuda")).name == "h100"
    assert f"the rates of {name.lower()} are not known" in caplog.text


def test_what_others_and_cuda_hold_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_bytes(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 200)
    assert available_bytes(torch.device("cuda", 0)) == 900
