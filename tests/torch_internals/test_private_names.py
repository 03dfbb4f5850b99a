"""Private names of other libraries: used in one package, listed in one table, asked for one by one."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import python

from memlab import torch_internals
from memlab.torch_internals import compiler, dispatch, private_names, process, shell
from memlab.torch_internals.private_names import DISTRIBUTED, FAKE_CUDA, MEASURING, MissingPrivateName, private

PACKAGE = Path(private_names.__file__).parents[1]
LIBRARIES = ("torch", "IPython", "ipykernel")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names_in(tree: ast.Module) -> Iterator[str]:
    """The dotted private names of the libraries that a file imports or reaches from an import."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.asname or alias.name.partition(".")[0]: alias for alias in node.names}
            known |= {short: alias.name if alias.asname else short for short, alias in names.items()}
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in known:
                yield f"{known[root]}.{rest}"


def found(*paths: Path) -> dict[str, str]:
    """Each private name up to its first private part and one more, and a file that uses it."""
    names = {}
    for path in paths:
        for name in private_names_in(ast.parse(path.read_text(encoding="utf-8"))):
            parts = name.split(".")
            if parts[0] in LIBRARIES and any(map(is_private, parts)) and parts[-1] != "_C":
                names[name] = str(path.relative_to(PACKAGE))
    return names


def test_they_are_used_in_one_package():
    assert found(*(path for path in PACKAGE.rglob("*.py") if path.parent.name != "torch_internals")) == {}


def test_each_is_in_the_table_once_and_is_used():
    listed = [*MEASURING, *FAKE_CUDA, *DISTRIBUTED]
    files = list((PACKAGE / "torch_internals").glob("*.py"))
    unlisted = {
        name
        for name in found(*files)
        if not any(name == one or name.startswith(f"{one}.") or one.startswith(f"{name}.") for one in listed)
    }
    assert unlisted <= {"torch._C._cudnn.getCompileVersion", "torch._C._cudnn"}  # asked for and done without
    assert len(set(listed)) == len(listed) > 80
    assert all(private_names.table().values())
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.name != "private_names.py"]
    unused = {
        one for one in listed if not any(one.rpartition(".")[2].removeprefix("_global_forward_") in t for t in texts)
    }
    assert not unused
    with pytest.raises(KeyError, match="not in the table"):
        private("torch._C._no_such_thing")


def test_every_function_that_touches_one_is_tried():
    tests = "".join(
        Path(__file__).with_name(f"test_{name}.py").read_text("utf-8")
        for name in ("held_tracebacks", "internals", "process")
    )
    for module in (torch_internals, compiler, dispatch, process, shell):
        for name, thing in vars(module).items():
            if getattr(thing, "__module__", "") == module.__name__ and not name.startswith("_"):
                assert name in tests.replace("def test", ""), f"{module.__name__}.{name} has no test"


def test_each_is_there():
    assert private_names.missing() == []


def test_one_that_is_gone_is_named_and_says_so_when_it_is_used(monkeypatch):
    monkeypatch.setitem(MEASURING, "torch._C._no_such_thing", "nothing at all")
    monkeypatch.setitem(FAKE_CUDA, "no_such_library._thing", "nothing")
    monkeypatch.setitem(private_names._NEEDS, "no_such_library._thing", "no_such_library")
    assert private_names.missing() == ["torch._C._no_such_thing (nothing at all)"]
    assert private_names.missing(FAKE_CUDA) == []
    gone = private("torch._C._no_such_thing")

    class Derived(gone):
        """Can be made, and has no instances."""

    for use in (gone, lambda: gone.part, lambda: gone.__get__(1), lambda: isinstance(1, gone), Derived):
        with pytest.raises(MissingPrivateName) as caught:
            use()
        assert str(caught.value) == (
            f"torch {torch.__version__} lacks torch._C._no_such_thing (nothing at all), which was seen in 2.11 to 2.15: "
            "install one of those versions, or a newer memlab."
        )
    with pytest.raises(ZeroDivisionError):
        try:
            1 / 0  # noqa: B018
        except private_names.private_error("torch._C._no_such_thing"):
            pass


def test_memlab_is_imported_where_every_name_is_gone():
    """All at once, after PyTorch itself has been imported, which needs them; then each says so when it is used."""
    code = """
        import importlib, pkgutil, sys
        import torch, torch._dynamo, torch._inductor.utils, torch.distributed.tensor, torch.nn.attention, torch.optim
        import IPython.core.interactiveshell, pandas, plotly
        from memlab.torch_internals import private_names as names
        for name in names.table():
            holder, _, last = name.rpartition(".")
            holder = names._find(holder) if "." in holder else sys.modules[holder]
            needed = last.startswith("_disabled_torch")  # by torch's C code, for each class of tensors
            if last in getattr(holder, "__dict__", ()) and name not in sys.modules and not needed:
                try:
                    delattr(holder, last)
                except TypeError:  # of a class of C's
                    pass
        assert len(names.missing()) > 55, names.missing()
        import memlab
        for module in pkgutil.walk_packages(memlab.__path__, "memlab."):
            if not module.name.endswith(("__main__", "integrations.lightning", "integrations.transformers")):  # they need those
                importlib.import_module(module.name)
        from memlab import torch_internals
        try:
            torch_internals.engine_entry()()
        except memlab.MemlabError as error:
            print(error)
    """
    (line,) = python("-c", textwrap.dedent(code)).splitlines()
    assert line.startswith(f"torch {torch.__version__} lacks torch.autograd._engine_run_backward (mark backward)")


def test_the_search_finds_what_it_should():
    imports = "import torch._dynamo as d\nfrom torch.utils import _pytree as p\nimport torch\n"
    source = imports + "x = torch.cuda._lazy_call\ny = p.tree_map\n"
    names = set(private_names_in(ast.parse(source)))
    assert {"torch._dynamo", "torch.utils._pytree", "torch.cuda._lazy_call", "torch.utils._pytree.tree_map"} <= names
    assert torch.cuda._lazy_call  # what the example names is real
