# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("02 by hand", needs="750 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% tensors
MiB = 2**20
for shape in [(3, 500, 500), (30, 3, 512, 512), (120, 3, 512, 512), (256, 3, 100, 100)]:
    floats, small = (torch.empty(shape, device="meta", dtype=t).nbytes for t in (None, torch.int8))
    print(f"{shape}: {floats / 1e6:.2f} MB = {floats / MiB:.2f} MiB, as int8 {small / 1e6:.2f} MB")
lesson.headline("(256, 3, 100, 100) floats, in MB", floats / 1e6)
assert floats == 30_720_000

# %% layers
formulas = {
    nn.Conv2d(64, 128, 3): 4 * 64 * 128 * 3 * 3,  # 4 Cin Cout K K
    nn.Linear(512, 512): 4 * 512 * 512,  # 4 M N
    nn.BatchNorm2d(4096): 4 * 2 * 4096,  # 4 x 2 N
    nn.Embedding(1000, 64): 4 * 1000 * 64,  # 4 N W
}
for layer, formula in formulas.items():
    held = sum(tensor.nbytes for tensor in layer.state_dict().values())
    print(f"{layer}: {formula:,} bytes by the formula, {held - formula:,} more in fact")

# %% vgg16
with torch.device("meta"):
    vgg, picture = memlab.workloads.vgg16(), torch.empty(1, 3, 224, 224)
outputs = [picture.numel()]  # the notes begin with the picture

def note(layer, inputs, output):
    outputs.append(output.numel())
    shape, count = str(tuple(output.shape[1:])), sum(p.numel() for p in layer.parameters())
    print(f"{type(layer).__name__:9} {shape:15} {outputs[-1]:9,} outputs {count:11,} parameters")

for layer in vgg.modules():
    if type(layer) in (nn.Conv2d, nn.MaxPool2d, nn.Linear):
        layer.register_forward_hook(note)
vgg(picture)
outputs, P = sum(outputs), sum(p.numel() for p in vgg.parameters())
lesson.headline("VGG-16: outputs of its layers, in millions", round(outputs / 1e6, 1))
print(f"4 x {outputs:,} = {4 * outputs / 1e6:.1f} MB of outputs")
print(f"4 x {P:,} = {4 * P / 1e6:.1f} MB of parameters")
assert outputs < 16e6  # and not 24 million

# %% guess guesses=["610 MiB", "backward"]
net = nn.Sequential(
    nn.Conv2d(3, 64, 3, padding=1),
    nn.ReLU(inplace=True),
    nn.Conv2d(64, 64, 3, padding=1),
    nn.ReLU(inplace=True),
    nn.MaxPool2d(2),
    nn.Conv2d(64, 128, 3, padding=1),
).to(device)
x = torch.randn(1, 3, 682, 700, device=device)
output = 4 * 64 * 682 * 700  # bytes that the first layer gives
classic = memlab.size(net, x).classic
doubled = classic.with_backward_bytes
print(f"parameters {classic.parameter_bytes / 1e6} MB")
print(f"forward {classic.without_backward_bytes / 1e6} MB")
print(f"with backward {doubled / 1e6} MB = {doubled / MiB:.1f} MiB")
peak = lesson.guess("Peak of forward and backward?", between=("100 MiB", "2 GiB"))
where = lesson.guess("When is it?", choices=["forward", "backward"])

# %% step
%%memtrack --name step
net(x).sum().backward()

# %% account
run = memlab.runs["step"]
held = run.breakdown()
print(peak.compare(run.peak_allocated_bytes, run))
print(where.compare(run.devices[0].at["phase"], run))
times = held["activation"] / doubled
lesson.holds("activations are far from twice the count", times < 0.7, run)
lesson.headline("kept for backward, over what `modelsize` says", round(times, 2))

if held.get("temporary", 0) > 2.2 * output:  # on some GPUs: see below
    lesson.not_measurable("the account", "cuDNN takes a workspace, of a size that it chooses")
else:
    expected = {
        "activation": 2 * output,
        "temporary": 2 * output,  # in backward
        "input": 4 * 3 * 682 * 700,
        "parameter": classic.parameter_bytes,
        "gradient": sum(p.nbytes for p in net[5].parameters()),  # the last layer
    }
    display(lesson.account("At the peak", run, expected))

# %% guess-temporary guesses=[50]
share = lesson.guess("Share of temporary gradients in the peak of 32 layers, in percent?")

# %% depth
y = torch.randn(4096, 128, device=device)
temporary = {}
for L in (1, 2, 4, 8, 16, 32):
    layers = []
    for _ in range(L):
        layers += [nn.Linear(128, 128), nn.ReLU(inplace=True)]
    deep = nn.Sequential(*layers).to(device)
    with memlab.track(f"{L} layers", show=False) as run:
        deep(y).sum().backward()
    temporary[L] = run.breakdown().get("temporary", 0)
    percent = 100 * temporary[L] / run.peak_allocated_bytes
    print(f"L = {L:2}: {temporary[L] / y.nbytes:.1f} are temporary, {percent:2.0f} % of the peak")
lesson.headline("temporary gradients, in percent of the peak of 32 layers", round(percent))
print(share.compare(percent, run))  # of the last: 32 layers
is_flat = temporary[32] < temporary[2] + y.nbytes
lesson.holds("32 layers have no more temporary gradients than two", is_flat, run)

# %% kept-by-layers
for layer in (nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(), nn.BatchNorm2d(16), nn.ReLU(inplace=True)):
    seen = memlab.size(nn.Sequential(nn.Conv2d(3, 16, 1), layer), (8, 3, 64, 64))
    saved = [one for one in seen.kept if one.why == "saved" and one.nbytes > 9999]
    kept = [f"{one.nbytes / MiB:.1f} MiB of {one.dtype}" for one in saved]
    print(layer, "keeps", ", ".join(kept))
    lesson.headline(f"{type(layer).__name__} of 2 MiB keeps", sum(one.nbytes for one in saved))

# %% optimizers
big = nn.Linear(128, 32768, device=device)
big(y[:8]).sum().backward()
parameter_bytes = sum(p.nbytes for p in big.parameters())
cases = [
    (torch.optim.SGD, {}, 0),
    (torch.optim.SGD, {"momentum": 0.9}, 1),
    (torch.optim.Adam, {}, 2),
]
for kind, options, times in cases:
    name = f"{kind.__name__} {options}"
    optimizer = kind(big.parameters(), lr=1e-3, **options)
    with memlab.track(name, show=False) as run:
        optimizer.step()
    left = run.devices[0].levels[0].left_bytes / parameter_bytes
    print(f"{name} keeps {left:.2f} times the parameters")
    is_so = abs(left - times) < 0.02
    lesson.holds(f"{name} keeps {times} times the parameters", is_so, run)

# %% price
small = x[..., :128, :128]
forward, training = lambda: net(small), lambda: net(small).sum().backward()
lesson.price("forward and backward", forward, training, at_most=3)

# %% exercise tags=["exercise"]
big = optimizer = None  # free what is not needed any more
pictures = torch.randn(8, 3, 128, 128, device=device)
layers = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
).to(device)

def yours():
    ...  # about 3 lines: torch.tensor of six numbers, one for each layer

# %% check tags=["check"]
def counted():
    kept, h, seen = [], pictures, {p.data_ptr() for p in layers.parameters()}

    def pack(tensor):  # is called with each tensor that autograd saves
        is_new = tensor.numel() > 9999 and tensor.data_ptr() not in seen
        seen.add(tensor.data_ptr())
        kept[-1] += tensor.nbytes if is_new else 0
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in layers:
            kept.append(0)
            h = layer(h)
    return torch.tensor(kept)

lesson.check(yours).same_as(counted).peak_below("48 MiB")

# %% solution tags=["solution"]
def yours():
    full, half = 8 * 128 * 128, 8 * 64 * 64  # numbers in one channel, before and after pooling
    before = [4 * 3 * full, 4 * 32 * full, 4 * 32 * full]  # input, convolution's result, ReLU's
    return torch.tensor([*before, 8 * 32 * half, 4 * 32 * half, 4 * 64 * half])

# %% end
lesson.end()
