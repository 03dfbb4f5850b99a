"""The CUDA probe against PyTorch's own counters: every program runs tracked here and untracked in a twin process."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import pytest
from probes.programs import PROGRAMS
from processes import python

# What is different -> the environment. The card is small, so that the allocator has to empty its cache and try again.
SETTINGS = {
    "default": {},
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    "max_split": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:24"},
    "roundup": {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:4"},
    "roundup_list": {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[1:8,2:0,16:2,64:4,>:1]"},
    "large_segments": {"PYTORCH_ALLOC_CONF": "large_segment_size_mb:64"},
    "collecting": {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.3,max_split_size_mb:40"},
    "two_devices": {},
}
IN_CI = ("default", "expandable", "max_split", "two_devices")
SAMPLED = [pytest.param(one, marks=() if one in IN_CI else pytest.mark.release) for one in SETTINGS]
# Which free remainders come and go depends on whether the engine's thread or the main thread frees first: these differ
# from one untracked run to the next.
LUCK = re.compile(r"inactive_split.*\.(allocated|freed|peak)$")


@functools.cache
def twin(setting: str, how: str) -> dict[str, dict[str, Any]]:
    """What `tracked_or_bare` finds under a setting, tracked or bare; each process has a device of its own."""
    gpu = {"total_mb": 2048, "devices": 2 if setting == "two_devices" else 1}
    return json.loads(python("-m", "probes.tracked_or_bare", how, gpu=gpu, **SETTINGS[setting]))


@pytest.mark.simulated
@pytest.mark.parametrize("setting", SAMPLED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_peaks_are_exact(name, setting):
    run, truth = twin(setting, "tracked")[name], twin(setting, "bare")[name]
    assert run["events"] == truth["peaks"], "the highest level that the events come to"
    assert run["ends"] == truth["ends"]
    assert run["peaks"] == truth["peaks"], "what the analysis says"
    assert run["is_exact"]
    assert (run["gaps"], run["inconsistencies"]) == ([], 0)


@pytest.mark.simulated
@pytest.mark.parametrize("setting", SAMPLED)
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_counter_reads_as_if_memlab_had_not_been_there(name, setting):
    run, truth = (twin(setting, how)[name]["stats"] for how in ("tracked", "bare"))
    assert run.keys() == truth.keys()
    assert len(run) > 90
    different = {key: (run[key], truth[key]) for key in run if run[key] != truth[key] and not LUCK.search(key)}
    assert not different


@pytest.mark.simulated
def test_the_programs_do_what_they_are_for():
    found = twin("default", "tracked")
    assert found["caught_out_of_memory"]["ooms"] == [2, 2]
    assert found["uncaught_out_of_memory"]["ooms"] == [1, 1]
    assert found["the_allocator_tries_again"]["retries"] >= 1
    assert found["frees_are_completed_later"]["pending"] >= 4
    assert found["the_user_resets_counters"]["ooms"] == [0, 0]
    assert any(found["both_devices"]["events"]["allocated"])
    assert all(twin("two_devices", "tracked")["both_devices"]["events"]["allocated"])
    different = {setting: twin(setting, "bare")["sizes_at_every_border"]["peaks"] for setting in SETTINGS}
    assert len({json.dumps(peaks) for peaks in different.values()}) >= 6, "the settings change nothing"
