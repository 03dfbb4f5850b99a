"""What is listed: every storage once, with its bytes and what it is for; tensors of every sort."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from notebook import Notebook, notebook  # noqa: F401

from memlab.errors import MemlabError
from memlab.references.live_storages import Storage, StorageGroup, live_storages, storages, storages_in
from memlab.references.live_tensors import tensors_and_storages


def found(notebook: Notebook, *expressions: str) -> list[Storage]:
    """What is found of these tensors' storages, in their order."""
    keys = [notebook.key(expression) for expression in expressions]
    by_key = {one.key: one for one in live_storages().storages}
    return [by_key[key] for key in keys]


def test_a_storage_counts_once_and_whole(notebook):
    notebook.run("x = torch.ones(100)\nviews = [x[i:i + 10] for i in range(5)]\nlast = x[90:].view(2, 5)")
    before = live_storages()
    (one,) = found(notebook, "x")
    assert (one.nbytes, one.shape, one.dtype, one.device, one.path) == (400, (100,), "float32", "cpu", "x")
    assert one.address == notebook.value("x.data_ptr()")
    assert sum(other.key == one.key for other in before.storages) == 1
    notebook.run("del x, last")
    (one,) = found(notebook, "views[3]")
    assert (one.nbytes, one.shape, one.path) == (400, (100,), "views[0]")  # a view keeps the tensor it was taken of
    assert one.address == notebook.value("views[0].data_ptr()")


def test_total_bytes_are_those_of_the_objects(notebook):
    gc.collect()
    before = live_storages().total_bytes
    notebook.run("""
        m = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5))
        o = torch.optim.Adam(m.parameters())
        m(torch.ones(6, 30)).sum().backward()
        o.step()
    """)
    made = live_storages().group("category")
    m, o = notebook.value("m"), notebook.value("o")
    state = [value for one in o.state.values() for value in one.values()]
    assert made["parameter"].nbytes >= sum(p.nbytes for p in m.parameters())
    assert live_storages().total_bytes - before == sum(
        t.nbytes for t in [*m.parameters(), *m.buffers(), *(p.grad for p in m.parameters()), *state]
    )


CATEGORIES = {
    "m[0].weight": "parameter",
    "m[1].running_var": "buffer",
    "m[1].num_batches_tracked": "buffer",
    "m[0].bias.grad": "gradient",
    "o.state[m[0].weight]['exp_avg']": "optimizer",
    "o.state[m[0].weight]['step']": "optimizer",
    "bare": "parameter",
    "bare_state": "optimizer",
    "x": "other",
    "y": "activation",
    "loss.grad_fn.next_functions[0][0]._saved_self": "activation",
    "made_from_x": "other",
    "m[0].weight.t()": "parameter",
}


def test_categories_come_from_the_objects(notebook):
    notebook.run("""
        m = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 5))
        bare = torch.ones(7, requires_grad=True)  # no nn.Parameter, but an optimizer's
        o = torch.optim.Adam([*m.parameters(), bare])
        (m(torch.ones(6, 30)).sum() + bare.sum()).backward()
        o.step()
        bare_state = o.state[bare]['exp_avg_sq']
        x = torch.ones(6, 30)
        made_from_x = x * 2
        y = m(x)
        loss = ((m(x) + 1) ** 2).mean()
        torch.optim.LBFGS(m.parameters())
    """)
    categories = [one.category for one in found(notebook, *CATEGORIES)]
    assert dict(zip(CATEGORIES, categories, strict=True)) == CATEGORIES


def test_quick_listing_has_the_same_storages(notebook):
    notebook.run("""
        m = torch.nn.Linear(30, 40)
        x = torch.ones(6, 30)
        loss = (m(x) ** 2).relu().sum()
        loss.backward(retain_graph=True)
    """)
    quick, whole = storages(), live_storages().storages
    assert {(one.key, one.nbytes, one.address, one.device) for one in quick} == {
        (one.key, one.nbytes, one.address, one.device) for one in whole
    }
    assert all(one.path == "" and one.others == 0 for one in quick)
    categories = {one.key: one.category for one in quick}
    assert categories[notebook.key("m.weight")] == "parameter"
    assert categories[notebook.key("m.weight.grad")] == "gradient"


def test_what_a_graph_alone_keeps_is_listed(notebook):
    notebook.run("x = torch.ones(1000, requires_grad=True)")
    held = tensors_and_storages()  # so that no key of these is used again
    before = {one.key for one in (*storages(), *live_storages().storages)}
    notebook.run("loss = x.exp().exp().exp().sum()")
    new = [one for one in live_storages().storages if one.key not in before]
    assert sorted(one.nbytes for one in new) == [4, 4000, 4000, 4000]
    assert {one.path for one in new} == {"loss", "loss.grad_fn -> ... -> ExpBackward0 -> saved result"}
    assert {one.key for one in storages()} - before == {one.key for one in new}
    notebook.run("loss.backward()")
    left = sorted(one.nbytes for one in live_storages().storages if one.key not in before)
    assert left == [4, 4000]  # loss and x.grad
    del held


def test_groups(notebook):
    keys = {one.key for one in storages()}
    held = tensors_and_storages()  # keeps what earlier tests left alive, so that no new storage gets the key of one
    notebook.run("x = torch.ones(4, 5)\ny = torch.ones(4, 5)\nz = torch.ones(3, dtype=torch.int8)")
    result = live_storages(only={one.key for one in storages()} - keys)
    assert result.group("shape") == {"(4, 5)": StorageGroup(2, 160), "(3,)": StorageGroup(1, 3)}
    assert result.group("dtype") == {"float32": StorageGroup(2, 160), "int8": StorageGroup(1, 3)}
    assert result.group("category") == {"other": StorageGroup(3, 163)}
    assert result.total_bytes == 163
    del held
    with pytest.raises(MemlabError, match=r"cannot group by 'colour'. Choose one of shape, dtype, category, device"):
        result.group("colour")


def test_a_device_is_chosen_and_only_what_is_wanted(notebook):
    notebook.run("x = torch.ones(3)\ny = torch.ones(4)")
    assert notebook.key("x") in {one.key for one in live_storages("cpu").storages}
    assert live_storages("cuda").storages == storages("cuda:1") == [] or not live_storages("cuda").storages
    result = live_storages(only=[notebook.key("y"), 12345])
    assert [(one.path, one.nbytes) for one in result.storages] == [("y", 16)]
    assert live_storages(only=[]).storages == ()


def test_a_budget_ends_naming_and_not_listing(notebook):
    notebook.run("m = torch.nn.Linear(3, 4)\nloss = m(torch.ones(3)).exp().sum()\nmany = [[i] for i in range(100_000)]")
    whole, cut = live_storages(), live_storages(budget_s=0)
    assert {one.key for one in whole.storages} <= {one.key for one in cut.storages}
    assert (whole.is_complete, cut.is_complete) == (True, False)
    assert not any(one.path for one in cut.storages if one.key == notebook.key("m.weight"))


def test_others_counts_further_paths(notebook):
    notebook.run("x = torch.ones(3)\na = {'x': x}\nb = (x, [x])\nalone = torch.ones(2)")
    x, alone = found(notebook, "x", "alone")
    assert (x.path, x.others, alone.others) == ("x", 3, 0)


def test_what_no_name_leads_to_is_said_to_be_held_by(notebook):
    notebook.run("ring = [torch.ones(50)]\nring.append(ring)\nkey = ring[0].untyped_storage()._cdata")
    gc.disable()
    try:
        notebook.run("del ring")
        result = live_storages()
    finally:
        gc.enable()
    (one,) = [one for one in result.storages if one.key == notebook.value("key")]
    assert (one.path, result.holders[one.key]) == ("", "a list")


def test_two_storages_of_one_numpy_array_count_once(notebook):
    notebook.run("import numpy\narray = numpy.ones(100)\na = torch.from_numpy(array)\nb = torch.from_numpy(array)")
    address = notebook.value("a.data_ptr()")
    assert [one.nbytes for one in live_storages().storages if one.address == address] == [800]


def test_what_is_in_something(notebook):
    notebook.run("""
        class Net(torch.nn.Linear):
            shared = torch.ones(9)
        m = Net(3, 4)
        x = torch.ones(2)
    """)
    assert storages_in(notebook.value("[m, {'a': 1}]")) == {notebook.key("m.weight"), notebook.key("m.bias")}
    assert storages_in(notebook.value("x")) == {notebook.key("x")}
    assert storages_in(notebook.value("[1, 'a', None]")) == set()


# --- tensors of every sort ---

SORTS = {
    "float8": ("x = torch.ones(8).to(torch.float8_e4m3fn)", 8),
    "float4": ("x = torch.empty(8, dtype=torch.float4_e2m1fn_x2)", 8),
    "one bit": ("x = torch.empty(8, dtype=torch.uint1)", 8),
    "complex": ("x = torch.ones(8, dtype=torch.complex64)", 64),
    "conjugate": ("x = torch.ones(8, dtype=torch.complex64).conj()", 64),
    "bool": ("x = torch.ones(8, dtype=torch.bool)", 8),
    "scalar": ("x = torch.tensor(1.0)", 4),
    "quantized": ("x = torch.quantize_per_tensor(torch.ones(8), 0.1, 0, torch.qint8)", 8),
    "coo": ("x = torch.eye(8).to_sparse()", 2 * 8 * 8 + 8 * 4),
    "csr": ("c, v = torch.arange(9), torch.ones(8)\nx = torch.sparse_csr_tensor(c, c[:8], v)\ndel c, v", 9 * 8 + 8 * 4),
    "csc": (
        "c, r, v = torch.arange(9), torch.arange(8), torch.ones(8)\nx = torch.sparse_csc_tensor(c, r, v)\ndel c, r, v",
        9 * 8 + 8 * 8 + 8 * 4,
    ),
    "bsr": (
        "c, r, v = torch.arange(3), torch.arange(2), torch.ones(2, 4, 4)\nx = torch.sparse_bsr_tensor(c, r, v)\ndel c, r, v",
        3 * 8 + 2 * 8 + 2 * 16 * 4,
    ),
    "sparse with a graph": ("x = torch.eye(8).to_sparse().requires_grad_()", 2 * 8 * 8 + 8 * 4),
    "nested": ("x = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)])", 40),
    "lazy": ("x = torch.nn.LazyLinear(3).weight", 0),
    "meta": ("x = torch.ones(8, device='meta')", 0),
    "no elements": ("x = torch.ones(0)", 0),
    "nothing of much": ("x = torch.ones(8)[:0]", 32),
    "a subclass": ("class T(torch.Tensor): pass\nx = torch.ones(8).as_subclass(T)", 32),
    "inference": ("with torch.inference_mode(): x = torch.ones(8)", 32),
    "a parameter of a subclass": ("class P(torch.nn.Parameter): pass\nx = P(torch.ones(8))", 32),
    "expanded": ("x = torch.ones(1).expand(1000)", 4),
    "a storage": ("x = torch.ones(8).untyped_storage()", 32),
    "a typed storage": ("typed = torch.ones(8).storage()\nx = [typed]\ndel typed", 32),
    "fake": (
        "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode(): x = torch.ones(8)", 0,
    ),
    "a wrapper of two": (
        "from torch.testing._internal.two_tensor import TwoTensor\nx = TwoTensor(torch.ones(8), torch.ones(8))", 64,
    ),
    "jagged": (
        "x = torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged)", 40 + 3 * 8,
    ),
}  # fmt: skip


@pytest.mark.sample(9)
@pytest.mark.parametrize(("code", "nbytes"), SORTS.values(), ids=SORTS)
def test_every_sort_of_tensor_is_counted(notebook, code, nbytes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = {one.key for one in storages()}
        notebook.run(code)
        new = [one for one in live_storages().storages if one.key not in before and one.path.startswith("x")]
        assert sum(one.nbytes for one in new) == nbytes
        keys = {one.key for one in new}
        assert sum(one.nbytes for one in storages() if one.key in keys) == nbytes
        if type(notebook.value("x")) is not list:
            assert notebook.paths("x")[0].startswith("x")


def test_an_opaque_tensor_is_named_as_such(notebook):
    notebook.run("x = torch.ones(8, 8).to_mkldnn()")
    assert "a tensor without a storage (Tensor, _mkldnn)" in live_storages().not_inspected


def test_tensors_inside_functional_transforms(notebook):
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(live_storages())
        return (x**2).sum()

    notebook.run("x = torch.ones(5, 7)")
    key, x = notebook.key("x"), notebook.value("x")
    others = live_storages().not_inspected  # of objects that are not this test's
    for transformed in (torch.func.vmap(look), torch.func.grad(look), torch.func.vmap(torch.func.grad(look))):
        transformed(x)
    assert len(seen) == 3
    for result in seen:
        (one,) = [one for one in result.storages if one.key == key]
        assert (one.path, one.nbytes) == ("x", 140)
        assert result.not_inspected == others


def test_what_the_graph_hides_of_views_is_said(notebook):
    notebook.run("base = torch.ones(4, requires_grad=True) * 1")
    assert not any("CopySlices" in what for what in live_storages().not_inspected)
    notebook.run("base[:2].exp_()")
    assert any("CopySlices" in what for what in live_storages().not_inspected)


def test_a_lazy_copy_stays_lazy(notebook):
    notebook.run("x = torch.ones(8)\ny = torch._lazy_clone(x)")
    address = notebook.value("x.data_ptr()")
    for listed in (live_storages().storages, storages()):
        assert address in {one.address for one in listed}
    notebook.paths("y")
    assert torch._C._is_cow_tensor(notebook.value("y"))
