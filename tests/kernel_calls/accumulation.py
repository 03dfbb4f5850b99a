"""What autograd's engine does with gradients: adds them up in place, takes them, copies them."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from kernel_calls import Setup, T

CASES: dict[str, Setup] = {}


def acc(fn, name=None):
    def setup():
        x = T(64, 64)
        y = T(64, 64)
        g = torch.zeros(64, 64, device="cuda")

        def body():
            x.grad = y.grad = None
            fn(x, y, g)
            x.grad = y.grad = None

        return body

    CASES[name or fn.__name__] = setup


acc(lambda x, y, g: (x * x).backward(g), "xx")
acc(lambda x, y, g: (x + x).backward(g), "x_plus_x")
acc(lambda x, y, g: (x + x * y).backward(g), "residual")
acc(lambda x, y, g: (x * y + x).backward(g), "residual2")


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a * 2

    @staticmethod
    def backward(ctx, g):
        return g + g * 2


def of_double(name, fn, hold=lambda h: None):
    """What is computed of `h = x * 2`, which is held until the end."""

    def run(x, y, g):
        h = x * 2
        hold(h)
        fn(h, y).backward(g)

    acc(run, name)


of_double("residual_h", lambda h, y: h + h * y)
of_double("retained", lambda h, y: h + h * y, hold=lambda h: h.retain_grad())
of_double("thrice", lambda h, y: h * y + h * y + h * y)
of_double("hook_new", lambda h, y: h * y + h * y, hold=lambda h: h.register_hook(lambda g: g * 2))
of_double("custom", lambda h, y: Fn.apply(h * 2))
of_double("custom_twice", lambda h, y: Fn.apply(h) + Fn.apply(h))
of_double("shared_grad", lambda h, y: h + y)


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
def accumulate_twice(x, y, g):
    (x * y).backward(g)
    (x * y).backward(g)


acc(lambda x, y, g: (x * y).sum().backward(), "expand_grad")
acc(lambda x, y, g: (x + y).backward(g), "stolen")
acc(lambda x, y, g: x.sum().backward(), "sum_leaf")
acc(lambda x, y, g: (x.t() @ y).backward(g), "leaf_t")


@acc
def create_graph(x, y, g):
    (gx,) = torch.autograd.grad((x * x * y).sum(), x, create_graph=True)
    (gx * gx).sum().backward()


@acc
def retain(x, y, g):
    z = (x * y).tanh()
    z.backward(g, retain_graph=True)
    z.backward(g)


def checkpointed(x, y, g, use_reentrant=False):
    def f(x):
        return torch.tanh(x * y) @ y

    again = {"use_reentrant": use_reentrant}
    checkpoint(f, checkpoint(f, x * 1 if use_reentrant else x, **again), **again).backward(g)


acc(checkpointed)
acc(lambda x, y, g: checkpointed(x, y, g, True), "checkpointed_reentrant")


@acc
def clip(x, y, g):
    (x * y).backward(g)
    torch.nn.utils.clip_grad_norm_([x, y], 1.0)


@acc
def clip_value(x, y, g):
    (x * y).backward(g)
    torch.nn.utils.clip_grad_value_([x, y], 1.0)


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
