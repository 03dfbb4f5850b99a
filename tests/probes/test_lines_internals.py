"""The private hooks behind line listings: noticed here when PyTorch or IPython change them."""

from __future__ import annotations

import gc
import linecache

import torch
from IPython.core.compilerop import CachingCompiler

from memlab.torch_internals import cell_code, graph


def test_nodes_are_numbered_as_they_are_made():
    x = torch.ones(3, requires_grad=True)
    first = x * 2
    second = first + 1
    assert graph.number_of(graph.node_of(first)) < graph.number_of(graph.node_of(second))
    assert graph.node_of(x) is None
    assert graph.node_of(torch.ones(1)) is None


def test_the_handle_of_a_hook_knows_whether_its_node_is_alive():
    output = torch.ones(3, requires_grad=True) * 2
    handle = graph.node_of(output).register_prehook(lambda gradients: None)
    assert graph.is_alive(handle)
    del output
    gc.collect()
    assert not graph.is_alive(handle)


def test_functional_transforms_are_told_apart():
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(graph.can_hook())
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    torch.vmap(function)(torch.ones(3, 3))
    assert seen == [False, False]
    assert graph.can_hook()


def test_cells_are_told_by_their_names():
    compiler = CachingCompiler()
    name = compiler.cache("x = 1", 7)
    try:
        assert compiler._filename_map[name] == 7
        assert cell_code.cell_number(name) in (0, 7)  # the shell of this process, if there is one, has another compiler
    finally:
        del linecache.cache[name]
    assert cell_code.cell_number("/tmp/ipykernel_12/3456.py") == 0
    assert cell_code.cell_number(r"C:\Temp\ipykernel_12\3456.py") == 0
    for other in ("/home/me/ipykernel_notes.py", "train.py", "<stdin>", "<string>"):
        assert cell_code.cell_number(other) is None
