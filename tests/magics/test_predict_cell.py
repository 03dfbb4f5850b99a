"""`%%memtrack --predict CARD` and `%memfit` in a real kernel."""

from __future__ import annotations

import pytest
from kernel import Kernel

SETUP = ("%load_ext memlab", "import torch, random\nfrom torch import nn\nmodel = nn.Linear(64, 64)")
STATE = "(random.getstate()[1][:5], torch.get_rng_state().sum().item(), model.weight.sum().item())"
RUNS = "__import__('memlab').runs"


TRAINING = """%%memtrack --predict 'RTX 4060' --name predicted
big = nn.Sequential(*[nn.Linear(512, 512) for _ in range(3)]).to("cuda")
model.to("cuda")
print("on", model.weight.device)
loss = big(torch.randn(8, 512, device="cuda")).sum()
loss.backward()
random.random()
len(list(big.parameters()))
"""


def test_a_cell_runs_elsewhere_and_leaves_a_report(notebook: Kernel):
    before = notebook.value(STATE)
    reply = notebook.ok(TRAINING)
    assert (reply.out, reply.stdout) == ("6", "on cuda:0\n")
    assert "fits on RTX 4060" in reply.report
    assert "big.0" in reply.report
    assert any("application/vnd.plotly.v1+json" in kinds for kinds in reply.kinds)
    left = "('big' in globals(), 'loss' in globals(), str(model.weight.device))"
    assert notebook.value(left) == (False, False, "cpu")
    assert notebook.value(STATE) == before
    assert notebook.value(f"type({RUNS}['predicted']).__name__") == "Prediction"


def test_a_cell_is_predicted_for_another_torch(notebook: Kernel):
    for version in ("2.10.0", "2.15"):
        cell = f"%%memtrack --predict T4 --torch {version}\nx = torch.ones(1 << 20, device='cuda')"
        said = notebook.ok(cell).report
        assert ("Predicted for PyTorch" in said) != notebook.value(f"torch.__version__.startswith({version!r})")
    line = "--predict 2GiB --torch 2.10.0 --raises-oom --quiet --name cut"
    assert notebook.run(f"%%memtrack {line}\nx = torch.ones(1 << 30, device='cuda')").error == "OutOfMemoryError"
    notebook.run("import memlab\ncut = memlab.fit(memlab.runs['cut'], on=['T4'])")
    name, assumptions = notebook.value("(cut.name, cut.assumptions)")
    assert "predicted to the end" in name and any("are those of PyTorch 2.10.0;" in text for text in assumptions)
    reply = notebook.run("%%memtrack --predict T4 --torch 1.13\nprint('ran')")
    assert reply.error == "UsageError" and "2.10 to 2.15, not of 1.13" in reply.said and not reply.stdout


def test_the_cells_error_goes_out_with_its_line_and_the_report_is_shown(notebook: Kernel):
    reply = notebook.run("%%memtrack --predict T4\nx = torch.ones(1 << 20, device='cuda')\n\n1 / 0\n")
    assert (reply.status, reply.error) == ("error", "ZeroDivisionError")
    assert reply.lines == [4]
    assert "memlab/" not in reply.traceback
    assert "The cell raised ZeroDivisionError: division by zero." in reply.report
    assert "Predicted up to where the cell ended with an error, nothing ran on a card: fits on T4" in reply.report


def test_a_cell_that_fails_before_it_allocates_has_no_chart_and_no_range(notebook: Kernel):
    reply = notebook.run("%%memtrack --predict 8GiB --name nothing\nimport no_such_module")
    assert reply.error == "ModuleNotFoundError"
    assert reply.report.startswith("Ended with an error before anything was allocated. ")
    assert not any("application/vnd.plotly.v1+json" in kinds for kinds in reply.kinds)
    assert "llocates nothing" not in reply.report and "the range does not cover it" not in reply.report


def test_an_out_of_memory_is_explained_without_asking_the_driver(notebook: Kernel):
    cell = "%%memtrack --predict 'RTX 4060' --raises-oom\nx = [torch.ones(1 << 30, device='cuda') for _ in range(4)]"
    reply = notebook.run(cell)
    assert (reply.status, reply.error) == ("error", "OutOfMemoryError")
    texts = [data["text/plain"] for data in reply.shown]
    explained = next(text for text in texts if "ran out of memory: 4.00 GiB requested" in text)
    assert "The device was full." in explained and "could not be read" not in explained
    assert "predicted: nothing ran on a card" in explained
    again = notebook.ok("%memoom").out
    assert "predicted for RTX 4060 · cuda:0 ran out of memory: 4.00 GiB requested" in again


def test_a_cell_finds_as_many_gpus_as_it_is_given(notebook: Kernel):
    cell = "x = torch.ones(1 << 20, device='cuda:1')\nstr(x.device)"
    reply = notebook.ok(f"%%memtrack --predict T4 --devices 2 --name pair\n{cell}")
    assert reply.out == "'cuda:1'" and "fits on 2 x T4: cuda:1 needs" in reply.report
    assert notebook.value(f"[*{RUNS}['pair'].by_device]") == [1]
    refused = notebook.run(f"%%memtrack --predict T4\n{cell}")
    assert "cell:2 asks for cuda:1, and one GPU is predicted" in refused.traceback
    assert "--devices goes with --predict CARD" in notebook.run(f"%%memtrack --devices 2\n{cell}").stderr


def test_a_device_that_an_earlier_cell_chose_is_the_cpu(notebook: Kernel):
    notebook.run('device = "cuda" if torch.cuda.is_available() else "cpu"')
    reply = notebook.run("%%memtrack --predict T4\nnn.Linear(64, 64).to(device)(torch.ones(1, 64, device=device))")
    assert "allocated nothing on T4" in reply.report
    assert 'What was put on "cpu" before stays there' in reply.report


def test_a_setting_that_makes_no_sense_is_a_usage_error(notebook: Kernel):
    notebook.run("%env PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync")
    reply = notebook.run("%%memtrack --predict T4\nprint('ran')")
    notebook.run("del __import__('os').environ['PYTORCH_CUDA_ALLOC_CONF']")
    assert reply.error == "UsageError"
    assert "PYTORCH_CUDA_ALLOC_CONF: backend:cudaMallocAsync is not simulated" in reply.said
    assert not reply.stdout


def test_a_budget_is_held_against_what_it_needs(notebook: Kernel):
    body = "x = [torch.ones(1 << 28, device='cuda') for _ in range(9)]"
    reply = notebook.run(f"%%memtrack --predict 'RTX 3050 Laptop' --budget 1GiB\n{body}")
    assert reply.error == "BudgetExceeded"
    assert "needs 9.00 GiB allocated, above its budget of 1.00 GiB" in reply.traceback
    assert "memlab/" not in reply.traceback
    assert "It would raise: CUDA out of memory" in reply.report


def test_the_error_that_a_cell_ended_with_is_in_its_report_once(notebook: Kernel):
    body = "x = [torch.ones(1 << 28, device='cuda') for _ in range(9)]"
    reply = notebook.run(f"%%memtrack --predict 'RTX 3050 Laptop' --raises-oom\n{body}")
    assert reply.error == "OutOfMemoryError"
    report = reply.shown[-1]["text/plain"]
    assert "The cell raised OutOfMemoryError: CUDA out of memory." in report
    assert report.count("Tried to allocate") == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("--predict nothing", "no card is known as 'nothing'"),
        ("--predict ''", "no card is known as ''"),
        ("--predict", "expected one argument"),
        ("--predict T4 --lines", "--lines does not go with --predict"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(notebook: Kernel, line, text):
    reply = notebook.run(f"%%memtrack {line}\nprint('ran')")
    assert (reply.error, reply.stdout) == ("UsageError", "")
    assert text in reply.said


def test_one_statement_is_predicted_too(notebook: Kernel):
    reply = notebook.ok("%memtrack --predict T4 --name one y = torch.ones(1 << 20, device='cuda')")
    assert "fits on T4" in reply.report
    assert notebook.value("'y' in globals()") is False


def test_the_table_of_cards(notebook: Kernel):
    notebook.run(TRAINING)
    assert " of 65 fit\n" in (notebook.run("%memfit predicted").out or "")
    reply = notebook.run("%memfit predicted T4, 8GiB")
    assert reply.out is not None
    assert reply.out.splitlines()[0] == "predicted · smallest GPU: 8.00 GiB card; 2 of 2 fit"
    assert "fits" in reply.out
    reply = notebook.run("%memfit no such thing")
    assert reply.error == "UsageError"
    assert "Nor is there a run of that name" in reply.said


def test_a_run_that_ran_out_of_memory_is_predicted_to_its_end(notebook: Kernel):
    cell = "%%memtrack --predict 2GiB --raises-oom --quiet --name cut\nx = torch.ones(1 << 28, device='cuda')\n"
    assert notebook.run(f"{cell}y = torch.ones(1 << 30, device='cuda')\n").error == "OutOfMemoryError"
    notebook.run("import memlab\ncut = memlab.fit(memlab.runs['cut'])\nmemlab.runs['cut'].cell_text = ''")
    assert "cut (it raised; its cell predicted to the end)" in (notebook.ok("cut").out or "")
    # 1 GiB had been allocated when it raised, the whole cell needs 5.
    answers = "cut['RTX 3050 Laptop'].fits, cut['RTX 4060'].fits, cut['T4'].needs_bytes.low >> 30"
    assert notebook.value(f"({answers})") == ("no", "yes", 5)
    least = notebook.ok("memlab.fit(memlab.runs['cut'], ['RTX 4060', 'T4']).to_pandas().fits.tolist()")
    assert least.out == "['unknown', 'unknown']"


def test_a_cell_that_fails_again_is_given_as_at_least(notebook: Kernel):
    notebook.run("%%memtrack --predict T4 --quiet --name broken\nx = torch.ones(1 << 28, device='cuda')\n1 / 0\n")
    assert notebook.value("memlab.fit(memlab.runs['broken'], ['T4']).rows[0].fits") == "unknown"


def test_ctrl_c_ends_the_child(notebook: Kernel):
    cell = "%%memtrack --predict T4\nprint('begun', flush=True)\nwhile True:\n    torch.ones(9, device='cuda')\n"
    reply = notebook.run(cell, interrupt_at="begun")
    assert reply.error == "KeyboardInterrupt"
    assert notebook.value("__import__('psutil').Process().children()") == []


def test_in_a_function_its_own_names_are_known(notebook: Kernel):
    statement = "%memtrack --predict T4 --name local y = torch.ones(rows, device='cuda')"
    notebook.ok(f"def f():\n    rows = 1 << 20\n    {statement}\nf()")
    assert notebook.value(f"{RUNS}['local'].peak_allocated_bytes") == 4 << 20


def test_files_and_threads_of_the_cell_work_and_are_held_off(notebook: Kernel):
    cell = """%%memtrack --predict T4 --name held
import threading, os
with open("log.txt", "w") as file:
    file.write("x")
made = []
thread = threading.Thread(target=lambda: made.append(torch.ones(1 << 20, device="cuda")))
thread.start(); thread.join()
os.path.exists("log.txt"), made[0].shape[0]
"""
    reply = notebook.ok(cell)
    assert reply.out == "(True, 1048576)"
    assert "Blocked in the child process: writing 'log.txt'" in reply.report
    assert notebook.value("__import__('os').path.exists('log.txt')") is False
    assert notebook.value(f"{RUNS}['held'].peak_allocated_bytes") == 4 << 20


def test_a_track_inside_of_a_prediction_is_refused(notebook: Kernel):
    reply = notebook.run("%%memtrack --predict T4\nimport memlab\nwith memlab.track():\n    pass\n")
    assert reply.error == "MemlabError"
    assert "the prediction is of all that runs in it" in reply.traceback
