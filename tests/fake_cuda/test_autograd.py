"""Autograd on fake CUDA tensors: what it keeps, what it frees, and who runs in it."""

from __future__ import annotations

import pytest
import torch
from fake_gpus import alive
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


def net(width: int = 32, depth: int = 3) -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]).cuda()


def test_backward_fills_gradients_and_frees_the_graph(fake):
    model, x = net(), torch.randn(8, 32, device="cuda")
    resting = alive(fake)
    loss = model(x).sum()
    assert alive(fake) > resting
    loss.backward()
    del loss
    size = sum(p.numel() * 4 for p in model.parameters())
    assert alive(fake) == resting + size
    assert all(p.grad.is_cuda and p.grad.shape == p.shape for p in model.parameters())
    for p in model.parameters():
        p.grad = None
    assert alive(fake) == resting


def test_a_retained_graph_serves_twice(fake):
    model, x = net(), torch.randn(8, 32, device="cuda")
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    held = alive(fake)
    loss.backward()
    assert alive(fake) < held
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradients_of_gradients(fake):
    x = torch.randn(8, 32, device="cuda", requires_grad=True)
    y = net()(x).square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    assert grad.is_cuda and grad.requires_grad
    grad.square().sum().backward()
    assert x.grad.is_cuda


def test_hooks_and_custom_functions_run(fake):
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            seen.append((x.is_cuda, grad.is_cuda, torch.zeros(1, device="cuda").is_cuda))
            return grad * 2

    model = net()
    model.register_full_backward_hook(lambda *args: seen.append("module"))
    x = torch.randn(4, 32, device="cuda", requires_grad=True)
    x.register_hook(lambda grad: seen.append(grad.device.type))
    model[0][0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(type(p.grad).__name__))
    Double.apply(model(x)).sum().backward()
    assert seen[0] == (True, True, True) and "module" in seen and "cuda" in seen and "FakeCudaTensor" in seen


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints_run_their_part_again(fake, use_reentrant):
    model, calls = net(), []
    model[1].register_forward_hook(lambda *args: calls.append(1))
    x = torch.randn(8, 32, device="cuda", requires_grad=True)
    y = checkpoint(model, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert len(calls) == 2 and x.grad is not None
    checkpoint_sequential(model, 2, x, use_reentrant=use_reentrant).sum().backward()


def test_dropout_keeps_a_mask_of_one_byte(fake):
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    before = alive(fake)
    y = F.dropout(x, 0.5)
    assert alive(fake) == before + (4 << 20) + (1 << 20)
    with torch.inference_mode():
        z = F.dropout(x, 0.5)
    assert z.is_inference() and z.is_cuda and not y.is_inference()


def test_tensors_can_be_saved_on_the_host(fake):
    model, x = net(256), torch.randn(64, 256, device="cuda")
    resting = alive(fake)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(x).sum()
    assert alive(fake) < resting + 3 * 64 * 256 * 4
    loss.backward()
    assert model[0][0].weight.grad.is_cuda


def test_views_share_and_operators_in_place_make_nothing(fake):
    x = torch.zeros(100, 100, device="cuda")
    before = alive(fake)
    views = [x.t(), x[3:5], x.view(-1), x.reshape(50, 200), x.unsqueeze(0)]
    views += [x.expand(2, 100, 100), x.chunk(4)[1], x.real]
    x.add_(1).mul_(2).t_().relu_().clamp_(0, 1)
    x[0] = 1
    assert all(one.untyped_storage() is x.untyped_storage() for one in views)
    assert alive(fake) == before


def test_storages_that_change_their_size(fake):
    x = torch.zeros(256, device="cuda")
    x.untyped_storage().resize_(0)
    y = torch.empty(0, device="cuda")
    y.resize_(512)
    assert alive(fake) in (2048, 2048 + 1024)  # resizing a storage itself reaches no operator
    y.set_(torch.zeros(16, device="cuda"))
    assert y.shape == (16,)
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(32, device="cuda"), 1, out=out)
    assert out.shape == (32,)


def test_complex_numbers(fake):
    z = torch.fft.fft(torch.randn(64, device="cuda"))
    assert z.dtype == torch.complex64 and (z * z.conj()).real.is_cuda
    torch.view_as_real(z.conj().resolve_conj()).sum()


def test_functional_transforms(fake):
    model = nn.Linear(4, 3).cuda()
    params = dict(model.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(model, params, (x,)).square().sum()

    x = torch.randn(5, 4, device="cuda")
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    assert each["weight"].shape == (5, 3, 4) and each["weight"].is_cuda
    assert torch.func.jacrev(lambda t: model(t))(x[0]).shape == (3, 4)


def test_parametrisations_and_lazy_modules(fake):
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)).cuda()
    layer(torch.ones(2, 8, device="cuda")).sum().backward()
    assert layer.parametrizations.weight.original0.grad.is_cuda
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)).cuda()
    spectral(torch.ones(2, 8, device="cuda"))
    lazy = nn.LazyLinear(4).cuda()
    lazy(torch.ones(2, 8, device="cuda"))
    assert lazy.weight.is_cuda and lazy.weight.shape == (4, 8)


def test_embeddings_have_sparse_gradients(fake):
    table = nn.Embedding(100, 8, sparse=True).cuda()
    table(torch.zeros(4, dtype=torch.long, device="cuda")).sum().backward()
    assert table.weight.grad.is_sparse and table.weight.grad._values().shape == (4, 8)


def test_backward_works_on_the_stream_of_its_forward(fake):
    side, model = torch.cuda.Stream(), net(depth=1)
    with torch.cuda.stream(side):
        hidden = model(torch.ones(8, 32, device="cuda"))
    loss = (hidden * 2).sum()
    first = len(fake.log)
    loss.backward()
    columns = fake.log.columns()
    born = columns["kind"][first:] == 1
    sizes, streams = columns["nbytes"][first:][born].tolist(), columns["stream"][first:][born].tolist()
    on_side = {size for size, stream in zip(sizes, streams, strict=True) if stream == side.cuda_stream}
    assert 32 * 32 * 4 in on_side  # the gradient of the weight
    assert streams[0] == 0  # of the sum, which ran on the stream of the caller
