# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("10 accumulation", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% build-model
B, C, S = 64, 16, 64
loss = nn.functional.cross_entropy
torch.set_num_threads(1)  # so that the seconds depend less on what else the machine does

def make(norm):
    layers = []
    for channels in (3, C, C, C):
        layers += [nn.Conv2d(channels, C, 3, padding=1), norm(C), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, 10))

def group_norm(channels):
    return nn.GroupNorm(4, channels)

net = make(group_norm).to(device)
x = torch.randn(B, 3, S, S, device=device)
y = torch.randint(0, 10, (B,), device=device)

# %% guess guesses=[25, 25, "backward"]
each = lesson.guess("Backward for each piece: peak in percent of the whole batch's?")
once = lesson.guess("One backward at the end: peak in percent of the whole batch's?")
question = "When is the peak with a backward for each piece?"
where = lesson.guess(question, choices=["forward", "backward"])

# %% whole
%%memtrack --name whole
def train(net, x, y, n):
    total = 0
    net.zero_grad()
    for xs, ys in zip(x.chunk(n), y.chunk(n)):
        part = loss(net(xs), ys) * len(xs) / len(x)
        part.backward()
        total += part.item()
    return total

train(net, x, y, 1)

# %% four-pieces
with memlab.track("four pieces", show=False) as four:
    four.result(train(net, x, y, 4))

whole = memlab.runs["whole"]
memlab.compare(whole, four)

# %% account
print(each.compare(100 * four.peak_bytes / whole.peak_bytes, whole, four))
print(where.compare(four.devices[0].at["phase"], four))
print(lesson.saves("four pieces", whole, four))
at_once, in_pieces = lambda: train(net, x, y, 1), lambda: train(net, x, y, 4)
print(lesson.price("four pieces", at_once, in_pieces, at_most=1))

n = 4
output = 4 * B * C * S * S  # bytes that one layer gives for the whole batch
P = sum(p.numel() for p in net.parameters())
expected = {
    "activation": 8 * output // n,  # of one piece
    "temporary": 2 * output // n,  # in backward
    "input": 4 * 3 * B * S * S,  # the images of the whole batch
    "parameter and gradient": 2 * 4 * P,
}
lesson.account("Four pieces, at the peak", four, expected)

# %% one-backward
def one_backward(n):
    with memlab.track("one backward", show=False) as run:
        net.zero_grad()
        pieces = zip(x.chunk(n), y.chunk(n))
        sum(loss(net(xs), ys) * len(xs) / B for xs, ys in pieces).backward()
    return run

halves, quarters = (one_backward(n).peak_bytes / whole.peak_bytes for n in (2, 4))
print(once.compare(100 * quarters, whole, four))
lesson.headline("two forwards, one backward: percent of the whole peak", round(100 * halves))
stays = min(halves, quarters) > 0.8
lesson.holds("with one backward at least four fifths of the peak stay", stays, whole)

# %% pieces
def measured(name, images, n):
    with memlab.track(name, show=False) as run:
        train(net, images, y[: len(images)], n)
    return run

runs = {"1": whole}
for n in (2, 4, 8, 16):
    runs[str(n)] = measured(f"{n} pieces", x, n)

half_side = x[..., ::2, ::2].clone()
runs["half the batch"] = measured("half the batch", x[: B // 2], 1)
runs["half the side"] = measured("half the side", half_side, 1)
print(lesson.saves("two pieces, each with its backward", whole, runs["2"]))
print(lesson.saves("images of half the side", whole, runs["half the side"], at_least=0.3))
lesson.sweep("pieces", runs)

# %% same-training
torch.manual_seed(0)
few = torch.randn(32, 3, 16, 16)
classes = torch.randint(0, 10, (32,))
off = {}
for name, norm in {"GroupNorm": group_norm, "BatchNorm": nn.BatchNorm2d}.items():
    small = make(norm)
    train(small, few, classes, 1)
    expected = small[0].weight.grad.clone()
    train(small, few, classes, 4)
    difference = small[0].weight.grad - expected
    off[name] = (difference.abs().max() / expected.abs().max()).item()
    print(f"{name}: gradients of four pieces are off by {off[name]:.1g} of the largest")
print(f"BatchNorm counted {small[1].num_batches_tracked} batches")

as_said = off["GroupNorm"] < 1e-3 and off["BatchNorm"] > 0.05
lesson.holds("four pieces are the same with GroupNorm and not with BatchNorm", as_said)

# %% small-batches
images = torch.randn(2048, C, 8, 8) + torch.randn(2048, C, 1, 1)
spread = {}
for n in (2, 4, 8, 32):
    means = torch.stack([part.mean((0, 2, 3)) for part in images.split(n)])
    spread[n] = (means.std() / images.std()).item()
    print(f"{n:2} images: off by {spread[n]:.0%}", "#" * round(100 * spread[n]))
lesson.headline("the mean of 2 images is off by, over that of 32", round(spread[2] / spread[32]))
lesson.holds("two images are at least three times as far off as 32", spread[2] > 3 * spread[32])

# %% four-gpus
parts = images[:8].chunk(4)  # two images on each of four GPUs
means = torch.stack([part.mean((0, 2, 3)) for part in parts])
variances = torch.stack([part.var((0, 2, 3), correction=0) for part in parts])
joined = variances.mean(0) + means.var(0, correction=0)
same = torch.allclose(joined, images[:8].var((0, 2, 3), correction=0), rtol=1e-3)
lesson.holds("variances and means of four GPUs give the variance of all", same)

# %% exercise tags=["exercise"]
def alike(features):
    return torch.logsumexp(features @ features.T, 1).mean()

def yours():
    ...  # about 7 lines

# %% check tags=["check"]
def whole_step():
    net.zero_grad()
    alike(net(x)).backward()
    return net[0].weight.grad

lesson.check(yours).same_as(whole_step, relative=1e-3).peak_below(whole.peak_allocated_bytes // 2)

# %% solution tags=["solution"]
def yours():
    net.zero_grad()
    with torch.no_grad():
        features = torch.cat([net(part) for part in x.chunk(8)])
    alike(features.requires_grad_()).backward()
    for part, gradient in zip(x.chunk(8), features.grad.chunk(8)):
        net(part).backward(gradient)
    return net[0].weight.grad

# %% end
lesson.end()
