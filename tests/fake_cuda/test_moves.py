"""Models and tensors that move between the host and the fake GPU stay what they are."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
from fake_gpus import alive, card
from torch import nn

from memlab.fake_cuda import FakeCuda

KIB = 1 << 10


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 64)
        self.head = nn.Linear(64, 100, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("steps", torch.zeros(3))


@pytest.mark.parametrize("move", [lambda m: m.to("cuda"), lambda m: m.cuda(), lambda m: m.to(torch.device("cuda", 0))])
def test_a_model_keeps_its_parameters_and_what_they_share(fake, move):
    model = Tied()
    before, ids = model.words.weight, [id(one) for one in model.parameters()]
    assert move(model) is model
    assert model.words.weight is before is model.head.weight
    assert [id(one) for one in model.parameters()] == ids
    assert before.is_cuda and isinstance(before, nn.Parameter) and before.requires_grad and before.is_leaf
    assert model.steps.device == torch.device("cuda:0")
    assert alive(fake) == 100 * 64 * 4 + 3 * 4


def test_a_move_back_frees_the_card(fake):
    model = Tied().cuda()
    weight = model.words.weight
    model.cpu()
    assert model.words.weight is weight and weight.device.type == "cpu" and type(weight) is nn.Parameter
    assert alive(fake) == 0
    model.cuda()
    assert model.head.weight is weight and weight.is_cuda


def test_half_frees_each_parameter_before_the_next_is_made(fake):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).cuda()
    torch.cuda.reset_peak_memory_stats()
    weight = model[0].weight
    model.half()
    assert model[0].weight is weight and weight.dtype == torch.float16
    # as on CUDA, where `param.data = ...` frees the old storage at once: never more than one copy on top of the model
    assert torch.cuda.max_memory_allocated() == (16 + 16 + 8) * KIB
    assert alive(fake) == 16 * KIB


def test_gradients_and_hooks_move_with_their_parameter(fake):
    model = nn.Linear(8, 8)
    seen = []
    model.weight.register_hook(lambda grad: seen.append("hook"))
    model(torch.randn(2, 8)).sum().backward()
    model.cuda()
    assert model.weight.grad.is_cuda
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    assert seen == ["hook", "hook"]


def test_a_move_that_moves_nothing_is_the_same_tensor(fake):
    x = torch.ones(4, device="cuda")
    assert x.to("cuda") is x and x.cuda() is x and x.to("cuda:0", torch.float32) is x and x.to(x) is x
    assert x.to("cuda", copy=True) is not x
    assert x.float() is x and x.half() is not x and x.type(torch.float32) is x
    w = nn.Parameter(x)
    assert w.to("cuda") is w and w.is_leaf
    assert x.type() == "torch.cuda.FloatTensor" and isinstance(x, torch.cuda.FloatTensor)
    assert torch.cuda.HalfTensor(2, 3).shape == (2, 3) and torch.cuda.LongTensor([7]).tolist() == [7]


def test_host_tensors_go_where_another_tensor_is(fake):
    x = torch.ones(4, device="cuda", dtype=torch.float16)
    host = torch.ones(4)
    for moved in (host.to(x), host.type_as(x), host.to(other=x)):
        assert moved.is_cuda and moved.dtype == torch.float16
    assert x.to(host).device.type == "cpu" and x.new_tensor([1.0]).is_cuda and x.new_zeros(3).is_cuda


def test_default_devices(fake):
    with torch.device("cuda"):
        assert nn.Linear(2, 2).weight.is_cuda and torch.tensor([1.0]).is_cuda
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(2).is_cuda and torch.as_tensor([1]).is_cuda and torch.tensor(3).is_cuda
    finally:
        torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


def test_a_model_without_data_gets_its_memory_on_the_card(fake):
    with torch.device("meta"):
        model = nn.Linear(64, 64, bias=False)
    other = nn.Linear(64, 64, bias=False, device="meta")
    assert model.weight.is_meta and other.weight.is_meta and alive(fake) == 0
    model.to_empty(device="cuda")
    other.to_empty(device="cuda")
    assert model.weight.is_cuda and isinstance(other.weight, nn.Parameter) and alive(fake) == 2 * 16 * KIB


def test_a_model_that_moves_to_the_meta_device_leaves_the_card(fake):
    model = nn.Linear(64, 64, bias=False, device="cuda")
    half = model.weight.detach().to("meta", torch.float16)
    assert half.is_meta and half.dtype == torch.float16 and half.shape == (64, 64)
    model.to("meta")
    assert model.weight.is_meta and type(model.weight) is nn.Parameter and alive(fake) == 0


def test_operators_that_ask_for_new_tensors_get_them_on_the_card(fake):
    ids = torch.randint(10, (4,), device="cuda")
    assert nn.functional.one_hot(ids, 10).is_cuda
    assert torch.cdist(torch.ones(3, 2, device="cuda"), torch.ones(4, 2, device="cuda")).is_cuda


def test_data_is_exchanged_across_devices(fake):
    w = nn.Parameter(torch.zeros(16))
    w.data = w.data.cuda()
    assert w.is_cuda and isinstance(w, nn.Parameter) and alive(fake) == 64
    w.data = w.data.half()
    assert w.dtype == torch.float16 and alive(fake) == 32
    w.data = torch.zeros(16)
    assert w.device.type == "cpu" and type(w) is nn.Parameter and alive(fake) == 0


def test_copies_share_what_the_originals_share(fake):
    model = Tied().cuda()
    twin = copy.deepcopy(model)
    assert twin.words.weight is twin.head.weight and twin.words.weight is not model.words.weight
    assert isinstance(twin.words.weight, nn.Parameter) and twin.steps.is_cuda
    assert alive(fake) == 2 * (100 * 64 * 4 + 12)
    base = torch.zeros(100, device="cuda")
    first, view = copy.deepcopy([base, base[10:20]])
    assert view.untyped_storage() is first.untyped_storage() and view.shape == (10,)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(nn.Parameter(base) * 2)


def test_a_saved_state_can_be_loaded(fake):
    model = Tied().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model.head(model.words(torch.zeros(2, dtype=torch.long, device="cuda"))).sum().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for where in ("cuda", "cpu", None):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded["model"]["words.weight"].device.type == (where or "cuda")
    file.seek(0)
    other = Tied().cuda()
    other.load_state_dict(torch.load(file, map_location="cuda")["model"])
    assert other.head.weight is other.words.weight and other.words.weight.is_cuda
    before = alive(fake)
    file.seek(0)
    first = torch.load(file, weights_only=False)["model"]
    file.seek(0)
    second = torch.load(file)["model"]
    assert first["words.weight"].untyped_storage() is first["head.weight"].untyped_storage()
    assert first["words.weight"].untyped_storage() is not second["head.weight"].untyped_storage()
    assert alive(fake) == before + 2 * (100 * 64 * 4 + 12)


def test_a_file_of_the_host_is_loaded_onto_the_card(fake):
    file = io.BytesIO()
    torch.save({"w": torch.arange(3.0)}, file)
    file.seek(0)
    assert torch.load(file, map_location="cuda")["w"].is_cuda
    file.seek(0)
    assert torch.load(file)["w"].tolist() == [0.0, 1.0, 2.0]


def test_mixtures_of_host_and_card_raise_as_on_cuda(fake):
    x = torch.ones(4, device="cuda")
    for wrong in (lambda: x + torch.ones(4), lambda: x.add_(torch.ones(4)), lambda: nn.Linear(4, 4)(x)):
        with pytest.raises(
            RuntimeError, match=r"[Ee]xpected all tensors to be on the same device|two different devices"
        ):
            wrong()
    assert (x + torch.tensor(2.0)).is_cuda and (x * np.float32(2)).is_cuda
    with pytest.raises(TypeError, match="can't convert cuda:0"):
        x.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(2, device="cuda:1")


def test_storages_are_told_apart_by_their_address(fake):
    a, b = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    assert a.data_ptr() != b.data_ptr() and a[2:].data_ptr() == a.data_ptr() + 8
    assert a.untyped_storage().data_ptr() == a[4:].untyped_storage().data_ptr() == a.data_ptr()
    assert hash(a) != hash(b) and a.get_device() == 0


def test_tensors_that_outlive_fake_cuda_do_not_ask_the_driver():
    with FakeCuda(card()):
        x, layer = torch.ones(3, device="cuda"), torch.nn.Linear(2, 2).cuda()
    assert x.cuda() is x
    assert x.to("cuda") is x
    assert layer.cuda() is layer
