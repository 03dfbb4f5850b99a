"""The CTC loss allocates what PyTorch's allocator did on the simulated GPU (2.12.1): 50 steps, 16 samples, 20 labels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import ctc_loss

from memlab.trace.columns import Kind

SAMPLES, LABELS = 16, 20


def events(fake, start):
    columns = fake.log.columns()
    rows = zip(columns["kind"][start:], columns["nbytes"][start:], strict=True)
    return " ".join(("+" if kind == Kind.ALLOC else "-") + str(nbytes) for kind, nbytes in rows)


KERNEL = "+128 +128 +128 +163200 +64 -128 -128 -128"
MEAN = "+64 +64 -64 +64 +4 -64"
BACK = "+128 +128 +128 +163200 +64000 -163200 -128 -128 -128"


@pytest.mark.parametrize(
    ("given", "steps", "forward", "backward"),
    [
        ({}, 50, f"{KERNEL} {MEAN}", f"+4 +64 +64 -64 -64 {BACK} -64 -64 -163200 -4"),
        ({"reduction": "sum"}, 50, f"{KERNEL} +4", f"+4 {BACK} -64 -163200 -4"),
        (
            {"zero_infinity": True}, 50, f"{KERNEL} +4 +16 +64 -4 {MEAN} -64",
            f"+4 +64 +64 -64 -64 +4 +64 -4 -64 -16 {BACK} -64 -64 -163200 -4",
        ),
        (
            {}, 700, f"{KERNEL} {MEAN}".replace("163200", "2284800"),
            "+4 +64 +64 -64 -64 +128 +128 +128 +2284800 +896000 +1164800 +44800 +44800 +11200 -11200 -44800 +1164800 "
            "+44800 -1164800 -44800 -44800 -1164800 -2284800 -128 -128 -128 -64 -64 -2284800 -4",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_it_allocates_as_on_cuda(fake, given, steps, forward, backward, where):
    probabilities = torch.empty(steps, SAMPLES, LABELS, device="cuda").requires_grad_()
    targets = torch.ones(SAMPLES, 30, dtype=torch.long, device="cuda")
    inputs, wanted = torch.full((SAMPLES,), steps, device=where), torch.arange(10, 26).to(where)
    start = len(fake.log)
    loss = ctc_loss(probabilities, targets, inputs, wanted, **given)
    fake.log.record_frees()
    assert events(fake, start) == forward
    start = len(fake.log)
    loss.backward()
    fake.log.record_frees()
    assert events(fake, start) == backward
    assert probabilities.grad.shape == probabilities.shape and not fake.assumptions


def test_unknown_lengths_are_the_largest(fake):
    probabilities = torch.empty(50, SAMPLES, LABELS, device="cuda")
    lengths = torch.randint(1, 30, (SAMPLES,), device="cuda")
    ctc_loss(probabilities, torch.ones(SAMPLES, 30, dtype=torch.long, device="cuda"), lengths, lengths)
    assert max(fake.log.columns()["nbytes"][2:]) == 16 * 50 * 61 * 4
    assert any(
        "test_ctc.py:" in text and "ctc_loss: assumed " in text and "its lengths" in text for text in fake.assumptions
    )


def test_a_single_sequence_and_cudnn(fake):
    single = torch.empty(50, LABELS, device="cuda").log_softmax(1)
    assert ctc_loss(single, torch.ones(9, dtype=torch.long), torch.tensor(50), torch.tensor(9)).shape == ()
    batch = torch.empty(50, 2, LABELS, device="cuda")
    ctc_loss(batch, torch.ones(9, dtype=torch.int32), torch.tensor([50, 50]), torch.tensor([4, 5]))
    assert any("cuDNN computes it here" in text for text in fake.assumptions)
