"""Predictions of one program on several GPUs: each has its peaks, and those are the simulated GPUs'."""

from __future__ import annotations

import importlib.util
import json

import pytest
import several_gpus
import torch
from processes import python

import memlab
from memlab.__main__ import main
from memlab.errors import MemlabError, PredictionError
from memlab.units import GiB, MiB

SMALL = memlab.Card("small", GiB, (8, 0), 0, GiB, GiB, 108)
NEEDS = {"dispatched": ("accelerate", "transformers"), "device_map": ("accelerate", "transformers")}


def at(name: str, mebibytes: int) -> torch.Tensor:
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device=name)


@pytest.mark.simulated
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", several_gpus.PROGRAMS)
def test_peaks_are_those_of_the_allocators_to_the_byte(name):
    lacking = [one for one in NEEDS.get(name, ()) if importlib.util.find_spec(one) is None]
    if lacking:
        pytest.skip(f"needs {', '.join(lacking)}")
    ways = ("measured", "predicted")
    there, here = (json.loads(python(several_gpus.__file__, way, name, gpu={"devices": 2})) for way in ways)
    assert here == there
    assert min(there[0] + there[1]) > MiB


@pytest.mark.simulated
def test_a_measured_run_fits_where_both_of_its_gpus_do():
    (_, first), (_, second), least = json.loads(python(several_gpus.__file__, "fitted", "mlp", gpu={"devices": 2}))
    assert first > second
    assert least == round(first * 0.98)


def test_the_order_of_branches_in_backward_is_an_assumption():
    def step() -> None:
        model = several_gpus.Stages(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        model(torch.ones(4, 8)).sum().backward()

    said = "branches of backward on different GPUs"
    assert any(said in text for text in memlab.predict(step, SMALL, devices=2).assumptions)
    elsewhere = lambda: [torch.ones(8, device="cuda:0"), torch.ones(8, device="cuda:1")]  # noqa: E731
    assert not any(said in text for text in memlab.predict(elsewhere, SMALL, devices=2).assumptions)


def test_the_prediction_is_that_of_the_gpu_that_needs_most():
    def step() -> None:
        kept = [at("cuda:0", 100), at("cuda:1", 300)]
        assert (torch.cuda.device_count(), torch.cuda.memory_allocated(1)) == (2, 300 * MiB)
        kept.clear()

    found = memlab.predict(step, SMALL, devices=2)
    assert [*found.by_device] == [1, 0]
    assert found.fits == "yes" and all(one.fits == "yes" for one in found.by_device.values())
    assert [tuple(found.by_device[number].allocated_bytes) for number in range(2)] == [
        (100 * MiB,) * 2,
        (300 * MiB,) * 2,
    ]
    assert found.allocated_bytes.high == found.peak_bytes == 300 * MiB
    assert found.verdict.startswith("fits 2 x small") and found.verdict.endswith("on cuda:1")
    assert "cuda:1 needs" in found.report().text and "cuda:0 (small, 1.00 GiB)" in found.report().text


def test_it_fits_only_if_each_part_does(tmp_path):
    def step() -> None:
        kept = [at("cuda:0", 900), at("cuda:1", 10)]
        del kept
        at("cuda:1", 2048)

    found = memlab.predict(step, SMALL, devices=2)
    assert {number: one.fits for number, one in found.by_device.items()} == {1: "no", 0: "yes"}
    assert (found.fits, found.verdict.partition(":")[0]) == ("no", "does not fit 2 x small")
    assert "missing on cuda:1" in found.verdict
    assert "GPU 1 has a total capacity of 1024.00 MiB" in found.out_of_memory
    again = memlab.load(found.save(tmp_path / "two.memlab"))
    assert again.by_device == found.by_device
    larger = found.for_card(several_gpus.CARD)
    assert larger.fits == "yes" and [*larger.by_device] == [1, 0]


def test_the_gpu_that_is_full_raises():
    def step() -> None:
        kept = [at("cuda:0", 900)]
        try:
            kept += [at("cuda:1", 900), at("cuda:1", 900)]
        except torch.cuda.OutOfMemoryError as error:
            assert "GPU 1 has" in str(error)
            kept.append(at("cuda:0", 10))
            return
        raise AssertionError("1.8 GiB fit into 1 GiB")

    found = memlab.predict(step, SMALL, devices=2, raises_oom=True)
    assert found.fits == "yes" and "as it catches 1 out-of-memory error" in found.report().text
    assert found.by_device[0].allocated_bytes.high == 910 * MiB


def test_a_gpu_that_is_not_used_needs_nothing():
    found = memlab.predict(lambda: at("cuda:1", 50), SMALL, devices=3)
    assert [*found.by_device] == [1] and found.verdict.endswith("on cuda:1")
    assert memlab.predict(lambda: at("cuda", 50), SMALL).by_device.keys() == {0}


def test_with_one_gpu_the_line_that_asks_for_another_is_named():
    with pytest.raises(
        PredictionError, match=r"test_several_gpus.py:\d+ asks for cuda:1, and one GPU .* devices=2, or --devices 2"
    ):
        memlab.predict(lambda: at("cuda:1", 50), SMALL)
    with pytest.raises(PredictionError, match="asks for cuda:2, and 2 GPUs are predicted"):
        memlab.predict(lambda: at("cuda:2", 50), SMALL, devices=2)


def test_tensors_on_two_gpus_do_not_mix():
    def step() -> None:
        one, other = torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1")
        for mix in (lambda: one + other, lambda: one.add_(other), lambda: torch.cat([one, other])):
            with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
                mix()

    memlab.predict(step, SMALL, devices=2)


@pytest.mark.parametrize(
    ("copy", "depends"),
    [
        (lambda x: x.to("cuda:1"), False),
        (lambda x: x.to("cuda:1", torch.float16), True),
        (lambda x: torch.empty(8, 4, device="cuda:1").copy_(x.t()), True),
        (lambda x: torch.empty(8, 4, device="cuda:0").copy_(x.t()).half(), False),
    ],
    ids=["plain", "dtype", "layout", "on one GPU"],
)
def test_copies_that_depend_on_peer_access_say_so(copy, depends):
    found = memlab.predict(lambda: copy(torch.ones(4, 8, device="cuda:0")), SMALL, devices=2)
    assert any("peer access" in text for text in found.assumptions) is depends


def test_data_parallel_is_refused_in_one_line():
    def step() -> None:
        torch.nn.DataParallel(torch.nn.Linear(4, 4).cuda())(torch.ones(4, 4))

    with pytest.raises(PredictionError, match="DataParallel on several GPUs cannot be predicted: use Distributed"):
        memlab.predict(step, SMALL, devices=2)


@pytest.mark.parametrize("wrong", [0, -1, 17, 2.0, "2", True])
def test_a_wrong_number_of_gpus_is_refused(wrong):
    with pytest.raises(MemlabError, match="devices is a number of GPUs, 1 to 16, got"):
        memlab.predict(lambda: at("cuda", 1), SMALL, devices=wrong)


def test_of_a_job_each_rank_has_one_gpu():
    with pytest.raises(MemlabError, match="devices and world_size do not go together"):
        memlab.predict(lambda: at("cuda", 1), SMALL, devices=2, world_size=2)


SCRIPT = """
import torch
kept = [torch.empty(100 << 20, dtype=torch.uint8, device=f"cuda:{number}") for number in (0, 1, 1)]
"""


def predicted(capsys, tmp_path, *words: str) -> tuple[int, str]:
    script = tmp_path / "two.py"
    script.write_text(SCRIPT)
    try:
        status = main(["predict", *words, str(script)])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, "".join(capsys.readouterr())


def test_the_command_says_what_each_gpu_needs(capsys, tmp_path):
    status, said = predicted(capsys, tmp_path, "--card", "T4", "--devices", "2", "--json")
    found = json.loads(said)
    assert (status, found["fits"], found["allocated_bytes"]) == (0, "yes", [200 * MiB] * 2)
    assert [(one["device"], one["fits"], one["allocated_bytes"]) for one in found["devices"]] == [
        (1, "yes", [200 * MiB] * 2),
        (0, "yes", [100 * MiB] * 2),
    ]
    status, said = predicted(capsys, tmp_path, "--devices", "2")
    assert status == 0 and "with 2 of each" in said.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "two.py:3 asks for cuda:1, and one GPU is predicted: predict it with devices=2, or --devices 2"),
        (("--devices", "0"), "devices is a number of GPUs, 1 to 16, got 0"),
        (
            ("--devices", "2", "--nproc-per-node", "2"),
            "--devices goes with one process: of a job each rank has one GPU",
        ),
    ],
)
def test_what_the_command_refuses(capsys, tmp_path, words, why):
    status, said = predicted(capsys, tmp_path, "--card", "T4", *words)
    assert status and why in said


def test_compiled_code_on_several_gpus_is_predicted_as_eager():
    def step() -> None:
        torch.compile(torch.nn.Linear(64, 64).to("cuda:1"))(torch.ones(8, 64, device="cuda:1"))

    found = memlab.predict(step, SMALL, devices=2)
    assert any("as eager: there are several GPUs" in text for text in found.assumptions)
