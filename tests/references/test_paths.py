"""The path that is found: as the user would write it, the nearest and most telling one."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
from notebook import Notebook, notebook  # noqa: F401

from memlab.references.live_storages import live_storages


def path(notebook: Notebook, key: int) -> str:
    """What is found of one storage."""
    (found,) = live_storages(only=[key]).storages
    return found.path


PLACES = {
    "a variable": ("x = torch.ones(3)", "x", "x"),
    "a list": ("losses = [torch.ones(3) for _ in range(20)]", "losses[17]", "losses[17]"),
    "a dict": ("cfg = {'x': torch.ones(3)}", "cfg['x']", "cfg['x']"),
    "keys that are plain": ("d = {(1, 'a'): {None: {2.5: torch.ones(3)}}}", "d[(1, 'a')][None][2.5]", "d[(1, 'a')][None][2.5]"),
    "a nested place": ("d = {'a': [0, (1, {'b': torch.ones(3)})]}", "d['a'][1][1]['b']", "d['a'][1][1]['b']"),
    "a set": ("s = {torch.ones(3)}", "next(iter(s))", "s -> element of a set"),
    "a key": ("d = {torch.ones(3): 1}", "next(iter(d))", "d -> key"),
    "a deque": ("from collections import deque\nq = deque([0, torch.ones(3)])", "q[1]", "q[1]"),
    "a named tuple": (
        "from collections import namedtuple\np = namedtuple('P', 'x y')(0, torch.ones(3))", "p.y", "p.y",
    ),
    "a default dict": (
        "from collections import defaultdict\nd = defaultdict(list)\nd['a'].append(torch.ones(3))", "d['a'][0]", "d['a'][0]",
    ),
    "an attribute": ("class A: pass\na = A(); a.b = A(); a.b.t = torch.ones(3)", "a.b.t", "a.b.t"),
    "a slot": ("class A: __slots__ = ('t',)\na = A(); a.t = torch.ones(3)", "a.t", "a.t"),
    "a slot above": (
        "class A: __slots__ = ('t',)\nclass B(A): pass\na = B(); a.t = torch.ones(3); a.u = 1", "a.t", "a.t",
    ),
    "a list of one's own": (
        "class L(list):\n  def __iter__(self): raise RuntimeError\nl = L([torch.ones(3)])", "list.__getitem__(l, 0)", "l[0]",
    ),
    "a parameter": ("m = torch.nn.Sequential(torch.nn.Linear(2, 3))", "m[0].weight", "m.0.weight"),
    "a deep parameter": (
        "m = torch.nn.ModuleDict({'layers': torch.nn.ModuleList([torch.nn.TransformerEncoderLayer(8, 2, 16)])})",
        "m['layers'][0].self_attn.in_proj_weight", "m.layers.0.self_attn.in_proj_weight",
    ),
    "a buffer": ("m = torch.nn.BatchNorm1d(7)", "m.running_mean", "m.running_mean"),
    "a module's plain attribute": ("m = torch.nn.Linear(2, 3)\nm.cache = [torch.ones(3)]", "m.cache[0]", "m.cache[0]"),
    "a gradient": ("m = torch.nn.Linear(2, 3)\nm(torch.ones(2)).sum().backward()", "m.weight.grad", "m.weight.grad"),
    "a kept gradient": (
        "x = torch.ones(3, requires_grad=True)\ny = x * 2\ny.retain_grad()\ny.sum().backward()", "y.grad", "y.grad",
    ),
    "an optimizer": (
        "m = torch.nn.Linear(2, 3)\no = torch.optim.Adam(m.parameters())\nm(torch.ones(2)).sum().backward()\no.step()",
        "o.state[m.weight]['exp_avg']", "o.state[m.weight]['exp_avg']",
    ),
    "a parameter whose model is gone": (
        "m = torch.nn.Linear(2, 3)\no = torch.optim.Adam(m.parameters())\nm(torch.ones(2)).sum().backward()\no.step()\ndel m",
        "o.param_groups[0]['params'][0]", "o.param_groups[0]['params'][0]",
    ),
    "a state whose model is gone": (
        "m = torch.nn.Linear(2, 3)\no = torch.optim.Adam(m.parameters())\nm(torch.ones(2)).sum().backward()\no.step()\ndel m",
        "o.state[o.param_groups[0]['params'][1]]['exp_avg']", "o.state[o.param_groups[0]['params'][1]]['exp_avg']",
    ),
    "a value before a key": ("d = {torch.ones(3): 1}\ne = [[[next(iter(d))]]]", "e[0][0][0]", "e[0][0][0]"),
    "a closure": ("def make():\n  big = torch.ones(3)\n  return lambda: big\nf = make()", "f()", "f -> closure 'big'"),
    "a default": ("def f(a, b=1, c=torch.ones(3)): pass", "f.__defaults__[1]", "f -> default 'c'"),
    "a keyword default": ("def f(*, c=torch.ones(3)): pass", "f.__kwdefaults__['c']", "f -> defaults['c']"),
    "a function's attribute": ("def f(): pass\nf.cache = torch.ones(3)", "f.cache", "f.cache"),
    "a bound method": (
        "class A:\n  def f(self): pass\na = A(); a.t = torch.ones(3)\nf = a.f\ndel a", "f.__self__.t", "f.__self__.t",
    ),
    "a partial": ("import functools\nf = functools.partial(print, torch.ones(3))", "f.args[0]", "f.args[0]"),
    "a class": ("class A:\n  cache = {'a': torch.ones(3)}", "A.cache['a']", "A.cache['a']"),
    "the class of an object": (
        "def make():\n  class A:\n    cache = torch.ones(3)\n  return A()\na = make()", "a.cache", "a -> class A.cache",
    ),
    "a generator": (
        "def gen():\n  big = torch.ones(3)\n  yield\n  big\ng = gen()\nnext(g)", "g.gi_frame.f_locals['big']", "g -> gen() -> big",
    ),
    "an iterator": ("it = iter([torch.ones(3)])", "it.__reduce__()[1][0][0]", "it -> list[0]"),
    "Out": ("Out = {7: torch.ones(3)}", "Out[7]", "Out[7]"),
    "an underscore": ("_ = torch.ones(3)", "_", "_"),
    "a number's underscore": ("_12 = torch.ones(3)", "_12", "_12"),
    "a variable before outputs": ("Out = {7: torch.ones(3)}\n_ = _7 = Out[7]\nz = {'deep': [Out[7]]}", "_", "z['deep'][0]"),
    "the whole before an inner list": ("m = torch.nn.Linear(2, 3)\np = list(m.parameters())", "p[0]", "m.weight"),
    "a loop's variable is no name of a parameter": (
        "m = torch.nn.Linear(2, 3)\nfor p in m.parameters(): pass", "m.bias", "m.bias",
    ),
    "two names": ("a = b = [torch.ones(3)]", "a[0]", "a[0]"),
    "sparse": ("s = torch.eye(4).to_sparse()", "s._values()", "s"),
}  # fmt: skip


@pytest.mark.parametrize(("code", "tensor", "expected"), PLACES.values(), ids=PLACES)
def test_a_path_is_what_the_user_would_write(notebook, code, tensor, expected):
    notebook.run(code)
    assert path(notebook, notebook.key(tensor)) == expected


def test_an_array_keeps_the_tensor_it_was_made_of(notebook):
    notebook.run("""
        import numpy
        t = torch.ones(3)
        key, arrays = t.untyped_storage()._cdata, [t.numpy()]
        objects = numpy.array([None, t.view(3, 1)], dtype=object)
        del t
    """)
    key = notebook.value("key")
    assert path(notebook, key) == "objects[1]"
    notebook.run("del objects")
    assert path(notebook, key) == "arrays[0].base"


def test_hooks_are_named_by_their_functions(notebook):
    notebook.run("""
        m = torch.nn.Linear(2, 3)
        def make():
            kept = torch.ones(3)
            def save(*args): kept
            return save, kept.untyped_storage()._cdata
        hook, key = make()
        x = torch.ones(2, requires_grad=True)
        for register in (m.register_forward_hook, m.register_full_backward_hook, x.register_hook):
            register(hook)
        del hook, register
    """)
    key = notebook.value("key")
    assert path(notebook, key) == "m -> backward hook save() -> closure 'kept'"
    notebook.run("m._backward_hooks.clear()")
    assert path(notebook, key) == "m -> forward hook save() -> closure 'kept'"
    notebook.run("del m")
    assert path(notebook, key) == "x -> hook save() -> closure 'kept'"
    notebook.run("x._post_accumulate_grad_hooks = x._backward_hooks\nx._backward_hooks = None")
    assert path(notebook, key) == "x -> hook after accumulation save() -> closure 'kept'"


def test_a_graph_is_named_by_the_node_that_saved_it(notebook):
    notebook.run("""
        x = torch.ones(3, requires_grad=True)
        loss = (x * 2).exp()
        kept = loss.grad_fn._raw_saved_result.data.untyped_storage()._cdata
        square = (x + 1) ** 2
        key = square.grad_fn._saved_self.untyped_storage()._cdata
        total = square.sum() + 1
        del square
    """)
    assert path(notebook, notebook.value("kept")) == "loss"
    assert path(notebook, notebook.value("key")) == "total.grad_fn -> ... -> PowBackward0 -> saved self"
    notebook.run("node = total.grad_fn\ndel total")
    assert path(notebook, notebook.value("key")) == "node -> ... -> PowBackward0 -> saved self"


def test_what_a_function_of_the_users_saved_is_found(notebook):
    notebook.run("""
        class F(torch.autograd.Function):
            @staticmethod
            def forward(ctx, a):
                ctx.save_for_backward(a + 1)
                ctx.mine = a + 2
                return a.clone()
            @staticmethod
            def backward(ctx, g): return g
        y = F.apply(torch.ones(3, requires_grad=True))
        saved = y.grad_fn._raw_saved_tensors[0].data.untyped_storage()._cdata
        mine = y.grad_fn.mine.untyped_storage()._cdata
    """)
    assert path(notebook, notebook.value("saved")) == "y.grad_fn -> FBackward -> saved tensors[0]"
    assert path(notebook, notebook.value("mine")) == "y.grad_fn -> FBackward.mine"


def test_packed_tensors_are_found_and_not_unpacked(notebook):
    notebook.run("""
        unpacked = []
        x = torch.ones(3, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: {'packed': t.clone()}, lambda p: unpacked.append(1) or p['packed']):
            y = x.exp()
        packed = y.grad_fn._raw_saved_result.data['packed'].untyped_storage()._cdata
    """)
    assert path(notebook, notebook.value("packed")) == "y.grad_fn -> ExpBackward0 -> saved result['packed']"
    assert notebook.value("unpacked") == []


def test_the_last_error_is_a_holder(notebook, monkeypatch):
    notebook.run("""
        def f():
            big = torch.ones(3)
            keys.append(big.untyped_storage()._cdata)
            [][0]
        keys = []
    """)
    try:
        notebook.run("f()")
    except IndexError as error:
        kept = error
    (key,) = notebook.value("keys")
    monkeypatch.setattr(sys, "last_traceback", kept.__traceback__, raising=False)
    assert path(notebook, key) == "traceback of cell.py -> f() -> big"
    notebook.names["tb"] = kept.__traceback__
    assert path(notebook, key) == "tb -> traceback of cell.py -> f() -> big"
    del notebook.names["tb"]
    monkeypatch.setattr(sys, "last_value", kept, raising=False)
    monkeypatch.delattr(sys, "last_traceback")
    assert path(notebook, key) == "sys.last_value -> traceback of cell.py -> f() -> big"
    notebook.names["error"] = kept
    assert path(notebook, key) == "error -> traceback of cell.py -> f() -> big"
    try:
        raise ValueError from kept
    except ValueError as outer:
        notebook.names["error"] = outer.with_traceback(None)
    monkeypatch.delattr(sys, "last_value")
    assert path(notebook, key) == "error -> IndexError -> traceback of cell.py -> f() -> big"


@pytest.mark.parametrize(("held", "expected"), [("batch", "step() -> batch"), ("torch.ones(4)", "step() -> hidden[0]")])
def test_a_running_function_is_a_holder(notebook, held, expected):
    notebook.names["look"] = lambda key: path(notebook, key)
    notebook.run(f"""
        def step(batch):
            hidden = [{held}]
            def inner(): return hidden
            return look(hidden[0].untyped_storage()._cdata)
        found = step(torch.ones(3))
    """)
    assert notebook.value("found") == expected


def test_another_threads_function_is_a_holder(notebook):
    ready, done = threading.Event(), threading.Event()
    notebook.names.update(ready=ready, done=done, keys=[])
    notebook.run("""
        def worker():
            batch = {'x': torch.ones(3)}
            keys.append(batch['x'].untyped_storage()._cdata)
            ready.set()
            done.wait()
    """)
    thread = threading.Thread(target=notebook.value("worker"), name="loader 1")
    thread.start()
    try:
        assert ready.wait(120)
        (key,) = notebook.value("keys")
        assert path(notebook, key) == "thread 'loader 1': worker() -> batch['x']"
    finally:
        done.set()
        thread.join()
    gc.collect()
    assert live_storages(only=[key]).storages == ()


def test_another_module_is_a_holder_when_no_variable_is(notebook, monkeypatch):
    notebook.run("""
        import types
        module = types.ModuleType('helpers')
        module.CACHE = {1: torch.ones(3)}
    """)
    monkeypatch.setitem(sys.modules, "helpers", notebook.value("module"))
    key = notebook.key("module.CACHE[1]")
    assert path(notebook, key) == "helpers.CACHE[1]"


def test_a_long_path_is_cut_in_the_middle(notebook):
    notebook.run("x = [torch.ones(3)]\nfor _ in range(5000): x = [x]")
    notebook.run("y = x\nwhile type(y[0]) is list: y = y[0]\nkey = y[0].untyped_storage()._cdata\ndel y")
    found = path(notebook, notebook.value("key"))
    assert found == "x" + "[0]" * 11 + " … 4,984 more … " + "[0]" * 6


def test_every_path_of_a_tensor(notebook):
    notebook.run("""
        x = torch.ones(4)
        view = x[1:]
        losses = [0, x]
        Out = {3: x}
        alias = losses
    """)
    assert notebook.paths("x") == ["x", "view", "losses[1]", "alias[1]", "Out[3]"]
    assert notebook.paths("view[1:]") == ["x", "view", "losses[1]", "alias[1]", "Out[3]"]
    assert notebook.paths("torch.ones(3)") == []  # a temporary


def test_every_path_ends_where_paths_are_too_many(notebook):
    notebook.run("""
        class N: pass
        nodes = [N() for _ in range(30)]
        for n in nodes: n.all = nodes; n.next = list(nodes)
        nodes[7].t = torch.ones(3)
        del n
    """)
    found = notebook.paths("nodes[7].t")
    assert found[0] == "nodes[7].t"
    assert len(found) == len(set(found)) <= 100


def test_the_graph_and_the_optimizer_keep_a_parameter_too(notebook):
    notebook.run("""
        m = torch.nn.Linear(2, 3)
        o = torch.optim.SGD(m.parameters(), 0.1)
        loss = m(torch.ones(2)).sum()
    """)
    assert notebook.paths("m.weight") == [
        "m.weight",
        "loss.grad_fn -> ... -> AccumulateGrad -> leaf",
        "o.param_groups[0]['params'][0]",
    ]


def test_a_workload_is_the_users_own(notebook):
    notebook.run("from memlab import workloads\nmodel = workloads['mlp'].sized('tiny')()[0]")
    assert notebook.paths("model.head.weight")[0] == "model.head.weight"
