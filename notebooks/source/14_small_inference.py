# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("14 small inference", needs="600 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.allow_tf32 = False  # with it cuDNN copies tensors to another layout

# %% build-model
H, L = 1024, 4

def teacher():
    torch.manual_seed(0)
    blocks = [[nn.Linear(H, 4 * H), nn.ReLU(), nn.Linear(4 * H, H)] for _ in range(L)]
    return nn.Sequential(*sum(blocks, [])).to(device).eval()  # the lists joined to one

model = teacher()

# %% guess guesses=[40, "one layer in float32"]
x = torch.randn(16, H, device=device)
share = lesson.guess("Peak with int8 weights, in percent of that with float32?")
choices = ["nothing large", "one layer in float32", "all layers in float32"]
where = lesson.guess("What is there at the new peak, beside int8 weights?", choices=choices)

# %% float32
%%memtrack --name float32
with torch.no_grad():
    exact = model(x)

# %% int8-layer
class Int8(nn.Module):
    def __init__(self, linear):
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x):
        unfolded = self.weight.to(x.dtype).mul_(self.scale)
        return nn.functional.linear(x, unfolded, self.bias)

def quantized(model):
    for name, layer in model.named_children():
        if isinstance(layer, nn.Linear):
            setattr(model, name, Int8(layer))
    return model

# %% int8
model = None
model = quantized(teacher())
with memlab.track("int8") as int8, torch.no_grad():
    model(x)
full, held = memlab.runs["float32"], int8.breakdown()
print(share.compare(100 * int8.peak_allocated_bytes / full.peak_allocated_bytes, full, int8))
print(lesson.saves("int8 weights", full, int8))

# %% account
P, R = L * 8 * H * H, L * 5 * H
layer = 4 * 4 * H * H
unfolded = held["temporary"] / layer
there = [number for number in (0, 1, 2 * L) if number <= unfolded + 0.1]
print(where.compare(choices[len(there) - 1], int8))
print(lesson.holds("one layer is there in float32", 0.9 < unfolded < 1.2, int8))
expected = {
    "buffer": P + 4 * R,  # weights, and a scale for each row
    "temporary": layer,  # one layer unfolded
    "parameter": 4 * R,  # biases
}
lesson.account("The peak with int8 weights", int8, expected)

# %% formats
MiB = 2**20
formats = {"float32": nn.Module.float, "bfloat16": nn.Module.bfloat16, "int8": quantized}
model = None
for name, prepare in formats.items():
    ready = prepare(teacher())
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    with memlab.track(name, show=False) as run, torch.no_grad():
        off = (ready(x.to(dtype)) - exact).abs().max() / exact.abs().max()
    print(f"{name:9} peak {run.peak_allocated_bytes / MiB:6.1f} MiB, off by up to {off.item():.1%}")
    lesson.accuracy(name, off.item(), at_most=0.05)
    del ready
print(lesson.saves("bfloat16", full, memlab.runs["bfloat16"]))
lesson.sweep("format", {name: memlab.runs[name] for name in formats})

# %% guess-folding guesses=[30]
from torch.nn.utils.fusion import fuse_conv_bn_eval

W = 32
images = torch.randn(4, W, 128, 128, device=device)
folded = lesson.guess("What does folding save of the peak of an inference, in percent?")

# %% fold-norm
layers, fewer = [], []
for _ in range(4):
    conv = nn.Conv2d(W, W, 3, padding=1).to(device).eval()
    norm = nn.BatchNorm2d(W).to(device).eval()
    layers += [conv, norm, nn.ReLU()]
    fewer += [fuse_conv_bn_eval(conv, norm), nn.ReLU()]
plain, fused = nn.Sequential(*layers), nn.Sequential(*fewer)

def peak(model, grad=False):
    with memlab.track("peak", show=False) as run, torch.set_grad_enabled(grad):
        model(images)
    return run

before, after = peak(plain), peak(fused)
saved = 1 - after.peak_allocated_bytes / before.peak_allocated_bytes
print(folded.compare(max(0.0, 100 * saved), before, after))
print(lesson.saves_nothing("BatchNorm folded, under no_grad", before, after))
lesson.saves("BatchNorm folded, where the graph is kept", peak(plain, True), peak(fused, True))

# %% merge-branches
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.three, self.one = nn.Conv2d(W, W, 3, padding=1), nn.Conv2d(W, W, 1)

    def forward(self, x):
        return (self.three(x) + self.one(x) + x).relu_()

@torch.no_grad()
def merged(block):
    conv = nn.Conv2d(W, W, 3, padding=1)
    middle = block.one.weight + torch.eye(W)[:, :, None, None]
    conv.weight.copy_(block.three.weight + nn.functional.pad(middle, (1, 1, 1, 1)))
    conv.bias.copy_(block.three.bias + block.one.bias)
    return nn.Sequential(conv, nn.ReLU(inplace=True))

trained = nn.Sequential(*[Branches() for _ in range(4)])
deployed = nn.Sequential(*[merged(block) for block in trained])
lesson.saves("branches merged", peak(trained.to(device)), peak(deployed.to(device)))

# %% prune
import warnings
from torch.nn.utils import prune

warnings.simplefilter("ignore")  # sparse tensors in rows are "in beta"
layer = nn.Linear(2048, 2048, bias=False)
dense = layer.weight.nbytes
prune.l1_unstructured(layer, "weight", 0.9)
pruned = layer.weight_orig.nbytes + layer.weight_mask.nbytes + layer.weight.nbytes
rows = layer.weight.detach().to_sparse_csr()
sparse = rows.values().nbytes + rows.col_indices().nbytes + rows.crow_indices().nbytes
print(f"as it was                    {dense / MiB:5.1f} MiB")
print(f"prune: nine of ten are zero  {pruned / MiB:5.1f} MiB")
print(f"stored sparse (CSR)          {sparse / MiB:5.1f} MiB")
print(f"half of the outputs removed  {dense / 2 / MiB:5.1f} MiB")
print(f"a student of half the width  {dense / 4 / MiB:5.1f} MiB")
lesson.headline("a pruned layer, over what it was", pruned / dense)
lesson.holds("pruned and not yet stored otherwise is three times as large", pruned == 3 * dense)

# %% exercise tags=["exercise"]
square = nn.Conv2d(W, W, (3, 3), padding=(1, 1)).to(device).requires_grad_(False)
upright = nn.Conv2d(W, W, (3, 1), padding=(1, 0)).to(device).requires_grad_(False)
flat = nn.Conv2d(W, W, (1, 3), padding=(0, 1)).to(device).requires_grad_(False)

def yours():
    ...  # about 5 lines; nn.functional.pad(tensor, (left, right, top, bottom))

# %% check tags=["check"]
def whole():
    return square(images) + upright(images) + flat(images)

limit = peak(nn.Identity()).peak_allocated_bytes + int(1.5 * images.nbytes)
lesson.check(yours).same_as(whole, relative=1e-3).peak_below(limit)

# %% solution tags=["solution"]
def yours():
    wide = nn.functional.pad(upright.weight, (1, 1, 0, 0))
    high = nn.functional.pad(flat.weight, (0, 0, 1, 1))
    weight = square.weight + wide + high
    bias = square.bias + upright.bias + flat.bias
    return nn.functional.conv2d(images, weight, bias, padding=1)

# %% end
lesson.end()
