# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("08 checkpointing", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% thousand-layers
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

checkpoint(nn.Identity(), torch.ones(0), use_reentrant=False)  # the first call imports much
N, B, H = 1000, 2048, 32
torch.set_num_threads(1)  # a thousand small layers: threads would mostly wait for each other
net = nn.Sequential(*[nn.Linear(H, H) for _ in range(N)]).to(device)
for layer in net:
    nn.init.eye_(layer.weight)
x, y = torch.randn(2, B, H, device=device)
P = sum(p.numel() for p in net.parameters())
one = 4 * B * H  # bytes of one activation

# %% guess guesses=[50, "forward ends", "250"]
moments = ["forward ends", "the second half goes backward", "the first half is run again"]
segments = ["5", "10", "25", "100", "250"]
halves_guess = lesson.guess("Peak with two halves, in percent of the peak without?")
where = lesson.guess("When is the new peak?", choices=moments)
best = lesson.guess("Which number of segments has the lowest peak?", choices=segments)

# %% plain
%%memtrack --name plain
def train(forward):
    net.zero_grad()
    loss = nn.functional.mse_loss(forward(x), y)
    loss.backward()
    return loss.item()

train(net)

# %% two-halves
def halves(x):
    middle = checkpoint(net[:500], x, use_reentrant=False)
    return net[500:](middle)  # its backward comes at once: forgetting would save nothing

with memlab.track("two halves", show=False) as two:
    two.result(train(halves))
memlab.compare(memlab.runs["plain"], two)

# %% account
plain = memlab.runs["plain"]
kept = plain.breakdown()["activation"]
is_again = two.breakdown().get("temporary", 0) > N / 4 * one
print(halves_guess.compare(100 * two.peak_bytes / plain.peak_bytes, plain, two))
print(where.compare(moments[2] if is_again else moments[0], two))
print(lesson.saves("two halves", plain, two))
lesson.holds("two halves leave at least half of the activations", two.peak_bytes > kept / 2, two)
expected = {
    "temporary": (N // 2 - 1) * one + 2 * one,  # the first half again, two gradients
    "activation": one,  # the loss, on its buffer
    "parameter": 4 * P,
    "gradient": 4 * P // 2,  # of the second half
    "input and other": 2 * one,  # x and y
}
lesson.account("Two halves, at the peak", two, expected)

# %% reentrant
import warnings

few = net[:8]
for reentrant in (True, False):
    few.zero_grad()
    with warnings.catch_warnings(record=True) as warned:
        few[4:](checkpoint(few[:4], x, use_reentrant=reentrant)).sum().backward()
    missing = sum(p.grad is None for p in few.parameters())
    print(f"use_reentrant={reentrant}: {missing} of 16 parameters got no gradient.")
    for warning in warned:
        print(f"  Warned: {str(warning.message)[:52]}")
    lost = 8 if reentrant else 0
    lesson.holds(f"use_reentrant={reentrant} loses {missing} gradients", missing == lost)

# %% segments
MiB = 2**20
runs = {}
for s in (5, 10, 25, 100, 250):
    with memlab.track(f"{s} segments", show=False) as run:
        train(lambda x: checkpoint_sequential(net, s, x, use_reentrant=False))
    runs[s] = run
    peak = run.peak_bytes / MiB
    formula = (s + N // s) * one / MiB
    print(f"{s:4} segments: {peak:5.1f} MiB   (s + N/s) 4 BH = {formula:5.1f} MiB")
lowest = min(runs, key=lambda s: runs[s].peak_bytes)
print(best.compare(str(lowest), runs[lowest]))
print(lesson.saves("25 segments", plain, runs[25], at_least=0.75))
ratio = runs[10].peak_bytes / runs[100].peak_bytes
is_so = abs(ratio - 1) < 0.1
lesson.holds("10 of 100 and 100 of 10 differ by less than a tenth", is_so, runs[10])
lesson.sweep("segments", runs)

# %% selective
class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)

def feed_forward(W):
    return Block(nn.LayerNorm(W), nn.Linear(W, 4 * W), nn.GELU(), nn.Linear(4 * W, W))

def keep_multiplications():
    expensive = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return create_selective_checkpoint_contexts(expensive)

stack = nn.ModuleList([feed_forward(128) for _ in range(16)]).to(device)
rows = torch.randn(2048, 128, device=device)

def step(how):
    h = rows
    for block in stack:
        h = block(h) if how is None else checkpoint(block, h, use_reentrant=False, **how)
    h.square().mean().backward()
    return h[0, 0].item()  # waits for the GPU

# %% measure-selective
from torch.utils.flop_counter import FlopCounterMode

ways = {"plain": None, "checkpoint": {}, "selective": {"context_fn": keep_multiplications}}
peaks, flops = {}, {}
for name, how in ways.items():
    with memlab.track(name, show=False) as run:
        step(how)
    with FlopCounterMode(display=False) as counter:
        step(how)
    peaks[name] = run
    flops[name] = counter.get_total_flops()
    more = flops[name] / flops["plain"]
    print(f"{name:10}: {run.peak_bytes / MiB:5.1f} MiB, FLOPs {more:.2f}")
stack.zero_grad()  # so that a second run of this cell begins as the first

# %% price
print(lesson.saves("selective checkpoints", peaks["plain"], peaks["selective"]))
more = round(flops["checkpoint"] / flops["plain"], 3)
lesson.headline("FLOPs with full checkpoints, over those without", more)
sentence = f"full checkpoints cost {more:.2f} times the FLOPs: at most one more forward"
print(lesson.holds(sentence, 1.1 < more < 1.34))
again = flops["selective"] / flops["plain"]
lesson.holds("selective ones compute no matrix multiplication twice", again == 1)
lesson.price("full checkpoints", lambda: step(None), lambda: step({}), at_most=2, of="seconds")

# %% exercise tags=["exercise"]
class Forget(torch.autograd.Function):
    ...  # static: forward(ctx, x, part) and backward(ctx, gradient); about 12 lines

def yours():
    ...  # about 6 lines: Forget.apply(h, part) for each part, then as in whole()

# %% check tags=["check"]
def whole():
    train(net)
    return net[0].weight.grad

lesson.check(yours).same_as(whole, relative=1e-4).peak_below(plain.peak_bytes // 4)

# %% solution tags=["solution"]
class Forget(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, part):
        ctx.part = part
        ctx.save_for_backward(x)
        return part(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.part(x)
        output.backward(gradient)
        return x.grad, None

def yours():
    net.zero_grad()
    h = x.clone().requires_grad_()
    for start in range(0, N, 40):
        h = Forget.apply(h, net[start : start + 40])
    nn.functional.mse_loss(h, y).backward()
    return net[0].weight.grad

# %% end
lesson.end()
