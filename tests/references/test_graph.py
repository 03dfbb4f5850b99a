"""The private names of autograd that names lean on: are they there, and do they do what memlab believes?"""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from memlab.torch_internals import graph


def saved(node: object) -> dict[str, object]:
    getters = graph.node_getters(type(node))
    assert getters is not None
    return dict(graph.saved_by(node, getters[1]))


def test_a_context_of_no_graph_leads_nowhere():
    """PyTorch before 2.13 raises where a function's context outlived its node, as after an error in compiled code."""
    kept = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept.append(ctx)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    def refuses(_: object) -> object:
        raise RuntimeError("Attribute 'next_functions' is invalid for this instance")

    result = Double.apply(torch.ones(2, requires_grad=True))
    getters = graph.node_getters(type(kept[0]))
    assert getters is not None
    assert len(graph.following(result.grad_fn, getters[0])) == 1
    del result
    gc.collect()
    assert len(graph.following(kept[0], getters[0])) <= 1
    assert graph.following(kept[0], refuses) == []


def test_what_a_node_saved_is_read_without_unpacking_or_computing():
    unpacked, ran = [], []
    x, index = torch.ones(3, requires_grad=True), torch.tensor([0, 1])
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: ("packed", t.detach()), lambda p: unpacked.append(1) or p[1]
    ):
        packed = x.exp()
    product = packed * x
    checkpointed = torch.utils.checkpoint.checkpoint(lambda a: ran.append(1) or a.exp(), x, use_reentrant=False)
    assert saved(packed.grad_fn)["result"][0] == "packed"
    assert saved(product.grad_fn) == {"self": packed, "other": x}
    assert saved(x[index].grad_fn)["indices[0]"] is index
    assert saved((x * 2).sum().grad_fn) == {}
    assert not isinstance(saved(checkpointed.grad_fn)["result"], torch.Tensor)
    assert (unpacked, ran) == ([], [1])
    plain = x.exp()
    plain.sum().backward()
    assert saved(plain.grad_fn) == {"result": None}  # it was given back


def test_nodes_are_told_from_other_objects():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * 2

    x = torch.ones(3, requires_grad=True)
    y, z = Double.apply(x), x * 2
    for node in (y.grad_fn, z.grad_fn, z.grad_fn.next_functions[0][0]):
        following, _, leaf = graph.node_getters(type(node))
        assert following(node) == node.next_functions
        assert leaf is None or leaf(node) is x
    assert saved(y.grad_fn) == {"tensors[0]": x}
    for other in (x, torch.nn.Linear(1, 1), [], object(), Double, type):
        assert graph.node_getters(type(other)) is None
    leaf_node = z.grad_fn.next_functions[0][0]
    assert graph.node_getters(type(leaf_node))[2](leaf_node) is x


@pytest.mark.parametrize("layout", list(graph.sparse_parts), ids=str)
def test_parts_of_sparse_tensors_share_their_memory(layout):
    blocks = {"blocksize": (2, 2)} if "bs" in str(layout) else {}
    tensor = torch.eye(4).to_sparse(layout=layout, **blocks)
    first = [function(tensor).untyped_storage()._cdata for _, function in graph.sparse_parts[layout]]
    assert first == [function(tensor).untyped_storage()._cdata for _, function in graph.sparse_parts[layout]]
    assert len(set(first)) == len(graph.sparse_parts[layout]) == (2 if layout is torch.sparse_coo else 3)


def test_parts_are_read_past_every_mode():
    class Loud(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise RuntimeError("seen")

    tensor = torch.eye(4).to_sparse().requires_grad_()
    parts = []

    def read(_: object) -> torch.Tensor:
        guards = graph.quiet()
        parts.extend(function(tensor) for _, function in graph.sparse_parts[torch.sparse_coo])
        del guards
        return torch.ones(1)

    torch.func.vmap(read)(torch.ones(2))
    with Loud():
        guards = graph.quiet()
        parts.extend(function(tensor) for _, function in graph.sparse_parts[torch.sparse_coo])
        del guards
        with pytest.raises(RuntimeError, match="seen"):
            torch.ones(1)
    assert [part.grad_fn for part in parts] == [None] * 4
    assert (torch.ones(1, requires_grad=True) * 2).grad_fn is not None


@pytest.mark.slow
def test_long_rows_of_nodes_are_freed_in_a_row_where_that_is_known():
    """The reason for a limit: should this fail for the versions named in `torch_internals`, the limit can go."""
    code = """
import sys, torch
y = torch.ones(1, requires_grad=True)
for _ in range(300_000):
    y = y * 2
    y.grad_fn
del y
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode < 0) is graph.nodes_stay


def test_a_nodes_python_object_is_the_same_while_it_lives():
    y = (torch.ones(3, requires_grad=True) * 2).exp()
    node = y.grad_fn
    assert y.grad_fn is node
    assert node.next_functions[0][0] is node.next_functions[0][0]
    kept = node.next_functions[0][0]
    assert id(node.next_functions[0][0]) == id(kept)
    assert gc.is_tracked(node)


def test_getters_of_tensors():
    x = torch.ones(4, requires_grad=True)
    y = (x * 2)[1:]
    assert graph.grad_fn(y) is y.grad_fn
    assert graph.base_of_view(y) is y._base
    assert graph.base_of_view(x) is None
    assert graph.tensor_hooks(x) is graph.accumulate_hooks(x) is None
    handles = x.register_hook(print), x.register_post_accumulate_grad_hook(repr)
    assert list(graph.tensor_hooks(x).values()) == [print]
    assert list(graph.accumulate_hooks(x).values()) == [repr]
    for handle in handles:
        handle.remove()


def test_an_address_does_not_make_a_lazy_copy_real():
    x = torch.ones(4)
    lazy = torch._lazy_clone(x)
    assert graph.address_of(lazy) == graph.address_of(x)
    assert torch._C._is_cow_tensor(lazy)
    plain = torch.ones(4)
    assert graph.address_of(plain[1:]) == graph.address_of(plain[:0]) == plain.data_ptr()
    assert graph.address_of(torch.ones(3, device="meta")) == 0


def test_wrappers_of_functional_transforms_are_unwrapped():
    inner = torch.ones(2, 3)
    found = []
    torch.func.vmap(lambda x: found.append(graph.unwrapped(x).data_ptr()) or x)(inner)
    assert found == [inner.data_ptr()]
    assert graph.unwrapped(inner) is None


def test_a_changed_view_hides_its_node():
    base = torch.ones(4, requires_grad=True) * 1
    base[:2].exp_()
    assert graph.hides_what_it_holds(type(base.grad_fn))
    assert not graph.hides_what_it_holds(type((base * 2).grad_fn))
