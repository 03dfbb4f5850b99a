# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("16 design", needs="500 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% networks-and-guess guesses=[100, "backward"]
B, S, L = 8, 40 * 40, 6

def point(c1, c2, groups=1):
    return nn.Sequential(nn.Conv2d(c1, c2, 1, groups=groups, bias=False), nn.ReLU())

def step(model, width):
    model(torch.ones(B, width, 40, 40, device=device)).sum().backward()

def net(block):
    return nn.Sequential(*[block() for _ in range(L)]).to(device)

uneven = net(lambda: nn.Sequential(point(32, 512), point(512, 32)))
even = net(lambda: nn.Sequential(point(128, 128), point(128, 128)))
question = "The even network: which share of the uneven one's peak does it need, in percent?"
share = lesson.guess(question)
where = lesson.guess("When is the peak of the uneven one?", choices=["forward", "backward"])

# %% uneven
%%memtrack --name uneven
step(uneven, 32)

# %% even
with memlab.track("even", show=False) as run:
    step(even, 128)
wide = memlab.runs["uneven"]
print(share.compare(100 * run.peak_allocated_bytes / wide.peak_allocated_bytes, wide, run))
print(where.compare(wide.devices[0].at["phase"], wide))
print(lesson.price("equal channels", lambda: step(uneven, 32), lambda: step(even, 128), at_most=1))
lesson.saves("equal channels", wide, run)

# %% account
c1, c2 = 32, 512
expected = {
    "activation": 4 * B * S * (L * (c1 + c2) - c1),
    "temporary": 2 * 4 * B * S * c2,  # in backward
    "input": 4 * B * S * c1,
    "parameter": 2 * 4 * 2 * L * c1 * c2,  # of both networks
}
lesson.account("The uneven network at its peak", wide, expected)

# %% how-uneven
def tracked(model, width, name):
    with memlab.track(name, show=False) as found:
        step(model, width)
    return found

between = tracked(net(lambda: nn.Sequential(point(64, 256), point(256, 64))), 64, "64 to 256")
lesson.sweep("channels in and out", {"128, 128": run, "64, 256": between, "32, 512": wide})

# %% guess-rules guesses=["fewer groups", 50]
choices = ["fewer groups", "fewer branches", "fewer element-wise"]
least = lesson.guess("Which of the three saves least here?", choices=choices)
question = "And next: what does a layer cost that is never used, "
head = lesson.guess(question + "in percent of what a trained one costs (with Adam)?")

class Sum(nn.Module):
    def __init__(self, *parts, last=nn.Identity()):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.last = last

    def forward(self, x):
        return self.last(sum(part(x) for part in self.parts))

# %% three-rules
def one():
    return point(128, 128)

def two():
    return nn.Sequential(point(128, 128), point(128, 128))

rules = {  # the width of the input, a network as it is usual, and a better one
    "fewer groups": (256, lambda: point(256, 256, groups=4), one),
    "fewer branches": (64, lambda: Sum(*[point(64, 64) for _ in range(4)]), one),
    "fewer element-wise": (128, lambda: Sum(two(), nn.Identity(), last=nn.ReLU()), two),
}
saved = {}
for rule, (width, usual, better) in rules.items():
    claim = lesson.saves(rule, tracked(net(usual), width, rule), tracked(net(better), 128, rule))
    saved[rule] = claim.saved_share
    print(claim)
print(least.compare(min(saved, key=saved.get), wide))

# %% unused-heads
def heads(count):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(count)]).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model[0](torch.ones(8, 2048, device=device)).sum().backward()
    optimizer.step()

with memlab.track("four heads") as four:
    heads(4)
with memlab.track("one head", show=False) as single:
    heads(1)
unused = (four.peak_allocated_bytes - single.peak_allocated_bytes) / 3
trained = 4 * 4 * (2048 * 2048 + 2048)
print(head.compare(100 * unused / trained, four, single))
lesson.saves("left out, not initialized", four, single)

# %% switches
plain = tracked(even, 128, "plain")

def shown(what, after):
    if torch.backends.cudnn.is_available():
        times = lesson.headline(f"{what}: times the peak", after.peak_bytes / plain.peak_bytes)
        print(f"{what}: {times:.2f} times the peak")
    else:
        lesson.not_measurable(what, "this build of PyTorch has no cuDNN")

for name in ("benchmark", "deterministic"):
    with torch.backends.cudnn.flags(enabled=True, **{name: True}):
        shown(f"cudnn.{name}", tracked(even, 128, name))
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
shown("deterministic algorithms and a seed", tracked(even, 128, "same bits"))
torch.use_deterministic_algorithms(False)

# %% convolution
def convolution():
    layer = nn.Conv2d(64, 64, 3).cuda()
    layer(torch.ones(64, 64, 96, 96, device="cuda")).sum().backward()

MiB = 2**20
low, high = lesson.predict(convolution, "convolution").allocated_bytes
print(f"One convolution on the {lesson.card} takes {low / MiB:.0f} MiB to {high / MiB:.0f} MiB")

# %% depthwise
from torch.utils.flop_counter import FlopCounterMode

flops, kept = [], []
for parts in ([(1, 3)], [(128, 3), (1, 1)]):  # groups and kernel: full, then depthwise
    convs = [nn.Conv2d(128, 128, k, padding=k // 2, groups=groups) for groups, k in parts]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        nn.Sequential(*convs).to(device)(torch.ones(B, 128, 40, 40, device=device))
    flops.append(counter.get_total_flops())
    kept.append(tracked(net(lambda: nn.Sequential(*convs)), 128, "convs").breakdown()["activation"])
percent, times = round(100 * flops[1] / flops[0]), round(kept[1] / kept[0], 1)
lesson.headline("depthwise separable: percent of the FLOPs", percent)
lesson.headline("depthwise separable: times the bytes kept", times)
print(f"depthwise separable: {percent} % of the FLOPs, {times} times the bytes kept at the peak")

# %% exercise tags=["exercise"]
def rand(*shape):
    return torch.rand(*shape, device=device, requires_grad=True)

layers = [(rand(128, 128, 1, 1), rand(128), rand(128)) for _ in range(L)]
images = torch.rand(B, 128, 40, 40, device=device)

def yours():
    ...  # as in whole(), with another third line: nn.functional.conv2d(y, weight, bias)

# %% check tags=["check"]
def whole(y=images):
    for weight, scale, shift in layers:
        y = (nn.functional.conv2d(y, weight) * scale[:, None, None] + shift[:, None, None]).relu()
    return torch.autograd.grad(y.mean(), [one for layer in layers for one in layer])

limit = "88 MiB" if device == "cpu" else "108 MiB"  # a GPU's workspaces
lesson.check(yours).same_as(whole, relative=1e-3).peak_below(limit)

# %% solution tags=["solution"]
def yours():
    y = images
    for weight, scale, shift in layers:
        y = nn.functional.conv2d(y, weight * scale[:, None, None, None], shift).relu()
    return torch.autograd.grad(y.mean(), [one for layer in layers for one in layer])

# %% end
lesson.end()
