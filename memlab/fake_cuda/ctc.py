"""The CTC loss: `torch.nn.functional.ctc_loss` by PyTorch's own kernels (ATen/native/LossCTC.cpp, cuda/LossCTC.cu).

Sizes and order were read off the C++ allocator's own history (2.12.1). What it needs depends on the longest target, so the
lengths are read; unknown ones are assumed to be the largest. Limits: cuDNN's kernel is not predicted, PyTorch's is in its place.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from memlab.fake_cuda.assumed import assumed, note
from memlab.fake_cuda.kernel_rules import FLOAT, LONG, bytes_of, rule
from memlab.fake_cuda.tensors import is_fake
from memlab.fake_cuda.values import is_assumed, known

aten = torch.ops.aten
MEAN, SUM = 1, 2
"""at::Reduction."""
MOST_CUDNN_LABELS = 256
CUDNN = "cuDNN computes it here, whose workspace is unknown: PyTorch's own kernel was assumed"


@rule("ctc_loss.Tensor", "ctc_loss.IntList")
def ctc_loss(cuda, func, log_probs, targets, input_lengths, target_lengths, blank=0, reduction=MEAN, to_zero=False):
    """The losses of the samples, and their mean over the lengths of their targets."""
    is_batched = log_probs.dim() == 3
    log_probs = log_probs if is_batched else log_probs.unsqueeze(1)
    longest, samples = log_probs.shape[0], log_probs.shape[1]
    labels = targets.shape[-1] if targets.dim() > 1 or samples == 1 else targets.numel() - samples + 1
    inputs, wanted = _lengths(cuda, input_lengths, longest), _lengths(cuda, target_lengths, labels)
    # As `_use_cudnn_ctc_loss` (ATen/native/cudnn/LossCTC.cpp).
    takes = targets.dim() == 1 and targets.dtype == torch.int32 and targets.device.type == "cpu"
    takes = takes and all(one == longest for one in inputs) and max(wanted, default=0) <= MOST_CUDNN_LABELS
    if takes and torch.backends.cudnn.enabled and blank == 0 and log_probs.dtype == FLOAT:
        note(cuda, "ctc_loss", CUDNN)
    run = aten._ctc_loss.default
    loss = run(log_probs, targets.to(log_probs.device, torch.int64), inputs, wanted, blank, to_zero)[0]
    if to_zero:
        zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
        loss = torch.where(loss == math.inf, zero, loss)
        del zero
    if reduction == MEAN:
        return (loss / torch.tensor(wanted, dtype=loss.dtype, device=loss.device).clamp_min(1)).mean()
    return loss.sum() if reduction == SUM else loss if is_batched else loss.squeeze(0)


def _lengths(cuda: Any, lengths: Any, largest: int) -> list[int]:
    if not isinstance(lengths, torch.Tensor):
        return list(lengths)
    if is_fake(lengths):
        found = known(lengths)
        if found is None or is_assumed(lengths):
            return [assumed(cuda, "ctc_loss", largest, (0, largest), "its lengths", "size")] * lengths.numel()
        lengths = found
    found = lengths.reshape(-1).tolist()
    return [int(one) for one in found]


@rule("_ctc_loss.default")
def ctc_loss_forward(cuda, func, log_probs, targets, input_lengths, target_lengths, *args):
    """Offsets and lengths, a probability per step and label or blank, the losses (ctc_loss_gpu_template)."""
    steps, samples = log_probs.shape[:2]
    with cuda.held(*[samples * LONG] * 3, op=func):
        alpha = cuda.empty((samples, steps, 2 * max(target_lengths, default=0) + 1), log_probs.dtype, op=func)
        return cuda.empty((samples,), log_probs.dtype, op=func), alpha


@rule("_ctc_loss_backward.default")
def ctc_loss_backward(cuda, func, grad, log_probs, targets, input_lengths, target_lengths, losses, alpha, *args):
    """The same again, and for long inputs the sums over blanks (ctc_loss_backward_gpu_template)."""
    steps, samples, labels = log_probs.shape
    with cuda.held(*[samples * LONG] * 3, op=func), cuda.held(bytes_of(alpha), op=func):
        out = cuda.op(aten.empty_like.default, log_probs)
        if 2 * steps + (24 * samples) // 10 + (2 * labels) // 10 > 450:
            blanks = cuda.empty((samples, steps, alpha.shape[2] // 2 + 1), alpha.dtype, op=func)
            total = blanks.logsumexp(2)
            del total, blanks
        return out
