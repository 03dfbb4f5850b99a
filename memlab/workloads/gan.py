"""Two networks against each other: DCGAN (Radford et al., 2015, https://arxiv.org/abs/1511.06434) on 64 x 64 pictures.

A step has two turns, first of the discriminator, then of the generator; each clears, feeds, goes forward and backward, and updates.
One Adam serves both, as the paper gives both the same: it leaves a parameter alone that has no gradient.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.job import Job, Parts
from memlab.workloads.workload import Workload


def _generator(noise: int, width: int) -> nn.Sequential:
    """Noise (batch, noise) -> pictures (batch, 3, 64, 64), between -1 and 1."""
    widths = (8 * width, 4 * width, 2 * width, width)
    blocks = [nn.Sequential(nn.ConvTranspose2d(noise, widths[0], 4, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())]
    for before, after in itertools.pairwise(widths):
        grow = nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)
        blocks.append(nn.Sequential(grow, nn.BatchNorm2d(after), nn.ReLU()))
    picture = nn.Sequential(nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
    return nn.Sequential(nn.Unflatten(1, (noise, 1, 1)), *blocks, picture)


def _discriminator(width: int) -> nn.Sequential:
    """Pictures -> one score each (batch,): above zero, it takes them for real."""
    blocks = [nn.Sequential(nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2))]
    for before in (width, 2 * width, 4 * width):
        shrink = nn.Conv2d(before, 2 * before, 4, 2, 1, bias=False)
        blocks.append(nn.Sequential(shrink, nn.BatchNorm2d(2 * before), nn.LeakyReLU(0.2)))
    return nn.Sequential(*blocks, nn.Conv2d(8 * width, 1, 4, bias=False), nn.Flatten(0))


class Gan(nn.Module):
    """`generator` and `discriminator`; called, it generates."""

    def __init__(self, noise: int = 100, width: int = 64) -> None:
        super().__init__()
        self.generator, self.discriminator = _generator(noise, width), _discriminator(width)
        for one in self.modules():
            if isinstance(one, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.normal_(one.weight, std=0.02)

    def forward(self, noise: Tensor) -> Tensor:
        """Pictures."""
        return self.generator(noise)

    def job_step(self, job: Job) -> None:
        """One step of a job: both turns, and the loss of each."""
        told_apart = self._turn(
            job, self.generator, self._telling_apart
        )  # alive while the other turn goes, as in most code
        with resting(self.discriminator):
            fooled = self._turn(job, self.discriminator, self._fooling)
        job.losses += [torch.stack([one.detach() for one in losses]).sum() for losses in (told_apart, fooled)]

    def _turn(self, job: Job, other: nn.Module, lost: Callable[[Job, Tensor, Tensor], Tensor]) -> list[Tensor]:
        """Train the one of them that is not `other`; gives the loss of each piece of the batch."""
        job.clear()
        for one in other.parameters():
            one.grad = None  # a gradient of zeros is one: Adam would go on moving the parameter
        losses = []
        for share, (noise, real) in job.feed():
            with job._forward_contexts():
                fake = job.forward(noise)
                loss = lost(job, fake, real)
            losses.append(loss * share if share != 1 else loss)
            job.backward(losses[-1])
            job.keep(fake, loss)
            del fake, loss
        job.update()
        return losses

    def _telling_apart(self, job: Job, fake: Tensor, real: Tensor) -> Tensor:
        scores, made_up = self.discriminator(real), self.discriminator(fake.detach())
        return job._lost(scores, torch.ones_like(scores)) + job._lost(made_up, torch.zeros_like(made_up))

    def _fooling(self, job: Job, fake: Tensor, real: Tensor) -> Tensor:
        scores = self.discriminator(fake)
        return job._lost(scores, torch.ones_like(scores))


@contextlib.contextmanager
def resting(network: nn.Module) -> Iterator[None]:
    """Gradients go through the network and not to its parameters."""
    trained = [one for one in network.parameters() if one.requires_grad]
    try:
        for one in trained:
            one.requires_grad_(False)
        yield
    finally:
        for one in trained:
            one.requires_grad_(True)


def gan(batch: int, noise: int, width: int) -> Parts:
    """The model in training on random pictures; the loss judges the scores of the discriminator."""
    model = Gan(noise, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
    batches = torch.randn(batch, noise), torch.rand(batch, 3, 64, 64) * 2 - 1
    return model, optimizer, batches, functional.binary_cross_entropy_with_logits


WORKLOADS = (
    Workload(
        "gan",
        "a generator against a discriminator: two turns a step, each with a graph of its own",
        gan,
        {
            "tiny": {"batch": 32, "noise": 16, "width": 8},
            "laptop": {"batch": 128, "noise": 100, "width": 32},
            "card": {"batch": 128, "noise": 100, "width": 64},
        },
    ),
)
