"""The explanation of an out-of-memory error: verdicts, sums and actions follow from the facts, and from nothing else."""

from __future__ import annotations

import dataclasses

import pytest
from analysis.oom_messages import WORDINGS, GiB, MiB

from memlab.analysis.breakdown import Breakdown
from memlab.analysis.oom.actions import LEAST_OUTPUT_BYTES, MOST, OF_ERRORS, OUTPUTS, actions, root_of
from memlab.analysis.oom.explain import amount_text, explain, grouped
from memlab.analysis.oom.facts import FRAGMENTATION, FULL, LIMIT, OTHERS, TOO_MUCH, Failure, HeldSegment, Holder
from memlab.analysis.oom.moment import Moment, PeakShare
from memlab.analysis.oom.text import Message, read_message
from memlab.references import release
from memlab.trace.columns import Phase
from memlab.units import ByteRange


def told(**sizes: int | tuple[int, ...]) -> Message:
    """A message of a card of 8 GiB: 0.5 GiB of context, nothing cached, 256 MiB asked and 64 MiB free, but for what is given."""
    known = {"asked": 256 * MiB, "capacity": 8 * GiB, "free": 64 * MiB, "allocated": 7616 * MiB, "cached": 0}
    known |= {"process": 8128 * MiB} | sizes
    known.setdefault("reserved", known["allocated"] + known["cached"])
    return Message("CUDA", 0, **{name: ByteRange.exact(size) for name, size in known.items() if size is not None})


def failed(*holders: tuple[str, str, int], **known: object) -> Failure:
    return Failure(known.pop("message", told()), holders=tuple(Holder(*one) for one in holders), **known)  # type: ignore[arg-type]


# --- why there was no room ---


@pytest.mark.parametrize(
    ("message", "verdict", "short"),
    [
        (told(), FULL, 192 * MiB),
        (told(asked=9 * GiB), TOO_MUCH, 9 * GiB - 64 * MiB),
        (told(allocated=6 * GiB, cached=1 * GiB), FRAGMENTATION, 192 * MiB),
        # Enough for the request, but 6 % of what is reserved.
        (told(allocated=7 * GiB, cached=448 * MiB), FULL, 192 * MiB),
        (told(allocated=1 * GiB, cached=120 * MiB, process=None), FULL, 192 * MiB),
        # Not as much as was asked, but far more than was missing.
        (told(asked=2 * GiB, free=1600 * MiB, allocated=5 * GiB, cached=1 * GiB), FRAGMENTATION, 448 * MiB),
        (told(allocated=3 * GiB, process=4 * GiB), OTHERS, 192 * MiB),
        (told(allocated=3 * GiB, process=None), FULL, 192 * MiB),  # nobody says whose the rest is
        (told(allocated=1 * GiB, process=2 * GiB, free=6 * GiB, allowed=1100 * MiB), LIMIT, 180 * MiB),
        (told(asked=2 * GiB, allocated=0, free=6 * GiB, allowed=1 * GiB), TOO_MUCH, 0),
        (told(allowed=8 * GiB), FULL, 192 * MiB),
    ],
)
def test_the_verdict_and_what_was_short(message, verdict, short):
    found = Failure(message)
    assert found.verdict == verdict
    assert found.shortfall == ByteRange.exact(short)


def test_a_small_cache_means_live_tensors_and_a_large_one_fragmentation():
    """A card of 7.93 GiB with 6.94 GiB in tensors and 4 % cached: the cure in the source was `no_grad`."""
    found = explain(Failure(read_message(WORDINGS["1.4"][0])))
    assert found.verdict == FULL
    assert "too many live tensors, not fragmentation" in " ".join(found.sentences)
    (action,) = found.actions
    assert "inference_mode" in action.text and action.is_enough is None
    large = WORDINGS["1.4"][0].replace("6.94 GiB already", "4.94 GiB already")
    found = explain(Failure(read_message(large)))
    assert found.verdict == FRAGMENTATION and "expandable_segments:True" in found.actions[0].text


def test_listed_processes_decide_whose_the_memory_was():
    def listed(process: int | None, allocated: int = 3, **others: int) -> Message:
        known = tuple((int(pid[1:]), ByteRange.exact(size * GiB)) for pid, size in others.items())
        return dataclasses.replace(told(allocated=allocated * GiB, process=process), others=known)

    message = listed(4 * GiB, p71=3)
    assert Failure(message).own_pid is None
    assert Failure(message, others_bytes=100 * MiB).verdict == FULL
    # In a container this process is in the list under a number of its own: the only one with room for PyTorch's part.
    assert Failure(listed(None, 5, p9=6)).own_pid == 9
    several = Failure(listed(None, p71=3, p72=4))
    assert (several.own_pid, several.process) == (None, None)


def test_the_parts_sum_to_the_device():
    message = told(allocated=3 * GiB, cached=100 * MiB, process=4 * GiB)
    found = Failure(message)
    parts = [message.allocated, message.cached, found.beside, found.rest, message.free]
    assert sum(part.low for part in parts) == sum(part.high for part in parts) == 8 * GiB
    (line,) = [line for line in explain(found).sentences if ", the whole device" in line]
    assert line == (
        "3.00 GiB allocated + 100.0 MiB cached + 924.0 MiB of this process outside PyTorch's allocator + 3.94 GiB of "
        "other processes and the driver + 64.00 MiB free = 8.00 GiB, the whole device."
    )


@pytest.mark.parametrize("version", ["1.3", "1.4", "2.1", "2.12", "2.5, ROCm"])
def test_parts_read_from_real_messages_hold_the_capacity_within_their_digits(version):
    message = read_message(WORDINGS[version][0])
    found = Failure(message)
    parts = [part for part in (message.allocated, message.cached, found.beside, found.rest, message.free) if part]
    low, high = sum(part.low for part in parts), sum(part.high for part in parts)
    assert low <= message.capacity.middle <= high


def test_titles_say_what_is_known():
    assert explain(failed()).title == (
        "cuda:0 ran out of memory: 256.0 MiB requested, 64.00 MiB free: 192.0 MiB short. The device was full."
    )
    assert explain(Failure(Message("CUDA"))).title == "cuda ran out of memory; the message gives no sizes."
    mps = read_message("MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 2.29 GB, max allowed: 6.77 GB). "
                       "Tried to allocate 1024.00 MB on private pool.")  # fmt: skip
    title = "mps ran out of memory: 1.00 GiB requested: 1.55 GiB to 1.59 GiB short. The limit"
    assert explain(Failure(mps)).title.startswith(title)
    assert "Process 3661 must be this one" in " ".join(explain(Failure(read_message(WORDINGS["2.1"][0]))).sentences)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1536 * MiB, 1536 * MiB, "1.50 GiB"),
        (1536 * MiB - 5000, 1536 * MiB + 5000, "1.50 GiB"),
        (10 * MiB, 20 * MiB, "10.00 MiB to 20.00 MiB"),
        (0, 20 * MiB, "at most 20.00 MiB"),
        (0, 0, "0 B"),
    ],
)
def test_amounts_are_written_as_exactly_as_they_are_known(low, high, text):
    assert amount_text(ByteRange(low, high)) == text


# --- by name ---


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("model.fc.weight", "model"), ("losses[17].grad_fn -> ... -> saved self", "losses"), ("größe['a b']", "größe"),
        ("traceback of cell 5 -> step() -> big", OF_ERRORS), ("sys.last_value -> big", OF_ERRORS),
        ("traceback.x", "traceback"), ("Out[7][0]", OUTPUTS), ("_oh[7]", OUTPUTS), ("_7", OUTPUTS),
        ("outputs[7]", "outputs"), ("___", OUTPUTS), ("_mine", "_mine"), ("__x", "__x"),
        ("Outer", "Outer"), ("", ""), ("<odd>", ""),
    ],
)  # fmt: skip
def test_what_a_path_begins_with(path, root):
    assert root_of(path) == root


def test_what_is_alive_is_grouped_by_the_name_that_keeps_it():
    found = grouped(
        (
            Holder("losses[0].grad_fn -> saved x", "activation", 5),
            Holder("losses[1]", "other", 7),
            Holder("w", "parameter", 3),
            Holder("", "other", 2),
            Holder("", "buffer", 1),
            Holder("traceback of cell 5 -> f() -> small", "other", 1),
            Holder("traceback of cell 5 -> f() -> large", "other", 8),
        )
    )
    assert [(one.path, one.category, one.count, one.nbytes) for one in found] == [
        ("losses", "activation other", 2, 12),
        ("traceback of cell 5 -> f() -> large", "other", 2, 9),
        ("w", "parameter", 1, 3),
        ("", "other", 1, 2),
        ("", "buffer", 1, 1),
    ]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        ({"f() -> net.kept[0]": 50, "f() -> net.kept[1].grad_fn -> saved x": 49, "f() -> net.l.weight": 1},
         [("f() -> net.kept", 99), ("f()", 1)]),
        ({"trainer.kept[0]": 9, "trainer.kept[1]": 9, "trainer.model.a": 1, "trainer.keptother": 1},
         [("trainer.kept", 18), ("trainer", 2)]),
        ({"model.a.weight": 6, "model.b.weight": 4}, [("model", 10)]),
        ({"losses[0]": 6, "losses[1].grad_fn -> saved x": 4}, [("losses", 10)]),
        ({"x.grad_fn -> saved self": 5, "x": 5}, [("x", 10)]),
    ],
)  # fmt: skip
def test_what_nearly_all_of_a_name_is_under_is_named(paths, names):
    found = grouped(tuple(Holder(path, "other", count) for path, count in paths.items()))
    assert [(one.path, one.nbytes) for one in found] == names


# --- what to do ---

MODEL = ("model.weight", "parameter", 1 * GiB)
LOSSES = [(f"losses[{i}].grad_fn -> saved x", "activation", 100 * MiB) for i in range(5)]
FRAMES = [("traceback of cell 5 -> step() -> big", "other", 300 * MiB)]


def advised(failure: Failure) -> list[tuple[str, int, bool, bool | None]]:
    return [(one.text, one.gives.low, one.is_estimate, one.is_enough) for one in actions(failure)]


def test_nothing_is_advised_that_nothing_supports():
    assert actions(failed(cell="cell [1]")) == ()
    assert actions(failed(MODEL, ("opt.state[model.weight]['exp_avg']", "optimizer", GiB), ("x", "input", MiB))) == ()
    assert actions(Failure(Message("CUDA"))) == ()
    assert actions(Failure(told(asked=9 * GiB))) == ()


def test_what_a_running_function_holds_is_not_deleted_by_its_name():
    held = [(f"on_error() -> error -> traceback of graph.py -> f() -> kept[{i}]", "activation", GiB) for i in range(3)]
    assert not [text for text, *_ in advised(failed(*held)) if "del " in text]


def test_names_frames_and_outputs_give_what_they_hold():
    found = advised(failed(MODEL, *LOSSES, *FRAMES, ("Out[3]", "other", 20 * MiB)))
    assert [one[1:] for one in found] == [(500 * MiB, False, True), (320 * MiB, False, False)]
    assert found[0][0] == (
        "`losses` keeps 5 storages, most of it autograd graphs: `del losses`, and store `.item()` or `.detach()`"
    )
    assert found[1][0] == (
        "`%memoom release`: frees what only the failed cell's frames hold, 300.0 MiB and outputs (`Out`, `_`) that "
        "alone hold tensors, 20.00 MiB, for the next cell; the same cell needs most of it again"
    )


LISTED = [(f"main() -> kept[{i}].grad_fn -> saved x", "activation", 100 * MiB) for i in range(5)]


def in_script(*holders: tuple[str, str, int], **known: object) -> Failure:
    """A failure that ends the process; addresses of holders are 1, 2, 3, ..."""
    found = tuple(Holder(*one, address=number) for number, one in enumerate(holders, 1))
    return Failure(told(), holders=found, goes_on=False, **known)  # type: ignore[arg-type]


def test_in_a_script_what_earlier_steps_left_is_to_be_freed_and_nothing_of_the_step_that_failed():
    step = [("x", "other", 600 * MiB), ("loss.grad_fn -> saved y", "activation", 600 * MiB)]
    before = frozenset(range(3, 8))
    (found,) = advised(in_script(*step, *LISTED, moment=moment(before_step=before, has_backward=True)))
    assert found == (
        "`kept` of main() keeps 5 storages of earlier steps, most of it autograd graphs: store `.detach()` or `.item()` in it",
        500 * MiB, False, True,
    )  # fmt: skip
    assert advised(in_script(*step, moment=moment(has_backward=True))) == []
    results = [(f"results[{i}]", "other", 100 * MiB) for i in range(5)]
    (found,) = advised(in_script(*results, moment=moment(before_step=frozenset(range(1, 6)), has_backward=True)))
    assert (
        found[0]
        == "`results` keeps 5 storages of earlier steps: keep them on the CPU (`.cpu()`), or `del results` if no longer needed"
    )


def test_graphs_that_this_step_gathered_may_be_needed_by_its_backward():
    (found,) = actions(in_script(*LISTED, moment=moment(has_backward=True)))
    assert found.text.endswith("store `.detach()` or `.item()` in it, if no backward goes through them")
    assert (found.is_estimate, found.is_enough) == (True, None)


def test_what_a_librarys_function_holds_is_nobodys_to_change():
    cache = [(f"forward() of modeling.py -> cache[{i}].grad_fn -> saved x", "activation", GiB) for i in range(3)]
    assert actions(in_script(*cache, moment=moment(has_backward=True))) == ()


def test_results_in_a_list_are_kept_without_gradients_too():
    kept = [(f"results[{i}]", "activation", 100 * MiB) for i in range(5)]
    shares = (Breakdown("category", "allocated", {"activation": 700 * MiB}),)
    found = in_script(*kept, moment=moment(before_pass=frozenset(range(1, 6)), shares=shares))
    assert [one.gives.low for one in actions(found) if "inference_mode" in one.text] == [200 * MiB]


def test_next_to_nothing_is_no_advice():
    assert actions(failed(MODEL, ("", "other", 2 * MiB), all_named=True)) == ()


def test_what_the_failed_cell_holds_is_not_enough_for_the_same_cell():
    """GPT-2 small, batch 8, 4 GB: `%memoom release` was called enough, and the same cell failed again."""
    (own,) = actions(failed(*FRAMES, cell="gpt2 · cell [5]"))
    assert (own.gives, own.is_enough) == (ByteRange.exact(300 * MiB), False)
    (earlier,) = actions(failed(*FRAMES, cell="gpt2 · cell [7]"))
    assert earlier.is_enough is True and "again" not in earlier.text
    (outputs,) = actions(failed(("Out[3]", "other", 300 * MiB), cell="cell [7]"))
    assert outputs.is_enough is True


def test_a_name_is_enough_only_where_it_was_there_before_the_cell():
    kept = Holder("kept", "other", 300 * MiB, address=64)
    (unknown,) = actions(Failure(told(), holders=(kept,)))
    assert unknown.is_enough is None
    for addresses, expected in (({64}, True), ((), None)):
        found = Failure(told(), holders=(kept,), moment=moment(preexisting=frozenset(addresses)))
        assert [one.is_enough for one in actions(found) if "`kept`" in one.text] == [expected]


def test_a_name_is_not_enough_where_its_segments_or_other_names_keep_the_memory():
    kept = Holder("kept", "other", 300 * MiB, address=64)
    shared = dataclasses.replace(kept, others=1)
    own, split = HeldSegment(300 * MiB, {64: 300 * MiB}), HeldSegment(600 * MiB, {64: 300 * MiB, 640: 300 * MiB})
    growing = HeldSegment(600 * MiB, {64: 300 * MiB, 640: 300 * MiB}, is_expandable=True)
    cases = (kept, own, True), (kept, split, None), (kept, growing, True), (shared, own, None)
    for holder, segment, expected in cases:
        found = Failure(told(), holders=(holder,), moment=moment(preexisting=frozenset({64})), segments=(segment,))
        (action,) = (one for one in actions(found) if "`kept`" in one.text)
        assert action.is_enough is expected
        assert ("`%memwho`" in action.text) is (action.gives.low == 0) is (holder is shared)


def test_small_outputs_are_not_promised_as_release_leaves_them():
    assert LEAST_OUTPUT_BYTES == release.LEAST_OUTPUT_BYTES
    small = [(f"Out[{number}]", "other", LEAST_OUTPUT_BYTES - 1) for number in range(9)]
    assert actions(failed(*small)) == ()
    together = [(f"{name}[33][{i}]", "other", LEAST_OUTPUT_BYTES // 2) for name in ("_oh", "Out") for i in range(1600)]
    assert [action.gives for action in actions(failed(*small, *together))] == [ByteRange.exact(100 * MiB)]


def test_where_no_room_would_do_only_what_asks_for_less_or_helps_the_next_cell_is_advised():
    request = told(asked=9 * GiB)
    frames = ("traceback of cell 5 -> step() -> big", "activation", 2 * GiB)
    known = {"message": request, "all_named": True, "others_bytes": GiB, "phase": Phase.FORWARD}
    found = failed(MODEL, *LOSSES, frames, ("", "other", GiB), ("x.grad", "gradient", GiB), **known)
    assert [one[0][:16] for one in advised(found)] == ["`%memoom release", "half the batch: ", "`gc.collect()`: "]
    assert [one[3] for one in advised(found)] == [None, None, None]
    assert explain(found).title.endswith(
        "This single request is larger than the whole device: only a smaller one can succeed."
    )


@pytest.mark.parametrize(
    ("size", "said"),
    [("99999999999999 PiB", "(99999999999999 PiB)"), ("17179869184.00 GiB", "(17179869184.00 GiB)"),
     (f"1{'0' * 400} bytes", "(a number of 401 digits)")],
)  # fmt: skip
def test_sizes_that_cannot_be_are_called_so(size, said):
    for text in (f"Tried to allocate {size}", f"CUDA out of memory. Tried to allocate {size}. GPU 0 has a total capacity of "
                 "8.00 GiB of which 1.00 GiB is free."):  # fmt: skip
        found = explain(Failure(read_message(text)))
        assert found.title.endswith("ran out of memory; the message gives no size that can be.")
        (line,) = found.sentences
        assert line.startswith(f"The size in it is impossible {said}: it was computed wrong")
    assert explain(Failure(read_message("CUDA out of memory. Tried to allocate much"))).sentences == ()


def test_a_name_with_a_parameter_in_it_and_a_small_one_are_left_alone():
    assert actions(failed(MODEL, ("model.cache[0]", "other", 5 * GiB), ("y", "other", MiB))) == ()
    assert "`del kept`" in advised(failed(("kept -> traceback of cell 2 -> f() -> x", "other", GiB)))[0][0]
    # What no name leads to may be garbage if every name was looked for.
    found = failed(MODEL, ("", "other", 300 * MiB), ("", "activation", 100 * MiB), all_named=True)
    (action,) = actions(found)
    assert (action.text[:14], action.gives, action.is_enough) == ("`gc.collect()`", ByteRange(0, 400 * MiB), None)
    assert actions(failed(MODEL, ("", "other", 300 * MiB))) == ()


def test_fragmentation_gives_what_is_cached_unless_segments_expand_already():
    message = told(allocated=6 * GiB, cached=1 * GiB)
    (found,) = actions(failed(message=message))  # it may also give nothing: pieces between living tensors stay
    assert (found.gives, found.is_estimate, found.is_enough) == (ByteRange(0, 1 * GiB), True, None)
    assert actions(failed(message=message, expandable=True)) == ()
    assert "Expandable segments are already on" in " ".join(explain(failed(message=message, expandable=True)).sentences)
    assert "PYTORCH_HIP_ALLOC_CONF" in advised(failed(message=dataclasses.replace(message, backend="HIP")))[0][0]
    assert actions(failed(message=dataclasses.replace(message, backend="XPU"))) == ()


def test_gradients_count_only_where_no_backward_was_running():
    holders = [MODEL, ("model.weight.grad", "gradient", 1 * GiB)]
    assert actions(failed(*holders)) == ()
    assert actions(failed(*holders, phase=Phase.BACKWARD)) == ()
    (found,) = advised(failed(*holders, phase=Phase.FORWARD))
    assert found[0].startswith("`optimizer.zero_grad()`")
    assert found[1:] == (1 * GiB, False, True)


def test_half_the_batch_is_an_interval_where_nobody_saw_what_this_step_made():
    frames = ("traceback of cell 5 -> forward() -> x.grad_fn -> saved x", "activation", 2 * GiB)
    found = advised(failed(MODEL, ("loss.grad_fn -> saved x", "activation", 4 * GiB), frames, phase=Phase.FORWARD))
    (half,) = [action for action in actions(failed(MODEL, frames, phase=Phase.FORWARD)) if "batch" in action.text]
    # Of the request the message gives the segment: the tensor may be 2 MiB less.
    assert half.gives == ByteRange((2 * GiB + 254 * MiB) // 2, (2 * GiB + 256 * MiB) // 2)
    assert (half.is_estimate, half.is_enough) == (True, None), "shown by no trace"
    assert [one[1:] for one in found if "batch" in one[0]] == [((2 * GiB + 254 * MiB) // 2, True, None)]
    for phase in (Phase.OPTIMIZER, Phase.OTHER):
        assert not any("batch" in one[0] for one in advised(failed(MODEL, frames, phase=phase)))


def test_what_only_names_keep_may_be_of_an_earlier_step():
    saved = ("loss.grad_fn -> saved x", "activation", 4 * GiB)
    (half,) = [one for one in actions(failed(saved, phase=Phase.BACKWARD)) if "batch" in one.text]
    assert (half.gives, half.is_enough) == (ByteRange(0, 2 * GiB + 128 * MiB), None)
    small = told(asked=20 * MiB, free=0)  # a segment that smaller tensors share
    assert failed(saved, message=small, phase=Phase.FORWARD).half_the_batch() == ByteRange(0, 2 * GiB + 10 * MiB)


def test_what_a_list_gathers_over_iterations_does_not_shrink_with_the_batch():
    assert failed(*LOSSES, phase=Phase.FORWARD).half_the_batch().high == 128 * MiB
    assert failed(*LOSSES[:2], phase=Phase.FORWARD).half_the_batch().high == 228 * MiB  # two views of one step?
    assert not any("batch" in one[0] for one in advised(failed(*LOSSES, phase=Phase.FORWARD)))
    few = told(asked=2 * GiB, free=MiB, allocated=600 * MiB)  # they may as well be of this step: then it saves more
    (half,) = [one for one in actions(failed(*LOSSES, phase=Phase.FORWARD, message=few)) if "batch" in one.text]
    assert "this step made and asked for, without what lists keep" in half.text
    assert half.gives.high < GiB + MiB
    assert half.is_enough is None
    (half,) = [one for one in actions(failed(phase=Phase.FORWARD, message=few)) if "batch" in one.text]
    assert ("without what lists keep" in half.text, half.is_enough) == (False, False)


@pytest.mark.parametrize(
    ("phase", "is_in_step", "wanted"),
    [(Phase.OTHER, True, True), (Phase.OTHER, False, False), (Phase.OPTIMIZER, True, False)],
)
def test_in_the_loss_no_module_runs_and_it_is_in_the_step_all_the_same(phase, is_in_step, wanted):
    found = failed(moment=moment(phase=phase, batch=PeakShare(GiB, GiB, is_in_step=is_in_step)))
    assert any("batch" in one.text for one in actions(found)) is wanted


def test_a_tracked_cell_tells_what_its_step_made_and_which_of_it_is_kept():
    share = PeakShare(100 * MiB, 120 * MiB, ((7, 50 * MiB), (8, 30 * MiB)))
    paths = [Holder(f"losses[{i}].grad_fn -> saved x", "activation", MiB, address=i) for i in (5, 6, 7)]
    found = Failure(told(), moment=moment(batch=share), holders=tuple(paths))
    assert found.half_the_batch() == ByteRange(100 * MiB, 150 * MiB)
    cases = (PeakShare(200 * MiB, 900 * MiB), True), (PeakShare(100 * MiB, 900 * MiB), None), (PeakShare(0, 9), None)
    for shown, is_enough in cases:
        halves = [one for one in actions(failed(moment=moment(batch=shown))) if "batch" in one.text]
        assert [one.is_enough for one in halves] == ([is_enough] if shown.at_most_bytes > 9 else [])
        assert all("later requests of the step are not counted" in one.text for one in halves)


def moment(**known: object) -> Moment:
    facts = {"device": 0, "row": 9, "time_ns": 1, "asked_bytes": 200 * MiB, "free_bytes": 64 * MiB}
    facts |= {"allocated_bytes": 7616 * MiB, "reserved_bytes": 7616 * MiB, "phase": Phase.FORWARD, "step_bytes": 0}
    return Moment(**(facts | {"has_backward": False, "shares": ()} | known))  # type: ignore[arg-type]


def test_a_tracked_cell_without_backward_may_not_need_activations():
    saved = ("y.grad_fn -> saved x", "activation", 4 * GiB)
    assert any("inference_mode" in one[0] for one in advised(failed(saved, moment=moment())))
    for found in (
        failed(saved, moment=moment(has_backward=True)),
        failed(saved, phase=Phase.FORWARD),
        failed(saved, moment=moment(), calls_backward=True),
        failed(saved, ("opt.state[w]", "optimizer", MiB), moment=moment()),
        failed(saved, ("w.grad", "gradient", MiB), moment=moment()),
    ):
        assert not any("inference_mode" in one[0] for one in advised(found))


def test_temporaries_of_a_step_and_the_tensors_own_size():
    found = failed(moment=moment(phase=Phase.OPTIMIZER, step_bytes=GiB))
    assert [(one[1], one[2]) for one in advised(found)] == [(GiB, True)]
    assert "foreach=False" in advised(found)[0][0]
    assert "The tensor itself needs 200.0 MiB; PyTorch requested a whole segment." in explain(found).sentences
    in_pieces = told(allocated=1800 * MiB, cached=210 * MiB)
    assert failed(message=in_pieces, moment=moment()).verdict == FRAGMENTATION
    assert failed(message=in_pieces).verdict == FULL


def test_other_processes_and_limits():
    assert advised(failed(others_bytes=3 * GiB))[0][1:] == (3 * GiB, False, True)
    assert actions(failed(others_bytes=0, place="at train.py:3")) == ()
    told_apart = told(allocated=3 * GiB, process=4 * GiB)
    assert advised(Failure(told_apart))[0][1:] == (4 * GiB - 64 * MiB, True, None)  # the driver's part is in it
    limited = told(allocated=1 * GiB, process=2 * GiB, free=6 * GiB, allowed=1100 * MiB)
    assert "set_per_process_memory_fraction" in advised(Failure(limited))[0][0]
    too_much = explain(Failure(told(asked=5 * GiB, allocated=0, free=7 * GiB, allowed=4 * GiB)))
    assert "larger than the 4.00 GiB that this process may use" in too_much.title
    assert not any("fragmented" in sentence for sentence in too_much.sentences)


def test_at_most_three_enough_before_too_little_measured_before_estimated():
    saved = ("z.grad_fn -> saved x", "activation", 6 * GiB)
    found = failed(saved, *FRAMES, others_bytes=100 * MiB, phase=Phase.FORWARD)
    listed = advised(found)
    assert len(listed) == MOST
    assert [(one[2], one[3]) for one in listed] == [(False, None), (True, None), (False, False)]
    assert [one[1] for one in listed] == [6 * GiB, 127 * MiB, 300 * MiB]
