"""Practices that memlab does not switch on: asking for one names its lesson; what docs and lessons say of PyTorch holds."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from job_runs import printed

import memlab
from memlab.errors import MemlabError
from memlab.saving_techniques.registry import LESSONS

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.mark.parametrize("name", LESSONS)
def test_a_practice_names_its_lesson_in_one_line(name: str) -> None:
    lesson = f"notebooks/{LESSONS[name]}.ipynb"
    for ask in (memlab.techniques.__getitem__, lambda one: memlab.techniques.conflict([one])):
        with pytest.raises(MemlabError, match=lesson) as caught:
            ask(name)
        assert "\n" not in str(caught.value) and name in str(caught.value)
    assert memlab.techniques.get(name) is None and memlab.techniques.get(name, "default") == "default"
    assert name not in memlab.techniques and (NOTEBOOKS.parent / lesson).exists()


def test_the_lab_and_the_advisor_name_it_too() -> None:
    def step() -> None:
        torch.ones(1)

    with pytest.raises(MemlabError, match="notebooks/13_feeding"):
        memlab.advise(step, techniques=["prefetch"])
    lab = memlab.Lab()
    with pytest.raises(MemlabError, match="notebooks/16_design"):
        lab.state = {"techniques": ["channels_last"]}


def test_few_samples_make_unsteady_statistics() -> None:
    """The reason for SyncBatchNorm: the mean of n samples varies as 1 / sqrt(n)."""
    draw = torch.Generator().manual_seed(0)
    deviation = {n: torch.randn(400, n, 16, generator=draw).mean(1).std() for n in (2, 32)}
    assert 3 < deviation[2] / deviation[32] < 5  # sqrt(16) = 4


def test_float16_has_no_epsilon_for_adam() -> None:
    """Why all of a training in float16 ends in NaN: epsilon is zero there, and a gradient of zero gives 0 / 0."""
    weight = torch.zeros(4, dtype=torch.float16, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    torch.optim.Adam([weight], eps=1e-8).step()
    assert torch.tensor(1e-8).half() == 0 and weight.isnan().all()


def test_dynamic_quantization_takes_a_quarter_of_the_file(tmp_path: Path) -> None:
    """Packed int8 weights are no tensors, so that only the file shows their size."""
    quantize = pytest.importorskip("torch.ao.quantization").quantize_dynamic
    plain = torch.nn.Sequential(torch.nn.Linear(256, 256))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated in favor of torchao
        packed = quantize(plain, {torch.nn.Linear}, dtype=torch.qint8)
    sizes = []
    for name, model in {"plain": plain, "packed": packed}.items():
        torch.save(model.state_dict(), tmp_path / name)
        sizes.append((tmp_path / name).stat().st_size)
    assert sizes[1] < 0.5 * sizes[0]
    x = torch.randn(4, 256)
    torch.testing.assert_close(packed(x), plain(x), atol=0.1, rtol=0)


# --- on the simulated GPU ---


PEAK = """
import torch
torch.use_deterministic_algorithms({deterministic}, warn_only=True)
x = torch.randn(512, 512, device="cuda", requires_grad=True)
(x @ x).sum().backward()
print(torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["num_device_alloc"])
"""


@pytest.mark.simulated
def test_what_a_deterministic_cublas_takes() -> None:
    """32 MiB in place of 8.1 on a GPU of capability 8; twice, as the thread of backward has a handle of its own."""
    plain = int(printed(PEAK.format(deterministic=False))[0])
    fixed = int(printed(PEAK.format(deterministic=True), CUBLAS_WORKSPACE_CONFIG=":4096:8")[0])
    assert fixed - plain == 2 * (8 * 4096 - (2 * 4096 + 8 * 16)) * 1024


@pytest.mark.simulated
def test_launch_blocking_is_about_time_alone() -> None:
    code = PEAK.format(deterministic=False)
    assert printed(code, CUDA_LAUNCH_BLOCKING="1") == printed(code)


SEEN = """
import os, torch
{first}
os.environ["CUDA_VISIBLE_DEVICES"] = "1"
torch.ones(1, device="cuda")
print(torch._C._cuda_getDeviceCount())  # before 2.12 torch.cuda.device_count() reads the variable once more
"""


@pytest.mark.simulated
@pytest.mark.parametrize(("first", "devices"), [("", "1"), ("torch.ones(1, device='cuda')", "2")])
def test_visible_devices_count_until_cuda_is_initialized(first: str, devices: str) -> None:
    """Not the import of torch decides, but the first use of CUDA."""
    assert printed(SEEN.format(first=first), gpu={"devices": 2}) == [devices]


@pytest.mark.simulated
def test_pinned_blocks_are_rounded_up_to_powers_of_two() -> None:
    torch.cuda.init()
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    batch = torch.empty(3000, 4096).pin_memory()  # 46.9 MiB
    taken = torch.cuda.host_memory_stats()["active_bytes.current"] - before
    assert batch.is_pinned() and (1 << 26) <= taken < (1 << 26) + (1 << 16)
