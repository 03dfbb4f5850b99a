"""What holds of every workload: it trains, repeats, takes the memory it is known for, and can be had as an inference."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest
import torch
from job_runs import JOBS, jobs  # noqa: F401
from torch import nn

import memlab
from memlab.probes.storage_tracker import StorageTracker
from memlab.workloads import SIZES, workloads
from memlab.workloads.job import Job, seeded
from memlab.workloads.workload import inference

pytestmark = pytest.mark.usefixtures("jobs")

MIB = 1 << 20
WITH_PARAMETERS = ["mlp"]
"""Those in which parameters and what follows from them are the largest part; in the others it is the activations."""


def job_of(name: str, steps: int = 1, size: str = "tiny", seed: int = 0, **settings: int) -> Job:
    with seeded(seed):
        job = Job("cpu", steps)
        JOBS.append(job)
        job.build(workloads[name].sized(size, **settings))
        job.run()
    return job


@pytest.mark.parametrize("name", workloads)
def test_training_lowers_the_loss(name):
    job = job_of(name, steps=0)
    for one in job.model.modules():
        if isinstance(one, nn.Dropout):
            one.p = 0.0
    job.steps = 8
    job.run()
    turns = 2 if name == "gan" else 1
    assert len(job.losses) == 8 * turns and all(math.isfinite(one) for one in job.losses)
    assert sum(job.losses[-turns:]) < sum(job.losses[:turns])


@pytest.mark.parametrize("name", workloads)
def test_the_same_seed_gives_the_same_bits(name):
    first, second, other = (job_of(name, 2, seed=seed).outcome() for seed in (0, 0, 1))
    assert first["digest"] == second["digest"] and first["losses"] == second["losses"]
    assert other["digest"] != first["digest"]


@pytest.mark.parametrize("name", workloads)
def test_tiny_takes_the_memory_it_is_known_for(name):
    gc.collect()
    with memlab.track(name, show=False) as run:
        job_of(name, 2)
    assert 5 * MIB < run.peak_allocated_bytes < 60 * MIB
    shares = dict(run.breakdown(by="category"))
    largest = max(shares, key=lambda category: shares[category])
    if name in WITH_PARAMETERS:
        assert shares["parameter"] + shares["gradient"] + shares["optimizer"] > 0.9 * run.peak_allocated_bytes
    else:
        assert largest == "activation" and shares["activation"] > 0.5 * run.peak_allocated_bytes


@pytest.mark.parametrize("name", workloads)
def test_no_byte_is_left_and_no_random_number_used(name):
    gc.collect()
    state, tracker = torch.get_rng_state(), StorageTracker()
    tracker.start()
    try:
        job_of(name)
        vars(JOBS.pop()).clear()
        assert tracker.current_bytes == tracker.base_bytes < tracker.peak_bytes
    finally:
        tracker.stop()
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", workloads)
def test_as_an_inference(name):
    job = Job("cpu", 1)
    JOBS.append(job)
    job.build(inference(workloads[name].sized("tiny")))
    job.run()
    trained = job_of(name, steps=0)
    assert not job.trains and not job.model.training
    assert len(job.batch) == len(trained.batch) - 1
    assert len(job.output) == len(trained.batch[0]) and torch.isfinite(job.output).all()


def test_an_inference_of_an_inference_is_the_same():
    make = inference(inference(workloads["mlp"]))
    assert make()[1] is None and len(make()[2]) == 1


@pytest.mark.parametrize("name", workloads)
def test_rectifiers_are_modules_and_keep_their_input(name):
    with torch.device("meta"):
        model, *_ = workloads[name].sized("tiny")()
    assert not any(getattr(one, "inplace", False) for one in model.modules())


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "lstm", "vit", "resnet18", "resnet50", "densenet121", "mlp"])
def test_equal_layers_stand_in_a_row(name):
    with torch.device("meta"):
        model, *_ = workloads[name].sized("tiny")()
    assert isinstance(model.blocks, nn.Sequential) and len(model.blocks) > 1
    assert isinstance(model.head, nn.Linear)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "lstm"])
def test_a_language_model_is_features_and_a_head(name):
    for tied in (True, False):
        job = job_of(name, steps=0, tied=tied)
        features = job.model.features(job.batch[0])
        assert job.model.head.bias is None
        assert torch.equal(job.model.head(features), job.model(job.batch[0]))
        assert (job.model.head.weight is job.model.token.weight) == tied


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_a_decoder_looks_only_back(name):
    job = job_of(name, steps=0)
    tokens = job.batch[0][:1, :16].clone()
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 100
    same = torch.isclose(job.model(tokens), job.model(changed), atol=1e-6).all(dim=2)[0]
    assert same.tolist()[:9] == [True] * 9 and not same[9:].any()


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_an_encoder_looks_both_ways(name):
    job = job_of(name, steps=0)
    calls = [one for one in job.model.modules() if hasattr(one, "attend")]
    assert len(calls) == len(job.model.blocks) and not any(one.causal for one in calls)


@pytest.mark.parametrize("name", ["gpt", "llama", "bert", "vit"])
def test_attention_can_be_replaced(name):
    def explicit(q, k, v, is_causal):
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if is_causal:
            scores += torch.full(scores.shape[-2:], float("-inf")).triu(1)
        return scores.softmax(-1) @ v

    job = job_of(name, steps=0)
    expected = job.model(*job.batch[:-1])
    for one in job.model.modules():
        if hasattr(one, "attend"):
            one.attend = explicit
    found = job.model(*job.batch[:-1])
    assert torch.allclose(found, expected, atol=1e-5) and not torch.equal(found, expected)


def test_bert_is_asked_for_the_masked_words_alone():
    _, _, (tokens, target), _ = workloads["bert"].sized("tiny")()
    asked = target != -100
    assert (tokens[asked] == 0).all() and (tokens[~asked] != 0).all()
    assert 0.14 < asked.float().mean() < 0.155
    assert (asked.sum(1) == asked[0].sum()).all()  # so that a mean over pieces of a batch is the mean over the batch


@pytest.mark.parametrize("name", workloads)
def test_sizes_grow(name):
    def parameters(size: str) -> int:
        with torch.device("meta"):
            return sum(one.numel() for one in workloads[name].sized(size)()[0].parameters())

    assert parameters("tiny") < parameters("laptop") < parameters("card")
    assert tuple(workloads[name].sizes) == SIZES


# --- plain steps ---

STEPS = [workloads.vgg, workloads.resnet, workloads.unet, workloads.transformer]


@pytest.mark.parametrize("make", STEPS)
def test_steps_repeat_learn_and_leave_no_bytes(make: Callable[[], Callable[[], float]]) -> None:
    step, tracker = make(), StorageTracker()
    losses = [step() for _ in range(7)]
    tracker.start()
    try:
        losses.append(step())
    finally:
        tracker.stop()
    assert tracker.current_bytes == tracker.base_bytes < tracker.peak_bytes
    assert all(map(math.isfinite, losses))
    assert losses[0] == losses[-1] if make is workloads.unet else losses[-1] < losses[0]  # it only predicts
    again = make()
    assert [again() for _ in range(2)] == losses[:2]


@pytest.mark.simulated
def test_gpt2_steps_on_a_device() -> None:
    step = workloads.gpt2(batch=1, time=64)
    step()
    assert torch.cuda.max_memory_allocated() > 3 * 4 * 124_439_808
