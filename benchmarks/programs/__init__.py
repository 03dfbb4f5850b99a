"""Training programs as people write them, plain PyTorch for "cuda": what the predictor and the allocator are proved with.

They know nothing of memlab. None has shapes that depend on values, so that they also run on a simulated GPU.
"""

from benchmarks.programs import classic, language, loops, techniques, vision
from benchmarks.programs.registry import PROGRAMS

__all__ = ["PROGRAMS", "classic", "language", "loops", "techniques", "vision"]
