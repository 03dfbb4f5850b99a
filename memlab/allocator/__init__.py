"""PyTorch's CUDA caching allocator in pure Python: its rules, a tracker for recorded addresses, and the allocator itself."""

from memlab.allocator.blocks import Block
from memlab.allocator.caching import CachingAllocator
from memlab.allocator.conf import ConfError, parse_conf
from memlab.allocator.out_of_memory import OutOfMemory
from memlab.allocator.replay import Workspace, simulate
from memlab.allocator.rules import Settings
from memlab.allocator.tracker import BlockTracker, LiveBlock, TrackedEvents

__all__ = [
    "Block", "BlockTracker", "CachingAllocator", "ConfError", "LiveBlock", "OutOfMemory", "Settings", "TrackedEvents",
    "Workspace", "parse_conf", "simulate",
]  # fmt: skip
