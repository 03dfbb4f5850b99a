"""PyTorch's CUDA build on a simulated machine, started by `memlab simulate`."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import REPOSITORY, memlab_ran, ran

pytestmark = pytest.mark.simulated


def simulated(*arguments: str, **variables: str) -> str:
    """What a command prints on a simulated machine."""
    status, out, err = memlab_ran(REPOSITORY, "simulate", *arguments, **variables)
    assert status == 0, err[-3000:]
    return out


def test_the_device_is_the_card():
    code = """
import torch
from memlab.simulated_gpu import is_simulated
one = torch.cuda.get_device_properties(0)
print(torch.cuda.device_count(), one.name, one.total_memory, (one.major, one.minor), one.multi_processor_count)
free, total = torch.cuda.mem_get_info()
print(total - free)
print(is_simulated())
"""
    found = simulated("--card", "RTX 4060", "--devices", "2", "--context", "300MiB", "--", "python", "-c", code)
    assert found.splitlines() == [
        f"2 RTX 4060 (simulated) {7848 << 20} (8, 9) 24",
        str(300 << 20),
        "True",
    ]


def test_out_of_memory_names_the_card_and_its_bytes():
    code = """
import torch
try:
    torch.empty(5 << 30, device="cuda", dtype=torch.uint8)
except torch.cuda.OutOfMemoryError as error:
    print(error)
"""
    found = simulated("--total", "4GiB", "--capability", "8.9", "--", "python", "-c", code)
    assert "Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 4.00 GiB" in found


def test_cudnn_is_the_one_that_pytorch_was_built_with():
    code = """
import re, torch
built_with = re.search(r"CUDNN_VERSION=(\\d+)\\.(\\d+)", torch.__config__.show()).groups()
version = torch.backends.cudnn.version()
print(built_with == (str(version // 10000), str(version // 100 % 100)))
"""
    assert simulated("--card", "T4", "--", "python", "-c", code) == "True\n"


def test_two_commands_share_a_machine(tmp_path):
    code = """
import os, subprocess, sys, torch
kept = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
other = "import torch; free, total = torch.cuda.mem_get_info(); print(total - free)"
run = [sys.executable, "-m", "memlab", "simulate", "--machine", sys.argv[1], "--", "python", "-c", other]
print(subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip())
"""
    options = ("--total", "4GiB", "--context", "100MiB", "--machine", str(tmp_path / "gpu"))
    found = simulated(*options, "--", "python", "-c", code, str(tmp_path / "gpu"))
    assert int(found) == (1 << 30) + 2 * (100 << 20)


@pytest.mark.parametrize("damage", ["os.truncate(sys.argv[1], 0)", "open(sys.argv[1], 'w').write('x' * 50_000)"])
def test_a_machine_file_that_is_damaged_in_use_is_an_error_and_no_crash(tmp_path, damage):
    code = f"""
import os, sys, torch
kept = torch.empty(1 << 20, device="cuda")
{damage}
for again in range(2):
    try:
        torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    except torch.AcceleratorError as error:
        print(str(error).partition(chr(10))[0])
free, total = torch.cuda.mem_get_info()
del kept
torch.cuda.empty_cache()
"""
    file = str(tmp_path / "gpu")
    options = ("--total", "4GiB", "--capability", "8.9", "--machine", file)
    status, out, err = memlab_ran(REPOSITORY, "simulate", *options, "--", "python", "-c", code, file)
    assert status == 0, err[-3000:]
    assert out.splitlines() == ["CUDA error: OS call failed or operation not supported on this OS"] * 2
    said = "memlab simulated GPU: the machine's file was overwritten or cut short while in use: end its programs, and make it anew."
    assert err.splitlines() == [said]
    assert Path(file).read_text() in ("", "x" * 50_000)


@pytest.mark.parametrize(("is_elsewhere", "used_mib"), [(False, 100), (True, 100 + 70)])
def test_processes_of_another_container_are_not_taken_for_dead(tmp_path, is_elsewhere, used_mib):
    """Their numbers say nothing here; memory of a process that is gone is given back."""
    code = """
import os, struct, sys, torch
number = os.stat("/proc/self/ns/pid").st_ino + (sys.argv[2] == "True")
with open(sys.argv[1], "r+b") as file:
    file.seek(4096 + 7 * 160)
    file.write(struct.pack("<iIQ8Q8Q", 1 << 30, number & 0xFFFFFFFF, 5, *[0] * 8, 70 << 20, *[0] * 7))
free, total = torch.cuda.mem_get_info()
print(total - free)
"""
    file = str(tmp_path / "gpu")
    options = ("--total", "4GiB", "--capability", "8.9", "--context", "100MiB", "--machine", file)
    assert int(simulated(*options, "--", "python", "-c", code, file, str(is_elsewhere))) == used_mib << 20


COMPILED = """
import sys, torch
from torch._dynamo.utils import counters
layers = torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.LayerNorm(256), torch.nn.Linear(256, 10)
model = torch.nn.Sequential(*layers).cuda()
x = torch.randn(32, 64, device="cuda")
def held_by(run):
    for _ in range(3):
        model.zero_grad()
        run(x).sum().backward()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
held = [held_by(model), held_by(torch.compile(model, mode=sys.argv[1]))]
print(*held, counters["inductor"]["async_compile_cache_miss"], counters["inductor"]["cudagraph_recorded_non_static_inputs"])
"""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("capability", "mode"), [("8.0", "default"), ("8.9", "default"), ("12.0", "default"), ("8.9", "reduce-overhead")]
)
def test_a_compiled_step_has_the_memory_of_an_eager_one(tmp_path, capability, mode):
    """Inductor and Triton compile for the capability; with graphs, cuBLAS's workspace goes once they are recorded."""
    places = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    options = ("--total", "8GiB", "--capability", capability)
    found = simulated(*options, "--", "python", "-c", COMPILED, mode, **places)
    eager, compiled, kernels, recorded = map(int, found.split())
    assert compiled == eager if mode == "default" else 0 < compiled < eager and recorded > 0
    assert kernels > 0
    assert any(tmp_path.rglob("*.cubin"))


def test_children_and_the_shell_are_on_the_same_machine():
    code = "import torch; print(torch.cuda.get_device_name())"
    assert simulated("--card", "T4", "--", "sh", "-c", f"python -c '{code}'; exit $?") == "T4 (simulated)\n"


def test_a_command_returns_its_status_and_signals_reach_it():
    assert memlab_ran(REPOSITORY, "simulate", "--card", "T4", "--", "sh", "-c", "exit 7")[0] == 7


def test_a_first_use_compiles_into_the_cache(tmp_path):
    found = simulated("--card", "T4", "--", "sh", "-c", "echo $LD_LIBRARY_PATH", XDG_CACHE_HOME=str(tmp_path))
    assert found.startswith(str(tmp_path / "memlab" / "simulated_gpu"))
    assert (Path(found.strip().split(":")[0]) / "libcudart.so.13").exists()


KERNEL = """
import sys, time
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name=sys.argv[1], startup_timeout=120)
def said(code):
    texts = []
    hook = lambda message: texts.append(message["content"].get("text") or message["content"].get("ename", ""))
    client.execute_interactive(code, timeout=300, output_hook=hook)
    return "".join(texts).strip()
try:
    print(said("import torch; print(torch.cuda.get_device_name())"))
    client.execute("import time; print('sleeping'); time.sleep(60)", stop_on_error=False)
    while client.get_iopub_msg(timeout=300)["content"].get("text") != "sleeping\\n":
        pass
    manager.interrupt_kernel()
    print(client.get_shell_msg(timeout=300)["content"]["ename"])
    print(said("print('still there', torch.cuda.is_available())"))
finally:
    client.stop_channels()
    manager.shutdown_kernel()
"""


def test_an_installed_kernel_starts_and_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share" / "jupyter"))
    simulated("--install-kernel", "--card", "RTX 4060", "--prefix", str(tmp_path))
    _, out, err = ran(REPOSITORY, "-c", KERNEL, "memlab-simulated-rtx-4060-8-gib")
    assert out.splitlines() == ["RTX 4060 (simulated)", "KeyboardInterrupt", "still there True"], err[-3000:]
