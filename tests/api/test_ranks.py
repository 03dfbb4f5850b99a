"""`memlab.ranks` of folders as they are found: of one job, of several, with files that are damaged, missing or there twice."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from rank_traces import cut_off, error, trained

import memlab
from memlab.cli import files
from memlab.errors import MemlabError
from memlab.trace.file import load_head, save
from memlab.trace.trace import Trace
from memlab.units import MiB


def of_job(trace: Trace, job: str, **more) -> Trace:
    rank = {**trace.notes["rank"], "job": job}
    return dataclasses.replace(trace, notes={**trace.notes, "rank": rank, **more})


def filled(folder: Path, *traces: Trace, name: str = "train") -> Path:
    for trace in traces:
        save(trace, folder / f"{name}.rank{trace.notes['rank']['rank']}.memlab")
    return folder


def test_the_ranks_of_a_job_side_by_side(tmp_path):
    found = memlab.ranks(filled(tmp_path, trained(0), trained(1, kept=MiB, steps=8), trained(2), trained(3)))
    assert len(found) == found.world_size == 4
    assert found.peak.worst_rank == 1
    assert "Only on rank 1: grows by 1.00 MiB with each optimizer step" in found.text
    assert "4 ranks · measured" in found.text
    assert found.missing == found.left_out == ()
    assert found.to_pandas().loc[1, "peak_low_bytes"] == found[1].peak.low
    assert found.by("module")[0].name == "net.keeps"
    assert found.html.count("<table") == 3
    assert found.svg().startswith("<svg")
    assert found.figure.data
    assert "rank 1: grows" in found.svg()


def test_the_rank_is_that_of_the_run_and_not_of_the_file_name(tmp_path):
    save(trained(2), tmp_path / "train.rank0.memlab")
    save(trained(1), tmp_path / "a.memlab")
    found = memlab.ranks(tmp_path)
    assert [one.rank for one in found.ranks] == [1, 2]
    assert found.missing == (0, 3)
    assert "Missing: ranks 0, 3 left no file." in found.text


def test_of_two_jobs_the_one_that_began_last(tmp_path):
    filled(tmp_path, *(of_job(trained(rank), "old") for rank in range(4)))
    filled(tmp_path, *(of_job(trained(rank, began_s=900.0, world_size=2), "new") for rank in range(2)))
    found = memlab.ranks(tmp_path)
    assert found.world_size == 2
    assert len(found) == 2
    assert [text.partition(":")[0] for text in found.left_out] == ["train.rank2.memlab", "train.rank3.memlab"]
    assert "another job, 'train' with 4 ranks" in found.left_out[0]
    listed = memlab.ranks([tmp_path / "train.rank2.memlab", tmp_path / "train.rank3.memlab"])
    assert listed.missing == (0, 1)


def test_a_job_is_chosen_by_its_name(tmp_path):
    filled(tmp_path, trained(0), trained(1))
    filled(tmp_path, *(of_job(trained(rank, began_s=900.0), "b", name="eval") for rank in range(2)), name="eval")
    assert memlab.ranks(tmp_path).job.name == "eval"
    assert memlab.ranks(tmp_path, "train").job.name == "train"
    with pytest.raises(MemlabError, match=r"no job in .* has the name 'tune'. There: eval, train."):
        memlab.ranks(tmp_path, "tune")


def test_a_restarted_job_is_another_one(tmp_path):
    again = trained(1, began_s=900.0)
    filled(
        tmp_path,
        trained(0),
        dataclasses.replace(again, notes={**again.notes, "rank": again.notes["rank"] | {"attempt": 1}}),
    )
    found = memlab.ranks(tmp_path)
    assert [one.rank for one in found.ranks] == [1]
    assert "train.rank0.memlab" in found.left_out[0]


def test_a_rank_that_is_there_twice_counts_once(tmp_path):
    filled(tmp_path, trained(0), trained(1))
    save(trained(1, 9 * MiB, began_s=101.0), tmp_path / "copy.memlab")
    found = memlab.ranks(tmp_path)
    assert len(found) == 2
    assert found.peak.worst_bytes == 5 * MiB
    assert found.left_out == ("copy.memlab: rank 1 once more, at the time of train.rank1.memlab",)


def test_consecutive_parts_belong_together(tmp_path):
    filled(tmp_path, trained(0, steps=9), trained(1, steps=3))
    save(trained(1, 3 * MiB, steps=6, began_s=103.0, steps_before=3), tmp_path / "train.rank1.2.memlab")
    found = memlab.ranks(tmp_path)
    assert found[1].files == ("train.rank1.memlab", "train.rank1.2.memlab")
    assert found[1].steps.finished == found[0].steps.finished == 9
    assert found.peak.worst_rank == 1


def test_empty_damaged_and_foreign_files_are_named_and_left_out(tmp_path):
    filled(tmp_path, trained(0), trained(1), trained(2))
    whole = (tmp_path / "train.rank2.memlab").read_bytes()
    (tmp_path / "train.rank2.memlab").write_bytes(whole[: len(whole) - 40])
    (tmp_path / "train.rank3.memlab").write_bytes(b"")
    (tmp_path / "x.memlab").write_bytes(b"\x80\x04\x95 a pickle that nobody opens")
    (tmp_path / "notes.txt").write_text("not mine")
    with memlab.track("alone", show=False, save=tmp_path / "alone.memlab"):
        pass
    found = memlab.ranks(tmp_path)
    assert [one.rank for one in found.ranks] == [0, 1, 2]
    assert found[2].ending == "cut off"  # its end is missing
    assert [text.partition(":")[0] for text in found.left_out] == ["train.rank3.memlab", "x.memlab", "alone.memlab"]
    assert found.missing == (3,)


@pytest.mark.parametrize(
    "rank",
    [None, 7, {}, {"rank": -1, "world_size": 4}, {"rank": 4, "world_size": 4}, {"rank": "0", "world_size": 4},
     {"rank": 0, "world_size": 1 << 40}, {"rank": True, "world_size": 4}, {"rank": 0, "world_size": 4, "attempt": []}],
)  # fmt: skip
def test_notes_that_make_no_rank(tmp_path, rank):
    trace = trained(0)
    save(dataclasses.replace(trace, notes={**trace.notes, "rank": rank}), tmp_path / "a.memlab")
    with pytest.raises(MemlabError, match="there are no ranks of a job in"):
        memlab.ranks(tmp_path)


@pytest.mark.parametrize(
    "facts",
    [{"holders": 7}, {"holders": [["kept"], [1, "x"]]}, {"steps_before": "x"}, {"steps_before": 10**30}, {"steps_before": 10**11},
     {"error": "text", "raised": True},
     {"error": {"held": {"a": 1}, "text": 3}, "raised": True}],
)  # fmt: skip
def test_other_notes_may_say_anything(tmp_path, facts):
    filled(tmp_path, *(dataclasses.replace(one, notes=one.notes | facts) for one in (trained(0), trained(1))))
    assert memlab.ranks(tmp_path).text


def test_names_of_files_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    first = trained(0, **error(f"ValueError: {evil}"))
    filled(tmp_path, *(dataclasses.replace(one, notes={**one.notes, "name": evil}) for one in (first, trained(1))))
    found = memlab.ranks(tmp_path)
    assert evil not in found.html + found.svg()
    assert "\n" not in found.text.splitlines()[0]


def test_no_folder_an_empty_one_and_one_without_ranks(tmp_path):
    with pytest.raises(MemlabError, match="there is no folder"):
        memlab.ranks(tmp_path / "none")
    with pytest.raises(MemlabError, match=r"no ranks of a job .* Fill a folder by `memlab run --nproc-per-node"):
        memlab.ranks(tmp_path)
    (tmp_path / "x.memlab").write_bytes(b"")
    with pytest.raises(MemlabError, match=r"no ranks of a job in .* \(x.memlab: "):
        memlab.ranks(tmp_path)


def test_the_header_is_read_without_the_columns(tmp_path):
    path = save(trained(3, steps=50), tmp_path / "a.memlab")
    began_s, notes = load_head(path)
    assert (began_s, notes["rank"]["rank"]) == (100.0, 3)


def test_show_has_jobs_and_other_runs(tmp_path, capsys):
    filled(tmp_path, trained(0), trained(1, 2 * MiB), cut_off(2, [MiB] * 9), trained(3, **error("ValueError: no")))
    assert files.show([str(tmp_path)]) == 0
    assert "4 ranks" in capsys.readouterr().out
    assert files.show(["--json", "--html", str(tmp_path / "page.html"), str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["peak_allocated"]["worst_rank"] == 1
    assert facts["first_failed"] == 2
    assert [one["ending"] for one in facts["ranks"]] == ["ended", "ended", "cut off", "raised"]
    assert facts["ranks"][2]["peak_high_bytes"] is None
    page = (tmp_path / "page.html").read_text()
    assert "<svg" in page
    assert "Rank 2 failed first" in page
    with memlab.track("alone", show=False, save=tmp_path / "alone.memlab"):
        pass
    assert files.show(["--json", str(tmp_path)]) == 0
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["train", "alone"]
    with pytest.raises(SystemExit):
        files.show(["--html", str(tmp_path / "page.html"), str(tmp_path)])
    assert "--html is for one run or job" in capsys.readouterr().err


def test_of_a_job_of_one_rank_show_has_the_report_of_the_run(tmp_path, capsys):
    filled(tmp_path, trained(0, world_size=1))
    assert files.show([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("Peak 5.00 MiB allocated")


@pytest.mark.parametrize("count", [2, 9, 40, 512])
def test_one_picture_for_any_number_of_ranks(tmp_path, count):
    traces = [trained(rank, MiB + rank * 1024, world_size=count) for rank in range(count) if rank != 5]
    traces[-1] = trained(count - 1, world_size=count, **error("OutOfMemoryError: ...", out_of_memory=True))
    filled(tmp_path, *traces)
    found = memlab.ranks(tmp_path)
    svg = found.svg()
    assert len(svg) < 40_000
    assert f"rank {count - 1}: failed first" in svg
    assert len(found.text) < 6000
    assert len(found.figure.data) < 80
    if count > 5:
        assert found.missing == (5,)


def test_a_job_of_which_nearly_all_ranks_are_missing(tmp_path):
    filled(tmp_path, trained(0, world_size=100_000), trained(70_000, 2 * MiB, world_size=100_000))
    found = memlab.ranks(tmp_path)
    assert "Missing: ranks 1–69999, 70001–99999 left no file." in found.text
    assert len(found.svg()) < 10_000


def test_of_folders_of_ranks_check_and_compare_take_the_worst_and_say_which(tmp_path, capsys):
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    filled(before, trained(0, world_size=2), trained(1, 2 * MiB, world_size=2))
    filled(after, trained(0, 4 * MiB, world_size=2), trained(1, world_size=2))
    assert files.check([str(before), "--baseline", str(before)]) == 0
    assert files.check(["--json", str(after), "--baseline", str(before)]) == 1
    shown = capsys.readouterr()
    facts = json.loads(shown.out.splitlines()[-1])
    ranks = [memlab.ranks(folder) for folder in (before, after)]
    assert (facts["before_bytes"], facts["after_bytes"]) == tuple(one.peak.worst_bytes for one in ranks)
    assert f"of {before} rank 1 of 2, whose peak is the highest (train.rank1.memlab)" in shown.err
    assert f"of {after} rank 0 of 2" in shown.err
    assert files.compare([str(before), str(after)]) == 0
    with memlab.track("alone", device="cpu", show=False, save=tmp_path / "alone.memlab"):
        torch.ones(100)
    assert files.check([str(tmp_path), "--baseline", str(tmp_path / "alone.memlab")]) == 0
    (tmp_path / "alone.memlab").rename(before.parent / "other.memlab")
    (tmp_path / "again.memlab").write_bytes((tmp_path / "other.memlab").read_bytes())
    with pytest.raises(SystemExit):
        files.check([str(tmp_path), "--baseline", str(before)])
    assert "has 2 runs and no job of several ranks. Name one file." in capsys.readouterr().err
