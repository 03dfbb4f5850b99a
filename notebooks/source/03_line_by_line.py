# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("03 line by line", needs="1 GiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% vgg19 guesses=["550 MiB", "60 images"]
def vgg19():
    layers, before = [], 3
    for channels, convolutions in ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4)):
        for _ in range(convolutions):
            layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()]
    layers += [nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers)

weights = lesson.guess("All weights of VGG-19?", between=("32 MiB", "8 GiB"))
choices = ["the model", "30 images", "40 images", "60 images"]
most = lesson.guess("Which line adds the most?", choices=choices)

# %% arrivals
%%memtrack --name arrivals --lines --shapes
net = dummy_1 = dummy_2 = dummy_3 = None  # free what an earlier run of this cell has left
with torch.device("meta"):
    net = vgg19()
net = net.to_empty(device=device)
dummy_1 = torch.zeros(30, 3, 512, 512, device=device)
dummy_2 = torch.zeros(40, 3, 512, 512, device=device)
dummy_3 = torch.zeros(60, 3, 512, 512, device=device)

# %% account
run = memlab.runs["arrivals"]
rows = [row for row in run.lines().table if row.held_bytes > 0]
for row in rows:
    for new in row.came[:3]:  # the largest
        print(f"line {row.line}: + | {new.count} * Size:{new.shape} | {new.bytes / 1e6:.3f} M")
held = [row.held_bytes for row in rows]
print(weights.compare(held[0], run))
print(most.compare(choices[held.index(max(held))], run))

P = sum(p.numel() for p in net.parameters())
counted = [4 * P] + [4 * N * 3 * 512 * 512 for N in (30, 40, 60)]
assert [round(a / b, 2) for a, b in zip(held, counted)] == [1, 1, 1, 1]  # CUDA rounds up
expected = {"parameter": 4 * P, "input and other": 4 * (30 + 40 + 60) * 3 * 512 * 512}
lesson.account("After the last line", run, expected)

# %% what-holds-it
also = {"old": [dummy_2]}
%memwho dummy_2

# %% predict-gpu
def script():
    net = vgg19().cuda()
    dummies = [torch.zeros(N, 3, 512, 512, device="cuda") for N in (30, 40, 60)]

card = lesson.predict(script)
display(card)
holds_more = card.peak_device_bytes[0] > card.allocated_bytes[1]
lesson.holds("a GPU holds more than tensors", holds_more, card)

# %% collector
import gc

net = dummy_1 = dummy_2 = dummy_3 = also = None
small = nn.Sequential(nn.Conv2d(16, 64, 1), nn.MaxPool2d(2), nn.Dropout()).to(device)
loss = small(torch.ones(4, 16, 256, 256, device=device)).sum()
kinds = (torch.Tensor, nn.Parameter)
seen = sum(t.nbytes for t in gc.get_objects() if type(t) in kinds and t.device == loss.device)
alive = memlab.who(device=loss.device)
places = sum(one.nbytes for one in alive.storages if one.dtype == "int64")
N = 4 * 64 * 128 * 128  # elements after pooling
mask = 4 if device == "cpu" else 1
masks = sum(s.nbytes for s in alive.storages if "Mul" in s.path or "Dropout" in s.path)
lesson.holds("gc finds less than three quarters", seen < 0.75 * alive.total_bytes, alive)
lesson.account("Alive between forward and backward", alive.total_bytes, [
    ("found by gc", "input and convolution's output", 4 * (N + 4 * N), seen),
    ("places of the maxima", "8 for each output", 8 * N, places),
    ("dropout's mask", f"{mask} for each element", mask * N, masks),
], alive)

# %% guess-rebound guesses=["360 MiB", "the first"]
loss = small = None
again = lesson.guess("Peak of the two lines?", between=("100 MiB", "2 GiB"))
where = lesson.guess("On which line?", choices=["the first", "the second"])

# %% rebound
%%memtrack --name rebound --lines
big = torch.zeros(120, 3, 512, 512, device=device)
big = torch.zeros(80, 3, 512, 512, device=device)
del big

# %% compare-rebound
rebound = memlab.runs["rebound"]
print(again.compare(rebound.peak_allocated_bytes, rebound))
first, second = (rebound.lines().table[f"cell:{line}"] for line in (2, 3))
levels = [first.peak_bytes, first.level_bytes + second.peak_bytes]
print(where.compare(where.answer.options[levels.index(max(levels))], rebound))
with memlab.track("deleted first", show=False) as deleted:
    big = torch.zeros(120, 3, 512, 512, device=device)
    del big
    big = torch.zeros(80, 3, 512, 512, device=device)
del big
lesson.saves("del before the name is used again", rebound, deleted)

# %% growth
kept = []
for rounds in (1, 2, 4, 8):
    with memlab.track(f"{rounds} rounds", show=False) as run:
        for _ in range(rounds):
            kept.append(torch.zeros(2, 3, 512, 512, device=device))
    left = run.devices[0].levels[0].left_bytes / 2**20
    print(f"{rounds} rounds: {left:5.1f} MiB not freed, {left / rounds:.1f} MiB each")
lesson.holds("each round leaves 6 MiB", left == rounds * 6, run)

# %% price
def many_lines():
    x = torch.ones(512, 512, device=device)
    for _ in range(10):
        x = x @ x / 512
        x = x - x.mean() + 1
    return x

def track_it(*watched):
    with memlab.track("price", show=False, functions=watched):
        many_lines()

every_line = lambda: track_it(many_lines)
lesson.price("-f of this function", track_it, every_line, at_most=5, of="seconds")

# %% exercise tags=["exercise"]
kept = None
images = torch.rand(64, 3, 256, 256, device=device)

def whole():
    scaled = images * 2
    centered = scaled - 1
    curved = centered.tanh()
    squared = curved * curved
    return squared.mean((0, 2, 3))

def yours():
    ...  # about 5 lines

# %% check tags=["check"]
lesson.check(yours).same_as(whole).peak_below(int(3.5 * images.nbytes))

# %% solution tags=["solution"]
def yours():
    x = images * 2
    x.sub_(1).tanh_()
    x.mul_(x)
    return x.mean((0, 2, 3))

# %% end
lesson.end()
