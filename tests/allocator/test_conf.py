"""The text of PYTORCH_CUDA_ALLOC_CONF: what PyTorch 2.12.1 made of the same texts on the simulated GPU."""

from __future__ import annotations

import re

import pytest

from memlab.allocator import CachingAllocator, ConfError, Settings, parse_conf
from memlab.allocator.rules import UNLIMITED
from memlab.units import MiB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("backend:native,", {}),
        ("expandable_segments:True", {"expandable_segments": True}),
        (" expandable_segments : True ,max_split_size_mb: 64", {"expandable_segments": True, "max_split_size": 64 * MiB}),
        ("max_non_split_rounding_mb:30", {"max_non_split_rounding_size": 30 * MiB}),
        ("garbage_collection_threshold:0.8", {"garbage_collection_threshold": 0.8}),
        ("per_process_memory_fraction:0.5", {"memory_fraction": 0.5}),
        ("large_segment_size_mb:12", {"large_segment_size": 12 * MiB, "max_non_split_rounding_size": 12 * MiB}),
        ("expandable_segments:False,expandable_segments:True", {"expandable_segments": True}),
        ("max_split_size_mb:11,large_segment_size_mb:11",
         {"large_segment_size": 11 * MiB, "max_non_split_rounding_size": 11 * MiB, "max_split_size": 11 * MiB}),
        ("pinned_use_cuda_host_register:True,release_lock_on_cudamalloc:True,throw_on_cudamalloc_oom:False", {}),
    ],
)  # fmt: skip
def test_settings(text, expected):
    found = parse_conf(text)
    assert {
        name: getattr(found, name) for name in Settings.__slots__ if getattr(found, name) != getattr(Settings(), name)
    } == expected


@pytest.mark.parametrize(
    ("value", "table"),
    [
        ("4", [4] * 16),
        ("1", [1] * 16),
        ("[256:1,512:2,1024:4,>:8]", [1] * 9 + [2, 4] + [8] * 5),
        ("[256:1,512:2,>:8]", [1] * 9 + [2] + [8] * 6),
        ("[256:1]", [1] * 9 + [0] * 7),
        ("[128:2,64:4]", [2] * 6 + [4, 2] + [0] * 8),
        ("[65536:4]", [4] * 16),
        ("[1:0,>:0]", [0] * 16),
        ("[1:4,2:0,8:2,>:8]", [4, 0, 0, 2] + [8] * 12),
        ("[4:4,>:2,64:8]", [4] * 3 + [2] * 3 + [8] + [2] * 9),
        ("[>:4]", [0] + [4] * 15),
        ("[>:4,8:2]", [2] * 4 + [4] * 12),
        ("[1:4,]", [4] + [0] * 15),
        ("[]", [0] * 16),
    ],
)
def test_divisions(value, table):
    assert list(parse_conf(f"roundup_power2_divisions:{value}").roundup_power2_divisions) == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (",expandable_segments:True", "not an allocator setting: ''"),
        ("max_split_size_mb:32,,backend:native", "not an allocator setting: ''"),
        ("foo:1", "unknown allocator setting 'foo'"),
        ("expandable_segments", "not an allocator setting: 'expandable_segments'"),
        ("expandable_segments:true", "must be True or False, got 'true'"),
        ("max_split_size_mb:10", "at least 20, the size of large segments; got 10"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "at least 40, the size of large segments; got 30"),
        ("max_split_size_mb:x", "must be a whole number of MiB, got 'x'"),
        ("max_split_size_mb:99999999999999", "must be a whole number of MiB"),
        ("max_non_split_rounding_mb:10", "at least 20"),
        ("large_segment_size_mb:10", "must be above 10, got 10"),
        ("garbage_collection_threshold:1.0", "above 0 and below 1, got 1.0"),
        ("garbage_collection_threshold:much", "a number between 0 and 1, got 'much'"),
        ("per_process_memory_fraction:1.5", "between 0 and 1, got 1.5"),
        ("roundup_power2_divisions:3", "must be a power of two, got '3'"),
        ("roundup_power2_divisions:0", "must be a power of two, got '0'"),
        ("roundup_power2_divisions:[100:4]", "powers of two, got '100'"),
        ("roundup_power2_divisions:[64:4", "the list is not closed"),
        ("roundup_power2_divisions:[64]", "must be a power of two, got ''"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is not simulated"),
        ("throw_on_cudamalloc_oom:True", "throw_on_cudamalloc_oom:True is not simulated"),
    ],
)
def test_refusals(text, message):
    with pytest.raises(ConfError) as caught:
        parse_conf(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_allocator_takes_the_text_or_the_settings():
    assert CachingAllocator(MiB, "max_split_size_mb:20").settings.max_split_size == 20 * MiB
    assert CachingAllocator(MiB, Settings(max_split_size=20 * MiB)).settings == parse_conf("max_split_size_mb:20")
    assert parse_conf("").max_split_size == UNLIMITED


@pytest.mark.parametrize(
    ("text", "refusing", "taking"),
    [
        ("large_segment_size_mb:24", "2.10.0+cu128", "2.11.0"),
        ("max_split_size_mb:64,throw_on_cudamalloc_oom:False", "2.11.0+cu130", "2.12.1"),
        ("pinned_free_catch_all:True", "2.11.0", "2.13.0"),
    ],
)
def test_settings_that_a_version_does_not_know(text, refusing, taking):
    with pytest.raises(ConfError, match=f"PyTorch {re.escape(refusing)} does not know"):
        parse_conf(text, refusing)
    assert parse_conf(text, taking) == parse_conf(text)
