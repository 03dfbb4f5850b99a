"""Operators on fake CUDA tensors written down as a graph while they run."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from memlab.fake_cuda.dispatcher import gpu_for_meta
from memlab.fake_cuda.kernel_rules import operators
from memlab.fake_cuda.patches import Patches, constant
from memlab.fake_cuda.tensors import is_fake
from memlab.torch_internals.cuda_names import tree_map_only
from memlab.torch_internals.dispatch import current_autograd_node
from memlab.torch_internals.fakes import tree_leaves
from memlab.torch_internals.private_names import private

_checkpoint: Any = private("torch.utils.checkpoint")
_NAME = "_checkpoint_without_reentrant_generator"
# Since 2.14 checkpoint() calls this one, and the other is for callers outside of PyTorch.
_WITHOUT_REENTRANT = f"{_NAME}_impl" if hasattr(_checkpoint, f"{_NAME}_impl") else _NAME
READS = operators(("_local_scalar_dense.default", "nonzero.default", "equal.default"))


class NotOneGraph(BaseException):
    """The recorded function does what ends a graph; not an Exception, which the function might catch."""


class GraphRecorder:
    """A graph of what is dispatched; tensors from outside are its inputs."""

    is_on = False
    """Whether one is recording."""

    def __init__(self, cuda: Any) -> None:
        self.cuda, self.graph = cuda, fx.Graph()
        self.inputs: list[torch.Tensor] = []
        self.in_backward = False
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[torch.Tensor] = []  # so that no identity is used twice
        self._last = self.graph.call_function(len)  # placeholders stand before it
        self._is_inside = False
        self._checkpoint = self._checkpoints = 0
        self._policy: Callable[..., Any] | None = None

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Record what is dispatched; autocast casts each time, as AOTAutograd lets it."""
        run, keeps_casts = self.cuda.dispatch, torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        GraphRecorder.is_on = True
        try:
            with Patches() as patches:
                patches.put(self.cuda, dispatch=functools.partial(self._dispatch, run))
                patches.put(
                    _checkpoint,
                    CheckpointFunction=SimpleNamespace(apply=self._reentrant),
                    **{_WITHOUT_REENTRANT: self._without_reentrant},
                )
                patches.put(torch.compiler, is_compiling=constant(True), is_dynamo_compiling=constant(True))
                yield
        finally:
            GraphRecorder.is_on = False
            torch.set_autocast_cache_enabled(keeps_casts)

    def _dispatch(self, run: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self._is_inside or self.cuda.facts(func).is_composite:
            return run(func, types, args, kwargs)
        if func in READS:
            raise NotOneGraph("it reads values")
        if not self.in_backward and current_autograd_node() is not None:
            raise NotOneGraph("it calls backward")
        self._is_inside = True
        try:
            out = run(func, types, args, kwargs)
        finally:
            self._is_inside = False
        if any(isinstance(one, torch.Tensor) and not is_fake(one) for one in tree_leaves(out)):
            raise NotOneGraph("it copies to the host")
        given = tree_map_only(torch.Tensor, self.node_of, (tuple(args), gpu_for_meta(kwargs or {})))
        node = self.graph.call_function(func, *given)
        if self._checkpoint:
            # What Dynamo's operator for it tells the partitioner (torch/_higher_order_ops/wrap.py).
            node.meta |= {"recompute": self._chosen(func, args, kwargs or {}), "ac_graph_id": self._checkpoint}
        else:  # before 2.12 the operator runs a graph whose nodes say so, without a checkpoint
            told = fx.traceback.get_current_meta()
            node.meta |= {key: told[key] for key in ("recompute", "ac_graph_id") if key in told}
        self._put(out, node)
        return out

    def _chosen(self, func: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        """Whether a checkpoint keeps what an operator made."""
        if self._policy is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        chosen = self._policy(SelectiveCheckpointContext(is_recompute=False), func, *args, **kwargs)
        if isinstance(chosen, bool):
            return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy(chosen)

    @contextlib.contextmanager
    def _in_checkpoint(self, policy: Callable[..., Any] | None = None) -> Iterator[None]:
        """Within it operators are marked as those of a checkpoint, which the partitioner recomputes."""
        outer, self._checkpoints = (self._checkpoint, self._policy), self._checkpoints + 1
        self._checkpoint, self._policy = self._checkpoint or self._checkpoints, policy
        try:
            yield
        finally:
            self._checkpoint, self._policy = outer

    def _without_reentrant(self, function: Any, *rest: Any, **kwargs: Any) -> Iterator[None]:
        contexts = kwargs["context_fn"] if "context_fn" in kwargs else rest[1]
        with self._in_checkpoint(getattr(contexts()[0], "policy_fn", None)):
            yield

    def _reentrant(self, function: Any, preserves_random_state: Any, *args: Any) -> Any:
        with self._in_checkpoint():
            return function(*args)

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """What made a tensor; an unknown one becomes an input."""
        if id(tensor) not in self._nodes:
            self.inputs.append(tensor)
            self.placeholder(tensor)
        return self._nodes[id(tensor)]

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether it was made here, or is an input."""
        return id(tensor) in self._nodes

    def placeholder(self, tensor: torch.Tensor) -> None:
        """Take a tensor for one that is given."""
        with self.graph.inserting_before(self._last):
            self._put(tensor, self.graph.placeholder(f"input_{len(self._nodes)}"))

    def end(self, results: Any) -> fx.Graph:
        """The graph that returns these nodes."""
        self.graph.erase_node(self._last)
        self.graph.output(results)
        return self.graph

    def _put(self, out: Any, node: fx.Node) -> None:
        if isinstance(out, torch.Tensor):
            self._nodes[id(out)] = node
            self._kept.append(out)
        elif isinstance(out, list | tuple):
            for number, one in enumerate(out):
                self._put(one, self.graph.call_function(operator.getitem, (node, number)))
