"""A device that is not in the list is described by three numbers of its data sheet."""

from __future__ import annotations

import pytest

from thunder_memsave.finetune.plan.device_options import chosen_device
from thunder_memsave.finetune.plan.plan_command import parse_options
from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.settings.problems import ConfigError

RTX = {"--device-memory": "24GiB", "--device-bandwidth": "1.008TB", "--device-flops": "165.2T"}


def test_a_known_device_is_itself() -> None:
    assert chosen_device({}) is DEVICES["h200"]
    assert chosen_device({"--device": "A100"}) is DEVICES["a100"]


def test_an_unknown_device_has_the_numbers_given() -> None:
    device = chosen_device({"--device": "rtx4090", **RTX})
    assert device.name == "rtx4090"
    assert device.memory_bytes == 24 * 2**30
    assert device.memory_bytes_per_s == 1.008e12
    assert device.flops_per_s["bfloat16"] == pytest.approx(165.2e12)
    assert device.flops_per_s["float32"] == pytest.approx(165.2e12 * 19.5 / 312)


def test_a_number_changes_a_known_device_alone_in_that() -> None:
    device = chosen_device({"--device": "h100", "--device-memory": "94GiB"})
    assert device.memory_bytes == 94 * 2**30
    assert device.flops_per_s == DEVICES["h100"].flops_per_s
    assert device.compute_capability == (9, 0)


def test_the_host_of_any_device_has_the_memory_given() -> None:
    assert chosen_device({"--host-memory": "64GiB"}).host_memory_bytes == 64 * 2**30
    cpu = chosen_device({"--device": "cpu", "--host-memory": "8GiB"})
    assert (cpu.name, cpu.host_memory_bytes) == ("cpu", 8 * 2**30)
    with pytest.raises(ConfigError, match=r"--host-memory is '0B', but must be above 0\."):
        chosen_device({"--host-memory": "0B"})


@pytest.mark.parametrize("text", ["165.2T", "165.2TFLOPS", "165.2 tflop/s", "1.652e14", "0.1652P"])
def test_flops_are_written_as_data_sheets_do(text: str) -> None:
    device = chosen_device({"--device": "x", **RTX, "--device-flops": text})
    assert device.flops_per_s["bfloat16"] == pytest.approx(165.2e12)


@pytest.mark.parametrize("text", ["1.008TB", "1008GB/s", "1.008TB/s"])
def test_bandwidth_is_written_as_data_sheets_do(text: str) -> None:
    device = chosen_device({"--device": "x", **RTX, "--device-bandwidth": text})
    assert device.memory_bytes_per_s == 1.008e12


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"--device": "h20"},
            "did you mean 'h200'[?] Known are .*: add --device-memory=24GiB --dev",
        ),
        (
            {"--device": "rtx", "--device-memory": "24GiB"},
            "add --device-bandwidth=1.0TB --device-fl",
        ),
        (
            {"--device-flops": "many"},
            "--device-flops is 'many'; write the FLOP/s of dense bfloat16",
        ),
        ({"--device-flops": "-3T"}, "--device-flops is '-3T'; write"),
        ({"--device-memory": "big"}, "--device-memory: "),
        ({"--device": "cpu", "--device-memory": "4GiB"}, "describes a GPU, but --device is cpu"),
    ],
)
def test_what_cannot_be_used_says_what_to_write(given: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        chosen_device(given)


def test_the_command_takes_them_beside_its_other_arguments() -> None:
    words = [word for pair in RTX.items() for word in pair]
    options, rest = parse_options(["run.yaml", "--device", "rtx4090", *words, "--lora.r=4"])
    assert options.device.name == "rtx4090"
    assert rest == ["run.yaml", "--lora.r=4"]
