"""Neither images nor language: a multilayer perceptron, and a GAN.

The perceptron has equal layers of parameters and next to no activations. It is the one workload without a published size: a plain
stack, in which the optimizer's state is the largest part.

The two networks are DCGAN (Radford et al., 2015, https://arxiv.org/abs/1511.06434) on 64 x 64 images. A step has two turns, first
of the discriminator, then of the generator; each clears, feeds, goes forward and backward, and updates. One Adam serves both, as
the paper gives both the same: it skips parameters without a gradient.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from memlab.workloads.job import Job, Parts
from memlab.workloads.workload import Workload


class Mlp(nn.Module):
    """`blocks`: linear layers with ReLU, all of one width; then `head`."""

    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores for each class: (batch, classes)."""
        return self.head(self.blocks(x))


def mlp(batch: int, width: int, layers: int, classes: int) -> Parts:
    """Random vectors of the width, random classes, Adam."""
    model = Mlp(width, layers, classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, optimizer, (torch.randn(batch, width), torch.randint(classes, (batch,))), functional.cross_entropy


MLP = Workload.of(
    "mlp", "equal linear layers with Adam: parameters and what the optimizer keeps of them", mlp,
    (16, 512, 6, 10), (256, 2048, 6, 10), (1024, 4096, 16, 1000),
)  # fmt: skip


# --- a GAN ---


def _generator(noise: int, width: int) -> nn.Sequential:
    """Noise (batch, noise) -> images (batch, 3, 64, 64), between -1 and 1."""
    widths = (8 * width, 4 * width, 2 * width, width)
    blocks = [nn.Sequential(nn.ConvTranspose2d(noise, widths[0], 4, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())]
    for before, after in itertools.pairwise(widths):
        grow = nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False)
        blocks.append(nn.Sequential(grow, nn.BatchNorm2d(after), nn.ReLU()))
    picture = nn.Sequential(nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())
    return nn.Sequential(nn.Unflatten(1, (noise, 1, 1)), *blocks, picture)


def _discriminator(width: int) -> nn.Sequential:
    """Images -> one score each (batch,): above zero means real."""
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
        # These losses stay alive during the other turn, as in most code.
        discriminating = self._turn(job, discriminates=True)
        with frozen(self.discriminator):
            generating = self._turn(job, discriminates=False)
        job.losses += [torch.stack([one.detach() for one in losses]).sum() for losses in (discriminating, generating)]

    def _turn(self, job: Job, discriminates: bool) -> list[Tensor]:
        """Train one of them; return the loss of each piece of the batch."""
        assert job.loss is not None
        job.clear()
        for one in (self.generator if discriminates else self.discriminator).parameters():
            one.grad = None  # a zero gradient is a gradient: Adam would still move the parameter
        losses = []
        for share, (noise, real) in job.feed():
            with job.in_contexts():
                fake = job.forward(noise)
                if discriminates:
                    scores, made_up = self.discriminator(real), self.discriminator(fake.detach())
                    loss = job.loss(scores, torch.ones_like(scores)) + job.loss(made_up, torch.zeros_like(made_up))
                    del scores, made_up
                else:
                    scores = self.discriminator(fake)
                    loss = job.loss(scores, torch.ones_like(scores))
                    del scores
            losses.append(loss * share if share != 1 else loss)
            job.backward(losses[-1])
            job.keep(fake, loss)
            del fake, loss
        job.update()
        return losses


@contextlib.contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Gradients pass through the network, but not to its parameters."""
    trained = [one for one in network.parameters() if one.requires_grad]
    try:
        for one in trained:
            one.requires_grad_(False)
        yield
    finally:
        for one in trained:
            one.requires_grad_(True)


def gan(batch: int, noise: int, width: int) -> Parts:
    """The model in training on random images; the loss judges the scores of the discriminator."""
    model = Gan(noise, width)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.5, 0.999))
    batches = torch.randn(batch, noise), torch.rand(batch, 3, 64, 64) * 2 - 1
    return model, optimizer, batches, functional.binary_cross_entropy_with_logits


GAN = Workload.of(
    "gan", "a generator against a discriminator: two turns a step, each with its own graph", gan,
    (32, 16, 8), (128, 100, 32), (128, 100, 64),
)  # fmt: skip
