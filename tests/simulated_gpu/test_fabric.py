"""A simulated GPU is on no NVLink fabric, and says so where PyTorch asks before it makes an expandable segment."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import pynvml
import pytest
from processes import python

from memlab.units import MiB

pytestmark = pytest.mark.simulated
STEP = """
import json, torch
from torch import nn
torch.cuda.memory._record_memory_history()
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.zeros(256, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
said = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
snapshot = torch.cuda.memory._snapshot()
said["expandable"] = [segment["is_expandable"] for segment in snapshot["segments"]]
said["total"] = sum(segment["total_size"] for segment in snapshot["segments"])
said["actions"] = sorted({event["action"] for event in snapshot["device_traces"][0]})
try:
    torch.empty(5 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    said["error"] = str(error)
used = torch.cuda.mem_get_info()[0]
del model, optimizer
torch.cuda.empty_cache()
said["left"] = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
said["given_back"] = torch.cuda.mem_get_info()[0] - used
print(json.dumps(said))
"""


@pytest.fixture
def device() -> Any:
    pynvml.nvmlInit()
    yield pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlShutdown()


@pytest.mark.parametrize("kind", ["c_nvmlGpuFabricInfo_v2_t", "c_nvmlGpuFabricInfo_v3_t"])
def test_it_is_on_no_fabric(device, kind):
    info = getattr(pynvml, kind)()
    ctypes.memset(ctypes.addressof(info) + 4, 0xFF, ctypes.sizeof(info) - 4)
    pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))
    assert info.state == pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED
    assert bytes(info)[4:] == bytes(ctypes.sizeof(info) - 4)


def test_the_oldest_question(device):
    info = (ctypes.c_ubyte * (ctypes.sizeof(pynvml.c_nvmlGpuFabricInfo_t) + 1))(*[0xFF] * 29)
    pynvml.nvmlDeviceGetGpuFabricInfo(device, ctypes.byref(info))
    assert bytes(info) == bytes(28) + b"\xff"


def test_a_version_that_is_not_known_is_refused(device):
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    info.version = 0x09000024
    with pytest.raises(pynvml.NVMLError, match="Version Mismatch"):
        pynvml.nvmlDeviceGetGpuFabricInfoV(device, ctypes.byref(info))


@pytest.mark.parametrize("shared", ["0", "1"])
def test_a_step_in_expandable_segments(shared):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": shared}
    said = json.loads(python("-c", STEP, gpu={"total_mb": 4096}, **settings))
    assert said["expandable"] and all(said["expandable"])
    assert said["total"] == said["reserved"] > said["allocated"] > 90 * MiB
    assert "segment_map" in said["actions"] and "segment_alloc" not in said["actions"]
    assert "Tried to allocate 5.00 GiB. GPU 0 has a total capacity of 4.00 GiB" in said["error"]
    assert said["given_back"] > 60 * MiB
