# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("09 recomputed norm", needs="450 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% build-model
from torch.utils.checkpoint import checkpoint

checkpoint(nn.Identity(), torch.ones(0), use_reentrant=False)  # the first call imports much
L, B, C, S = 8, 16, 32, 64
torch.set_num_threads(1)  # so that the seconds depend less on what else the machine does

def conv(before):
    return nn.Conv2d(before, C, 3, padding=1, bias=False)

parts = [conv(3)]
for _ in range(L):
    parts += [nn.BatchNorm2d(C), nn.ReLU(), conv(C)]
net = nn.Sequential(*parts).to(device)
x = torch.randn(B, 3, S, S, device=device)
one = 4 * B * C * S * S  # bytes of one activation

# %% guess guesses=["2", 33, 40, "first layer is recomputed"]
moments = ["loss goes backward", "last layer is recomputed", "first layer is recomputed"]
kept = lesson.guess("How many of the three are kept for backward?", choices=["1", "2", "3"])
in_place = lesson.guess("ReLU(inplace=True) everywhere: how many percent of the peak go?")
left = lesson.guess("Peak with norm and ReLU recomputed, in percent of the peak without?")
moved = lesson.guess("When is the new peak?", choices=moments)

# %% plain
%%memtrack --name plain
def train(forward):
    net.zero_grad()
    loss = forward(x).square().mean()
    loss.backward()
    return loss.item()

train(net)

# %% account
plain = memlab.runs["plain"]
print(kept.compare(str(round(plain.breakdown()["activation"] / one) // L), plain))
expected = {
    "activation": (2 * L + 1) * one,
    "temporary": 4 * one,  # in backward
}
lesson.account("At the peak", plain, expected)

# %% relu-in-place
for relu in net[2::3]:
    relu.inplace = True
with memlab.track("in place", show=False) as inplace:
    train(net)
print(in_place.compare(100 - 100 * inplace.peak_bytes / plain.peak_bytes, plain, inplace))
lesson.saves_nothing("ReLU in place behind a BatchNorm", plain, inplace)

# %% recompute
def again(x, inside=3):  # norm, ReLU and convolution; or the first two of them only
    x = net[0](x)
    for k in range(1, 1 + 3 * L, 3):
        x = checkpoint(net[k : k + inside], x, use_reentrant=False)
        x = net[k + inside : k + 3](x)  # with all three inside, nothing is left to do
    return x

def gradient(forward):
    train(forward)
    return net[0].weight.grad

both = {}
for name, inside in {"recomputed": 3, "convolution outside": 2}.items():
    with memlab.track(name, show=False) as both[name]:
        both[name].result(train(lambda x: again(x, inside)))
recomputed, outside = both.values()
memlab.compare(plain, recomputed)

# %% compare-recomputed
is_full = recomputed.breakdown()["activation"] > L * one
print(left.compare(100 * recomputed.peak_bytes / plain.peak_bytes, plain, recomputed))
print(moved.compare(moments[0] if is_full else moments[1], recomputed))
print(lesson.saves("norm and ReLU recomputed", plain, recomputed))
print(lesson.saves_nothing("a checkpoint that leaves the convolution outside", plain, outside))
seconds = 2.5 if device == "cpu" else 5  # a GPU waits for the host in so small a network
for of, at_most in {"FLOPs": 1.0, "seconds": seconds}.items():  # no convolution runs twice
    print(lesson.price("recomputed", lambda: train(net), lambda: train(again), at_most, of))

# %% norm-momentum
numbers = torch.randn(64, 4, 8, 8)
once = nn.BatchNorm2d(4, momentum=0.1)
wrong = nn.BatchNorm2d(4, momentum=0.1)
right = nn.BatchNorm2d(4, momentum=1 - 0.9**0.5)
result = once(numbers)
for norm in (wrong, right):
    checkpoint(norm, numbers, use_reentrant=False).sum().backward()
print("batches counted:", [norm.num_batches_tracked.item() for norm in (once, wrong, right)])
same = [torch.allclose(norm.running_var, once.running_var, rtol=1e-6) for norm in (wrong, right)]
lesson.holds("the variance: wrong with the old momentum, right with the new", same == [False, True])

# %% dense-layers
def dense_layer(k):
    return nn.Sequential(nn.BatchNorm2d(8 * k), nn.ReLU(), nn.Conv2d(8 * k, 8, 3, padding=1))

def read(layer, *features):
    return layer(torch.cat(features, 1))

def read_again(layer, *features):
    return checkpoint(read, layer, *features, use_reentrant=False)

def dense(layers, features, reading):
    for layer in layers:
        features = [*features, reading(layer, *features)]
    return torch.cat(features, 1)

# %% densenet-depth
images = torch.randn(16, 8, 32, 32, device=device)
runs = {}
for depth in (6, 12, 24):
    layers = nn.ModuleList([dense_layer(k) for k in range(1, depth + 1)]).to(device)
    for how, reading in {"kept": read, "again": read_again}.items():
        with memlab.track(f"{depth} layers, {how}", show=False) as run:
            dense(layers, [images], reading).square().mean().backward()
        runs[f"{depth} {how}"] = run
held = {name: run.breakdown()["activation"] for name, run in runs.items()}
grown = held["24 kept"] / held["12 kept"]
grown_again = held["24 again"] / held["12 again"]
sentence = f"twice the layers keep {grown:.1f} times as much, recomputed {grown_again:.1f}"
print(lesson.saves("24 dense layers recomputed", runs["24 kept"], runs["24 again"], at_least=0.5))
print(lesson.holds(sentence, grown > 3.3 and grown_again < 2.3, runs["24 kept"]))
lesson.sweep("layers", runs)

# %% exercise tags=["exercise"]
def gate(h):
    return h * torch.sigmoid(h)

def whole():
    return gradient(gated)

def yours():
    ...  # about 8 lines

# %% check tags=["check"]
def gated(x):
    x = net[0](x)
    for k in range(1, 1 + 3 * L, 3):
        x = net[k + 2](gate(net[k](x)))
    return x

lesson.check(yours).same_as(whole, relative=1e-4).peak_below(int(0.8 * plain.peak_bytes))

# %% solution tags=["solution"]
def part(norm, convolution, h):
    return convolution(gate(norm(h)))

def yours():
    net.zero_grad()
    h = net[0](x)
    for k in range(1, 1 + 3 * L, 3):
        h = checkpoint(part, net[k], net[k + 2], h, use_reentrant=False)
    h.square().mean().backward()
    return net[0].weight.grad

# %% end
lesson.end()
