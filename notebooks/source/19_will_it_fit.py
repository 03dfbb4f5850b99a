# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from memlab.lesson import Lesson

lesson = Lesson("19 will it fit", needs="500 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% training-step
V, H, L, S = 8192, 512, 4, 512

def block():
    return nn.Sequential(nn.LayerNorm(H), nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))

def model():
    return nn.Sequential(nn.Embedding(V, H), *[block() for _ in range(L)], nn.Linear(H, V))

def make_step(B, device="cuda", pieces=1):
    def step():
        net = model().to(device)
        tokens = torch.randint(0, V, (B, S), device=device)
        optimizer = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            for part in tokens.chunk(pieces):
                (cross_entropy(net(part).flatten(0, 1), part.flatten()) / pieces).backward()
            optimizer.step()
            optimizer.zero_grad()
    return step

# %% guess guesses=["yes", "6 GiB"]
MiB = 2**20
with torch.device("meta"):
    batch = torch.zeros(48, S, dtype=torch.long)
    parts = memlab.size(model(), batch, optimizer="adamw").parts
for name, count in parts.items():
    if count > MiB:
        print(f"{name:20} {count / MiB:5.0f} MiB")
choices = ["yes", "no", "close"]
answer = lesson.guess(f"Does a batch of 48 fit on the {lesson.card}?", choices=choices)
peak = lesson.guess("Peak of allocated with 48?", between=("512 MiB", "64 GiB"))

# %% predict
predicted = lesson.predict(make_step(48), name="batch 48")
predicted

# %% account
B = 48
P = sum(p.numel() for p in model().parameters())
print(answer.compare(predicted.fits, predicted))
print(peak.compare(predicted.peak_allocated_bytes, predicted))
expected = {
    "activation": 4 * B * S * (10 * L * H + H + V),
    "temporary": 2 * 4 * B * S * V,  # gradients of the loss
    "parameter": 4 * P,
    "optimizer": 2 * 4 * P,  # AdamW's moments
}
lesson.account(f"Batch 48, predicted for the {lesson.card}", predicted, expected)

# %% cards
%memfit batch 48 RTX 3050 Laptop, GTX 1660, RTX 4060, T4, RTX 3090, A100 80GB

# %% here
%%memtrack --name here
make_step(2, device)()

# %% compare-measured
here = memlab.runs["here"]
two = lesson.predict(make_step(2), name="batch 2")
measured = here.breakdown()
for name, count in two.breakdown().items():
    if count > MiB:
        there = measured.get(name, 0)
        print(f"{name:10} predicted {count / MiB:6.1f} MiB, measured {there / MiB:6.1f} MiB")
before = here.devices[0].levels[0].start_bytes  # what earlier cells have left
off = two.peak_allocated_bytes / (here.peak_allocated_bytes - before) - 1
print(f"predicted over measured: {off:+.1%}")
lesson.holds("the prediction is within a tenth of the measurement", abs(off) < 0.1, here, two)

# %% guess-batch guesses=["64"]
options = ["32", "48", "64", "80", "96"]
largest = lesson.guess(f"Largest batch on the {lesson.card}, in steps of 16?", choices=options)

# %% max-batch
found = memlab.max_batch(lambda n: make_step(16 * n), lesson.card, at_most=9)
print("Of sixteens:", found)
nearest = min(options, key=lambda said: abs(int(said) - 16 * found.batch))
print(largest.compare(nearest, found))
tried = found.to_pandas()
sequences = 16 * tried.batch
slope = tried.device_low_bytes.diff() / sequences.diff() / MiB
lesson.headline("largest batch in sixteens", found.batch)
print("MiB for each more sequence:", slope.dropna().round(1).tolist())

# %% in-pieces
GiB = 2**30
pieces = lesson.predict(make_step(48, pieces=4), name="in pieces")
low, high = pieces.peak_device_bytes
print(f"in pieces: needs {low / GiB:.2f} to {high / GiB:.2f} GiB")
print(lesson.saves("four pieces of 12", predicted, pieces))
whole_step, in_pieces = make_step(48, "meta"), make_step(48, "meta", pieces=4)
lesson.price("four pieces of 12", whole_step, in_pieces, at_most=1)

# %% exercise tags=["exercise"]
budgets = torch.tensor([6, 8, 12, 24]) * 1024  # MiB of four GPUs
high_2, high_48 = (run.peak_device_bytes[1] / MiB for run in (two, predicted))
print(f"A batch of 2 needs at most {high_2:.0f} MiB, one of 48 at most {high_48:.0f} MiB")

def yours():
    ...  # about 3 lines: from these two figures, the largest batch in each budget

# %% check tags=["check"]
def from_the_search():  # the same line through two other batches
    high = tried.device_high_bytes.to_numpy() / MiB
    first, last = sequences.iloc[0].item(), sequences.iloc[-1].item()
    slope = (high[-1] - high[0]) / (last - first)
    return ((budgets - high[0]) / slope + first).floor()

lesson.check(yours).same_as(from_the_search, relative=0.03).peak_below("32 MiB")

# %% solution tags=["solution"]
def yours():
    slope = (high_48 - high_2) / (48 - 2)
    floor = high_2 - 2 * slope
    return ((budgets - floor) / slope).floor()

# %% end
lesson.end()
