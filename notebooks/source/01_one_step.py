# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("01 one step", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% build-model
H, L, B = 256, 6, 4096

def block():
    return nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))

model = nn.Sequential(*[block() for _ in range(L)]).to(device)
optimizer = torch.optim.Adam(model.parameters())
x, y = torch.randn(2, B, H, device=device)
P = sum(p.numel() for p in model.parameters())
print(f"P = {P:,} parameters: {4 * P / 2**20:.1f} MiB")

# %% guess guesses=[25, "forward"]
share = lesson.guess("Share of the parameters in the peak of one training step, in percent?")
where = lesson.guess("When is the peak?", choices=["forward", "backward", "optimizer step"])

# %% step
%%memtrack --name step
for _ in range(2):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()

# %% compare-guesses
run = memlab.runs["step"]
phases = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}
print(share.compare(100 * 4 * P / run.peak_allocated_bytes, run))
print(where.compare(phases[run.devices[0].at["phase"]], run))

# %% cuda-counter
if device == "cuda":
    torch.cuda.reset_peak_memory_stats()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    counted = torch.cuda.max_memory_allocated()
    print(f"{counted / 2**20:.1f} MiB, by PyTorch's own counter")
    assert abs(counted - run.peak_allocated_bytes) < 0.05 * counted

# %% account
expected = {
    "activation": 4 * L * 9 * B * H,
    "parameter": 4 * P,
    "optimizer": 2 * 4 * P,  # Adam's two moments
    "input": 2 * 4 * B * H,  # x and y
    "temporary": 4 * 5 * B * H,  # in backward: a gradient of width 4 H and one of width H
}
lesson.account("At the peak of the second step", run, expected)

# %% not-freed
end_bytes = run.devices[0].levels[0].end_bytes - run.breakdown().get("other", 0)
left = end_bytes - 4 * P - x.nbytes - y.nbytes  # those were there before
times = left / (4 * P)
lesson.holds(f"{times:.1f} times the parameters were not freed", 2.9 < times < 3.6, run)

# %% guess-half guesses=["160 MiB"]
half = lesson.guess("Peak with half of the rows?", between=("32 MiB", "2 GiB"))

# %% half-rows
with memlab.track("half", show=False) as halved:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x[: B // 2]), y[: B // 2]).backward()
    optimizer.step()
print(half.compare(halved.peak_allocated_bytes, halved))
lesson.saves("half of the rows", run, halved)

# %% price
def gradient(rows):
    model.zero_grad()
    nn.functional.mse_loss(model(x[:rows]), y[:rows]).backward()
    return model[0][0].weight.grad

whole, part = gradient(B).clone(), gradient(B // 2)
off = ((part - whole).norm() / whole.norm()).item()
lesson.accuracy("the gradient of half of the rows", off, at_least=0.05)
lesson.price("half of the rows", lambda: gradient(B), lambda: gradient(B // 2), at_most=0.51)

# %% whole
def whole():
    model.zero_grad()
    report = nn.functional.mse_loss(model(-x), y)  # is only printed
    nn.functional.mse_loss(model(x), y).backward()
    return model[0][0].weight.grad, report.detach()

# %% exercise tags=["exercise"]
def yours():
    ...  # whole(), repaired: one line more, or two changed

# %% check tags=["check"]
lesson.check(yours).same_as(whole, relative=1e-4).peak_below(int(1.25 * run.peak_allocated_bytes))

# %% solution tags=["solution"]
def yours():
    model.zero_grad()
    with torch.no_grad():
        report = nn.functional.mse_loss(model(-x), y)
    nn.functional.mse_loss(model(x), y).backward()
    return model[0][0].weight.grad, report

# %% end
lesson.end()
