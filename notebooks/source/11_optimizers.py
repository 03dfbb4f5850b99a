# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("11 optimizers", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% build-model
from torch.optim import SGD, Adafactor, Adam

H, L, B = 768, 12, 64
P = L * (H * H + H)
x, y = torch.randn(2, 1024, H, device=device)

def network():
    layers = [nn.Sequential(nn.Linear(H, H), nn.Tanh()) for _ in range(L)]
    return nn.Sequential(*layers).to(device)

def train(model, optimizer, rows=B):
    for _ in range(2):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[:rows]), y[:rows])
        loss.backward()
        optimizer.step()
    return loss.item()

def training(make, **settings):
    model = network()
    optimizer = make(model.parameters(), **settings)
    return lambda: train(model, optimizer)

# %% guess guesses=["4 times", "backward"]
choices = ["2 times", "3 times", "4 times", "5 times"]
times = lesson.guess("Peak with Adam, in bytes of the parameters?", choices=choices)
where = lesson.guess("When is the peak?", choices=["forward", "backward", "optimizer"])

# %% adam
%%memtrack --name adam
model = optimizer = None  # free what an earlier run of this cell has left
model = network()
optimizer = Adam(model.parameters(), foreach=True)
train(model, optimizer)

# %% account
run = memlab.runs["adam"]
held = run.breakdown()
data = held.get("input", 0) + held.get("other", 0)  # on a GPU also the matrix library's workspace

def peak_of(run):
    return (run.peak_allocated_bytes - data) / (4 * P)

def left_by(run):
    return run.devices[0].levels[0].left_bytes / (4 * P)

print(times.compare(f"{peak_of(run):.0f} times", run))
print(where.compare(run.devices[0].at["phase"], run))
expected = {
    "parameter": 4 * P,
    "gradient": 4 * P,
    "optimizer": 2 * 4 * P,  # Adam's two moments
    "temporary": 4 * P,  # in the step
    "input and other": 2 * 4 * 1024 * H,  # all rows of x and y
}
lesson.account("At the peak of training with Adam", run, expected)

# %% measured
def measured(name, make, rows=B, **settings):
    with memlab.track(name, show=False) as run:
        torch.manual_seed(0)  # so that the losses can be compared
        model = network()
        optimizer = make(model.parameters(), **settings)
        run.result(train(model, optimizer, rows))
    print(f"{name:>22}: peak {peak_of(run):.2f}, left {left_by(run):.3f}")
    return run

# %% compare-optimizers
model, optimizer = None, None  # release the first run's
each = {
    "SGD": measured("SGD", SGD),
    "momentum": measured("momentum", SGD, momentum=0.9),
    "Adafactor": measured("Adafactor", Adafactor),
    "Adam": measured("Adam", Adam, foreach=False),
}
state = {name: lesson.headline(name, round(left_by(one) - 2, 3)) for name, one in each.items()}
numbers = [round(state[name]) for name in ("SGD", "momentum", "Adam")]
print(lesson.holds("SGD keeps nothing, momentum P, Adam 2 P", numbers == [0, 1, 2], run))
lesson.saves("plain SGD in the place of Adam", run, each["SGD"])

# %% contiguous guesses=["foreach"]
choices = ["foreach", "loop", "fused", "contiguous"]
largest = lesson.guess("Which needs the most?", choices=choices)

def contiguous(params):
    params = list(params)
    sizes = [p.numel() for p in params]
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in params]))
    flat.grad = torch.zeros_like(flat)
    for p, data, grad in zip(params, flat.data.split(sizes), flat.grad.split(sizes)):
        p.data = data.view_as(p)
        p.grad = grad.view_as(p)
    optimizer = Adam([flat], foreach=False)
    optimizer.zero_grad = flat.grad.zero_  # None would free the buffer
    return optimizer

# %% compare-steps
measured("loop", Adam, foreach=False)
measured("foreach", Adam, foreach=True)
fused = measured("fused", Adam, fused=True)
one_buffer = measured("contiguous", contiguous)
peaks = {name: memlab.runs[name].peak_allocated_bytes for name in choices}
print(largest.compare(max(peaks, key=peaks.get), one_buffer, fused))
lesson.saves("fused in the place of a contiguous buffer", one_buffer, fused)

# %% in-backward guesses=["3 to 4 times", "half of them"]
choices = ["2 to 3 times", "3 to 4 times", "4 to 5 times"]
below = lesson.guess("Now the peak is how many times the parameters?", choices=choices)
choices = ["one layer's", "half of them", "all"]
floor = lesson.guess("How many of the gradients are there at the new peak?", choices=choices)

class InBackward:
    def __init__(self, params):
        self.optimizers = {p: Adam([p], foreach=False) for p in params}

    def zero_grad(self):  # before backward
        self.hooks = [p.register_post_accumulate_grad_hook(self.take) for p in self.optimizers]

    def take(self, p):  # in backward, as soon as p.grad is there
        self.optimizers[p].step()
        p.grad = None

    def step(self):  # after backward: nothing is left to do
        for hook in self.hooks:
            hook.remove()

# %% compare-in-backward
eager = measured("in backward", InBackward)
whole = int(peak_of(eager))
print(below.compare(f"{whole} to {whole + 1} times", eager))
share = eager.breakdown().get("gradient", 0) / (4 * P)
few, many = 1.5 / L, 1 - 1.5 / L
print(floor.compare(choices[0 if share < few else 1 if share < many else 2], eager))
lesson.holds("three times the parameters, and a part of one", 3 < peak_of(eager) < 4, eager)
lesson.saves("the step in backward", run, eager)
lesson.price("in backward", training(Adam, foreach=False), training(InBackward), 2, "seconds")

# %% rows
for rows in (64, 256, 1024):
    was = measured(f"{rows} rows", Adam, rows, foreach=True)
    now = measured(f"{rows} rows, in backward", InBackward, rows)
    saved = 1 - now.peak_allocated_bytes / was.peak_allocated_bytes
    print(f"{saved:.0%} saved, the peak is then in phase {now.devices[0].at['phase']}")
memlab.compare("64 rows", "64 rows, in backward")

# %% exercise tags=["exercise"]
def whole():
    model = network().append(nn.Linear(H, 10, device=device))
    optimizer = Adam(model[-1].parameters(), foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model[-1].weight

def yours():
    ...  # the same, and one line more

# %% check tags=["check"]
lesson.check(yours).same_as(whole, relative=1e-6).peak_below(int(2 * 4 * P) + data)

# %% solution tags=["solution"]
def yours():
    model = network().requires_grad_(False).append(nn.Linear(H, 10, device=device))
    optimizer = Adam(model[-1].parameters(), foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model[-1].weight

# %% end
lesson.end()
