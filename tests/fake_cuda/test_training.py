"""Training loops on the fake GPU: optimizers with the defaults of CUDA, scalers, loaders."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from fake_gpus import alive, logged
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from memlab.errors import PredictionError

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9}, "Adam": {}, "AdamW": {}, "AdamW foreach=False": {"foreach": False},
    "AdamW fused": {"fused": True}, "AdamW capturable": {"capturable": True}, "Adam amsgrad": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.9}, "Adagrad": {}, "Adadelta": {}, "Adamax": {}, "NAdam": {}, "RAdam": {},
    "ASGD": {}, "Rprop": {}, "Adafactor": {}, "Muon": {},
}  # fmt: skip


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    x, y = torch.randn(16, 32, device="cuda"), torch.randint(10, (16,), device="cuda")
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if hasattr(torch.optim, name.split()[0])])
def test_optimizers_step_and_keep_their_state_on_the_card(fake, name):
    kind, model = getattr(torch.optim, name.split()[0]), net()
    parameters = [one for one in model.parameters() if name != "Muon" or one.dim() == 2]
    optimizer = kind(parameters, **OPTIMIZERS[name])
    for _ in range(2):
        step(model, optimizer)
    values = [value for state in optimizer.state.values() for value in state.values()]
    states = [one for one in values if isinstance(one, torch.Tensor) and one.dim()]
    assert states and all(one.is_cuda for one in states)


def test_the_default_is_foreach_as_on_cuda(fake):
    steps = {}
    for foreach in (None, True, False):
        model = nn.Linear(512, 512).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
        for one in model.parameters():
            one.grad = torch.zeros_like(one)
        optimizer.step()
        steps[foreach] = logged(fake, optimizer.step)[1]
    assert steps[None] == steps[True] != steps[False]


def test_the_steps_of_the_default_adamw_stay_on_the_host(fake):
    model = net()
    for fused, where in ((False, "cpu"), (True, "cuda")):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        step(model, optimizer)
        assert {state["step"].device.type for state in optimizer.state.values()} == {where}


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_goes_on_as_long_as_it_may_and_keeps_its_history(fake, line_search):
    model = net()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=8, max_eval=100, history_size=5, line_search_fn=line_search
    )
    x, calls = torch.randn(16, 32, device="cuda"), []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        assert loss.item() == 1.0, "the user's code reads what it always reads"
        return loss

    optimizer.step(closure)
    state = next(iter(optimizer.state.values()))
    assert state["n_iter"] == 8 and len(state["old_dirs"]) == 5 and len(calls) >= 8
    assert any("LBFGS" in text for text in fake.assumptions)


@pytest.mark.parametrize("make", [lambda: torch.amp.GradScaler("cuda"), lambda: torch.cuda.amp.GradScaler()])
def test_a_scaler_does_not_skip_the_step(fake, make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model, scaler = net(), make()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(16, 32, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.is_enabled() and optimizer.state
    assert isinstance(scaler.get_scale(), float)


def test_a_loader_pins_and_moves(fake):
    data = TensorDataset(torch.randn(64, 8), torch.arange(64))
    seen, before = [], alive(fake)
    for x, y in DataLoader(data, batch_size=16, shuffle=True, pin_memory=True):
        seen += y.tolist()
        x, y = x.to("cuda", non_blocking=True), y.cuda(non_blocking=True)
        assert x.is_cuda and y.is_cuda
    assert sorted(seen) == list(range(64)), "host data stays what it is"
    del x, y
    assert alive(fake) == before
    assert torch.zeros(4).pin_memory().device.type == "cpu"
    assert torch.empty(4, pin_memory=True).device.type == "cpu"


def test_a_generator_of_the_card(fake):
    generator = torch.Generator("cuda").manual_seed(1)
    assert isinstance(generator, torch.Generator) and generator.device.type == "cuda"
    assert torch.randn(4, device="cuda", generator=generator).is_cuda
    assert torch.rand(4, generator=torch.Generator().manual_seed(1)).device.type == "cpu"
    torch.empty(4, device="cuda").normal_(generator=generator)


def test_an_average_of_a_model(fake):
    model, swa = net(), torch.optim.swa_utils
    average = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    average.update_parameters(model)
    assert next(average.parameters()).is_cuda


def test_what_cannot_be_predicted_is_refused_by_name(fake, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(PredictionError, match=r"one of several ranks.*world_size=8"):
        torch.distributed.init_process_group("nccl")
    assert nn.DataParallel(net())(torch.ones(2, 32)).is_cuda
    with pytest.raises(PredictionError, match="allocator of the user's"):
        torch.cuda.MemPool(object())


def test_threads_work_on_the_same_card(fake):
    x = torch.randn(32, 32, device="cuda")

    def work() -> None:
        for _ in range(200):
            (x @ x).relu_().sum()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    work()
    for one in threads:
        one.join()
    assert alive(fake) == 32 * 32 * 4


def test_a_thread_makes_tensors_of_lists_and_numbers(fake):
    made: list[torch.Tensor] = []

    def work() -> None:
        made.extend(
            (
                torch.tensor([1, 2], device="cuda"),
                torch.tensor(0.5, device="cuda"),
                torch.as_tensor([1.0], device="cuda"),
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [one.device.type for one in made] == ["cuda"] * 3 and alive(fake) == 2 * 8 + 4 + 4


def test_threads_may_ask_for_new_shapes_at_the_same_time(fake):
    """FakeTensorMode is of one thread: "AssertionError: False, True" in one of many runs."""
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for size in range(first, first + 60):
                x = torch.empty(size, size + 1, device="cuda")
                (x @ x.t()).softmax(0).sum()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(100 * place,)) for place in range(1, 5)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert errors == []
