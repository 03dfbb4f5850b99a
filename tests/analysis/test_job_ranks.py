"""Ranks side by side: what is worst, which one failed first, and what grows on one of them alone."""

from __future__ import annotations

import pytest
from rank_traces import BEGIN, END, MODULE, KiB, cut_off, error, trained
from scripted_traces import HOST, Script

from memlab.analysis.iterations import step_ends
from memlab.analysis.job_ranks import JobRanks, ranks_text
from memlab.analysis.rank_run import rank_run
from memlab.errors import MemlabError
from memlab.trace.trace import Trace
from memlab.units import MiB


def job(*traces: Trace) -> JobRanks:
    return JobRanks(tuple(rank_run([trace], [f"{number}.memlab"]) for number, trace in enumerate(traces)))


def test_worst_median_and_lowest_of_the_peak_by_category_and_module():
    found = job(trained(0), trained(1, 3 * MiB), trained(2, 2 * MiB), trained(3, 2 * MiB))
    peak = found.peak
    assert (peak.worst_rank, peak.worst_bytes) == (1, 7 * MiB)
    assert (peak.lowest_rank, peak.lowest_bytes, peak.median_bytes, peak.spread_bytes) == (0, 5 * MiB, 6 * MiB, 2 * MiB)
    first, second = found.by("category")
    assert (first.name, first.worst_rank, first.spread_bytes) == ("activation", 1, 2 * MiB)
    assert (second.name, second.spread_bytes) == ("parameter", 0)
    assert [one.name for one in found.by("module")] == ["net.0", "net"]
    assert found.missing == ()
    assert found.first_failed is None
    with pytest.raises(MemlabError, match="category or module"):
        found.by("tensor")


def test_what_some_ranks_do_not_have_counts_as_nothing_there():
    found = job(trained(0, kept=512 * KiB), trained(1))
    keeps = next(one for one in found.by("module") if one.name == "net.keeps")
    assert (keeps.worst_rank, keeps.worst_bytes, keeps.lowest_rank, keeps.lowest_bytes) == (0, 3 * MiB, 1, 0)


def test_each_step_has_its_peak_and_the_level_at_its_end():
    one = rank_run([trained(0, kept=KiB, steps=3)])
    assert one.steps.number.tolist() == [1, 2, 3]
    assert one.steps.peak_bytes.tolist() == [5 * MiB + KiB, 5 * MiB + 2 * KiB, 5 * MiB + 3 * KiB]
    assert one.steps.end_bytes.tolist() == [4 * MiB + KiB, 4 * MiB + 2 * KiB, 4 * MiB + 3 * KiB]
    assert one.steps.is_seen.all()
    assert one.steps.finished == 3


def test_steps_are_counted_from_the_first_of_the_script():
    one = rank_run([trained(0, steps=3, steps_before=2)])
    assert one.steps.number.tolist() == [3, 4, 5]
    assert one.steps.finished == 5


def test_parts_of_a_run_are_one_rank():
    parts = [trained(0, steps=3), trained(0, 2 * MiB, steps=2, began_s=110.0, steps_before=3)]
    one = rank_run(parts, ["train.memlab", "train.2.memlab"])
    assert one.steps.number.tolist() == [1, 2, 3, 4, 5]
    assert one.peak.low == 6 * MiB
    assert (one.began_s, one.ended_s) == (100.0, 112.0)


def test_ranks_with_other_steps_are_aligned_on_their_numbers():
    found = job(trained(0, steps=4), trained(1, 2 * MiB, steps=2), trained(2, steps=3, steps_before=1))
    numbers, levels = found.by_step()
    assert numbers.tolist() == [1, 2, 3, 4]
    assert [[int(level) // MiB if level == level else None for level in row] for row in levels] == [
        [5, 5, 5, 5], [6, 6, None, None], [None, 5, 5, 5],
    ]  # fmt: skip


def test_of_many_steps_the_highest_of_each_stretch_is_kept():
    found = job(trained(0, steps=500, kept=KiB))
    numbers, levels = found.by_step(most=100)
    assert len(numbers) == 100
    assert int(levels.max()) == found.ranks[0].peak.low


def test_a_step_that_calls_that_of_its_base_class_is_one_and_a_failed_one_is_none():
    script = Script(HOST)
    script.alloc(100, 1)
    marks = [(BEGIN, 10), (BEGIN, 11), (END, 12), (END, 13)]  # a derived class
    marks += [(BEGIN, 20)]  # raised; the script went on
    marks += [(BEGIN, 31), (END, 32), (BEGIN, 33), (END, 34)]  # two optimizers
    for kind, at in marks:
        if at == 31:
            script.mark(MODULE, "net", 30)
        script.mark(kind, "optimizer", at)
    trace = script.trace()
    assert trace.marks.time_ns[step_ends(trace)].tolist() == [13, 32, 34]


def test_a_closure_may_call_modules():
    script = Script(HOST)
    for kind, name, at in (
        (BEGIN, "optimizer with closure", 1),
        (MODULE, "net", 2),
        (END, "optimizer with closure", 3),
    ):
        script.mark(kind, name, at)
    trace = script.trace()
    assert trace.marks.time_ns[step_ends(trace)].tolist() == [3]


def test_growth_on_one_rank_alone_is_named_with_its_place():
    found = job(trained(0), trained(1, kept=512 * KiB, steps=8), trained(2), trained(3))
    (growth,) = found.growth
    assert growth.ranks == (1,)
    assert (growth.steady, growth.unknown) == (3, 0)
    assert growth.bytes_per_step == 512 * KiB
    assert growth.sentence.startswith("Only on rank 1: grows by 512.0 KiB with each optimizer step")
    assert "net.keeps" in growth.sentence


def test_growth_on_all_ranks_is_one_finding():
    found = job(*(trained(rank, kept=512 * KiB, steps=8) for rank in range(3)))
    (growth,) = found.growth
    assert growth.sentence.startswith("On all ranks: grows")


def test_samples_of_a_killed_rank_show_growth_without_a_holder():
    rising = [MiB * (4 + number // 2) for number in range(40)]
    found = job(trained(0, steps=12), cut_off(1, rising), cut_off(2, [4 * MiB] * 40))
    (growth,) = found.growth
    assert (growth.ranks, growth.steady) == ((1,), 2)
    assert "unknown, as its file was cut off" in growth.sentence
    assert growth.bytes_per_step == MiB


def test_a_rank_that_was_cut_off_counts_for_the_worst_alone():
    found = job(trained(0), trained(1), cut_off(2, [9 * MiB] * 5))
    assert (found.peak.worst_rank, found.peak.is_bound) == (2, True)
    assert (found.peak.lowest_bytes, found.peak.median_bytes) == (5 * MiB, 5 * MiB)
    assert {one.worst_rank for one in found.by("category")} <= {0, 1}
    lower = job(trained(0), trained(1), cut_off(2, [MiB] * 5))
    assert lower.peak.lowest_rank == 0  # its true peak may have been higher
    assert lower[2].steps.finished == 2
    assert not lower[2].steps.is_seen.any()


def test_of_errors_the_earliest_is_the_first():
    late, early = error("ValueError: late"), error("ValueError: early")
    found = job(trained(0, steps=7, **late), trained(1, steps=6, **early), trained(2))
    assert found.first_failed is found[1]
    assert found[1].held is not None
    assert found[1].held.allocated_bytes == 4 * MiB
    assert found[1].held.shares["category"] == {"parameter": 4 * MiB}


def test_clocks_of_absolute_time_count_and_not_the_seconds_of_each_run():
    found = job(trained(0, began_s=90.0, **error("A")), trained(1, began_s=80.0, steps=8, **error("B")))
    assert found.first_failed is found[1]


@pytest.mark.parametrize("late_s", [0.0, -0.15])
def test_who_lost_a_peer_did_not_fail_first(late_s):
    lost = error("RuntimeError: Connection closed by peer [127.0.0.1]:2")
    killed = cut_off(
        1, [MiB] * 60, began_s=100.0 + late_s
    )  # its last sample is of 5.9 s, and it may have lived until 6.1 s
    assert job(trained(0, **lost), killed).first_failed.rank == 1


def test_who_ran_out_of_memory_was_not_preceded_by_who_was_killed_then():
    killed = cut_off(1, [MiB] * 60)
    found = job(trained(0, **error("OutOfMemoryError: ...", out_of_memory=True)), killed)
    assert found.first_failed is found[0]
    much_earlier = cut_off(1, [MiB] * 30)
    found = job(trained(0, **error("OutOfMemoryError: ...", out_of_memory=True)), much_earlier)
    assert found.first_failed is found[1]


def test_where_every_file_ends_at_the_same_time_none_is_the_first():
    found = job(cut_off(0, [MiB] * 30), cut_off(1, [MiB] * 31))
    assert found.first_failed is None
    assert job(cut_off(0, [MiB] * 30), cut_off(1, [MiB] * 60)).first_failed.rank == 0


def test_who_was_terminated_did_not_fail_first_unless_others_only_lost_it():
    ended = {"error": {"text": "ended by SIGTERM", "out_of_memory": False}}
    found = job(trained(0, began_s=100.1, **ended), trained(1, **error("ValueError: no")))
    assert found[0].ending == "terminated"
    assert found.first_failed is found[1]
    found = job(trained(0, **ended), trained(1, began_s=100.1, **error("RuntimeError: Connection closed by peer")))
    assert found.first_failed is found[0]
    assert job(trained(0, **ended), trained(1, began_s=103.0, **ended)).first_failed is None
    assert job(trained(0, **ended), trained(1)).first_failed.rank == 0


def test_missing_ranks_and_one_that_is_not_there():
    found = job(trained(0), trained(3))
    assert found.missing == (1, 2)
    with pytest.raises(MemlabError, match="rank 1 left no file; there are ranks 0, 3"):
        found[1]


def test_ranks_in_words():
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([5, 4, 3, 0]) == "ranks 0, 3–5"
    assert ranks_text(range(0, 512, 2)) == "ranks 0, 2, 4, 6, 8, 10 and 250 more"


def test_a_table_of_the_ranks():
    frame = job(trained(0), trained(1, 2 * MiB, **error("ValueError: no"))).to_pandas()
    assert frame.peak_low_bytes.tolist() == [5 * MiB, 6 * MiB]
    assert frame.activation_bytes.tolist() == [MiB, 2 * MiB]
    assert frame.ending.tolist() == ["ended", "raised"]
    assert frame.ended_s.tolist() == [6.0, 6.0]
