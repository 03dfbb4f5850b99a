from __future__ import annotations

import copy

import pytest
import torch
from job_runs import JOBS, jobs  # noqa: F401
from torch.nn.functional import binary_cross_entropy_with_logits as judged

import memlab
from memlab.workloads import workloads
from memlab.workloads.job import Job, digest, seeded
from memlab.workloads.others import frozen

pytestmark = pytest.mark.usefixtures("jobs")


def built(**settings: int) -> Job:
    with seeded():
        job = Job("cpu", 2)
        JOBS.append(job)
        job.build(workloads["gan"].sized("tiny", **{"batch": 4, **settings}))
    return job


def reference(job: Job) -> list[float]:
    """The same steps, as the tutorial of PyTorch writes them: an optimizer for each network."""
    model = copy.deepcopy(job.model)
    generator, discriminator = model.generator, model.discriminator
    of_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    of_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    noise, real = job.batch
    ones, zeros = torch.ones(len(real)), torch.zeros(len(real))
    losses = []
    for _ in range(job.steps):
        of_d.zero_grad()
        loss = judged(discriminator(real), ones) + judged(discriminator(generator(noise).detach()), zeros)
        loss.backward()
        of_d.step()
        of_g.zero_grad()
        other = judged(discriminator(generator(noise)), ones)
        other.backward()
        of_g.step()
        losses += [loss.item(), other.item()]
    return [digest(list(model.parameters())), *losses]


def test_it_does_what_two_optimizers_do():
    job = built()
    expected = reference(job)
    job.run()
    assert [job.outcome()["digest"], *job.outcome()["losses"]] == expected


def test_zeros_for_gradients_change_nothing():
    job, plain = built(), built()
    job.clear = lambda: job.optimizer.zero_grad(set_to_none=False)
    job.run()
    plain.run()
    assert job.outcome()["digest"] == plain.outcome()["digest"]


def test_all_pieces_are_used_in_both_turns():
    job, calls = built(), []

    def noted(name, piece):
        def call(*args):
            calls.append(name)
            return piece(*args)

        return call

    for name in ("clear", "feed", "forward", "backward", "update", "keep"):
        setattr(job, name, noted(name, getattr(job, name)))
    job.steps = 1
    job.run()
    assert calls == ["clear", "feed", "forward", "backward", "keep", "update"] * 2


def test_a_graph_that_is_retained_lives_through_the_other_turn():
    """What a technique against `retain_graph` has to save."""

    def peak(job: Job) -> int:
        with memlab.track("gan", show=False) as run:
            job.run()
        return run.peak_allocated_bytes

    plain, keeping = built(batch=32), built(batch=32)
    keeping.backward = lambda loss: loss.backward(retain_graph=True)
    assert peak(keeping) > 1.25 * peak(plain)
    assert plain.outcome()["digest"] == keeping.outcome()["digest"]


def test_the_batch_in_pieces():
    job = built()

    def halves():
        for part in (slice(0, 2), slice(2, 4)):
            yield 0.5, tuple(one[part] for one in job.batch)

    job.feed = halves
    job.run()
    assert len(job.losses) == 4 and all(one.ndim == 0 for one in job.losses)


def test_what_is_frozen_stays_frozen():
    job = built()
    first = next(job.model.discriminator.parameters())
    first.requires_grad_(False)
    before = first.clone()
    job.run()
    assert not first.requires_grad and torch.equal(first, before)
    assert all(one.requires_grad for one in job.model.parameters() if one is not first)


def test_an_error_leaves_the_networks_as_they_were():
    job = built()
    with pytest.raises(ValueError), frozen(job.model.discriminator):
        assert not any(one.requires_grad for one in job.model.discriminator.parameters())
        raise ValueError
    assert all(one.requires_grad for one in job.model.parameters())


def test_an_optimizer_of_another_kind():
    job = built()
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=2e-4)
    job.run()
    assert len(job.losses) == 4


def test_gradients_stepped_in_backward_are_the_same_steps():
    """One optimizer per parameter, which steps as soon as its gradient is there: no turn may meet the other's gradients."""
    job, plain = built(), built()
    each = {one: torch.optim.Adam([one], lr=2e-4, betas=(0.5, 0.999)) for one in job.model.parameters()}

    def stepped(parameter):
        each[parameter].step()
        parameter.grad = None

    hooks = [one.register_post_accumulate_grad_hook(stepped) for one in each]
    job.update = lambda: None
    job.run()
    plain.run()
    for hook in hooks:
        hook.remove()
    assert job.outcome()["digest"] == plain.outcome()["digest"]
