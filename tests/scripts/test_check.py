"""`memlab check`, and every command on files that are none."""

from __future__ import annotations

import dataclasses
import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from rank_traces import cut_off, trained

import memlab
from memlab.__main__ import main
from memlab.api.prediction import Prediction
from memlab.api.run import Run
from memlab.api.runs import runs
from memlab.trace.file import load
from memlab.trace.trace import SIMULATED_GPU, Trace
from memlab.units import MiB


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, one that needs more, one that was cut off, and files that are no runs."""
    folder = tmp_path_factory.mktemp("files")
    for name, width in (("small", 100), ("large", 1000)):
        with memlab.track(name, device="cpu", show=False, save=folder / f"{name}.memlab") as run:
            torch.nn.Linear(100, width)(torch.randn(50, 100)).sum().backward()
        runs.discard(run)
    content = (folder / "small.memlab").read_bytes()
    (folder / "cut.memlab").write_bytes(content[: len(content) // 2])
    (folder / "head.memlab").write_bytes(content[:200])
    (folder / "noise.memlab").write_bytes(bytes(range(256)) * 20)
    (folder / "empty.memlab").write_bytes(b"")
    (folder / "folder.memlab").mkdir()
    (folder / "gone.memlab").symlink_to("nowhere")
    return folder


def checked(files: Path, run: str, baseline: str, *options: str) -> int:
    return main(["check", str(files / f"{run}.memlab"), "--baseline", str(files / f"{baseline}.memlab"), *options])


def test_growth_is_an_exit_status(files, capsys):
    assert checked(files, "small", "small") == checked(files, "small", "large") == 0
    assert capsys.readouterr().out.count("ok: ") == 2
    assert checked(files, "large", "small") == 1
    shown = capsys.readouterr().out
    assert "the peak grew by more than 2.0%" in shown
    assert "  module   Linear: " in shown
    assert "  line     not known: measured without lines" in shown


@pytest.mark.parametrize("run, baseline", [("cut", "small"), ("small", "cut"), ("cut", "cut")])
def test_of_a_run_that_was_cut_off_it_is_not_known(files, capsys, run, baseline):
    assert checked(files, run, baseline) == 3
    assert capsys.readouterr().out.startswith("not known: ")
    assert checked(files, run, baseline, "--json") == 3
    assert json.loads(capsys.readouterr().out)["is_regression"] is None


def test_a_run_on_the_cpu_is_no_baseline_for_one_on_a_gpu(files, capsys):
    predicted = memlab.predict(lambda: torch.ones(1 << 20, device="cuda"), "T4")
    predicted.save(files / "cuda.memlab")
    for run, baseline in (("cuda", "small"), ("small", "cuda")):
        assert checked(files, run, baseline) == 3
        assert "name two runs of one kind of device" in capsys.readouterr().out
    assert checked(files, "cuda", "cuda") == 0
    assert "note" not in capsys.readouterr().out


def test_another_gpu_and_a_simulated_one_are_named(files, capsys):
    for card in ("T4", "RTX 4060"):
        memlab.predict(lambda: torch.ones(1 << 20, device="cuda"), card).save(files / f"{card}.memlab")
    assert checked(files, "T4", "RTX 4060") == 0
    assert "note     the baseline is of RTX 4060, the run of T4: kernels and" in capsys.readouterr().out
    recorded = Path(__file__).parents[1] / "frozen" / "traces" / "cuda-out_of_memory.memlab"
    (files / "simulated.memlab").write_bytes(recorded.read_bytes())
    checked(files, "simulated", "T4")
    assert f"note     {SIMULATED_GPU}" in capsys.readouterr().out
    checked(files, "simulated", "T4", "--json")
    facts = json.loads(capsys.readouterr().out)
    assert (facts["baseline"]["provenance"], facts["run"]["provenance"]) == ("predicted", "simulated")
    assert SIMULATED_GPU in facts["notes"]


def test_a_baseline_of_another_torch_is_named(files, capsys):
    trace = load(files / "small.memlab")
    versions = {**trace.made_by.versions, "torch": "1.13.1+cu117"}
    other = dataclasses.replace(trace, made_by=dataclasses.replace(trace.made_by, versions=versions))
    Run("small", other).save(files / "older.memlab")
    assert checked(files, "small", "older") == 0
    note = capsys.readouterr().out.splitlines()[-1]
    assert note.startswith("  note     the baseline is of PyTorch 1.13.1, the run of 2.")
    checked(files, "small", "older", "--json")
    assert json.loads(capsys.readouterr().out)["baseline"]["torch"] == "1.13.1"
    assert checked(files, "small", "small") == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("version, said", [(1, "measure again"), (3, "upgrade memlab")])
def test_a_baseline_of_another_format_is_refused(files, refused, version, said):
    content = (files / "small.memlab").read_bytes()
    at = content.index(struct.pack("<I", 2))  # behind the magic word
    (files / "format.memlab").write_bytes(content[:at] + struct.pack("<I", version) + content[at + 4 :])
    line = refused(2, "check", str(files / "small.memlab"), "--baseline", str(files / "format.memlab"))
    assert line.startswith("memlab check: ") and f"has format {version}, " in line and said in line


def folder_of(folder: Path, *traces: Trace) -> str:
    folder.mkdir()
    for trace in traces:
        Run("train", trace).save(folder / f"train.rank{trace.notes['rank']['rank']}.memlab")
    return str(folder)


def test_of_a_folder_the_rank_with_the_highest_peak_is_compared(tmp_path, capsys):
    ranks = [trained(rank, world_size=2) for rank in range(2)]
    grown = [ranks[0], trained(1, size=3 * MiB, world_size=2)]
    main_runs, runs = folder_of(tmp_path / "main", *ranks), folder_of(tmp_path / "runs", *grown)
    assert main(["check", main_runs, "--baseline", main_runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_known"] == {"line": "measured without lines"}
    assert main(["check", runs, "--baseline", main_runs]) == 1
    out, err = capsys.readouterr()
    assert "category activation: 1.00 MiB -> 3.00 MiB (+2.00 MiB)" in out and "note" not in out
    assert err.splitlines()[1].endswith("runs rank 1 of 2, whose peak is the highest (train.rank1.memlab)")
    assert main(["check", main_runs, "--baseline", runs]) == 0


def test_what_grows_on_a_rank_that_is_not_the_highest_is_a_regression(tmp_path, capsys):
    ranks = [trained(0, size=9 * MiB, world_size=3), *(trained(rank, world_size=3) for rank in (1, 2))]
    main_runs = folder_of(tmp_path / "main", *ranks)
    runs = folder_of(tmp_path / "runs", *ranks[:2], trained(2, size=3 * MiB, world_size=3))
    assert main(["check", runs, "--baseline", main_runs]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "the peak of rank 2 grew by more than 2.0%: 5.00 MiB -> 7.00 MiB allocated (+40.0%)",
        "  module   net.0: 1.00 MiB -> 3.00 MiB (+2.00 MiB) on rank 2",
        "  category activation: 1.00 MiB -> 3.00 MiB (+2.00 MiB) on rank 2",
        "  line     not known: measured without lines",
        "  ranks    beyond it: rank 2; most rank 2: 5.00 MiB -> 7.00 MiB allocated (+40.0%)",
        "  highest  that of rank 0 is not beyond it: 13.00 MiB -> 13.00 MiB allocated (+0.0%)",
    ]
    assert main(["check", "--json", runs, "--baseline", main_runs]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["highest_rank"], facts["grown_ranks"]) == (0, [2])
    assert facts["grew_most"]["module"] == {
        "name": "net.0", "before_bytes": MiB, "after_bytes": 3 * MiB, "rank": 2,
    }  # fmt: skip
    worst = {"before_bytes": 9 * MiB, "before_rank": 0, "after_bytes": 9 * MiB, "after_rank": 0}
    assert facts["worst"]["category"]["activation"] == worst
    assert main(["check", "--tolerance", "40%", runs, "--baseline", main_runs]) == 0
    assert "and so is that of each of 3 ranks" in capsys.readouterr().out


def test_the_worst_of_each_name_is_of_any_rank(tmp_path, capsys):
    before = folder_of(tmp_path / "main", *(trained(rank, size=MiB * (4 - rank), world_size=3) for rank in range(3)))
    after = folder_of(tmp_path / "runs", *(trained(rank, size=MiB * (2 + rank), world_size=3) for rank in range(3)))
    assert main(["check", "--json", after, "--baseline", before]) == 1  # the highest peak is as high, of another rank
    facts = json.loads(capsys.readouterr().out)
    assert facts["worst"]["module"]["net.0"] == {
        "before_bytes": 4 * MiB, "before_rank": 0, "after_bytes": 4 * MiB, "after_rank": 2,
    }  # fmt: skip
    assert (facts["before_bytes"], facts["after_bytes"], facts["grown_ranks"]) == (8 * MiB, 8 * MiB, [2])


def test_a_job_of_more_ranks_is_named(tmp_path, capsys):
    two = folder_of(tmp_path / "two", *(trained(rank, world_size=2) for rank in range(2)))
    four = folder_of(tmp_path / "four", *(trained(rank) for rank in range(4)))
    assert main(["check", four, "--baseline", two]) == 0
    assert "note     the baseline is of a job of 2 ranks, the run of one of 4 ranks: " in capsys.readouterr().out


def test_a_rank_that_was_cut_off_or_is_missing_may_have_been_higher(tmp_path, capsys):
    whole = folder_of(tmp_path / "whole", *(trained(rank) for rank in range(4)))
    part = folder_of(tmp_path / "part", trained(0), trained(1), cut_off(3, [MiB, MiB]))
    grown = folder_of(tmp_path / "grown", trained(0, size=9 * MiB), cut_off(3, [MiB, MiB]))
    assert main(["check", part, "--baseline", whole]) == 3
    out, err = capsys.readouterr()
    assert out.startswith("not known: 5.00 MiB -> ≥ 5.00 MiB allocated")
    assert "; ranks 2, 3 may have been higher: cut off, or without a file" in err.splitlines()[1]
    assert main(["check", grown, "--baseline", whole]) == 1
    assert main(["check", whole, "--baseline", part]) == 0
    assert main(["check", grown, "--baseline", part]) == 1  # of rank 0 both are known


def test_a_script_that_uses_no_gpu_is_not_said_to_fit(tmp_path, refused):
    script = tmp_path / "train.py"
    script.write_text("import torch\nkept = torch.ones(1 << 20, device='cpu')\n")
    for words in (["--card", "T4"], [], ["--nproc-per-node", "1,2", "--card", "T4"]):
        line = refused(3, "predict", *words, str(script))
        assert 'allocated nothing on a GPU. Let it use the device "cuda"' in line
    script.write_text(script.read_text().replace("'cpu'", "'cuda'"))
    assert main(["predict", "--card", "T4", str(script)]) == 0


def test_json_of_a_prediction_is_alone_on_stdout(tmp_path, capfd):
    script = tmp_path / "train.py"
    script.write_text("import torch\nprint('from the script')\nkept = torch.ones(1 << 20, device='cuda')\n")
    assert main(["predict", "--json", "--card", "T4", str(script)]) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out)["fits"] == "yes"
    assert "from the script" in shown.err


@pytest.mark.skipif(sys.platform != "linux", reason="a disk that is full is made by a limit of resources")
def test_a_prediction_that_cannot_be_kept_is_answered_all_the_same(tmp_path, capfd):
    import resource

    script, limits = tmp_path / "train.py", resource.getrlimit(resource.RLIMIT_FSIZE)
    script.write_text("import torch\nkept = torch.ones(1 << 20, device='cuda')\n")
    original = Prediction.save

    def onto_a_full_disk(*words):
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        try:
            return original(*words)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(Prediction, "save", onto_a_full_disk)
        main(["predict", "--card", "T4", "--json", "--out", str(tmp_path / "kept.memlab"), str(script)])
    shown = capfd.readouterr()
    assert ended.value.code == 3
    assert json.loads(shown.out)["fits"] == "yes"
    assert "memlab predict: cannot save to " in shown.err


@pytest.mark.parametrize("name", ["head", "noise", "empty", "folder", "gone", "nothing"])
@pytest.mark.parametrize("command", ["show", "compare", "fit", "check"])
def test_what_is_no_run_is_one_line(files, refused, command, name):
    bad, good = str(files / f"{name}.memlab"), str(files / "small.memlab")
    words = {"compare": [good, bad], "check": [good, "--baseline", bad]}.get(command, [bad])
    line = refused(2, command, *words)
    assert line.startswith(f"memlab {command}: ") and name in line


def test_a_page_that_cannot_be_written_is_one_line(files, refused):
    for place in (files, files / "no" / "page.html"):
        line = refused(2, "show", "--html", str(place), str(files / "small.memlab"))
        assert line.startswith("memlab show: cannot write ")


LOADS = "import torch\nm = torch.nn.Linear(4, 4)\nm.load_state_dict({})"


@pytest.mark.parametrize(
    "text, said, whole",
    [
        ("raise SystemExit(4)", ["the script ended with status 4."], []),
        ("x = (", ["at script.py:1: SyntaxError: ", "    x = (", ""], ['script.py", line 1', "SyntaxError"]),
        (
            "def f():\n    return 1 / 0\nf()",
            ["the script raised in the dry run at script.py:2, in f(): ZeroDivisionError: ", "    return 1 / 0", ""],
            ['script.py", line 3', "in f", "ZeroDivisionError"],
        ),
        (LOADS, ["at script.py:3: RuntimeError: ", "    m.load_state_dict({})", ""], ["in load_state_dict"]),
    ],
)
def test_a_script_that_cannot_be_predicted_is_shown_where_it_raised(tmp_path, capsys, text, said, whole):
    (tmp_path / "script.py").write_text(text)
    command = ["predict", "--card", "8GiB", str(tmp_path / "script.py")]
    with pytest.raises(SystemExit) as ended:
        main(command)
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 3
    assert len(lines) == len(said)
    assert all(one in line for one, line in zip(said, lines, strict=True))
    with pytest.raises(SystemExit):
        main([*command[:1], "--traceback", *command[1:]])
    err = capsys.readouterr().err
    assert all(one in err for one in whole)
    assert err.count("Traceback") <= 1
    assert str(Path(memlab.__file__).parent) not in err


@pytest.mark.parametrize("name", ["json", "os.path.nothing", "nothing", "json.nothing", "json..tool", ""])
def test_what_cannot_be_run_as_a_module_is_refused(refused, name):
    assert f"there is no module {name!r} here" in refused(2, "run", "-m", name)
