"""PyTorch's CUDA caching allocator in pure Python: the rules, and the books kept along known addresses."""

from memlab.allocator.books import Books, Followed, Held
from memlab.allocator.rules import Settings

__all__ = ["Books", "Followed", "Held", "Settings"]
