"""The files around the code agree: pyproject.toml, environment.yml, constraints.txt, Makefile and .ci/run."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import python

ROOT = Path(__file__).resolve().parent.parent
CONDA_NAMES = {"torch": "pytorch"}  # where conda-forge's name is another


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements(*extras: str) -> dict[str, Requirement]:
    """Normal name -> requirement: what memlab needs, and the extras that are named."""
    project = pyproject()["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {canonicalize_name(need.name): need for need in map(Requirement, lines)}


def environment() -> list:
    return yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]


def constraints(text: str) -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    needs = [Requirement(line) for line in lines if line]
    names = [canonicalize_name(need.name) for need in needs]
    assert len(set(names)) == len(names), "a name is pinned twice"
    return dict(zip(names, needs, strict=True))


def pins() -> dict[str, Requirement]:
    return constraints((ROOT / "constraints.txt").read_text())


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_environment_yml_asks_for_what_pyproject_asks_for():
    python = pyproject()["project"]["requires-python"]
    conda = {Requirement(line).name: Requirement(line).specifier for line in environment() if isinstance(line, str)}
    expected = {CONDA_NAMES.get(name, name): need.specifier for name, need in requirements("lab").items()}
    assert conda == {
        **expected,
        "python": Requirement(f"python{python}").specifier,
        "pip": Requirement("pip").specifier,
    }


def test_environment_yml_installs_memlab_itself():
    assert [line["pip"] for line in environment() if isinstance(line, dict)] == [["-e ."]]


def test_the_version_stands_in_one_place():
    assert "version" not in pyproject()["project"]
    assert pyproject()["project"]["dynamic"] == ["version"]
    pattern = pyproject()["tool"]["hatch"]["version"]["pattern"]
    source = ROOT / pyproject()["tool"]["hatch"]["version"]["path"]
    found = re.findall(pattern, source.read_text())
    code = "import memlab; print(memlab.__version__)"
    assert found == [python("-c", code).strip()]


def test_constraints_pin_every_direct_dependency_within_its_range():
    pinned = pins()
    for name, need in requirements(*pyproject()["project"]["optional-dependencies"]).items():
        if name in ("torch", "torchvision"):  # torchvision's version is torch's choice
            continue
        assert name in pinned, f"{name} is not in constraints.txt"
        (pin,) = pinned[name].specifier
        assert need.specifier.contains(pin.version, prereleases=True), f"{pinned[name]} is outside {need}"


def test_constraints_pin_exactly_and_leave_torch_to_the_makefile():
    assert [str(pin) for pin in pins().values() if [one.operator for one in pin.specifier] != ["=="]] == []
    assert not pins().keys() & {"torch", "triton", "setuptools", "memlab", "pip"}
    (default,) = re.findall(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert requirements()["torch"].specifier.contains(default)


def test_a_name_pinned_twice_is_found():
    with pytest.raises(AssertionError, match="pinned twice"):
        constraints("Send2Trash==1\nsend2trash==2  # again")


@pytest.mark.parametrize(
    "target", ["lab", "test", "check", "format", "bench", "gpu", "course", "course-html", "clean", "help"]
)
def test_the_makefile_has_the_target(target):
    done = make("--dry-run", target)
    assert done.returncode == 0, done.stderr
    assert f"make {target} " in make("help").stdout


def test_the_makefile_refuses_a_python_out_of_range_in_one_line(tmp_path):
    old = tmp_path / "old python"
    old.write_text('#!/bin/sh\ncase "$*" in *platform*) echo 3.9.2 ;; *) exit 1 ;; esac\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "--silent", "-f", ROOT / "Makefile", "ready-lab", f"PYTHON={old}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("memlab:")]
    assert done.returncode != 0
    assert len(said) == 1
    assert f"needs Python 3.11, 3.12 or 3.13; {old} is 3.9.2" in said[0]
    assert not (tmp_path / ".venv").exists()


def test_ci_calls_what_people_call():
    script = (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert "set -euo pipefail" in script
    assert "make check" in script
    assert "make test" in script


def test_what_is_promised_to_packagers_is_there():
    project = pyproject()["project"]
    assert (ROOT / "memlab/py.typed").exists()
    licence = (ROOT / "LICENSE").read_text()
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence


def test_every_marker_that_is_left_out_by_default_is_run_by_ci_or_make():
    options = pyproject()["tool"]["pytest"]["ini_options"]
    left_out = set(re.findall(r"not (\w+)", options["addopts"][-1]))
    assert left_out == {line.partition(":")[0] for line in options["markers"]} - {"quick", "release", "sample(n)"}
    scripts = (*(ROOT / ".ci").iterdir(), ROOT / "Makefile")
    commands = "".join(path.read_text() for path in scripts if path.is_file())
    assert {marker for marker in left_out if not re.search(rf"-m {marker}\b", commands)} == set()
    assert '--release -m "release and' in commands


def test_the_list_of_slow_tests_names_tests_that_exist():
    lines = (ROOT / "tests/slow_tests.txt").read_text().splitlines()
    listed = [line.split("::") for line in lines if not line.startswith("#")]
    assert listed
    assert [name for file, name in listed if f"def {name}(" not in (ROOT / "tests" / file).read_text()] == []
