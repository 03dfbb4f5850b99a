"""What is done to train in less memory, or otherwise than in the plain loop: optimizers, precision, checkpoints, hooks."""

# Code as it is found in notebooks: a forward has no docstring there, and nobody types it.
# ruff: noqa: D102
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks.programs.language import Gpt, Llama
from benchmarks.programs.registry import images, program, token_loss, tokens, train
from benchmarks.programs.vision import resnet18

WORDS = 16_000


def gpt_with(make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    """A small GPT trained with this optimizer."""
    model = Gpt().to("cuda")
    train(model, make(model.parameters(), **options), tokens(4, 256, WORDS), token_loss)


# --- optimizers -----------------------------------------------------------------------------------------------------


@program
def sgd_plain() -> None:
    gpt_with(torch.optim.SGD, lr=0.1)


@program
def adam_for_loop() -> None:
    gpt_with(torch.optim.Adam, foreach=False)


@program
def adamw_foreach() -> None:
    gpt_with(torch.optim.AdamW, foreach=True, amsgrad=True)


@program
def adamw_fused() -> None:
    gpt_with(torch.optim.AdamW, fused=True)


@program
def adamw_capturable() -> None:
    gpt_with(torch.optim.AdamW, capturable=True)


@program
def adafactor() -> None:
    gpt_with(torch.optim.Adafactor)


@program
def radam_decoupled() -> None:
    gpt_with(torch.optim.RAdam, weight_decay=0.01, decoupled_weight_decay=True)


@program
def lbfgs_closure() -> None:
    model = nn.Sequential(nn.Linear(1024, 2048), nn.Tanh(), nn.Linear(2048, 1024)).cuda()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5)
    x = torch.randn(4096, 1024, device="cuda")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


@program
def two_groups_one_frozen() -> None:
    model = resnet18(100).cuda()
    for parameter in model[:5].parameters():
        parameter.requires_grad_(False)
    head = [{"params": model[-1].parameters(), "lr": 0.1}, {"params": model[5:-1].parameters(), "lr": 0.01}]
    train(model, torch.optim.SGD(head, momentum=0.9), images(32, 160, 100), F.cross_entropy)


@program
def optimizer_in_backward() -> None:
    model = Gpt().to("cuda")
    optimizers = {p: torch.optim.AdamW([p], lr=1e-3) for p in model.parameters()}

    def step_now(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step_now) for p in model.parameters()]
    batch = tokens(4, 256, WORDS)
    for _ in range(3):
        ids, target = batch()
        token_loss(model(ids), target).backward()
    for handle in handles:
        handle.remove()


# --- precision ------------------------------------------------------------------------------------------------------


@program
def amp_fp16_scaler() -> None:
    model, scaler = resnet18().cuda(), torch.amp.GradScaler("cuda")
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), images(32, 160)
    for _ in range(3):
        x, y = batch()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@program
def amp_fp16_adam() -> None:
    model, scaler = Gpt().cuda(), torch.amp.GradScaler("cuda")
    optimizer, batch = torch.optim.Adam(model.parameters()), tokens(4, 256, WORDS)
    for _ in range(3):
        ids, target = batch()
        with torch.autocast("cuda"):
            loss = token_loss(model(ids), target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@program
def amp_bf16() -> None:
    model, batch = Gpt(768, 8, 12).cuda(), tokens(4, 384, WORDS)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids, target = batch()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = token_loss(model(ids), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def amp_llama_checkpoint() -> None:
    model, batch = Llama().cuda(), tokens(4, 512, 32_000)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    turn = (model.cos[:512], model.sin[:512])
    for _ in range(2):
        ids, target = batch()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            x = model.embed(ids)
            for layer in model.layers:
                x = checkpoint(layer, x, turn, use_reentrant=False)
            loss = token_loss(model.head(model.norm(x)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def pure_bf16() -> None:
    model = Gpt(768, 8, 12).to(device="cuda", dtype=torch.bfloat16)
    train(model, torch.optim.AdamW(model.parameters()), tokens(8, 256, WORDS), token_loss)


@program
def half_inference() -> None:
    model = resnet18().half().cuda().eval()
    with torch.no_grad():
        for _ in range(3):
            print(model(torch.rand(64, 3, 224, 224).half().to("cuda")).argmax(1).shape)


# --- recomputing and moving away --------------------------------------------------------------------------------------


def _checkpointed(model: Gpt, ids: Tensor, reentrant: bool) -> Tensor:
    x = model.words(ids) + model.places(torch.arange(ids.shape[1], device="cuda"))
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=reentrant)
    return model.head(model.norm(x))


def _train_checkpointed(reentrant: bool) -> None:
    model, batch = Gpt(768, 8, 12).cuda(), tokens(4, 512, WORDS)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        ids, target = batch()
        optimizer.zero_grad()
        token_loss(_checkpointed(model, ids, reentrant), target).backward()
        optimizer.step()


@program
def checkpoint_reentrant() -> None:
    _train_checkpointed(True)


@program
def checkpoint_not_reentrant() -> None:
    _train_checkpointed(False)


@program
def checkpoint_in_segments() -> None:
    model = resnet18().to("cuda")
    body, head = model[:-3], model[-3:]
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), images(32, 192)
    for _ in range(2):
        x, y = batch()
        found = head(checkpoint_sequential(body, 3, x, use_reentrant=False))
        optimizer.zero_grad()
        F.cross_entropy(found, y).backward()
        optimizer.step()


@program
def activations_on_cpu() -> None:
    model, batch = Gpt(512, 6, 8).cuda(), tokens(4, 256, WORDS)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        ids, target = batch()
        with torch.autograd.graph.save_on_cpu():
            loss = token_loss(model(ids), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def packed_activations() -> None:
    model, batch = resnet18(100).cuda(), images(32, 160, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def pack(saved: Tensor) -> Tensor | tuple[Tensor]:
        return (saved.half(),) if saved.dtype == torch.float32 and saved.numel() > 1 << 16 else saved

    def unpack(packed: Tensor | tuple[Tensor]) -> Tensor:
        return packed[0].float() if isinstance(packed, tuple) else packed

    for _ in range(2):
        x, y = batch()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def chunked_loss() -> None:
    model, batch = Gpt(512, 6, 8, 50_257).cuda(), tokens(8, 256, 50_257)
    head, model.head = model.head, nn.Identity()
    optimizer = torch.optim.AdamW([*model.parameters()])
    for _ in range(2):
        ids, target = batch()
        optimizer.zero_grad()
        states = model(ids)
        flat = states.detach().flatten(0, 1).requires_grad_()
        for part, aim in zip(flat.split(512), target.reshape(-1).split(512), strict=True):
            (F.cross_entropy(head(part), aim, reduction="sum") / len(flat)).backward()
        states.backward(flat.grad.view_as(states))
        optimizer.step()


@program
def channels_last() -> None:
    model = resnet18().to("cuda", memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x = torch.rand(32, 3, 160, 160, device="cuda").to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), torch.randint(1000, (32,), device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# --- autograd beyond the plain loop -----------------------------------------------------------------------------------


class Clamped(torch.autograd.Function):
    """Clamps forward, passes the gradient straight through within the limits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.limit), None


@program
def custom_function() -> None:
    layers = nn.ModuleList(nn.Linear(2048, 2048) for _ in range(6)).cuda()
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(4096, 2048, device="cuda")
        for layer in layers:
            x = Clamped.apply(layer(x), 1.0)
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()


@program
def gradient_penalty() -> None:
    critic = nn.Sequential(*(nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.LeakyReLU(0.2)) for a, b in ((3, 64), (64, 128))),
                           nn.Flatten(), nn.Linear(128 * 256, 1)).cuda()  # fmt: skip
    optimizer = torch.optim.Adam(critic.parameters(), betas=(0.0, 0.9))
    for _ in range(2):
        x = torch.rand(96, 3, 64, 64, device="cuda", requires_grad=True)
        score = critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        loss = score.mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def physics_second_derivative() -> None:
    model = nn.Sequential(nn.Linear(2, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        place = torch.rand(20_000, 2, device="cuda", requires_grad=True)
        value = model(place)
        first = torch.autograd.grad(value.sum(), place, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), place, create_graph=True)[0]
        loss = (first[:, 1] - 0.01 * second[:, 0]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def retained_graph() -> None:
    body, heads = Gpt(384, 4, 6).cuda(), nn.ModuleList(nn.Linear(WORDS, 8) for _ in range(3)).cuda()
    optimizer, batch = torch.optim.SGD([*body.parameters(), *heads.parameters()], lr=0.1), tokens(4, 256, WORDS)
    for _ in range(2):
        ids, _ = batch()
        states = body(ids)
        optimizer.zero_grad()
        for head in heads:
            head(states).logsumexp(-1).mean().backward(retain_graph=True)
        optimizer.step()


@program
def hooks_everywhere() -> None:
    model, seen = resnet18(100).cuda(), {}
    handles = [
        layer.register_forward_hook(lambda layer, _, out: seen.__setitem__(id(layer), out.detach().mean()))
        for layer in model.modules()
        if isinstance(layer, nn.Conv2d)
    ]
    handles += [p.register_hook(lambda grad: grad.clamp(-1, 1)) for p in model.parameters()]
    handles.append(model[-1].register_full_backward_hook(lambda layer, grads, outs: None))
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), images(32, 128, 100), F.cross_entropy, steps=2)
    for handle in handles:
        handle.remove()
