"""Settings of the caching allocator are read as torch reads them."""

from __future__ import annotations

import pytest

from thunder_memsave.planner.caching_allocator.environment import (
    NotSimulatedError,
    settings_in,
    settings_of,
)
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings

M = 2**20


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", AllocatorSettings()),
        ("expandable_segments:True", AllocatorSettings(expandable_segments=True)),
        (
            " expandable_segments : False , max_split_size_mb:64",
            AllocatorSettings(max_split_bytes=64 * M),
        ),
        (
            "large_segment_size_mb:32,max_non_split_rounding_mb:40",
            AllocatorSettings(large_segment_bytes=32 * M, max_rounding_bytes=40 * M),
        ),
        ("roundup_power2_divisions:4", AllocatorSettings(power2_divisions=4)),
        ("backend:native,pinned_num_register_threads:2", AllocatorSettings()),
    ],
)
def test_settings_are_read(text: str, settings: AllocatorSettings) -> None:
    assert settings_of(text) == settings


@pytest.mark.parametrize(
    "text",
    [
        "backend:cudaMallocAsync",
        "garbage_collection_threshold:0.8",
        "per_process_memory_fraction:0.5",
        "roundup_power2_divisions:[256:1,512:2,>:4]",
        "expandable_segments:true",
        "expandable_segments:True,new_setting:1",
    ],
)
def test_a_setting_that_is_not_simulated_is_refused(text: str) -> None:
    with pytest.raises(
        NotSimulatedError, match="is not simulated, so what it reserves is not known"
    ):
        settings_of(text)


def test_the_variable_of_cuda_counts_alone() -> None:
    both = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    assert settings_in(both) == AllocatorSettings(expandable_segments=True)
    del both["PYTORCH_CUDA_ALLOC_CONF"]
    assert settings_in(both) == AllocatorSettings(max_split_bytes=64 * M)
    assert settings_in({}) == AllocatorSettings()
