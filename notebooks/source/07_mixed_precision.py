# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("07 mixed precision", needs="500 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% build-model
H, L, B = 64, 8, 4096

def block():
    return nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))

def make():
    torch.manual_seed(0)
    return nn.Sequential(*[block() for _ in range(L)])

def step(net, adam, x, y, dtype=None):
    adam.zero_grad()
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        loss = nn.functional.mse_loss(net(x), y)
    loss.backward()  # outside: backward takes its types from forward
    adam.step()

net = make().to(device)
adam = torch.optim.Adam(net.parameters())
x, y = torch.randn(2, B, H, device=device)

# %% guess guesses=["everything", 50, "backward"]
parts = ["everything", "weights", "gradients", "activations"]
phases = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
halved = lesson.guess("What is halved?", choices=parts)
share = lesson.guess("What goes away of the peak of a step, in percent?")
where = lesson.guess("When will the new peak be?", choices=list(phases.values()))

# %% full
%%memtrack --name full
for _ in range(2):
    step(net, adam, x, y)

# %% mixed
with memlab.track("mixed") as mixed:
    step(net, adam, x, y, torch.bfloat16)

# %% compare-guesses
full = memlab.runs["full"]
was, held = full.breakdown(), mixed.breakdown()
P = sum(p.numel() for p in net.parameters())
grads = sum(p.grad.nbytes for p in net.parameters())
weights = sum(p.nbytes for p in net.parameters())
now = {"weights": weights / (4 * P), "gradients": grads / (4 * P)}
now["activations"] = held["activation"] / was["activation"]
print(halved.compare(min(now, key=now.get), mixed))
print(share.compare(100 - 100 * mixed.peak_bytes / full.peak_bytes, full, mixed))
print(where.compare(phases[mixed.devices[0].at["phase"]], mixed))
print(lesson.saves("autocast", full, mixed))

# %% account
scratch = 0
if device == "cuda":  # a sum over all rows, for the gradient of a bias
    rows = torch.ones(B, 4 * H, dtype=torch.bfloat16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rows.sum(0)
    scratch = torch.cuda.max_memory_allocated() - before
    del rows

expected = {
    "activation": 2 * 9 * L * B * H + 4 * B * H + 2 * P,  # the loss, and the weights once more
    "parameter": 4 * P,
    "optimizer": 2 * 4 * P,  # Adam's moments
    "input": 2 * 4 * B * H,  # x and y
    "temporary": 2 * B * H + 2 * 4 * B * H + scratch,  # gradients of two activations
}
lesson.account("The peak under autocast", mixed, expected)

# %% rows
def saved(rows):
    peaks = []
    for dtype in (None, torch.bfloat16):
        with memlab.track("rows", show=False) as run:
            step(net, adam, x[:rows], y[:rows], dtype)
        peaks.append(run.peak_bytes)
    percent = round(100 * (1 - peaks[1] / peaks[0]), 1)
    return lesson.headline(f"saved with {rows} rows, in percent", percent), run

shares = {}
for rows in (16, 64, 256, 2048):
    shares[rows], run = saved(rows)
    print(f"{rows:5} rows: {shares[rows]:5.1f} % saved  {'#' * round(shares[rows])}")
lesson.holds("little with few rows, much with many", shares[16] < 5 < 25 < shares[2048], run)

# %% formats
ones = torch.ones(100_000)
gradient = torch.tensor(1e-8)
for dtype in (torch.float16, torch.bfloat16):
    total = torch.zeros((), dtype=dtype)
    for _ in range(4000):
        total += 1
    small = gradient.to(dtype).item()
    scaled = (gradient * 2**16).to(dtype).item() / 2**16
    print(f"{dtype}: sum {ones.to(dtype).sum():.0f} of 100000, one by one {total:.0f} of 4000")
    print(f"  a gradient of 1e-08: {small:.0e}, scaled {scaled:.0e}")
in_half = ones.half().sum().item()
in_float = ones.half().sum(dtype=torch.float32).item()
is_so = in_half == float("inf") and in_float == 100_000
lesson.holds("a sum in float16 overflows, in float32 it does not", is_so)
lesson.holds("counting in bfloat16 ends at 256", total == 256)

# %% scaler
def two_steps(half):
    model = make().cuda()
    adam = torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=half)
    x, y = torch.randn(2, B, H, device="cuda")
    for _ in range(2):
        adam.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=half):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(adam)  # not where a gradient is infinite
        scaler.update()

float32 = lesson.predict(lambda: two_steps(half=False), "float32")
float16 = lesson.predict(lambda: two_steps(half=True), "float16")
lesson.saves("float16 and a scaler", float32, float16)

# %% pure-bfloat16
pure = make().to(device, torch.bfloat16)
tiny = torch.optim.Adam(pure.parameters())
with memlab.track("pure", show=False) as everything:
    for _ in range(2):  # the moments come with the first step
        step(pure, tiny, x.bfloat16(), y.bfloat16())
others = 4 * P + 8 * P + 4 * P  # of the float32 model, which is still there
own = 1 - (everything.peak_bytes - others) / full.peak_bytes
lesson.headline("everything in bfloat16: share of the peak saved", round(own, 4))
print(lesson.holds(f"everything in bfloat16 saves {own:.0%}", own > 0.33, full, everything))
weight = torch.ones((), dtype=torch.bfloat16)
lesson.holds("a weight of 1 does not notice an update of 0.001", (weight - 0.001).item() == 1)

# %% price
def gradient(dtype=None):
    model = make().to(device)  # the same weights each time
    with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
        loss = nn.functional.mse_loss(model(x[:64]), y[:64])
    return torch.autograd.grad(loss, model[0][0].weight)[0]

off = ((gradient(torch.bfloat16) - gradient()).norm() / gradient().norm()).item()
lesson.accuracy("the gradient under autocast", off, at_most=0.1)
lesson.price("autocast", gradient, lambda: gradient(torch.bfloat16), at_most=20, of="seconds")

# %% exercise tags=["exercise"]
def careful(h):  # GELU, by somebody who did not trust 16 bits
    h = h.float()
    return 0.5 * h * (1 + torch.erf(h / 2**0.5))

def yours():
    ...  # 1 line: whole() of the next cell, with another function

# %% check tags=["check"]
def whole(act=careful, h=x[: B // 2]):
    with torch.autocast(x.device.type, torch.bfloat16):
        for first, _, second in net:
            h = second(act(first(h)))
        loss = nn.functional.mse_loss(h, y[: B // 2])
    return torch.autograd.grad(loss, net[0][0].weight)[0]

lesson.check(yours).same_as(whole, relative=0.05).peak_below(full.peak_bytes // 2)

# %% solution tags=["solution"]
def yours():
    return whole(nn.functional.gelu)

# %% end
lesson.end()
