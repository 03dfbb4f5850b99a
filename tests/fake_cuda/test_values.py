"""Known values: what factories made or the host copied in, and what follows from them alone."""

from __future__ import annotations

import copy

import pytest
import torch
from fake_gpus import card

from memlab.errors import PredictionError
from memlab.fake_cuda import FakeCuda, data_dependent, values

ON = {"device": "cuda"}


def unknown(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda d: torch.zeros(3, dtype=torch.long, **d), [0, 0, 0]),
        (lambda d: torch.ones(2, 2, dtype=torch.bool, **d), [[True, True]] * 2),
        (lambda d: torch.full((2,), 7, **d), [7, 7]),
        (lambda d: torch.full((), 2.5, **d), 2.5),
        (lambda d: torch.arange(4, **d), [0, 1, 2, 3]),
        (lambda d: torch.arange(2, 9, 3, **d), [2, 5, 8]),
        (lambda d: torch.arange(0, 1, 0.25, **d), [0, 0.25, 0.5, 0.75]),
        (lambda d: torch.eye(2, **d), [[1, 0], [0, 1]]),
        (lambda d: torch.linspace(0, 1, 5, **d), [0, 0.25, 0.5, 0.75, 1]),
        (lambda d: torch.tensor([3, 4], **d), [3, 4]),
        (lambda d: torch.as_tensor([3.5], **d), [3.5]),
        (lambda d: torch.zeros_like(torch.empty(2, 2, **d)), [[0, 0], [0, 0]]),
        (lambda d: torch.ones_like(torch.empty(2, **d), dtype=torch.int32), [1, 1]),
        (lambda d: torch.full_like(torch.empty(2, **d), -100), [-100, -100]),
        (lambda d: torch.empty(2, **d).new_zeros(3), [0, 0, 0]),
        (lambda d: torch.empty(2, **d).new_ones(1), [1]),
        (lambda d: torch.empty(2, **d).new_full((2,), 5), [5, 5]),
        (lambda d: torch.empty(2, **d).new_tensor([8]), [8]),
        (lambda d: torch.empty(3, **d).zero_(), [0, 0, 0]),
        (lambda d: torch.empty(3, **d).fill_(4), [4, 4, 4]),
        (lambda d: torch.empty(2, 2, **d).copy_(torch.tensor([1.0, 2.0])), [[1, 2], [1, 2]]),
        (lambda d: torch.tril_indices(2, 2, **d), [[0, 1, 1], [0, 0, 1]]),
        (lambda d: torch.ones(3, 3, dtype=torch.bool, **d).tril(), [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (lambda d: torch.scalar_tensor(3, **d), 3),
    ],
)
def test_factories_make_known_values(fake, make, expected):
    assert make(ON).tolist() == expected == make({}).tolist()
    assert not fake.assumptions


PROGRAMS = {
    "in place": lambda x, d: x.add_(1).mul_(2).sub_(x.new_ones(())),
    "with options": lambda x, d: x.add_(x.clone(), alpha=3).div_(2, rounding_mode="floor"),
    "an element is set": lambda x, d: setitem(x, 1, 50),
    "a slice is set": lambda x, d: setitem(x, slice(1, 3), torch.tensor([7, 8], **d)),
    "by a mask": lambda x, d: setitem(x, x > 3, 0),
    "by indices": lambda x, d: setitem(x, torch.tensor([0, 2], **d), torch.tensor([9, 8], **d)),
    "through a view": lambda x, d: [x.view(2, 3)[1].fill_(4), x][1],
    "through a view of a view": lambda x, d: [x[2:][::2].add_(10), x][1],
    "through the base": lambda x, d: [view := x[1:3], x.mul_(3), view][2],
    "detached": lambda x, d: [x.detach().neg_(), x][1],
    "data": lambda x, d: [x.data.fill_(2), x][1],
    "scatter": lambda x, d: x.scatter_(0, torch.tensor([1, 2], **d), 0),
    "scatter_add": lambda x, d: torch.zeros(8, dtype=torch.long, **d).scatter_add_(0, x, torch.ones_like(x)),
    "index_add": lambda x, d: torch.zeros(8, dtype=torch.long, **d).index_add_(0, x, x),
    "cat": lambda x, d: torch.cat([x, torch.arange(3, **d)]),
    "stack": lambda x, d: torch.stack([x, x + 1], dim=1),
    "where": lambda x, d: torch.where(x > 2, x, -x),
    "where of numbers": lambda x, d: torch.where(x > 2, 1, 0),
    "cumsum": lambda x, d: (x > 2).cumsum(0),
    "sort": lambda x, d: (-x).sort(),
    "topk": lambda x, d: x.topk(2),
    "max": lambda x, d: x.view(2, 3).max(1),
    "argmax": lambda x, d: x.argmax(),
    "unbind": lambda x, d: list(x),
    "split": lambda x, d: x.split([1, 2, 3]),
    "chunk": lambda x, d: x.chunk(2),
    "tensor_split": lambda x, d: x.tensor_split((1, 4)),
    "nonzero": lambda x, d: (x % 2 == 0).nonzero(),
    "where of one": lambda x, d: torch.where(x > 3),
    "mask": lambda x, d: x[x > 3],
    "masked_select": lambda x, d: x.masked_select(x < 3),
    "repeat_interleave": lambda x, d: x.repeat_interleave(x),
    "repeats": lambda x, d: torch.repeat_interleave(x),
    "bincount": lambda x, d: x.bincount(),
    "unique": lambda x, d: (x % 3).unique(return_counts=True, return_inverse=True),
    "unique_consecutive": lambda x, d: (x // 2).unique_consecutive(return_counts=True),
    "searchsorted": lambda x, d: torch.searchsorted(x.sort()[0], x),
    "gather": lambda x, d: x.gather(0, torch.tensor([0, 0, 3], **d)),
    "index_select": lambda x, d: x.index_select(0, torch.tensor([5, 1], **d)),
    "flip and roll": lambda x, d: x.flip(0).roll(1),
    "logic": lambda x, d: ((x > 1) & ~(x > 4)) | (x == 0),
    "meshgrid": lambda x, d: torch.meshgrid(x, x[:2], indexing="ij")[1] + 0,
    "one_hot": lambda x, d: torch.nn.functional.one_hot(x),
    "rsub": lambda x, d: 1 - x,
    "power": lambda x, d: 2**x,
    "as floats": lambda x, d: (x.float() / 4).exp().sum(),
    "as bytes": lambda x, d: x.view(torch.int32),
    "expanded": lambda x, d: x[:, None].expand(6, 2).reshape(-1),
    "transposed": lambda x, d: x.view(2, 3).t().contiguous(),
    "padded": lambda x, d: torch.nn.functional.pad(x, (1, 2), value=-1),
    "clamped": lambda x, d: x.clamp(min=2, max=4),
    "deep copy": lambda x, d: copy.deepcopy([x, x[2:]])[1],
    "tril": lambda x, d: torch.ones(4, 4, dtype=torch.bool, **d).tril().logical_not(),
    "iadd": lambda x, d: [x.__iadd__(5), x][1],
    "inference": lambda x, d: in_inference(x),
}  # fmt: skip


def setitem(x, key, value):
    x[key] = value
    return x


def in_inference(x):
    with torch.inference_mode():
        y = x.clone()
        y[2:].fill_(0)
        return y + x


def listed(found):
    if isinstance(found, list | tuple):
        return [listed(one) for one in found]
    return found.tolist()


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_follows_from_known_values_is_computed(fake, name):
    start = [3, 1, 4, 1, 5, 2]
    here = PROGRAMS[name](torch.tensor(start), {})
    there = PROGRAMS[name](torch.tensor(start).cuda(), ON)
    assert listed(there) == listed(here)
    assert not fake.assumptions


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.add_(unknown(4)),
        lambda x: x.copy_(unknown(4)),
        lambda x: x[1:2].copy_(unknown(1)),
        lambda x: x.view(2, 2)[0].mul_(unknown(2)),
        lambda x: x.uniform_(),
        lambda x: x.data.normal_(),
        lambda x: x.detach()[0].add_(unknown()),
        lambda x: x.__setitem__(0, unknown()),
        lambda x: x.__setitem__(x > 0, unknown(4)),
        lambda x: x.index_put_((torch.tensor([0], device="cuda"),), unknown(1)),
        lambda x: torch.add(unknown(4), 1, out=x),
        lambda x: torch.sort(unknown(4), out=(x, torch.empty(4, dtype=torch.long, device="cuda"))),
        lambda x: torch._foreach_add_([x], [unknown(4)]),
        lambda x: torch._foreach_zero_([x]),
        lambda x: x.scatter_(0, torch.randint(4, (4,), device="cuda"), 5.0),
        lambda x: torch.nn.init.normal_(torch.nn.Parameter(x)),
        lambda x: torch.nn.functional.batch_norm(unknown(2, 4), x, torch.ones(4, device="cuda"), training=True),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_stale_is_read(fake, change, mode):
    with mode():
        x = torch.full((4,), 7.0, device="cuda")
        early = x[:]
        assert early.tolist() == x.tolist() == [7.0] * 4
        change(x)
        assert x.tolist() == early.tolist() == [1.0] * 4


@pytest.mark.parametrize(
    "use",
    [
        lambda w, places: w.gather(0, places),
        lambda w, places: w.index_select(0, places),
        lambda w, places: w[places],
        lambda w, places: w.max().view(1),
        lambda w, places: w.topk(2)[0],
        lambda w, places: torch.cat([w + w, w[1:], w]),
    ],
)
def test_gradients_are_not_the_zeros_that_they_are_made_of(fake, use):
    weight = torch.zeros(4, device="cuda", requires_grad=True)
    (use(weight, torch.tensor([1, 2], device="cuda")) * unknown()).sum().backward()
    assert weight.grad.tolist() == [1.0] * 4 and weight.tolist() == [0.0] * 4


def test_a_view_from_before_sees_later_values(fake):
    x = torch.empty(4, device="cuda")
    view = x[1:3]
    x.zero_()
    view.fill_(3)
    assert x.tolist() == [0, 3, 3, 0]
    view.add_(unknown(2))
    assert x.tolist() == [1.0] * 4


def test_a_tensor_that_changes_its_shape_is_read_in_its_new_one(fake):
    x = torch.arange(6, device="cuda").view(2, 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert x.t_().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert x.unsqueeze_(0).squeeze_().shape == (3, 2) and x.tolist() == [[0, 3], [1, 4], [2, 5]]
    x.resize_(2, 2)
    assert len(x.tolist()) == 2
    y = torch.zeros(2, device="cuda")
    assert y.tolist() == [0, 0]
    y.data = torch.arange(3.0, device="cuda")
    assert y.tolist() == [0, 1, 2]
    y.data = y.data.view(3, 1)
    assert y.tolist() == [[0], [1], [2]]
    y.set_(torch.ones(1, device="cuda"))
    assert y.tolist() == [1] and (y + 1).tolist() == [2]


def test_only_small_tensors_keep_their_values(fake):
    many = torch.arange(values.MOST_NUMBERS, device="cuda")
    assert many[-1].item() == values.MOST_NUMBERS - 1
    assert torch.arange(values.MOST_NUMBERS + 1, device="cuda")[-1].item() == 1
    assert torch.zeros(values.MOST_FLOATS, device="cuda")[0].item() == 0.0
    assert torch.zeros(values.MOST_FLOATS + 1, device="cuda")[0].item() == 1.0


def test_masks_that_are_known_in_part(fake):
    causal, mask = torch.ones(4, 4, dtype=torch.bool, device="cuda").tril(), unknown(4, 4) > 0
    assert (causal & mask).nonzero().shape == (10, 2) and (mask & causal).nonzero().shape == (10, 2)
    assert (causal | mask).nonzero().shape == (16, 2) and (~(causal | mask)).nonzero().shape == (6, 2)
    every = mask | torch.ones_like(mask)
    assert every.all().item() is True and (~every).any().item() is False
    assert any("10 to 16" in text or "at most" in text for text in fake.assumptions)
    before = dict(fake.assumptions)
    assert (mask & torch.zeros_like(mask)).any().item() is False
    assert unknown(4, 4)[torch.zeros_like(mask) & mask].shape == (0,)
    assert torch.logical_or(mask, torch.ones_like(mask)).nonzero().shape == (16, 2)
    assert dict(fake.assumptions) == before, "these are known"
    unfinished = torch.ones(4, dtype=torch.long, device="cuda") & ~mask[0]
    assert bool((unfinished & torch.zeros_like(mask[0])).max() == 0) and not bool(unfinished.max() == 0)
    assert (unknown(4).long() * torch.zeros(4, dtype=torch.long, device="cuda")).tolist() == [0] * 4
    assert (causal & mask)[0, 0].item() is True and (causal & mask)[0, 1].item() is False
    assert (causal & mask)[0].tolist() == [True, False, False, False]


def test_answers_do_not_contradict_each_other(fake):
    x = unknown(4)
    total = x.sum()
    assert total.item() == 1.0 and bool(total == 1) and not bool(total == 0) and (total + 1).item() == 2.0
    assert not bool(x.sum() == 0) and bool(x.sum() != 0) and bool(x.sum() > 0) and bool(x.sum() <= 1)
    assert bool(~(x.sum() == 0)) and not bool((x.sum() == 0) & (x.max() > 0)) and bool((x.sum() == 0) | (x.max() > 0))
    zero = torch.zeros((), device="cuda")
    assert not bool(x.sum() == zero) and not bool(x.sum() < zero)
    assert not torch.equal(x.sum() == 0, torch.ones((), dtype=torch.bool, device="cuda"))
    total.add_(x[0])
    assert total.item() == 1.0
    first = (x > 3).any()
    assert bool(first) and bool(first == True) and not bool(~first)  # noqa: E712


def test_complex_layers(fake):
    window = torch.hann_window(64, device="cuda")
    spectrum = torch.stft(unknown(2, 1000), 64, window=window, return_complex=True)
    assert torch.istft(spectrum, 64, window=window).shape == (2, 992)
    weight = torch.nn.Parameter(torch.rand(4, 4, 6, 6, dtype=torch.cfloat, device="cuda"))
    optimizer = torch.optim.Adam([weight])
    for _ in range(2):
        parts = torch.fft.rfft2(unknown(2, 4, 32, 32))
        out = torch.zeros(2, 4, 32, 17, dtype=torch.cfloat, device="cuda")
        out[:, :, :6, :6] = torch.einsum("bixy,ioxy->boxy", parts[:, :, :6, :6], weight)
        torch.fft.irfft2(out, s=(32, 32)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()
    number = torch.tensor([1 + 2j], device="cuda")
    assert (number.conj() * 2).tolist() == [2 - 4j] and number.imag.tolist() == [2.0]
    assert torch.view_as_real(number).tolist() == [[1, 2]]


def test_a_loop_that_waits_for_true_ends_too(fake, monkeypatch):
    monkeypatch.setattr(data_dependent, "MOST_ROUNDS", 100)
    rounds = 0
    while not (unknown() < 1e-6).item():
        rounds += 1
    assert 98 <= rounds <= 101


def test_each_assumption_names_its_line(fake):
    x = unknown(4)
    x.sum().item()
    x[x > 0].sum()
    (x > 0).nonzero(), x.tolist(), x.cpu()
    found = [text.partition(": ")[0] for text in fake.assumptions]
    line = test_each_assumption_names_its_line.__code__.co_firstlineno
    file = "test_values.py"
    assert found == [
        f"{file}:{line + 2} item", f"{file}:{line + 3} mask", f"{file}:{line + 4} nonzero", f"{file}:{line + 4} tolist",
        f"{file}:{line + 4} copy to the host",
    ]  # fmt: skip


def raising(error):
    is_negative = (unknown(4) < 0).any().item()
    if is_negative:
        raise error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("negative"), "negative (after values that only a GPU computes were assumed: test_values.py:"),
        (KeyError("key"), "'key'"),
        (PredictionError("it is refused"), "it is refused"),
        (torch.OutOfMemoryError("out of memory"), "out of memory"),
    ],
)
def test_an_error_after_an_assumption_says_so(error, expected):
    with pytest.raises(type(error)) as caught, FakeCuda(card()):
        raising(error)
    line = raising.__code__.co_firstlineno + 1
    text = str(caught.value)
    assert text.startswith(expected) and (text == expected or f":{line} item=True)" in text)
    notes = getattr(caught.value, "__notes__", [])
    assert [f":{line} item=True" in note for note in notes] == ([True] if isinstance(error, KeyError) else [])
    with pytest.raises(ValueError, match=r"^plain$"), FakeCuda(card()):
        raise ValueError("plain")


def test_optimizers_and_scalers_start_from_known_values(fake):
    layer = torch.nn.Linear(4, 4, device="cuda")
    optimizer = torch.optim.Adam(layer.parameters(), capturable=True)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(2):
        scaler.scale(layer(unknown(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state = optimizer.state[layer.weight]
    assert state["exp_avg"][0].tolist() == [1.0] * 4 and layer.bias.tolist() == [1.0] * 4
