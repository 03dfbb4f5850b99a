"""The known GPUs as data: nominal memory, what PyTorch sees of it, and the source of each figure.

A row of `CARDS`: name, nominal GiB, compute capability, multiprocessors, other names, and what PyTorch reported
as the card's whole memory (`total_memory`, "total capacity" in its out-of-memory messages), each figure with its source. A
card without a figure gets an interval from similar ones (see `cards.py`), marked as an estimate.
`CONTEXTS` are sizes of a process outside PyTorch's allocator: "this process has X in use" minus allocated and cached, in
public out-of-memory messages; their resolution is 0.01 GiB. If a post does not name the GPU, its capacity identifies it
(Colab: T4).
"""

from __future__ import annotations

Seen = tuple[float | int, str]
"""GiB (a float) or bytes (an int) of total memory, and the source."""

_GITHUB = "https://github.com/"


def _g(figure: float | int, thread: str) -> Seen:
    return figure, _GITHUB + thread


# fmt: off
CARDS: tuple[tuple[str, float, tuple[int, int], int, tuple[str, ...], tuple[Seen, ...]], ...] = (
    # Turing
    ("GTX 1660", 6, (7, 5), 22, ("GTX 1660 Super",), ()),
    ("GTX 1660 Ti", 6, (7, 5), 24, (), (_g(5.81, "zhou13/lcnn/issues/23"),)),
    ("RTX 2060", 6, (7, 5), 30, (), ()),
    ("RTX 2060 12GB", 12, (7, 5), 34, (), ()),
    ("RTX 2060 Super", 8, (7, 5), 34, (), ()),
    ("RTX 2070", 8, (7, 5), 36, (), ()),
    ("RTX 2070 Super", 8, (7, 5), 40, (), ()),
    ("RTX 2080", 8, (7, 5), 46, (), ()),
    ("RTX 2080 Super", 8, (7, 5), 48, (), ()),
    ("RTX 2080 Ti", 11, (7, 5), 68, (), ()),
    ("Titan RTX", 24, (7, 5), 72, (), ()),
    ("T4", 16, (7, 5), 40, ("colab", "kaggle T4"), (
        _g(14.56, "Zheng-Chong/CatVTON/issues/133"), _g(14.56, "facebookresearch/tribev2/issues/28"),
        _g(15_655_829_504, "bottlerocket-os/bottlerocket/pull/3798"),
        _g(14.75, "tsugumi-sys/SA-ConvLSTM-Pytorch/issues/22"))),
    # Pascal and Volta: no kernels for them in PyTorch's CUDA 13 builds
    ("P100", 16, (6, 0), 56, ("kaggle P100", "P100-PCIE-16GB"), ()),
    ("V100 16GB", 16, (7, 0), 80, ("V100", "V100-SXM2-16GB", "V100-PCIE-16GB"), (
        _g(15.78, "kchengiva/Shift-GCN/issues/34"),)),
    ("V100 32GB", 32, (7, 0), 80, ("V100-SXM2-32GB", "V100-PCIE-32GB", "V100S-PCIE-32GB"), (
        _g(31.74, "liucongg/ChatGLM-Finetuning/issues/73"), _g(31.75, "uni-medical/SAM-Med3D/issues/8"))),
    # Ampere
    ("RTX 3050", 8, (8, 6), 20, ("RTX 3050 8GB",), ()),
    ("RTX 3050 Laptop", 4, (8, 6), 16, (), (_g(3.81, "NVlabs/RVT/issues/7"),)),
    ("RTX 3060", 12, (8, 6), 28, ("RTX 3060 12GB",), (_g(11.75, "smy20011/dreambooth-gui/issues/78"),)),
    ("RTX 3060 Laptop", 6, (8, 6), 30, (), (_g(5.80, "JiehongLin/SAM-6D/issues/13"),)),
    ("RTX 3060 Ti", 8, (8, 6), 38, (), ()),
    ("RTX 3070", 8, (8, 6), 46, (), (
        _g(7.78, "akshitac8/OW-DETR/issues/46"), _g(7.78, "meta-llama/codellama/issues/82"))),
    ("RTX 3070 Ti", 8, (8, 6), 48, (), ()),
    ("RTX 3080", 10, (8, 6), 68, ("RTX 3080 10GB",), (
        _g(9.78, "zai-org/CogVideo/issues/34"), _g(9.77, "bcmi/libcom/issues/54"))),
    ("RTX 3080 12GB", 12, (8, 6), 70, (), ()),
    ("RTX 3080 Ti", 12, (8, 6), 80, (), ()),
    ("RTX 3090", 24, (8, 6), 82, (), (
        _g(23.69, "ucwxb/GraphAvatar/issues/4"), _g(23.70, "Lightning-AI/lit-llama/issues/137"))),
    ("RTX 3090 Ti", 24, (8, 6), 84, (), ()),
    ("RTX A4000", 16, (8, 6), 48, ("A4000",), (_g(15.61, "DengKaiCQ/VGGT-Long/issues/6"),)),
    ("RTX A5000", 24, (8, 6), 64, ("A5000",), ()),
    ("RTX A6000", 48, (8, 6), 84, ("A6000",), ()),
    ("A10", 24, (8, 6), 72, (), (_g(21.99, "zai-org/CogVLM/issues/236"),)),
    ("A10G", 24, (8, 6), 80, (), ()),
    ("A30", 24, (8, 0), 56, (), (_g(23.50, "LHRLAB/ChatKBQA/issues/2"),)),
    ("A40", 48, (8, 6), 84, (), ()),
    ("A100 40GB", 40, (8, 0), 108, ("A100", "A100-SXM4-40GB", "A100-PCIE-40GB"), (
        _g(42_298_834_944, "bottlerocket-os/bottlerocket/pull/3873"),
        _g(39.50, "TianheWu/CoSeR/issues/10"))),
    ("A100 80GB", 80, (8, 0), 108, ("A100-SXM4-80GB", "A100 80GB PCIe"), (
        _g(79.25, "HiDream-ai/VAREdit/issues/6"), _g(79.25, "levihsu/OOTDiffusion/issues/235"))),
    # Ada
    ("RTX 4050 Laptop", 6, (8, 9), 20, ("RTX 4050",), ()),
    ("RTX 4060", 8, (8, 9), 24, ("RTX 4060 Laptop",), (_g(7.75, "ESRSchao/EdgeRegNet/issues/2"),)),
    ("RTX 4060 Ti", 8, (8, 9), 34, ("RTX 4060 Ti 8GB",), ()),
    ("RTX 4060 Ti 16GB", 16, (8, 9), 34, (), ()),
    ("RTX 4070", 12, (8, 9), 46, (), ()),
    ("RTX 4070 Laptop", 8, (8, 9), 36, (), ()),
    ("RTX 4070 Super", 12, (8, 9), 56, (), ()),
    ("RTX 4070 Ti", 12, (8, 9), 60, (), ()),
    ("RTX 4070 Ti Super", 16, (8, 9), 66, (), ()),
    ("RTX 4080", 16, (8, 9), 76, (), ()),
    ("RTX 4080 Super", 16, (8, 9), 80, (), ()),
    ("RTX 4090", 24, (8, 9), 128, (), (
        _g(23.52, "pytorch/torchchat/issues/1341"), _g(23.61, "pinokiofactory/flux-webui/issues/11"),
        _g(23.64, "ali-vilab/VGen/issues/104"), _g(23.68, "zai-org/CogVideo/issues/36"))),
    ("RTX 6000 Ada", 48, (8, 9), 142, ("RTX 6000 Ada Generation",), (
        _g(44.43, "DINGYANB/MTVCrafter/issues/21"), _g(50_865_307_648, "unslothai/unsloth-zoo/pull/1053"))),
    ("L4", 24, (8, 9), 58, (), (_g(22.03, "ArcInstitute/evo2/issues/190"),)),
    ("L40", 48, (8, 9), 142, (), (_g(44.40, "QwenLM/Qwen3-VL/issues/2097"),)),
    ("L40S", 48, (8, 9), 142, (), (_g(44.42, "stepfun-ai/Step-Video-T2V/issues/8"),)),
    # Hopper
    ("H100 80GB", 80, (9, 0), 132, ("H100", "H100 80GB HBM3", "H100 SXM"), (
        _g(79.11, "vllm-project/vllm/issues/27508"),)),
    ("H100 PCIe", 80, (9, 0), 114, (), ()),
    ("H200", 141, (9, 0), 132, ("H200 141GB",), ()),
    # Blackwell
    ("RTX 5060", 8, (12, 0), 30, (), ()),
    ("RTX 5060 Ti", 8, (12, 0), 36, ("RTX 5060 Ti 8GB",), ()),
    ("RTX 5060 Ti 16GB", 16, (12, 0), 36, (), ()),
    ("RTX 5070", 12, (12, 0), 48, (), ()),
    ("RTX 5070 Ti", 16, (12, 0), 70, (), ()),
    ("RTX 5080", 16, (12, 0), 84, (), ()),
    ("RTX 5090", 32, (12, 0), 170, (), (
        _g(31.36, "TrajectoryCrafter/TrajectoryCrafter/issues/20"), _g(31.37, "Wan-Video/Wan2.1/issues/465"),
        _g(31.37, "Ksuriuri/index-tts-vllm/issues/91"))),
    ("RTX PRO 6000", 96, (12, 0), 188, ("RTX PRO 6000 Blackwell",), ()),
    ("B200", 180, (10, 0), 148, (), ()),
    # AMD, through ROCm
    ("MI300X", 192, (9, 4), 304, (), ()),
)

NOT_ON_A_THREAD: dict[str, tuple[tuple[float, ...], str]] = {
    "P100": ((15.90,), "get_device_properties in a public log: total_memory=16280MB, 56 multiprocessors"),
    "H200": ((139.72, 139.81), "out-of-memory messages in public run logs"),
    "B200": ((178.35, 178.36), "out-of-memory messages in public run logs"),
    "MI300X": ((191.69, 191.98), "out-of-memory messages (HIP) in public run logs"),
}
"""Figures from public files without an address: card -> GiB, and where."""

CONTEXTS: tuple[tuple[str, float, str], ...] = (
    ("T4", 0.13, _GITHUB + "Zheng-Chong/CatVTON/issues/133"),
    ("T4", 0.12, _GITHUB + "facebookresearch/tribev2/issues/28"),
    ("RTX 4060", 0.11, _GITHUB + "ESRSchao/EdgeRegNet/issues/2"),
    ("RTX 3070", 0.17, _GITHUB + "meta-llama/codellama/issues/82"),
    ("RTX A4000", 0.21, _GITHUB + "DengKaiCQ/VGGT-Long/issues/6"),
    ("L4", 0.23, _GITHUB + "ArcInstitute/evo2/issues/190"),
    ("RTX 3080", 0.25, _GITHUB + "bcmi/libcom/issues/54"),
    ("A100 80GB", 0.40, _GITHUB + "HiDream-ai/VAREdit/issues/6"),
    ("A100 40GB", 0.49, _GITHUB + "TianheWu/CoSeR/issues/10"),
    ("RTX 4090", 0.46, _GITHUB + "pinokiofactory/flux-webui/issues/11"),
    ("RTX 4090", 0.48, _GITHUB + "pytorch/torchchat/issues/1341"),
    ("RTX 4090", 0.44, _GITHUB + "Soul-AILab/SoulX-FlashTalk/issues/5"),
    ("RTX 6000 Ada", 0.42, _GITHUB + "DINGYANB/MTVCrafter/issues/21"),
    ("RTX 6000 Ada", 0.416, _GITHUB + "unslothai/unsloth-zoo/pull/1053"),
    ("L40", 0.49, _GITHUB + "QwenLM/Qwen3-VL/issues/2097"),
    ("L40S", 0.41, _GITHUB + "stepfun-ai/Step-Video-T2V/issues/8"),
    ("RTX 5090", 0.60, _GITHUB + "TrajectoryCrafter/TrajectoryCrafter/issues/20"),
    ("RTX 5090", 0.58, _GITHUB + "Wan-Video/Wan2.1/issues/465"),
)
"""Card, GiB outside the allocator, source: includes the libraries and kernels loaded by then."""
# fmt: on
