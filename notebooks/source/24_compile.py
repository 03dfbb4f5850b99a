# %% setup
%reset -f
%load_ext memlab
from functools import partial
import memlab, torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from memlab.lesson import Lesson
lesson = Lesson("24 compile", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% model
H, L, B = 512, 4, 2048

def chain(y, n=4):
    for _ in range(n):
        y = y * torch.sigmoid(y)
    return y

class Net(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.layers, self.act = nn.ModuleList(nn.Linear(H, H) for _ in range(L)), act

    def forward(self, x):
        for layer in self.layers:
            x = x + self.act(layer(x))
        return x

# %% step
def step(act=chain, wrap=lambda net: net, device=device):
    torch.manual_seed(0)
    net = Net(act).to(device)
    forward, adam = wrap(net), torch.optim.Adam(net.parameters())
    x, y = torch.randn(2, B, H, device=device)
    for _ in range(2):  # the first one allocates Adam's state
        adam.zero_grad()
        nn.functional.mse_loss(forward(x), y).backward()
        adam.step()
    return net.layers[0].weight.grad

def measured(name, act=chain):
    with memlab.track(name, show=False) as run:
        step(act)
    return run

# %% guess guesses=[30, "activation", "it grows half as much"]
parts = ["parameter", "optimizer", "activation"]
longer = ["it grows as in eager mode", "it grows half as much", "it hardly changes"]
share = lesson.guess("n = 4: how much of the peak does torch.compile save, in percent?")
shrinks = lesson.guess("Which category shrinks most?", choices=parts)
grows = lesson.guess("What does the compiled peak do from n = 1 to n = 4?", choices=longer)

# %% predict
def predicted(n, wrap=lambda net: net):
    return lesson.predict(lambda: step(lambda y: chain(y, n), wrap, "cuda"), f"n = {n}")

import torch._inductor.compile_fx  # once here, not in every prediction
torch._logging.set_logs(inductor=40)  # errors only: it warns that this GPU is small
eager, fused = predicted(4), predicted(4, torch.compile)
was, held = eager.breakdown(), fused.breakdown()
most = max(parts, key=lambda part: was[part] - held[part])
saved = 100 - 100 * fused.peak_allocated_bytes / eager.peak_allocated_bytes
print(share.compare(saved, eager, fused))
print(shrinks.compare(most, eager, fused))
same = all(was[part] == held[part] for part in ("parameter", "optimizer", "input"))
print(lesson.holds("parameters, Adam's state and the batch stay as they are", same, eager, fused))
lesson.saves("torch.compile", eager, fused, at_least=0.5)

# %% account
P = L * (H * H + H)
one = 4 * B * H  # bytes of one activation
workspaces = 2 * (2 * 4096 + 8 * 16) * 1024  # cuBLAS: one for forward, one for backward
expected = {
    "activation": (2 * L - 1) * one + one,  # of the layers, and the loss
    "temporary and other": 2 * one + workspaces,  # two gradients
    "optimizer": 2 * 4 * P,  # Adam's moments
    "input": 2 * one,  # x and y
    "parameter": 4 * P,
    "gradient": 4 * H * H,  # of one layer
}
lesson.account("The compiled peak, n = 4", fused, expected)

# %% chain-length
bars = {"eager, 1": predicted(1), "eager, 2": predicted(2), "eager, 4": eager}
bars |= {"compiled, 1": predicted(1, torch.compile), "compiled, 4": fused}
first, second, last, short, long = (run.peak_allocated_bytes for run in bars.values())
more = last - first
growth = longer[(long - short < 0.7 * more) + (long - short < 0.1 * more)]
print(grows.compare(growth, *bars.values()))
links = abs(more - 3 * 2 * L * one) < 0.02 * more and first < second < last
print(lesson.holds("in eager mode each link adds 2 x 4 BH per layer", links, *bars.values()))
lesson.sweep("links", bars)

# %% by-hand
by_hand = partial(checkpoint, chain, use_reentrant=False)
plain, hand = measured("eager"), measured("by hand", by_hand)
if device == "cuda":  # PyTorch's own counter of the same figure
    print(torch.cuda.max_memory_allocated())
lesson.saves("a checkpoint around the chain", plain, hand, at_least=0.3)

# %% partitioned
def partitioned(act):
    act = torch.compile(act, backend="aot_eager_decomp_partition")
    step(act)  # the first call compiles
    run = measured("partitioned", act)
    torch.compiler.reset()  # compiled code refers to the model
    return run

# %% compare-parts
cut = partitioned(chain)
print(lesson.saves("the partitioner alone", plain, cut, at_least=0.3))
whole = fused.peak_allocated_bytes - workspaces
for name, run in {"eager": plain, "by hand": hand, "partitioner": cut}.items():
    print(f"{name:12} {run.peak_allocated_bytes / 2**20:6.1f} MiB, {run.trace.provenance}")
print(f"{'and fusion':12} {whole / 2**20:6.1f} MiB, {fused.trace.provenance}, less the workspaces")

# %% less-saved
def broken(y):
    y = chain(y, 2)
    torch._dynamo.graph_break()  # does what a print would do
    return chain(y, 2)

halves = partitioned(broken)
kept = (halves.breakdown()["activation"] - cut.breakdown()["activation"]) / one
print(lesson.holds("a break saves one more tensor per layer", round(kept, 1) == L, halves, cut))
base = lesson.predict(lambda: step(nn.functional.silu, device="cuda"))
same = lesson.predict(lambda: step(nn.functional.silu, torch.compile, "cuda"))
little = 100 - 100 * same.peak_allocated_bytes / base.peak_allocated_bytes
sentence = f"{little:.0f} % saved where SiLU is one operation, {saved:.0f} % in the chain"
lesson.holds(sentence, little < saved / 4, base, same)

# %% price
def everything(net):
    return lambda x: checkpoint(net, x, use_reentrant=False)

print(lesson.price("the chain recomputed", step, lambda: step(by_hand), at_most=1))
print(lesson.price("the network recomputed", step, lambda: step(wrap=everything), at_most=1.37))
lesson.price("the chain by hand", step, lambda: step(by_hand), at_most=2, of="seconds")

# %% exercise tags=["exercise"]
class Tiled(torch.autograd.Function):
    ...  # static: forward(ctx, y) and backward(ctx, gradient); about 16 lines

def yours():
    ...  # 1 line: step(Tiled.apply)

# %% check tags=["check"]
limit = whole + 3 * 2**20 + (workspaces + 2 * one if device == "cuda" else 0)
lesson.check(yours).same_as(step, relative=1e-3).peak_below(limit)

# %% solution tags=["solution"]
class Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        result = torch.empty_like(y)
        for tile, place in zip(y.split(128), result.split(128)):
            place.copy_(chain(tile))
        return result

    @staticmethod
    def backward(ctx, gradient):
        (y,) = ctx.saved_tensors
        result = torch.empty_like(y)
        for tile, passed, place in zip(*(t.split(128) for t in (y, gradient, result))):
            tile = tile.detach().requires_grad_()
            with torch.enable_grad():
                out = chain(tile)
            place.copy_(torch.autograd.grad(out, tile, passed)[0])
        return result

def yours():
    return step(Tiled.apply)

# %% end
lesson.end()
