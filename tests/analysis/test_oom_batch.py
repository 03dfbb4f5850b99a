"""What of an out-of-memory grows with the batch, told from traces written by hand."""

from __future__ import annotations

from handmade import Script

from memlab.analysis.oom.batch import Share, gathered, share
from memlab.analysis.oom.text import Amount
from memlab.trace import Category, Kind, MarkKind

KiB, MiB = 1 << 10, 1 << 20


def ended(script: Script, asked: int = 0) -> Share:
    """Memory runs out now."""
    script._row(Kind.OOM, -1, asked, 0, None, None)
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
        assert found == Share((448 + 48) * KiB - 3 * 512, (448 + 48 + 32) * KiB, (), is_in_step=True)


def test_after_a_step_no_forward_has_run():
    script = Script()
    assert not ended(script).is_in_step
    call(script, "net", 64 * KiB)
    assert ended(script).is_in_step
    step(script, "optimizer")
    assert ended(script) == Share()


def test_an_input_of_before_may_be_the_batch_or_a_whole_data_set():
    script = Script()
    known = script.adopt(640 * KiB)
    script.blocks[known]["category"] = Category.INPUT
    call(script, "net", 64 * KiB)
    assert ended(script).saving([]) == Amount(32 * KiB - 512, (32 + 320) * KiB)


def test_a_module_that_is_called_again_may_begin_a_step_unless_a_list_keeps_what_it_made():
    script = Script()
    for _ in range(3):
        call(script, "net", 64 * KiB)
        call(script, "loss", 32 * KiB)
    found = ended(script)
    assert found.saving([]).low_bytes == 48 * KiB - 2 * 512
    assert found.saving([]).high_bytes == 3 * 48 * KiB
    assert found.saving([0]).high_bytes == 48 * KiB  # by hand all addresses are 0


def test_modules_that_follow_each_other_make_one_pass():
    script = Script()
    for _ in range(2):
        call(script, "encoder", 64 * KiB)
    call(script, "decoder", 32 * KiB)
    assert ended(script).surely_bytes == 48 * KiB - 2 * 512


def test_as_many_blocks_as_there_are_weights_of_their_size_may_be_copies_of_them():
    script = Script()
    for size in (256 * KiB, 512 * KiB):
        script.blocks[script.adopt(size)]["category"] = Category.PARAMETER
    call(
        script, "net", 128 * KiB, 128 * KiB, 256 * KiB
    )  # two of the half and one of the whole first, or half the second
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
    paths = [f"logs['loss'][{i}].grad_fn -> saved x" for i in range(3)] + [
        "pair[0]",
        "pair[1]",
        "x.grad_fn -> saved y[2]",
    ]
    assert gathered(paths) == set(paths[:3])
    assert gathered(["x.grad_fn -> saved [0]", "x.grad_fn -> saved [1]", "x.grad_fn -> saved [2]"]) == set()
