"""PyTorch's CUDA caching allocator in pure Python: the rules, the books along known addresses, and the allocator itself."""

from memlab.allocator.blocks import Block
from memlab.allocator.books import Books, Followed, Held
from memlab.allocator.caching import CachingAllocator
from memlab.allocator.conf import ConfError, parse_conf
from memlab.allocator.oom import OutOfMemory
from memlab.allocator.replay import Extra, settle
from memlab.allocator.rules import Settings

__all__ = [
    "Block",
    "Books",
    "CachingAllocator",
    "ConfError",
    "Extra",
    "Followed",
    "Held",
    "OutOfMemory",
    "Settings",
    "parse_conf",
    "settle",
]
