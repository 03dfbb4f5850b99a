# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("15 attention", needs="700 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% guess guesses=["2", 30, "backward"]
torch.set_num_threads(1)  # so that the seconds depend less on what else the machine does
A, D = 8, 32

def written_out(q, k, v):
    return (q @ k.transpose(-2, -1) / D**0.5).softmax(-1) @ v

def train(way, S=2048):
    torch.manual_seed(0)  # so that the losses can be compared
    q, k, v = (torch.randn(1, A, S, D, device=device, requires_grad=True) for _ in range(3))
    loss = way(q, k, v).square().mean()
    loss.backward()
    return loss.item()

question = "How many S x S matrices (of all heads together) are there at the peak?"
kept = lesson.guess(question, choices=["1", "2", "3", "4"])
left = lesson.guess("Peak without any matrix, in percent of the peak with them?")
where = lesson.guess("When is the peak with the matrices?", choices=["forward", "backward"])

# %% written
%%memtrack --name written
train(written_out)

# %% account
S = 2048
matrix = 4 * A * S * S
written = memlab.runs["written"]
gradients = 2 if device == "cpu" else 3
print(kept.compare(str(round(written.peak_allocated_bytes / matrix)), written))
print(where.compare(written.devices[0].at["phase"], written))
expected = {
    "activation": matrix,  # the weights of attention
    "temporary": gradients * matrix,  # of weights and of scores
    "other and parameter and gradient and input": 4 * 4 * A * S * D,  # q, k, v, a gradient
}
lesson.account("Attention written out, at the peak", written, expected)

# %% fused
from torch.nn.functional import scaled_dot_product_attention as attention

with memlab.track("fused", show=False) as fused:
    fused.result(train(attention))
print(left.compare(100 * fused.peak_bytes / written.peak_bytes, written, fused))
print(lesson.saves("scaled_dot_product_attention", written, fused))
memlab.compare(written, fused)

# %% ways
from torch.nn.attention import SDPBackend, sdpa_kernel

matrix = 4 * A * 1024 * 1024
mask = torch.ones(1024, 1024, dtype=torch.bool, device=device).tril()
layer = nn.MultiheadAttention(A * D, A, batch_first=True, device=device)

def module(q, k, v, need_weights=True):
    x = q.transpose(1, 2).flatten(2)
    return layer(x, x, x, need_weights=need_weights)[0]

ways = {
    "as it is": attention,
    "is_causal=True": lambda q, k, v: attention(q, k, v, is_causal=True),
    "a mask of booleans": lambda q, k, v: attention(q, k, v, mask),
    "dropout_p=0.1": lambda q, k, v: attention(q, k, v, dropout_p=0.1),
    "the math kernel": sdpa_kernel(SDPBackend.MATH)(attention),
    "MultiheadAttention": module,
    "the same, need_weights=False": lambda q, k, v: module(q, k, v, need_weights=False),
}

# %% measure-ways
matrices = {}
for name, way in ways.items():
    with memlab.track(name, show=False) as run:
        train(way, 1024)
    matrices[name] = run.peak_bytes / matrix
    print(f"{name:30} {matrices[name]:4.1f} matrices")
is_made = min(matrices["the math kernel"], matrices["MultiheadAttention"]) > 1.5
lesson.holds("the math kernel and need_weights=True make the matrix", is_made, run)

# %% length
runs = {}
for length in (512, 1024, 2048):
    for name, way in {"written": written_out, "fused": attention}.items():
        with memlab.track(f"{name} {length}", show=False) as runs[f"{length} {name}"]:
            train(way, length)
plainly = runs["2048 written"].peak_bytes / runs["1024 written"].peak_bytes
tiled = runs["2048 fused"].peak_bytes / runs["1024 fused"].peak_bytes
sentence = f"twice the text: {plainly:.1f} times the peak written out, {tiled:.1f} fused"
print(lesson.holds(sentence, plainly > 3 and tiled < 3, *runs.values()))
lesson.sweep("tokens", runs)

# %% predict-long
def vectors():
    return torch.randn(1, 16, 16384, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

def long(way):
    def step():
        q, k, v = vectors(), vectors(), vectors()
        way(q, k, v).sum().backward()
    return step

plainly, tiled = lesson.predict(long(written_out)), lesson.predict(long(attention))
for name, predicted in {"written out": plainly, "fused": tiled}.items():
    least = predicted.peak_device_bytes[0] / 2**30
    print(f"{name:12} needs {least:5.1f} GiB or more: fits: {predicted.fits}")
is_so = (plainly.fits, tiled.fits) == ("no", "yes")
lesson.holds(f"16,384 tokens fit on the {lesson.card} only when fused", is_so, plainly, tiled)

# %% guess-chunks guesses=["16 MiB"]
from torch.utils.checkpoint import checkpoint

T, H, V = 2048, 128, 16384
head = nn.Linear(H, V, bias=False, device=device)
question = "All logits are 128 MiB. The peak, with the loss in 16 chunks?"
chunked_guess = lesson.guess(question, between=("16 MiB", "1 GiB"))

# %% chunked-loss
hidden = torch.randn(T, H, device=device, requires_grad=True)
words = torch.randint(0, V, (T,), device=device)

def part(hidden, words, reduction="sum"):
    return nn.functional.cross_entropy(head(hidden), words, reduction=reduction)

def chunked(n):
    pairs = zip(hidden.chunk(n), words.chunk(n))
    return sum(checkpoint(part, h, w, use_reentrant=False) for h, w in pairs) / T

runs = {}
for n in (1, 2, 4, 8, 16):
    with memlab.track(f"{n} chunks", show=False) as runs[n]:
        loss = part(hidden, words, "mean") if n == 1 else chunked(n)
        loss.backward()
    head.weight.grad = hidden.grad = None

# %% price
print(chunked_guess.compare(runs[16].peak_allocated_bytes, runs[16]))
print(lesson.saves("16 chunks", runs[1], runs[16]))
whole, chunks = lambda: part(hidden, words, "mean").backward(), lambda: chunked(16).backward()
print(lesson.price("16 chunks", whole, chunks, at_most=1.34))
head.weight.grad = hidden.grad = None
lesson.sweep("chunks", runs)

# %% exercise tags=["exercise"]
def capped(q, k, v):
    return (30 * torch.tanh(q @ k.transpose(-2, -1) / D**0.5 / 30)).softmax(-1) @ v

query, key, value = (torch.randn(1, A, 1024, D, device=device) for _ in range(3))

def yours():
    ...  # about 5 lines; whole() is in the next cell

# %% check tags=["check"]
def whole():
    q = query.clone().requires_grad_()
    capped(q, key, value).square().mean().backward()
    return q.grad

lesson.check(yours).same_as(whole, relative=1e-3).peak_below("80 MiB")

# %% solution tags=["solution"]
def yours():
    q = query.clone().requires_grad_()
    pieces = [checkpoint(capped, part, key, value, use_reentrant=False) for part in q.split(128, 2)]
    torch.cat(pieces, 2).square().mean().backward()
    return q.grad

# %% end
lesson.end()
