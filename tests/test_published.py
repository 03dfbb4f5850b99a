"""What makes memlab a package for others: addresses, workflows, citation, recipe, README, wheel and sdist."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement

import memlab

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHECKSUM = "ab" * 32

pytestmark = pytest.mark.skipif(
    not (ROOT / ".ci/published.toml").exists(), reason="an sdist has no workflows and no recipe"
)


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", ROOT / ".ci/published.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path, published: ModuleType) -> Path:
    """What a release is made of, to be changed."""
    more = ("memlab/__init__.py", "CHANGELOG.md", "LICENSE", ".ci/published.toml", ".ci/wheel_hook.py")
    for name in (*published.PLACES, *more):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def schema(name: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """Check files against a schema that check-jsonschema ships: no network is needed."""
    pytest.importorskip("check_jsonschema", reason="it is in the extra test: make ready-test")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", name, *map(str, files)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


# --- what nobody knows yet -----------------------------------------------------------------------------------------------


def test_every_file_repeats_the_table(published):
    assert list(published.disagreements()) == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("README.md", "/gh/OWNER-UNKNOWN/", "/gh/somebody-else/"),
        ("SECURITY.md", "contact@example.invalid", "me@example.org"),
        ("recipe/recipe.yaml", "sha256: 0000", "sha256: 1000"),
        ("pyproject.toml", "OWNER-UNKNOWN.github.io", "somebody.github.io"),
    ],
)
def test_a_file_that_differs_is_found(published, tree, file, old, new):
    text = (tree / file).read_text()
    assert old in text
    (tree / file).write_text(text.replace(old, new, 1))
    (line,) = published.disagreements(tree)
    assert line.startswith(f"{file} has ")


def test_a_value_is_set_everywhere_at_once(published, tree):
    for name, value in {"owner": "octo-cat", "contact": "team@example.org", "sdist_sha256": CHECKSUM}.items():
        published.fill(name, value, tree)
    assert list(published.disagreements(tree)) == []
    texts = "".join((tree / name).read_text() for name in (*published.PLACES, ".ci/published.toml"))
    assert [one for one in published.PLACEHOLDERS.values() if one in texts] == []
    assert "https://octo-cat.github.io/memlab/" in texts and "mybinder.org/v2/gh/octo-cat/memlab/" in texts


def test_placeholders_stand_nowhere_else(published):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not listed:
        pytest.skip("not a git checkout")
    allowed = {*published.PLACES, ".ci/published.toml", ".ci/published.py", "tests/test_published.py"}
    small = [name for name in listed if name not in allowed and not name.startswith("benchmarks/results")]
    texts = {name: (ROOT / name).read_bytes() for name in small if (ROOT / name).is_file()}
    assert [name for name, text in texts.items() if b"OWNER-UNKNOWN" in text or b"example.invalid" in text] == []


def test_a_release_with_placeholders_is_refused():
    done = subprocess.run(
        [sys.executable, ".ci/published.py", "release"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    unfinished = [
        line for line in done.stderr.splitlines() if "is a placeholder" in line or "none of a release" in line
    ]
    known = tomllib.loads((ROOT / ".ci/published.toml").read_text())
    if "OWNER-UNKNOWN" in known.values():
        assert done.returncode == 1 and unfinished, done.stderr


def test_a_finished_release_is_accepted_and_another_sdist_is_not(published, tree):
    code = tree / "memlab/__init__.py"
    code.write_text(re.sub(r'__version__ = ".*"', '__version__ = "1.0"', code.read_text()))
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 1.0 (2030-01-31)\n")
    published.fill("owner", "octo-cat", tree)
    published.fill("contact", "team@example.org", tree)
    (line,) = [line for line in published.unfinished(tree) if "placeholder" in line]
    assert "sdist_sha256" in line
    published.fill("sdist_sha256", published.checksum(tree), tree)
    assert list(published.unfinished(tree)) == []
    code.write_text(code.read_text() + "\n")
    (line,) = published.unfinished(tree)
    assert "is not that of the sdist" in line


# --- workflows, citation, recipe -----------------------------------------------------------------------------------------


def test_workflows_and_citation_follow_their_schemas():
    assert {one.stem for one in WORKFLOWS} == {"tests", "docs", "wheels", "release"}
    done = schema("vendor.github-workflows", *WORKFLOWS)
    assert done.returncode == 0, done.stdout
    done = schema("vendor.citation-file-format", ROOT / "CITATION.cff")
    assert done.returncode == 0, done.stdout


def test_a_wrong_workflow_is_refused(tmp_path):
    wrong = tmp_path / "tests.yml"
    wrong.write_text(WORKFLOWS[-1].read_text().replace("runs-on:", "runs_on:"))
    done = schema("vendor.github-workflows", wrong)
    assert done.returncode == 1 and "runs_on" in done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda one: one.stem)
def test_workflows_call_make_and_ci_alone(workflow):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [re.sub(r"\$\{\{.*?\}\}", "VALUE", step["run"]) for step in steps(workflow) if "run" in step]
    allowed = re.compile(rf"\.ci/run|make ({'|'.join(targets)})( [A-Z]+=(\"[^\"]*\"|\S+))*")
    assert [line for line in commands if not allowed.fullmatch(line)] == []


def test_the_tests_workflow_covers_every_python_and_torch():
    matrix = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    pythons = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d", line)]
    assert matrix["python"] == pythons
    (torch,) = [Requirement(line) for line in PROJECT["dependencies"] if line.startswith("torch")]
    assert all(torch.specifier.contains(version) for version in matrix["torch"])
    low, high = (int(re.search(rf"{sign}2\.(\d+)", str(torch.specifier))[1]) for sign in (">=", "<"))
    assert [int(version.split(".")[1]) for version in matrix["torch"]] == list(range(low, high))


def test_the_version_of_citation_and_recipe_is_that_of_the_package():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == memlab.__version__
    assert yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())["context"]["version"] == memlab.__version__


def test_the_recipe_asks_for_what_pyproject_asks_for():
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
    have = {Requirement(line.replace(" ", "")) for line in recipe["requirements"]["run"]}
    needs = {Requirement(re.sub(r"^torch\b", "pytorch", line)) for line in PROJECT["dependencies"]}
    assert have == needs | {Requirement(f"python{PROJECT['requires-python']}")}
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {at}" for name, at in PROJECT["scripts"].items()]
    assert f"memlab-{'${{ version }}'}.tar.gz" in recipe["source"]["url"]


def test_the_pre_commit_hooks_run_the_tools_of_make_check():
    config = ROOT / ".pre-commit-config.yaml"
    pytest.importorskip("pre_commit.clientlib").load_config(config)
    entries = " ".join(hook["entry"] for repo in yaml.safe_load(config.read_text())["repos"] for hook in repo["hooks"])
    assert all(f"-m {tool}" in entries for tool in ("ruff format", "ruff check", "check_jsonschema"))


# --- what readers see ----------------------------------------------------------------------------------------------------


def test_the_readme_is_short_and_begins_with_a_picture_two_commands_and_three_cells():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 500
    first = text.partition("## ")[0]
    (picture,) = re.findall(r"!\[[^\]]+\]\((docs/[^)]+)\)", first)
    assert (ROOT / picture).exists()
    assert len(re.findall(r"^    \S", first, re.MULTILINE)) == 2
    assert first.count("```python") == 3
    assert [link for link in re.findall(r"\]\(([\w/]+\.\w+)\)", text) if not (ROOT / link).exists()] == []


def test_the_reference_names_everything_public():
    text = (ROOT / "docs/api.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: (\w+)", text, re.MULTILINE))
    private = {"__version__", "load_ipython_extension", "unload_ipython_extension"}
    assert listed == set(memlab.__all__) - private


def test_every_page_is_in_the_menu():
    listed = set((ROOT / "docs/index.md").read_text().split())
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages - listed == set(), "add them to a toctree of docs/index.md"


# --- wheel and sdist -----------------------------------------------------------------------------------------------------

OUTSIDE = """
import importlib.metadata, pathlib, sys
import memlab, torch
with memlab.track("outside", device="cpu", live=False) as run:
    torch.ones(1 << 20)
assert run.peak_bytes == 4 << 20, run.peak_bytes
saved = memlab.load(run.save(pathlib.Path("outside.memlab")))
assert saved.peak_bytes == run.peak_bytes
urls = importlib.metadata.metadata("memlab").get_all("Project-URL")
assert any(line.startswith("Source, https://") for line in urls), urls
print(memlab.__file__)
"""


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_was_built_installs_and_runs_outside_the_repository(kind, tmp_path):
    build = f"import sys; from hatchling.build import build_{kind} as build; print(build(sys.argv[1]))"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def ran(*command: str | Path, cwd: Path = tmp_path) -> str:
        done = subprocess.run(
            [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        return done.stdout.strip()

    package = tmp_path / ran(sys.executable, "-c", build, tmp_path, cwd=ROOT).split()[-1]
    # A venv of its own, which finds torch and the others where they are, behind what is installed in it.
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    site = Path(ran(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    places = [path for path in sys.path if path.endswith("site-packages")]
    (site / "beside.pth").write_text("".join(f"import site; site.addsitedir({place!r})\n" for place in places))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
    ]
    ran(*pip, package)
    assert Path(ran(python, "-c", OUTSIDE).splitlines()[-1]).is_relative_to(site)
    assert ran(tmp_path / "venv/bin/memlab", "--version") == f"memlab {memlab.__version__}"
    assert not (site / "tests").exists() and not (site / "notebooks").exists()
