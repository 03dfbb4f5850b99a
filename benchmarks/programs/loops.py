"""The loop around a step: loaders, lengths that vary, evaluation, streams, caches, what is kept and what is freed."""

# Code as it is found in notebooks: a forward has no docstring there, and nobody types it.
# mypy: ignore-errors

from __future__ import annotations

import copy
import gc
import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.programs.language import Gpt
from benchmarks.programs.registry import images, program, token_loss, tokens
from benchmarks.programs.vision import Vit, resnet18

WORDS = 16_000


@program
def gradient_accumulation() -> None:
    model, batch = Gpt(512, 6, 8).cuda(), tokens(2, 256, WORDS)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        for _ in range(4):
            ids, target = batch()
            (token_loss(model(ids), target) / 4).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@program
def gradients_kept_as_zeros() -> None:
    model, batch = Gpt(512, 6, 8).cuda(), tokens(4, 256, WORDS)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        ids, target = batch()
        optimizer.zero_grad(set_to_none=False)
        token_loss(model(ids), target).backward()
        optimizer.step()


@program
def clipping_by_value() -> None:
    model, batch = Vit(256, 6, 100).cuda(), images(32, 224, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


@program
def loader_with_pinning() -> None:
    data = TensorDataset(torch.rand(96, 3, 128, 128), torch.randint(100, (96,)))
    loader = DataLoader(data, batch_size=32, shuffle=True, pin_memory=True, num_workers=0)
    model = resnet18(100).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    total = 0.0
    for x, y in loader:
        x, y = x.to("cuda", non_blocking=True), y.to("cuda", non_blocking=True)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(f"{total / len(loader):.3f}")


@program
def prefetch_on_a_side_stream() -> None:
    model, side = resnet18(100).cuda(), torch.cuda.Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fetch() -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(side):
            return torch.rand(32, 3, 128, 128).cuda(non_blocking=True), torch.randint(100, (32,)).cuda(
                non_blocking=True
            )

    following = fetch()
    for _ in range(3):
        torch.cuda.current_stream().wait_stream(side)
        x, y = following
        for tensor in (x, y):
            tensor.record_stream(torch.cuda.current_stream())
        following = fetch()
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def two_streams_at_work() -> None:
    left, right = (nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 2048)).cuda() for _ in range(2))
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    optimizer = torch.optim.Adam([*left.parameters(), *right.parameters()])
    for _ in range(2):
        x, results = torch.randn(4096, 2048, device="cuda"), []
        for model, stream in zip((left, right), streams, strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                results.append(model(x).square().mean())
                x.record_stream(stream)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        optimizer.zero_grad()
        sum(results).backward()
        optimizer.step()


@program
def emptied_cache_in_the_loop() -> None:
    model, batch = resnet18(100).cuda(), images(32, 160, 100)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        torch.cuda.empty_cache()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()


@program
def varying_batch_sizes() -> None:
    model = resnet18(100).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for count, size in ((8, 224), (24, 160), (12, 192), (32, 128), (5, 256), (16, 208)):
        x, y = images(count, size, 100)()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@program
def varying_lengths() -> None:
    model = Gpt(512, 6, 8, WORDS, 1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for length in (128, 509, 300, 77, 640, 333, 720, 401):
        ids, target = tokens(2, length, WORDS)()
        optimizer.zero_grad()
        token_loss(model(ids), target).backward()
        optimizer.step()


@program
def varying_generation() -> None:
    model = Gpt(512, 6, 8, WORDS, 1024).cuda().eval()
    with torch.no_grad():
        for start in (100, 37, 260):
            caches: list[list[Tensor]] = [[] for _ in model.blocks]
            ids = torch.randint(WORDS, (16, start), device="cuda")
            logits = model(ids, caches)
            for step in range(12):
                logits = model(logits[:, -1:].argmax(-1), caches, start=start + step)


@program
def evaluation_between() -> None:
    model, batch, large = Vit(256, 6, 100).cuda(), images(16, 224, 100), images(64, 224, 100)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model.train()
        for _ in range(2):
            x, y = batch()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            x, y = large()
            right = (model(x).argmax(1) == y).sum().item()
            print(right)


@program
def deleted_before_backward() -> None:
    model, batch = Gpt(512, 6, 8).cuda(), tokens(4, 256, WORDS)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        ids, target = batch()
        logits = model(ids)
        loss = token_loss(logits, target)
        del logits, ids, target
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@program
def everything_kept_too_long() -> None:
    model, batch = Gpt(384, 4, 6).cuda(), tokens(4, 256, WORDS)
    optimizer = torch.optim.Adam(model.parameters())
    losses, outputs = [], []
    for _ in range(3):
        ids, target = batch()
        logits = model(ids)
        loss = token_loss(logits, target)
        losses.append(loss)
        outputs.append(logits)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(sum(losses).item() / len(losses))


@program
def losses_kept_with_graphs() -> None:
    model, batch = resnet18(100).cuda(), images(16, 128, 100)
    optimizer, total = torch.optim.SGD(model.parameters(), lr=0.1), 0
    for _ in range(3):
        x, y = batch()
        total = total + F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    total.backward()
    optimizer.step()


@program
def saved_and_loaded() -> None:
    model, batch = Gpt(512, 6, 8).cuda(), tokens(4, 128, WORDS)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        ids, target = batch()
        optimizer.zero_grad()
        token_loss(model(ids), target).backward()
        optimizer.step()
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])


@program
def inference_without_gradients() -> None:
    model = Vit(512, 8).to("cuda").eval()
    found = []
    with torch.inference_mode():
        for _ in range(4):
            found.append(model(torch.rand(64, 3, 224, 224).to("cuda")).cpu())
    print(torch.cat(found).shape)


@program
def inference_with_gradients() -> None:
    model = Vit(384, 8).cuda().eval()
    scores = [model(torch.rand(24, 3, 224, 224).cuda()).softmax(-1) for _ in range(3)]
    print(torch.cat(scores).shape)


@program
def models_one_after_another() -> None:
    for width in (256, 512, 384):
        model, batch = Gpt(width, 6, 8).cuda(), tokens(4, 256, WORDS)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            ids, target = batch()
            optimizer.zero_grad()
            token_loss(model(ids), target).backward()
            optimizer.step()
        model.cpu()
        del model, optimizer
        torch.cuda.empty_cache()


@program
def cycles_until_collected() -> None:
    class Result:
        def __init__(self, value: Tensor) -> None:
            self.value, self.me = value, self

    model, batch = resnet18(100).cuda(), images(16, 128, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()
    try:
        for step in range(3):
            x, y = batch()
            result = Result(model(x))
            optimizer.zero_grad()
            F.cross_entropy(result.value, y).backward()
            optimizer.step()
            if step == 1:
                gc.collect()
    finally:
        gc.enable()


# --- models beside the model --------------------------------------------------------------------------------------------


@program
def adversarial_inputs() -> None:
    model, batch = resnet18(100).cuda(), images(24, 128, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = batch()
        change = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x + change), y), change)
            change = (change + 0.01 * slope.sign()).clamp(-0.03, 0.03).detach().requires_grad_()
        optimizer.zero_grad()
        F.cross_entropy(model(x + change.detach()), y).backward()
        optimizer.step()


@program
def per_sample_gradients() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    x, y = torch.randn(128, 512, device="cuda"), torch.randint(10, (128,), device="cuda")
    for _ in range(2):
        grads = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(weights, x, y)
        weights = {name: weight - 0.1 * grads[name].mean(0) for name, weight in weights.items()}


@program
def moving_average_copy() -> None:
    model, batch = resnet18(100).cuda(), images(32, 128, 100)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.01)
