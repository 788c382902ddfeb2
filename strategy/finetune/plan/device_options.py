"""The device that a plan is for: a known one by its name, any other by its memory, bandwidth and FLOP/s."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from thunder_memsave.planner.devices import DEVICES
from thunder_memsave.planner.graph import Device
from thunder_memsave.settings.problems import ConfigError, suggestion
from thunder_memsave.settings.quantities import parse_bytes

DEVICE, MEMORY = "--device", "--device-memory"
BANDWIDTH, FLOPS = "--device-bandwidth", "--device-flops"
HOST = "--host-memory"

EXAMPLES: Mapping[str, str] = {
    DEVICE: "h200",
    MEMORY: "24GiB",
    BANDWIDTH: "1.0TB",
    FLOPS: "165T",
    HOST: "256GiB",
}
"""Options of the command, each with an example of its value."""

_DEFAULT = "h200"
_SI = {"T": 1e12, "P": 1e15, "G": 1e9}


def chosen_device(given: Mapping[str, str]) -> Device:
    """Return the device that the options describe, with the memory of its host.

    Args:
        given: Options of the command line with their values.

    Raises:
        ConfigError: an option cannot be read, or one is missing.
    """
    device = _device(given)
    if HOST not in given:
        return device
    return dataclasses.replace(device, host_memory_bytes=_bytes(HOST, given[HOST]))


def _device(given: Mapping[str, str]) -> Device:
    """Return the device without its host.

    A name that is not known needs all three numbers; with a known name, or with none, a number replaces its own. What
    is not given (float32 and fp8 rates, the network) follows the known device, or an unknown one's as an A100's: the
    float32 rate in the same relation to the bfloat16 rate, no fp8.

    Args:
        given: Options of the command line with their values: bytes, bytes per second, FLOP/s of bfloat16 products.

    Raises:
        ConfigError: the name is not known and a number is missing, or a number cannot be read.
    """
    name = given.get(DEVICE, _DEFAULT).lower()
    numbers = {option: _NUMBERS[option](given[option]) for option in _NUMBERS if option in given}
    if name == "cpu" and numbers:
        raise ConfigError(
            f"{next(iter(numbers))} describes a GPU, but --device is cpu; name a GPU."
        )
    if name in DEVICES:
        return _changed(DEVICES[name], numbers) if numbers else DEVICES[name]
    missing = [option for option in _NUMBERS if option not in numbers]
    if missing:
        examples = " ".join(f"{option}={EXAMPLES[option]}" for option in missing)
        raise ConfigError(
            f"--device is {name!r}, which is not known{suggestion(name, DEVICES)} Known are {', '.join(DEVICES)}; any "
            f"other is described by its data sheet: add {examples}."
        )
    base = dataclasses.replace(DEVICES["a100"], name=name)
    return _changed(base, numbers)


def _changed(device: Device, numbers: Mapping[str, float]) -> Device:
    """Replace the numbers given; the rates of all dtypes keep their relation."""
    scale = numbers.get(FLOPS, device.flops_per_s["bfloat16"]) / device.flops_per_s["bfloat16"]
    return dataclasses.replace(
        device,
        memory_bytes=int(numbers.get(MEMORY, device.memory_bytes or 0)),
        memory_bytes_per_s=numbers.get(BANDWIDTH, device.memory_bytes_per_s),
        flops_per_s={dtype: rate * scale for dtype, rate in device.flops_per_s.items()},
    )


def _memory(text: str) -> float:
    return float(_bytes(MEMORY, text))


def _bandwidth(text: str) -> float:
    return float(_bytes(BANDWIDTH, text.lower().removesuffix("/s").upper().replace("IB", "iB")))


def _bytes(option: str, text: str) -> int:
    try:
        found = parse_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None
    if found <= 0:
        raise ConfigError(f"{option} is {text!r}, but must be above 0.")
    return found


def _flops(text: str) -> float:
    number = text.strip().upper().removesuffix("/S").removesuffix("LOPS").removesuffix("LOP")
    number = number.removesuffix("F")
    unit = _SI.get(number[-1:])
    try:
        value = float(number[:-1] if unit else number) * (unit or 1.0)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"{FLOPS} is {text!r}; write the FLOP/s of dense bfloat16 products, such as {EXAMPLES[FLOPS]}."
        )
    return value


_NUMBERS = {MEMORY: _memory, BANDWIDTH: _bandwidth, FLOPS: _flops}
