"""The environment of a command on a simulated machine, its file, and which PyTorch it needs."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import launch, machine, torch_build
from memlab.simulated_gpu.elf import Linkage
from memlab.simulated_gpu.machine import Machine, SimulatedDevice
from memlab.simulated_gpu.torch_build import TorchBuild
from memlab.units import GiB, MiB

ONE = Machine((SimulatedDevice("One", 8 * GiB, 300 * MiB, (8, 9), 24),))
OTHER = Machine((SimulatedDevice("Other", 4 * GiB, 300 * MiB, (8, 9), 24),))


def test_the_library_and_this_interpreter_come_first():
    base = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/theirs", "HOME": "/home/me"}
    found = launch.prepared(base, "/machine", Path("/lib"))
    assert found == {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}/usr/bin",
        "LD_LIBRARY_PATH": "/lib:/theirs",
        "TRITON_LIBCUDA_PATH": "/lib",
        "MEMLAB_SIMULATED_GPU": "/machine",
        "HOME": "/home/me",
    }
    assert launch.prepared(found, "/machine", Path("/lib")) == found, "a command in a command"


def test_names_are_preloaded_once_before_others():
    found = launch.prepared(
        {"LD_PRELOAD": "a.so:libcudart.so.13"}, "/m", Path("/lib"), ["libcudart.so.13", "libcublas.so.13"]
    )
    assert found["LD_PRELOAD"] == "libcudart.so.13 libcublas.so.13 a.so"


def test_real_libraries_beside_torch_are_found(tmp_path):
    torch = TorchBuild("2.12.1", "13.0", "", tmp_path / "torch")
    linkages = [Linkage({}, (), ("$ORIGIN/../../nvidia/cu13/lib", "$ORIGIN"))]
    assert torch_build.libraries_beside(torch, linkages, ["libcudart.so.13"]) == []
    (tmp_path / "torch" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13").touch()
    (found,) = torch_build.libraries_beside(torch, linkages, ["libcudart.so.13", "libcublas.so.13"])
    assert found.resolve() == tmp_path / "nvidia" / "cu13" / "lib" / "libcudart.so.13"


@pytest.mark.skipif(sys.platform != "linux", reason="needs memfd")
def test_the_unnamed_file_is_the_machine_and_is_inherited():
    where = launch.unnamed_file(ONE)
    descriptor = int(where.rpartition("/")[2])
    try:
        assert machine.read(Path(where)) == ONE
        assert os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_a_shared_machine_is_made_once_and_never_replaced(tmp_path):
    path = tmp_path / "gpu"
    assert launch.shared_file(path, ONE) == str(path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")  # a process has used it
    assert launch.shared_file(path, ONE) == launch.shared_file(path, None) == str(path)
    assert path.read_bytes().endswith(b"x")
    with pytest.raises(SimulatedGpuError, match=r"is another machine \(One, 8\.00 GiB, capability 8\.9\)"):
        launch.shared_file(path, OTHER)
    assert [each.name for each in tmp_path.iterdir()] == ["gpu"]


def test_a_shared_machine_that_cannot_be_says_why(tmp_path):
    with pytest.raises(SimulatedGpuError, match=r"there is no machine .* yet: say what it has"):
        launch.shared_file(tmp_path / "gpu", None)
    with pytest.raises(SimulatedGpuError, match=r"cannot write .*: No such file"):
        launch.shared_file(tmp_path / "no" / "gpu", ONE)
    with pytest.raises(SimulatedGpuError, match=r"cannot write .*: File name too long"):
        launch.shared_file(tmp_path / ("x" * 300), ONE)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(
            SimulatedGpuError, match=r" is no file, and a simulated machine is one: give another name\."
        ):
            launch.shared_file(path, ONE)
    (tmp_path / "text").write_text("mine")
    with pytest.raises(SimulatedGpuError, match="is not the file of a simulated machine"):
        launch.shared_file(tmp_path / "text", ONE)
    assert (tmp_path / "text").read_text() == "mine"


def test_a_command_that_is_not_there():
    with pytest.raises(SimulatedGpuError, match=r"there is no command 'train\.py'\. Write python train\.py\."):
        launch.replace_process(["train.py"], {"PATH": "/nowhere"})
    with pytest.raises(SimulatedGpuError, match=r"no command 'jupyter'\. Install it: pip install jupyterlab\."):
        launch.replace_process(["jupyter", "lab"], {"PATH": "/nowhere"})


def version_file(folder: Path, text: str) -> Path:
    (folder / "lib").mkdir()
    (folder / "lib" / "libtorch_cuda.so").touch()
    (folder / "version.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip = None",
            "torch 2.13.0+cpu is a build for the CPU",
        ),
        (
            "__version__ = '2.13.0+rocm6'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4'",
            "was built for ROCm 6.4",
        ),
        ("__version__ = '2.8.0'\ncuda = '12.6'", "torch 2.8.0 was built for CUDA 12.6"),
        ("__version__ = '2.13.0'\ncuda = '13.0'", ""),
    ],
)
def test_which_builds_of_torch_can_be_simulated(tmp_path, monkeypatch, text, why):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    torch = torch_build.read(version_file(tmp_path, text))
    if not why:
        assert torch_build.suitable(torch) is torch
        return
    with pytest.raises(SimulatedGpuError) as error:
        torch_build.suitable(torch)
    said = str(error.value)
    assert why in said
    assert "needs Linux on x86-64 and a build of PyTorch for CUDA 13" in said
    assert "--predict, memlab.predict" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("system", "processor", "named"), [("Darwin", "arm64", "macOS on arm64"), ("Windows", "AMD64", "Windows on AMD64")]
)
def test_other_systems_are_named(tmp_path, monkeypatch, system, processor, named):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    torch = torch_build.read(version_file(tmp_path, "__version__ = '2.13.0'\ncuda = '13.0'"))
    with pytest.raises(SimulatedGpuError, match=f"this is {named}"):
        torch_build.suitable(torch)


@pytest.mark.parametrize("text", [None, "x = (", "\0"])
def test_a_folder_that_is_no_torch(tmp_path, text):
    if text is not None:
        (tmp_path / "version.py").write_text(text)
    with pytest.raises(SimulatedGpuError, match=r"no readable version\.py"):
        torch_build.read(tmp_path)


def test_this_torch_is_read_as_it_says_itself():
    import torch

    found = torch_build.installed()
    assert (found.version, found.cuda or None) == (torch.__version__, torch.version.cuda)
