"""Where the processes begin that torch.multiprocessing starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from memlab.torch_internals import process_start

MODULE = sys.modules["torch.multiprocessing.spawn"]


def begin(function: Any, index: int, arguments: Any, error_file: Any) -> None:
    """In the process: first a file, then what torch does."""
    Path(arguments[0], f"began{index}").touch()
    process_start.leave()(function, index, arguments, error_file)


def write(index: int, folder: str) -> None:
    Path(folder, f"{index} {vars(MODULE)['_wrap'] is begin} {process_start.entry().__module__}").touch()


def test_every_process_begins_in_ours_and_goes_on_in_that_of_torch(tmp_path):
    theirs = MODULE._wrap
    assert process_start.entry() is theirs
    assert process_start.replace_entry(begin) and not process_start.replace_entry(begin)
    assert process_start.entry() is theirs and MODULE._wrap is begin
    mp.start_processes(write, (str(tmp_path),), nprocs=2, start_method="fork")
    process_start.restore_entry(begin)
    assert MODULE._wrap is theirs and process_start.replace_entry(begin)
    other = MODULE._wrap = lambda *arguments: None
    process_start.restore_entry(begin)
    assert MODULE._wrap is other
    MODULE._wrap = theirs
    place = "torch.multiprocessing.spawn"
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        f"0 False {place}",
        f"1 False {place}",
        "began0",
        "began1",
    ]
