"""`memlab simulate`: what is asked wrongly gets one line; kernels are written and removed."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from processes import python

from memlab.__main__ import main
from memlab.cli import simulate
from memlab.simulated_gpu import kernelspec, launch


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no command to run"),
        (["--", "true"], 'which GPU? Name one with --card "RTX 4060"'),
        (["--card", "RTX 4O60", "--", "true"], "no card is known as 'RTX 4O60'. Did you mean"),
        (["--card", "T4", "--total", "8GiB", "--", "true"], "--card and --total exclude each other"),
        (["--card", "T4", "--capability", "8.0", "--", "true"], "--card and --capability exclude each other"),
        (["--card", "P100", "--", "true"], "have kernels for capability 7.5 to 12.1, and P100 (simulated) has 6.0"),
        (["--card", "MI300X", "--", "true"], "only CUDA is simulated"),
        (["--total", "8 cats", "--", "true"], "not a size"),
        (
            ["--total", "8GiB", "--capability", "new", "--", "true"],
            "a capability is two numbers such as 8.9, got 'new'",
        ),
        (["--total", "8GiB", "--context", "9GiB", "--", "true"], "the context must be smaller"),
        (["--card", "T4", "--devices", "9", "--", "true"], "1 to 8 devices, got 9"),
        (["--card", "T4", "--devices", "9" * 20, "--", "true"], "1 to 8 devices, got 9999"),
        (["--machine", "there-is-none", "--devices", "2", "--", "true"], "which GPU?"),
        (["--card", "T4", "--user", "--", "true"], "add --install-kernel"),
        (["--card", "T4", "--json", "--", "true"], "add --install-kernel"),
        (["--card", "T4", "--install-kernel", "--", "true"], "a kernel takes no command"),
        (["--card", "T4", "--install-kernel", "--machine", "x"], "a kernel has a machine of its own"),
    ],
)
def test_a_wrong_question_gets_one_line(arguments, said, refused):
    line = refused(1, "simulate", *arguments)
    assert line.startswith("memlab simulate: ") and said in line


@pytest.mark.parametrize("arguments", [["--devices", "two"], ["--card"], ["--user", "--sys-prefix"]])
def test_wrong_options_get_one_line(arguments, refused):
    line = refused(2, "simulate", *arguments)
    assert line.startswith("memlab simulate: ") and line.endswith("memlab simulate --help shows how it is used.\n")


def test_help_has_examples_and_needs_no_torch():
    found = python(
        "-c",
        "import atexit, sys; from memlab.__main__ import main\n"
        "atexit.register(lambda: print('torch' in sys.modules)); main(['simulate', '--help'])",
    )
    assert 'memlab simulate --card "RTX 4060" -- jupyter lab' in found
    assert found.endswith("False\n")


STARTED = """
import sys
from memlab.simulated_gpu import launch
launch.environment = lambda base, where: {**base, "where": where}
launch.replace_process = lambda command, variables: (print(command), sys.exit(0))
from memlab.__main__ import main
try:
    main(["simulate", "--card", "RTX 4060", "--devices", "2", "--", "python", "-c", "pass", "--card"])
finally:
    print([name for name in ("torch", "numpy", "IPython") if name in sys.modules])
"""


def test_a_command_is_started_without_torch():
    assert python("-c", STARTED).splitlines() == ["['python', '-c', 'pass', '--card']", "[]"]


@pytest.fixture
def jupyter(tmp_path, monkeypatch):
    """A prefix for kernels, and no folders of this user; the library is there."""
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(launch, "environment", lambda base, where: {})
    return tmp_path / "prefix"


def test_a_kernel_is_written_and_removed(jupyter, capsys):
    options = ["--card", "RTX 4060", "--devices", "2", "--context", "300MiB", "--prefix", str(jupyter)]
    assert main(["simulate", "--install-kernel", *options]) == 0
    said = capsys.readouterr().out
    assert '"Python (simulated 2 × RTX 4060, 8 GiB, context 300MiB)"' in said
    folder = jupyter / "share/jupyter/kernels/memlab-simulated-2-rtx-4060-8-gib-context-300mib"
    spec = json.loads((folder / "kernel.json").read_text())
    assert spec["argv"][1:] == [
        "-m", "memlab", "simulate", "--card", "RTX 4060", "--context", "300MiB", "--devices", "2", "--",
        sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}",
    ]  # fmt: skip
    assert spec["display_name"] == "Python (simulated 2 × RTX 4060, 8 GiB, context 300MiB)"
    assert main(["simulate", "--remove-kernel", *options]) == 0
    assert capsys.readouterr().out == f"removed {folder}\n"
    assert not folder.exists()
    assert main(["simulate", "--remove-kernel", "--prefix", str(jupyter)]) == 0
    assert capsys.readouterr().out == "no kernel with a simulated GPU was found\n"


def test_what_was_written_and_removed_is_given_as_json(jupyter, capsys):
    folders = []
    for action in ("--install-kernel", "--remove-kernel", "--remove-kernel"):
        assert main(["simulate", action, "--json", "--card", "T4", "--prefix", str(jupyter)]) == 0
        folders.append(json.loads(capsys.readouterr().out))
    folder = str(jupyter / "share/jupyter/kernels/memlab-simulated-t4-16-gib")
    assert folders == [{"written": folder, "gpu": "T4, 16 GiB"}, {"removed": [folder]}, {"removed": []}]


def test_only_kernels_of_memlab_are_removed(jupyter):
    kernels = jupyter / "share/jupyter/kernels"
    for name, text in {
        "theirs": "{}",
        "memlab-simulated-theirs": '{"argv": [], "display_name": "", "language": ""}',
    }.items():
        (kernels / name).mkdir(parents=True)
        (kernels / name / "kernel.json").write_text(text)
    kernelspec.install("T4, 16 GiB", ["--card", "T4"], str(jupyter))
    kernelspec.install("T4, 16 GiB", ["--card", "colab"], str(jupyter))
    assert [path.name for path in kernelspec.remove(None, str(jupyter))] == ["memlab-simulated-t4-16-gib"]
    assert {path.name for path in kernels.iterdir()} == {"theirs", "memlab-simulated-theirs"}


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("../../etc, 8 GiB", "memlab-simulated-etc-8-gib"),
        ("é\n{}", "memlab-simulated-gpu"),
        ("x" * 900, f"memlab-simulated-{'x' * 60}"),
    ],
)
def test_hostile_names_are_made_safe(jupyter, label, name):
    folder = kernelspec.install(label, [], str(jupyter))
    assert folder == jupyter / "share/jupyter/kernels" / name
    shown = json.loads((folder / "kernel.json").read_text())["display_name"]
    assert shown.isprintable()
    assert len(shown) < 120


def test_a_folder_that_cannot_be_written(jupyter, refused):
    jupyter.write_text("")
    line = refused(1, "simulate", "--install-kernel", "--card", "T4", "--prefix", str(jupyter))
    assert "cannot write the kernel under" in line


def test_where_a_kernel_goes(monkeypatch, tmp_path):
    for prefix, base, expected in (
        ("/venv", "/usr", "/venv"),
        ("/usr", "/usr", None),
        (str(tmp_path), str(tmp_path), str(tmp_path)),
    ):
        (tmp_path / "conda-meta").mkdir(exist_ok=True)
        monkeypatch.setattr(kernelspec, "sys", SimpleNamespace(prefix=prefix, base_prefix=base))
        assert kernelspec.default_prefix() == expected


def test_labels_have_the_size_once():
    for options, label in (
        (["--card", "A100 80GB"], "A100 80GB"),
        (["--total", "6GiB", "--capability", "8.9"], "GPU 8.9, 6 GiB"),
        (["--total", "1.5GiB"], "GPU 8.6, 1.50 GiB"),
    ):
        assert simulate.label_of(simulate.make_parser().parse_args(options)) == label
