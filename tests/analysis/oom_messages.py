"""Messages of out-of-memory as PyTorch has worded them, and what each says."""

from __future__ import annotations

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

ADVICE_2_0 = (
    " If reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation.  See "
    "documentation for Memory Management and PYTORCH_CUDA_ALLOC_CONF"
)
ADVICE_2_12 = (
    " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
    "avoid fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf)"
)

# PyTorch's version and backend -> (the message, what it says in binary units; sizes as (number, unit in bytes, digits)).
WORDINGS: dict[str, tuple[str, dict[str, object]]] = {
    "1.3": (
        "RuntimeError: CUDA out of memory. Tried to allocate 164.50 GiB (GPU 2; 10.92 GiB total capacity; 19.66 MiB "
        "already allocated; 10.40 GiB free; 14.34 MiB cached)",
        {"device": 2, "asked": (164.50, GiB), "capacity": (10.92, GiB), "allocated": (19.66, MiB), "free": (10.40, GiB),
         "cached": (14.34, MiB)},
    ),
    "1.4": (
        "RuntimeError: CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 7.93 GiB total capacity; 6.94 GiB "
        "already allocated; 10.56 MiB free; 7.28 GiB reserved in total by PyTorch)",
        {"device": 0, "asked": (128, MiB), "capacity": (7.93, GiB), "allocated": (6.94, GiB), "free": (10.56, MiB),
         "reserved": (7.28, GiB)},
    ),
    "1.13": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 12.00 MiB (GPU 0; 2.00 GiB total "
        "capacity; 1.63 GiB "
        f"already allocated; 0 bytes free; 1.50 GiB allowed; 1.67 GiB reserved in total by PyTorch){ADVICE_2_0}",
        {"device": 0, "asked": (12, MiB), "capacity": (2, GiB), "allocated": (1.63, GiB), "free": 0, "allowed": (1.5, GiB),
         "reserved": (1.67, GiB)},
    ),
    "2.1": (
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacty of "
        "14.75 GiB of which 6.81 MiB is free. Process 3661 has 14.74 GiB memory in use. Of the allocated memory "
        "14.37 GiB is allocated by PyTorch, and 180.71 MiB is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting max_split_size_mb to avoid fragmentation.",
        {"device": 0, "asked": (20, MiB), "capacity": (14.75, GiB), "free": (6.81, MiB), "allocated": (14.37, GiB),
         "cached": (180.71, MiB), "others": {3661: (14.74, GiB)}},
    ),
    "2.12": (
        "CUDA out of memory. Tried to allocate 900.00 MiB. GPU 1 has a total capacity of 2.00 GiB of which 12.00 "
        "MiB is free. Process 71 has 256.00 MiB memory in use. Process 72 has 1.00 GiB memory in use. Including "
        "non-PyTorch memory, this process has 1.99 GiB memory in use. 1024.00 MiB allowed; Of the allocated memory "
        "1.74 GiB is allocated by PyTorch, with 22.00 MiB allocated in private pools (e.g., CUDA Graphs), and 0 "
        "bytes is reserved by PyTorch but unallocated."
        + ADVICE_2_12,
        {"device": 1, "asked": (900, MiB), "capacity": (2, GiB), "free": (12, MiB), "process": (1.99, GiB),
         "allowed": (1024, MiB), "allocated": (1.74, GiB), "private_pools": (22, MiB), "cached": 0,
         "others": {71: (256, MiB), 72: (1, GiB)}},
    ),
    "2.15, expandable segments": (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8.00 GiB of "
        "which 7.61 GiB is free. Including non-PyTorch memory, this process has 401.00 MiB memory in use. Of the allocated "
        "memory 83.12 MiB is allocated by PyTorch, and 40.88 MiB is reserved by PyTorch but unallocated. expandable_segments "
        "is enabled. If instead the process is running out of virtual address space (VSZ), expandable segments may be "
        "over-reserving VA (each segment reserves ~9/8 of device memory, times the number of streams); reduce it via "
        "PYTORCH_CUDA_ALLOC_CONF expandable_segments_reserve / expandable_segments_reserve_by_class.",
        {"device": 0, "asked": (20, GiB), "capacity": (8, GiB), "free": (7.61, GiB), "process": (401, MiB),
         "allocated": (83.12, MiB), "cached": (40.88, MiB)},
    ),
    "2.5, ROCm": (
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 76.00 MiB. GPU 1 has a total capacity of "
        "287.98 GiB of which 0 bytes is free. Of the allocated memory 200.12 GiB is allocated by PyTorch, and 1.20 "
        "GiB is reserved by PyTorch but unallocated.",
        {"backend": "HIP", "device": 1, "asked": (76, MiB), "capacity": (287.98, GiB), "free": 0, "allocated": (200.12, GiB),
         "cached": (1.2, GiB)},
    ),
    "cudaMallocAsync": (
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 9.43 "
        "GiB\nRequested               : 640.00 MiB\nDevice limit            : 11.59 GiB\nFree (according to CUDA): "
        "7.12 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 "
        "GiB",
        {"device": 0, "asked": (640, MiB), "capacity": (11.59, GiB), "free": (7.12, MiB), "allocated": (9.43, GiB)},
    ),
    "2.4, XPU": (
        "XPU out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.91 GiB. Of the allocated "
        "memory 14.55 GiB is allocated by PyTorch, and 30.25 MiB is reserved by PyTorch but unallocated. Please use "
        "`empty_cache` to release all unoccupied cached memory.",
        {"backend": "XPU", "device": 0, "asked": (20, MiB), "capacity": (15.91, GiB), "allocated": (14.55, GiB),
         "cached": (30.25, MiB)},
    ),
    "1.13, MPS": (
        "MPS backend out of memory (MPS allocated: 67.09 GB, other allocations: 22.75 GB, max allowed: 81.60 GB). "
        "Tried to\nallocate 30.25 KB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper "
        "limit for memory allocations (may cause system failure).",
        {"backend": "MPS", "asked": (30.25, KiB), "allocated": (67.09, GiB), "elsewhere": (22.75, GiB), "allowed": (81.6, GiB)},
    ),
    "2.9, MPS": (
        "RuntimeError: MPS backend out of memory (MPS allocated: 1024.00 MiB, other allocations: 384.00 KiB). Tried "
        "to allocate 256.00 MiB on shared pool.",
        {"backend": "MPS", "asked": (256, MiB), "allocated": (1024, MiB), "elsewhere": (384, KiB)},
    ),
    "MPS, one buffer": ("RuntimeError: Invalid buffer size: 20.00 GB", {"backend": "MPS", "asked": (20.0, GiB)}),
    "CPU": (
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 35184372088832 bytes. Error code 12 (Cannot allocate memory)",
        {"backend": "CPU", "asked": 35184372088832},
    ),
    "CPU, Windows": (
        "RuntimeError: [enforce fail at ..\\c10\\core\\impl\\alloc_cpu.cpp:72] data. DefaultCPUAllocator: not "
        "enough memory: you tried to allocate 1207959552 bytes. Buy new RAM!",
        {"backend": "CPU", "asked": 1207959552},
    ),
    "numpy": (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape "
        "(2000000000,) and data type float64",
        {"backend": "numpy", "asked": (14.9, GiB, 1)},
    ),
}  # fmt: skip
