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
from memlab.torch_internals import compiler, dispatch, objects, private_names, process, shell
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


PYTHONS = {"_getframe", "_current_frames", "_active", "_is_gil_enabled", "_fields"}
"""Private names of the standard library, and the documented `_fields` of named tuples."""
ACCELERATES = {"_set_sync_gradients"}
REPLACED = {
    "fake_cuda/autocast.py": {"_is_view"},
    "fake_cuda/compiled.py": {"_callback_from_stance"},
    "fake_cuda/cuda_graphs.py": {"_C"},
    "fake_cuda/devices.py": {
        "_C",
        "_cuda_getCurrentRawStream",
        "_foreach_supported_types",
        "_group_tensors_by_device_and_dtype",
        "_has_foreach_support",
    },
    "fake_cuda/dispatcher.py": {"_device_constructors"},
    "fake_cuda/identity.py": {"_parse_to"},
    "fake_cuda/sparse.py": {"_values"},
    "fake_cuda/pipelines.py": {
        "_StageBackwardMeta",
        "_StageForwardMeta",
        "_TensorMeta",
        "_derive_grad_metas",
        "_get_default_group",
    },
    "fake_cuda/process_groups.py": {"_new_process_group_helper", "_world"},
    "fake_cuda/sharding.py": {"_C", "_propagate_tensor_meta_non_cached"},
}
"""What the files that replace parts of PyTorch reach through `torch_internals`, or call on a tensor."""


BY_NAME = ("getattr", "setattr", "hasattr", "delattr")
"""Functions, and methods of monkeypatch, that take the name of an attribute."""


def private_attributes(tree: ast.AST) -> Iterator[str]:
    """The private attributes of any object but a package of operators, as attributes and as texts for `getattr` and its like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value).rpartition(".")[2] not in ("aten", "_aten"):
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in BY_NAME:
            name = node.args[1] if len(node.args) > 1 else None
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield str(name.value)


def is_own(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls")


def names_defined_in(tree: ast.AST) -> Iterator[str]:
    """What a file defines or imports, and the attributes that it gives to `self` and `cls`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def foreign_attributes(package: Path) -> dict[str, set[str]]:
    """File -> the private attributes that nothing in the package defines; `torch_internals` may use any."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in package.rglob("*.py")}
    outside = {path: tree for path, tree in trees.items() if path.parent.name != "torch_internals"}
    own = {name for tree in outside.values() for name in names_defined_in(tree)}
    used = {path.relative_to(package).as_posix(): set(private_attributes(tree)) - own for path, tree in outside.items()}
    return {name: names for name, names in used.items() if names}


def test_private_attributes_are_used_in_one_package():
    allowed = PYTHONS | ACCELERATES
    elsewhere = {name: names - allowed for name, names in foreign_attributes(PACKAGE).items() if names - allowed}
    assert elsewhere == REPLACED
    known = {part for name in private_names.table() for part in name.split(".")}
    assert set().union(*REPLACED.values()) - known <= {"_parse_to"}  # of the module in `cuda_names.nn_functions`


def test_a_private_attribute_is_found(tmp_path):
    text = "x = storage._cdata; y = getattr(func, '_schema'); aten._softmax; self._own; self._mine = 1; other._mine"
    (tmp_path / "one.py").write_text(text)
    assert foreign_attributes(tmp_path) == {"one.py": {"_cdata", "_schema", "_own"}}


SHARED = {  # of other libraries, though the package defines such a name, too
    "_actions", "_buffers", "_css", "_engine_run_backward", "_esm", "_exit", "_indices", "_ipython_display_", "_iterator",
    "_make_subclass", "_mime_", "_next_data", "_record_memory_history", "_repr_html_", "_repr_mimebundle_", "_send",
    "_shutdown_workers", "_threads", "_values", "_version",
}  # fmt: skip


def test_tests_use_no_private_name_of_the_package():
    package = [ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")]
    own = {name for tree in package for name in names_defined_in(tree) if is_private(name)} - SHARED
    used = []
    for path in Path(__file__).parents[1].rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        names = own & {*private_attributes(tree), *imported} - set(names_defined_in(tree))
        used += [f"{path.name}: {name}" for name in names]
    # The table of the public face is what one tests; the other puts its own techniques in the place of the known ones.
    assert sorted(used) == ["test_public_face.py: _PUBLIC", "test_workload_run.py: _known"]


def test_attributes_of_objects():
    func, layer = torch.ops.aten.add.Tensor, torch.nn.Linear(1, 1)
    assert objects.schema_of(func) is objects.schema_if_any(func) and objects.schema_of(func).name == "aten::add"
    assert objects.function_of(func) is objects.function_or_itself(func) is not func
    assert objects.schema_if_any(layer) is None and objects.function_or_itself(layer) is layer
    same = layer.weight.untyped_storage()
    assert objects.storage_id(layer.weight[:1].untyped_storage()) == objects.storage_id(same)
    assert objects.own_parameters(layer) == dict(layer.named_parameters(recurse=False))
    assert not objects.forward_hooks(layer)
    assert objects.local_part_or(layer.weight) is None and objects.local_part_or(1, 2) == 2
    assert objects.written_model(torch.compile(layer)) is objects.written_model(layer) is layer


def test_an_attribute_that_is_gone_is_missed(monkeypatch):
    monkeypatch.setitem(MEASURING, "torch.nn.Module._no_such_attribute", "nothing")
    assert private_names.missing() == ["torch.nn.Module._no_such_attribute (nothing)"]


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
        for name in ("shown_tracebacks", "internals", "process")
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
    monkeypatch.setitem(private_names.NEEDS, "no_such_library._thing", "no_such_library")
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
        import torch, torch._dynamo, torch._inductor.compile_fx, torch._inductor.fx_passes.joint_graph, torch._inductor.debug
        import torch.distributed.tensor, torch.nn.attention, torch.optim
        import IPython.core.interactiveshell, pandas, plotly
        from memlab.torch_internals import private_names as names
        for name in names.table():
            holder, _, last = name.rpartition(".")
            holder = names.find_name(holder) if "." in holder else sys.modules[holder]
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
