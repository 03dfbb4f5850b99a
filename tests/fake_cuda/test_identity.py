"""What fake CUDA tensors and devices are taken for by programs and libraries."""

from __future__ import annotations

import copy
import io
import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from memlab.errors import PredictionError

CUDA0 = torch.device("cuda", 0)


class Boxes(torch.Tensor):
    """A subclass without anything of its own."""


class Named(torch.Tensor):
    """A subclass that sees the functions that are called."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2).to(0),
        lambda: torch.ones(2).to(device=0),
        lambda: torch.ones(2).cuda(0),
        lambda: torch.ones(2).to(torch.device(0)),
        lambda: torch.zeros(2, device=0),
        lambda: torch.zeros_like(torch.ones(2), device=0),
        lambda: torch.ones(2).new_zeros(3, device=0),
        lambda: torch.ones(2).new_full((3,), 1, device=0),
        lambda: torch.ones(2).new_tensor([1], device=0),
        lambda: torch.ones(2).new_tensor([1], device="cuda"),
        lambda: nn.Linear(2, 2, device=0).weight,
        lambda: nn.Linear(2, 2).to(0).weight,
        lambda: nn.Linear(2, 2, device="meta").to_empty(device=0).weight,
        lambda: torch.rand(2, device=0, generator=torch.Generator(device=0)),
        lambda: torch.ones(2, device=torch.accelerator.current_accelerator()),
    ],
)
def test_a_number_is_the_card(fake, make):
    assert make().device == CUDA0


def test_devices_are_of_the_class_they_were(fake):
    device = torch.device(0)
    assert type(device) is type(CUDA0) and device == CUDA0 and isinstance(device, torch.device)
    assert isinstance(CUDA0, torch.device) and issubclass(type(CUDA0), torch.device) and type(CUDA0) == torch.device  # noqa: E721
    assert torch.device("cuda", 0) == torch.device(type="cuda", index=0) == CUDA0 and torch.device("cpu").index is None
    assert pickle.loads(pickle.dumps([CUDA0, torch.device("cpu")])) == [CUDA0, torch.device("cpu")]
    assert copy.deepcopy(CUDA0) == CUDA0 and not isinstance("cuda", torch.device | None)
    file = io.BytesIO()
    torch.save({"device": CUDA0}, file)
    file.seek(0)
    assert torch.load(file) == {"device": CUDA0}
    with torch.device("cuda"):
        assert torch.zeros(1).is_cuda
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(2, device=1)


def test_the_accelerator_is_the_card(fake):
    accelerator = torch.accelerator
    assert accelerator.is_available() and accelerator.device_count() == 1 and accelerator.current_device_index() == 0
    assert accelerator.current_accelerator() == torch.device("cuda") and torch.get_device_module() is torch.cuda
    x = torch.empty(1 << 20, device="cuda")
    assert accelerator.memory_allocated() == torch.cuda.memory_allocated() == 4 << 20
    reserved = torch.cuda.memory_reserved()
    assert accelerator.memory.memory_reserved() == accelerator.memory_stats()["reserved_bytes.all.current"] == reserved
    assert accelerator.get_memory_info() == torch.cuda.mem_get_info()
    accelerator.empty_cache(), accelerator.empty_host_cache(), accelerator.synchronize()
    accelerator.set_device_index(0)
    del x


def test_tensors_of_a_users_class(fake):
    x = torch.arange(4.0, device="cuda", requires_grad=True)
    boxes = x.as_subclass(Boxes)
    assert isinstance(boxes, Boxes) and boxes.is_cuda and boxes.data_ptr() == x.data_ptr()
    assert isinstance(boxes * 2, Boxes) and isinstance(boxes[1:], Boxes) and (boxes * 2).device == CUDA0
    (boxes * 2).sum().backward()
    assert x.grad.shape == (4,) and type(boxes.as_subclass(torch.Tensor)) is type(x)
    Named.seen.clear()
    assert isinstance(x.as_subclass(Named).exp(), Named) and "exp" in Named.seen
    assert isinstance(torch.Tensor._make_subclass(Boxes, x.detach()), Boxes)
    host = torch.ones(2).as_subclass(Boxes)
    assert isinstance(host.to("cuda"), Boxes) and host.to("cuda").is_cuda
    assert torch.cat([boxes, boxes]).shape == (8,) and nn.Linear(4, 2).cuda()(boxes).shape == (2,)


def test_parameters_of_parameters(fake):
    layer = nn.Linear(2, 2).cuda()
    weight = layer.weight
    for kind in (type(weight), nn.Parameter):
        again = kind(weight)
        assert isinstance(again, nn.Parameter) and again.is_leaf and again.data_ptr() == weight.data_ptr()
        frozen = kind(weight, requires_grad=False)
        assert isinstance(frozen, nn.Parameter) and not frozen.requires_grad
    layer.weight = type(weight)(torch.ones(2, 2), requires_grad=True)
    assert layer.weight.device.type == "cpu"
    layer.weight = nn.Parameter(weight)
    assert layer(torch.ones(1, 2, device="cuda")).requires_grad


def test_libraries_ask_whose_tensors_they_are(fake):
    x = torch.ones(2, device="cuda")
    assert type(x).__module__.split(".")[0] == type(nn.Parameter(x)).__module__.split(".")[0] == "torch"


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_the_default_tensor_type(fake):
    torch.set_default_tensor_type(torch.cuda.HalfTensor)
    assert torch.zeros(2).is_cuda and torch.zeros(2).dtype == torch.float16
    torch.set_default_tensor_type("torch.cuda.FloatTensor")
    assert nn.Linear(2, 2).weight.is_cuda and torch.zeros(2).dtype == torch.float32
    torch.set_default_tensor_type(torch.DoubleTensor)
    assert torch.zeros(2).dtype == torch.float64 and not torch.zeros(2).is_cuda
    with pytest.raises(TypeError, match="only floating-point types"):
        torch.set_default_tensor_type(torch.cuda.LongTensor)
    torch.set_default_tensor_type(torch.FloatTensor)


def test_memory_for_other_libraries_is_refused_in_one_line(fake):
    x = torch.ones(2, device="cuda")
    for wrong in (lambda: torch.utils.dlpack.to_dlpack(x), x.__dlpack__):
        with pytest.raises(PredictionError, match=r"^memory handed to another library \(DLPack\) cannot be predicted"):
            wrong()
    assert torch.from_dlpack(x).data_ptr() == x.data_ptr() and x.__dlpack_device__() == (2, 0)
    assert torch.from_dlpack(torch.ones(2)).tolist() == [1, 1]


def test_profilers_are_quiet(fake, capfd):
    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=both, profile_memory=True) as found, record_function("a"):
        torch.ones(3, device="cuda") + 1
    assert "aten::add" in {one.key for one in found.key_averages()}
    with torch.cuda.nvtx.range("a"), torch.autograd.profiler.profile(use_device="cuda"):
        torch.cuda.nvtx.mark("b"), torch.cuda.profiler.start(), torch.cuda.cudart().cudaProfilerStop()
        torch.ones(3, device="cuda") + 1
    read = capfd.readouterr()
    assert len((read.out + read.err).splitlines()) <= 5
    assert any("recorded the host only" in text for text in fake.assumptions)
