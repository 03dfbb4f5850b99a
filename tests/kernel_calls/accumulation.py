"""What autograd's engine does with gradients: adds them up in place, takes them, copies them."""

from __future__ import annotations

import torch

from kernel_calls import Setup, T

CASES: dict[str, Setup] = {}


def acc(fn):
    def setup():
        x = T(64, 64)
        y = T(64, 64)
        g = torch.zeros(64, 64, device="cuda")

        def body():
            x.grad = y.grad = None
            fn(x, y, g)
            x.grad = y.grad = None

        return body

    CASES[fn.__name__] = setup


@acc
def xx(x, y, g):
    (x * x).backward(g)


@acc
def x_plus_x(x, y, g):
    (x + x).backward(g)


@acc
def residual(x, y, g):
    (x + x * y).backward(g)


@acc
def residual2(x, y, g):
    (x * y + x).backward(g)


@acc
def residual_h(x, y, g):
    h = x * 2
    (h + h * y).backward(g)


@acc
def residual_deep(x, y, g):
    h = x * 2
    for _ in range(4):
        h = h + torch.tanh(h * y)
    h.backward(g)


@acc
def residual_sum(x, y, g):
    h = x * 2
    for _ in range(4):
        h = h + torch.tanh(h @ y)
    h.sum().backward()


@acc
def retained(x, y, g):
    h = x * 2
    h.retain_grad()
    (h + h * y).backward(g)


@acc
def thrice(x, y, g):
    h = x * 2
    (h * y + h * y + h * y).backward(g)


@acc
def views(x, y, g):
    h = x * 2
    (h.view(4096) * y.view(4096) + h.t().reshape(4096) * y.view(4096)).backward(g.view(4096))


@acc
def views2(x, y, g):
    h = x * 2
    a, b, c = h.view(64, 4, 16).split(1, 1)[:3]
    (a * b + c * a).sum().backward()


@acc
def heads(x, y, g):
    h = x * 2
    q = (h @ y).view(64, 4, 16).transpose(0, 1)
    k = (h @ y).view(64, 4, 16).transpose(0, 1)
    (q @ k.transpose(1, 2)).sum().backward()


@acc
def hook_keep(x, y, g):
    keep = []
    h = x * 2
    h.register_hook(lambda g: keep.append(g))
    (h * y + h * y).backward(g)


@acc
def hook_new(x, y, g):
    h = x * 2
    h.register_hook(lambda g: g * 2)
    (h * y + h * y).backward(g)


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g + g * 2


@acc
def custom(x, y, g):
    h = x * 2
    Fn.apply(h * 2).backward(g)


@acc
def custom_twice(x, y, g):
    h = x * 2
    (Fn.apply(h) + Fn.apply(h)).backward(g)


@acc
def accumulate_twice(x, y, g):
    (x * y).backward(g)
    (x * y).backward(g)


@acc
def expand_grad(x, y, g):
    (x * y).sum().backward()


@acc
def stolen(x, y, g):
    (x + y).backward(g)


@acc
def sum_leaf(x, y, g):
    x.sum().backward()


@acc
def leaf_t(x, y, g):
    (x.t() @ y).backward(g)


@acc
def create_graph(x, y, g):
    (gx,) = torch.autograd.grad((x * x * y).sum(), x, create_graph=True)
    (gx * gx).sum().backward()


@acc
def retain(x, y, g):
    z = (x * y).tanh()
    z.backward(g, retain_graph=True)
    z.backward(g)


@acc
def checkpointed(x, y, g):
    from torch.utils.checkpoint import checkpoint

    def f(x):
        return torch.tanh(x * y) @ y

    checkpoint(f, checkpoint(f, x, use_reentrant=False), use_reentrant=False).backward(g)


@acc
def checkpointed_reentrant(x, y, g):
    from torch.utils.checkpoint import checkpoint

    def f(x):
        return torch.tanh(x * y) @ y

    checkpoint(f, checkpoint(f, x * 1, use_reentrant=True), use_reentrant=True).backward(g)


@acc
def clip(x, y, g):
    (x * y).backward(g)
    torch.nn.utils.clip_grad_norm_([x, y], 1.0)


@acc
def clip_value(x, y, g):
    (x * y).backward(g)
    torch.nn.utils.clip_grad_value_([x, y], 1.0)


@acc
def shared_grad(x, y, g):
    h = x * 2
    (h + y).backward(g)


@acc
def inplace_add(x, y, g):
    h = x * 2
    h += y
    h.add_(y).mul_(2)
    h.backward(g)


@acc
def save_on_cpu(x, y, g):
    with torch.autograd.graph.save_on_cpu():
        z = torch.tanh(x * y) * y
    z.backward(g)
