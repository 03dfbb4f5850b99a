"""`memlab.size`: the memory of a training step of a model, part by part, before it is run."""

from __future__ import annotations

import dataclasses
from typing import Any

from memlab.analysis.step_size import Kept, Layer, Sizes
from memlab.errors import MemlabError
from memlab.views.page import Page
from memlab.views.shown import Shown
from memlab.views.size import size_page


class ModelSize(Shown, Sizes):
    """The sizes of a model: as text, in a notebook, or `parts`, `layers`, `kept`, `to_pandas()`."""

    __slots__ = ()

    @property
    def page(self) -> Page:
        """Build the report."""
        return size_page(self)

    def to_pandas(self, of: str = "layers") -> Any:
        """A pandas DataFrame of "layers", "tensors" (what the forward keeps) or "parts"."""
        import pandas

        if of == "parts":
            return pandas.DataFrame(list(self.parts.items()), columns=["part", "nbytes"])
        if of not in ("layers", "tensors"):
            raise MemlabError(f'to_pandas takes "layers", "tensors" or "parts", got {of!r}.')
        values, kind = (self.layers, Layer) if of == "layers" else (self.kept, Kept)
        names = [field.name for field in dataclasses.fields(kind)]
        return pandas.DataFrame([[getattr(one, name) for name in names] for one in values], columns=names)


def size(model: Any, /, *inputs: Any, optimizer: Any = None, **kwargs: Any) -> ModelSize:
    """The memory of a training step of `model`: parameters, buffers, gradients, optimizer state, activations, per layer.

    Nothing is computed and the model stays as it is: its forward runs in a child process on tensors without data, so a model
    on the meta device is enough. `inputs` and `kwargs` go to the forward; a tuple of whole numbers stands for a float32 tensor of
    that shape. `optimizer` is a class or a name of torch.optim ("adamw"), an optimizer, or a function that makes one of
    parameters. The figures hold for the device of the model, else of the inputs, else PyTorch's default device, and for the
    mode that the model is in (train or eval). What autograd keeps is read from its graph: each storage once, views and in-place
    results included, without parameters, buffers and inputs.

    Not included: the loss, unless the model returns it; temporaries of operators and of backward; the allocator's rounding.
    """
    from memlab.prediction.model_size import measure

    sizes: ModelSize = ModelSize.from_json(measure(model, inputs, kwargs, optimizer))
    return sizes
