"""The moment at which memory ran out, and what of it grows with the batch, read from traces written by hand."""

from __future__ import annotations

from scripted_traces import HOST, Script

from memlab.analysis.oom.facts import Failure
from memlab.analysis.oom.moment import Moment, PeakShare, gathered, last_moment, share
from memlab.analysis.oom.text import Message
from memlab.trace import Category, MarkKind, Phase
from memlab.units import ByteRange


def moment_of(script: Script) -> Moment:
    found = last_moment(script.trace())
    assert found is not None
    return found


def training() -> Script:
    """A parameter from before, two activations of which one is gone, a cache of 300, then 5000 asked."""
    script = Script()
    script.preexisting(1000)
    script.segment(4000, at=0)
    script.here_it_starts()
    script.alloc(700, requested=650, category=Category.ACTIVATION, phase=Phase.FORWARD, line="cell:3", module="net.0")
    gone = script.alloc(2000, category=Category.ACTIVATION, phase=Phase.FORWARD, line="cell:4", module="net.1")
    script.alloc(1500, category=Category.INPUT, line="cell:2")
    script.free(gone)
    script.alloc(500, category=Category.TEMPORARY, phase=Phase.OPTIMIZER, line="cell:6")
    script.alloc(100, category=Category.OPTIMIZER, phase=Phase.OPTIMIZER, line="cell:6")
    return script


def test_the_numbers_are_those_of_the_row_and_not_of_what_came_after():
    script = training()
    script.oom(5000, 64)
    script.alloc(9000, at=900, category=Category.OTHER)
    script.segment(9000, at=900)
    found = moment_of(script)
    assert (found.device, found.asked_bytes, found.free_bytes) == (0, 5000, 64)
    assert (found.allocated_bytes, found.reserved_bytes, found.cached_bytes) == (3800, 4000, 200)
    assert found.step_bytes == 500
    shares = {by: dict(found.share(by)) for by in ("category", "line", "module")}
    assert shares["category"].pop("other") == 1000  # the one from before, of which nothing is told
    assert shares["category"] == {"input": 1500, "activation": 650, "temporary": 500, "optimizer": 100, "rounding": 50}
    assert shares["line"] == {"cell:2": 1500, "before the run": 1000, "cell:3": 650, "cell:6": 600, "rounding": 50}
    assert shares["module"] == {"elsewhere": 2100, "before the run": 1000, "net.0": 650, "rounding": 50}
    assert all(share.total_bytes == 3800 for share in found.shares)
    failure = Failure(Message("CUDA", 0), moment=found)
    assert (failure.bytes_of("activation"), failure.bytes_of("gradient")) == (650, 0)


def test_a_trace_without_it_has_none_and_one_from_before_the_cell_does_not_count():
    assert last_moment(training().trace()) is None
    script = Script()
    script.oom(10, 1)
    script.here_it_starts()
    script.alloc(10)
    assert last_moment(script.trace()) is None


def test_of_several_the_last_counts_on_its_own_device():
    script = training()
    script.oom(5000, 64)
    script.alloc(77, device=-1)
    script.devices = (*script.devices, HOST)
    script.oom(6000, 32)
    assert (moment_of(script).asked_bytes, moment_of(script).allocated_bytes) == (6000, 3800)


def test_a_breakdown_in_which_nothing_is_told_is_left_out():
    script = Script()
    script.preexisting(1000)
    script.alloc(500)
    script.oom(10, 1)
    assert moment_of(script).shares == ()
    assert moment_of(script).share("line") is None


def test_the_phase_comes_from_the_marks_before_it():
    for kind, name, phase, backward in (
        (MarkKind.MODULE_BEGIN, "net", Phase.FORWARD, False),
        (MarkKind.PHASE_BEGIN, "backward", Phase.BACKWARD, True),
        (MarkKind.PHASE_BEGIN, "optimizer", Phase.OPTIMIZER, False),
    ):
        script = training()
        script.mark(kind, name, at=script.now + 5)
        script.oom(10, 1)
        script.mark(MarkKind.PHASE_BEGIN, "optimizer", at=script.now + 5)
        found = moment_of(script)
        assert (found.phase, found.has_backward) == (phase, backward)
    script = training()
    script.oom(10, 1)
    assert moment_of(script).phase == Phase.OTHER


# --- the batch ---

KiB, MiB = 1 << 10, 1 << 20


def ended(script: Script, asked: int = 0) -> PeakShare:
    """Memory runs out now."""
    script.oom(asked, 0)
    return share(script.trace(), 0, len(script.rows) - 1)


def call(script: Script, name: str, *sizes: int) -> list[int]:
    """A call of a module that leaves activations of these sizes."""
    script.mark(MarkKind.MODULE_BEGIN, name, at=script.now + 1)
    made = [script.alloc(size, category=Category.ACTIVATION) for size in sizes]
    script.mark(MarkKind.MODULE_END, name, at=script.now + 1)
    return made


def step(script: Script, name: str) -> None:
    script.mark(MarkKind.PHASE_BEGIN, name, at=script.now + 1)
    script.mark(MarkKind.PHASE_END, name, at=script.now + 2)


def test_only_what_was_made_since_the_last_step_counts_and_half_of_the_request():
    for ends in (["backward"], ["optimizer"], ["backward", "optimizer"]):
        script = Script()
        call(script, "net", 64 * KiB)
        for name in ends:
            step(script, name)
        call(script, "net", 512 * KiB, 256 * KiB)
        script.alloc(128 * KiB, category=Category.TEMPORARY)
        script.alloc(4 * MiB, category=Category.GRADIENT)
        script.alloc(64 * KiB, category=Category.OTHER)  # of the loss, or the user's own
        found = ended(script, asked=96 * KiB)
        assert found == PeakShare((448 + 48) * KiB - 3 * 512, (448 + 48 + 32) * KiB, (), is_in_step=True)


def test_after_a_step_no_forward_has_run():
    script = Script()
    assert not ended(script).is_in_step
    call(script, "net", 64 * KiB)
    assert ended(script).is_in_step
    step(script, "optimizer")
    assert ended(script) == PeakShare()


def test_an_input_of_before_may_be_the_batch_or_a_whole_data_set():
    script = Script()
    known = script.preexisting(640 * KiB)
    script.blocks[known]["category"] = Category.INPUT
    call(script, "net", 64 * KiB)
    assert ended(script).saving([]) == ByteRange(32 * KiB - 512, (32 + 320) * KiB)


def test_a_module_that_is_called_again_may_begin_a_step_unless_a_list_keeps_what_it_made():
    script = Script()
    for _ in range(3):
        call(script, "net", 64 * KiB)
        call(script, "loss", 32 * KiB)
    found = ended(script)
    assert found.saving([]).low == 48 * KiB - 2 * 512
    assert found.saving([]).high == 3 * 48 * KiB
    assert found.saving([0]).high == 48 * KiB  # by hand all addresses are 0


def test_modules_that_follow_each_other_make_one_pass():
    script = Script()
    for _ in range(2):
        call(script, "encoder", 64 * KiB)
    call(script, "decoder", 32 * KiB)
    assert ended(script).surely_bytes == 48 * KiB - 2 * 512


def test_as_many_blocks_as_there_are_weights_of_their_size_may_be_copies_of_them():
    script = Script()
    for size in (256 * KiB, 512 * KiB):
        script.blocks[script.preexisting(size)]["category"] = Category.PARAMETER
    # Two of the half and one of the whole first, or half the second.
    call(script, "net", 128 * KiB, 128 * KiB, 256 * KiB)
    found = ended(script, asked=256 * KiB)  # in backward, the gradient of the first
    assert found.at_most_bytes == (64 + 64 + 128 + 128) * KiB
    assert found.surely_bytes == 64 * KiB - 3 * 512


def test_the_allocator_may_round_halves_up_by_what_it_does_not_split():
    script = Script()
    call(script, "net", 150 * MiB, 8 * MiB)
    found = ended(script)
    assert found.at_most_bytes == 79 * MiB
    assert found.surely_bytes == 79 * MiB - MiB - 4 * MiB // 10 - 2 * 512


def test_entries_of_a_list_are_told_from_two_views_and_from_what_a_graph_saved():
    paths = [f"logs['loss'][{i}].grad_fn -> saved x" for i in range(3)]
    assert gathered([*paths, "pair[0]", "pair[1]", "x.grad_fn -> saved y[2]"]) == set(paths)
    assert gathered(["x.grad_fn -> saved [0]", "x.grad_fn -> saved [1]", "x.grad_fn -> saved [2]"]) == set()
