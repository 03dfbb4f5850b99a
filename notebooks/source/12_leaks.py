# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("12 leaks", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% build-model
K, B, H, L = 8, 2048, 512, 4

def block():
    return nn.Sequential(nn.Linear(H, H), nn.ReLU())

model = nn.Sequential(*[block() for _ in range(L)], nn.Linear(H, 10)).to(device)
x = torch.randn(K, B, H, device=device)
y = torch.randint(10, (K, B), device=device)

# %% guess guesses=["8 MiB", "both"]
question = "Validation: how much do eight losses in a list keep?"
more = lesson.guess(question, between=("1 KiB", "1 GiB"))
choices = ["validation", "training", "both", "none"]
which = lesson.guess("Which loop grows from batch to batch?", choices=choices)

# %% validation
%%memtrack --name validation
losses = []
for k in range(K):
    losses.append(nn.functional.cross_entropy(model(x[k]), y[k]))

# %% account
runs = memlab.runs
run = runs["validation"]
growth = run.leaks()[0]
print(more.compare(growth.bytes_per_iteration * K, run))
lesson.headline("each loss in the list keeps", growth.bytes_per_iteration)

P = sum(p.numel() for p in model.parameters())
expected = {
    "activation": K * L * 4 * B * H,  # outputs of ReLU in K graphs
    "other": (K - 1) * 4 * 10 * B + K * 8 * B,  # log-probabilities and classes
    "input": K * 4 * B * H,
    "parameter": 4 * P,
    "temporary": 4 * B * H,  # in forward
}
lesson.account("At the end of the validation", run, expected)

# %% detach
print(memlab.who(losses[0]))
MiB = 2**20
for way, keep in {"kept": lambda loss: loss, "detached": torch.Tensor.detach}.items():
    for batches in (2, 4, K):
        losses.clear()
        with memlab.track(way, show=False) as last:
            for k in range(batches):
                losses.append(keep(nn.functional.cross_entropy(model(x[k]), y[k])))
        peak = last.peak_allocated_bytes / MiB
        print(f"{batches} batches, {way:9} peak {peak:5.1f} MiB")

lesson.holds("detached, nothing grows", run.leaks() and not last.leaks(), run, last)
lesson.saves("detached losses", run, last)

# %% training
def train(how):
    losses = []
    for k in range(K):
        output = model(x[k])
        loss = nn.functional.cross_entropy(output, y[k])
        loss.backward()
        losses.append(loss if how == "loss" else loss.item())
        if how == "item and del":
            del loss, output
    model.zero_grad()

for how in ("loss", "item", "item and del"):
    with memlab.track(how, show=False) as last:
        train(how)
grows = bool(run.leaks()), bool(runs["loss"].leaks())  # validation, training
words = {(1, 0): "validation", (0, 1): "training", (1, 1): "both", (0, 0): "none"}
print(which.compare(words[grows], run, runs["loss"]))
print(lesson.saves_nothing("losses as numbers, in a training,", runs["loss"], runs["item"]))
lesson.saves_nothing("`del loss, output` at the end of each step", runs["item"], last)

# %% gan-step guesses=["backward", 10]
where = lesson.guess("When is the peak of steps that retain?", choices=["forward", "backward"])
question = "When a step that retained is over and its loss has a name: "
kept = lesson.guess(question + "how much of the peak is left, in percent?")

act = nn.GELU()
G = nn.Sequential(nn.Linear(64, H), act, nn.Linear(H, H), act, nn.Linear(H, H), act).to(x.device)
D = nn.Sequential(nn.Linear(H, H), act, nn.Linear(H, H), act, nn.Linear(H, 1), act).to(x.device)

def step(retain):
    fake = G(x[0, :, :64])  # made from noise
    d_loss = D(fake if retain else fake.detach()).mean() - D(x[1]).mean()
    d_loss.backward(retain_graph=retain)
    G.zero_grad()
    g_loss = -D(fake).mean()
    g_loss.backward()
    return d_loss

# %% retain
both = {}
for name, retain in {"retained": True, "released": False}.items():
    with memlab.track(name, show=False) as both[name]:
        for _ in range(2):
            d_loss = step(retain)
    d_loss = None
retained, released = both.values()

# %% compare-retained
for one in (retained, released):
    peak = one.peak_allocated_bytes
    end = one.devices[0].levels[0].end_bytes
    print(f"{one.name:8}: peak {peak / MiB:.0f} MiB, {end / MiB:.0f} MiB when it is over")
print(where.compare(retained.devices[0].at["phase"], retained))
left = retained.devices[0].levels[0].end_bytes
print(kept.compare(100 * left / retained.peak_allocated_bytes, retained))
print(lesson.price("a detached fake", lambda: step(True), lambda: step(False), at_most=1.0))
lesson.saves("a detached fake", retained, released)

# %% hidden-references
try:
    nn.functional.cross_entropy(model(x[0]), y)  # y[0] was meant
except ValueError as error:
    caught = error

torch.ones(B, H, device=device)[:1, :3]

# %% find-references
names = memlab.who().to_pandas()
held = names[names.path.str.contains("caught|Out")]
print(held[["storage_bytes", "path"]].to_string(index=False))
memlab.ledger()

# %% exercise tags=["exercise"]
one = nn.Linear(10, 5, device=device)
two = nn.Linear(10, 5, device=device)

def whole():
    history = []
    for k in range(K):
        shared = model(x[k])
        a = nn.functional.cross_entropy(one(shared), y[k] % 5)
        b = nn.functional.cross_entropy(two(shared), y[k] // 2)
        a.backward(retain_graph=True)
        b.backward(retain_graph=True)
        history.append(torch.stack([a, b]))
    model.zero_grad()
    return torch.stack(history)

def yours():
    ...  # two changes

# %% check tags=["check"]
losses, caught = [], None  # release what was held
lesson.check(yours).same_as(whole, relative=1e-5).peak_below(int(0.7 * run.peak_allocated_bytes))

# %% solution tags=["solution"]
def yours():
    history = []
    for k in range(K):
        shared = model(x[k])
        a = nn.functional.cross_entropy(one(shared), y[k] % 5)
        b = nn.functional.cross_entropy(two(shared), y[k] // 2)
        (a + b).backward()
        history.append(torch.stack([a, b]).detach())
    model.zero_grad()
    return torch.stack(history)

# %% end
lesson.end()
