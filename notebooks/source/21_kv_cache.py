# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention
from memlab.lesson import Lesson
lesson = Lesson("21 KV cache", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% attention
L, A, D, B, S = 4, 8, 64, 4, 1024
H = A * D

class Attention(nn.Module):
    def __init__(self, K):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(H, H), nn.Linear(H, 2 * K * D), nn.Linear(H, H)

    def forward(self, x, cache, start):
        end = start + x.shape[1]
        q = self.q(x).unflatten(2, (A, D)).transpose(1, 2)
        kv = self.kv(x).unflatten(2, (2, -1, D)).permute(2, 0, 3, 1, 4)
        cache[..., start:end, :] = kv  # store the new ones, then attend to all
        y = attention(q, *cache[..., :end, :], is_causal=start == 0, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).flatten(2))

# %% generate
@torch.no_grad()
def generate(K=A, tokens=S, prompt=16):
    torch.manual_seed(0)
    model = nn.ModuleList(Attention(K) for _ in range(L)).to(device)
    cache = torch.zeros(L, 2, B, K, tokens, D, device=device)
    x = torch.randn(B, prompt, H, device=device)  # prefill, then four new tokens
    for start in (0, *range(prompt, prompt + 4)):
        for layer, kept in zip(model, cache):
            x = layer(x, kept, start)
        x = x[:, -1:]
    return x

# %% guess guesses=[30, 75]
share = lesson.guess("Four sequences of 1,024 tokens: the cache's share of the peak, in percent?")
grouped = lesson.guess("2 instead of 8 key and value heads: what is left of the peak, in percent?")

# %% decode
with memlab.track("8 heads") as full:
    generate()
with memlab.track("2 heads", show=False) as gqa:
    generate(K=2)
if device == "cuda":  # PyTorch's own counter of the same figure
    print(torch.cuda.max_memory_allocated())

def last(T):  # the last T of 256 tokens go through one layer
    room = torch.zeros(2, B, A, 256, D, device=device)
    x = torch.randn(B, T, H, device=device)
    return Attention(A).to(device)(x, room, 256 - T)

lesson.price("one more token from the cache", lambda: last(256), lambda: last(1), at_most=0.01)

# %% account
per_token = 2 * L * A * D * 4
print(share.compare(100 * B * S * per_token / full.peak_allocated_bytes, full))
print(grouped.compare(100 * gqa.peak_allocated_bytes / full.peak_allocated_bytes, full, gqa))
print(lesson.saves("grouped-query attention", full, gqa))
expected = {
    "parameter": 4 * L * 4 * (H * H + H),
    "input": B * S * per_token,  # the KV cache
}
lesson.account("Decoding, 8 heads", full, expected)

# %% serving
def serving(batch, context):
    def step():
        weights = torch.empty(1_235_814_400, dtype=torch.bfloat16, device="cuda")
        cache = torch.empty(16, 2, batch, 8, context, 64, dtype=torch.bfloat16, device="cuda")
        return weights, cache
    return step

runs = {(b, s): lesson.predict(serving(b, s)) for b, s in ((8, 16384), (64, 2048), (64, 8192))}
for (batch, context), run in runs.items():
    print(f"batch {batch:2}, context {context:6,}: fits on the {lesson.card}: {run.fits}")
short, long, both = runs.values()
same = short.peak_allocated_bytes == long.peak_allocated_bytes
print(lesson.holds("equal batch x context takes equal memory", same, short, long))
no_longer = (long.fits, both.fits) == ("yes", "no")
lesson.holds("four times the context no longer fits", no_longer, long, both)

# %% exercise-1 tags=["exercise"]
def new(t):  # keys and values of 16 more tokens, always the same for the same t
    made = torch.randn(2, B, A, 16, D, generator=torch.Generator().manual_seed(t))
    return made.to(device)

def yours():
    ...  # about 4 lines; grown() is in the next cell

# %% check-1 tags=["check"]
def grown():
    cache = new(0)
    for t in range(1, 128):
        cache = torch.cat([cache, new(t)], dim=3)
    return cache

lesson.check(yours).same_as(grown).peak_below("48 MiB")

# %% solution-1 tags=["solution"]
def yours():
    cache = torch.empty(2, B, A, 2048, D, device=device)
    for t in range(128):
        cache[..., 16 * t : 16 * t + 16, :] = new(t)
    return cache

# %% exercise-2 tags=["exercise"]
query = torch.randn(B, A, 1, D, device=device)
limit = "30 MiB" if device == "cpu" else "38 MiB"  # on a GPU cuBLAS has a workspace

def yours():
    ...  # about 9 lines; exact() is in the next cell

# %% check-2 tags=["check"]
def exact():
    return attention(query, *torch.cat([new(t) for t in range(128)], dim=3))

lesson.check(yours).same_as(exact, relative=0.02).peak_below(limit)

# %% solution-2 tags=["solution"]
def yours():
    codes = torch.empty(2, B, A, 2048, D, dtype=torch.int8, device=device)
    scales = torch.empty(2, B, A, 2048, 1, device=device)
    for t in range(128):
        place, kv = slice(16 * t, 16 * t + 16), new(t)
        scales[..., place, :] = scale = kv.abs().amax(-1, keepdim=True) / 127
        codes[..., place, :] = (kv / scale).round()
    key_scale, value_scale = scales.transpose(-2, -1)  # a row each, as the scores
    scores = query @ codes[0].float().transpose(-2, -1) * key_scale / D**0.5
    return (scores.softmax(-1) * value_scale) @ codes[1].float()

# %% exercise-3 tags=["exercise"]
budget, context = 5 * 2**30, 32768
variants = {  # key and value heads, type, window
    "32 heads": (32, torch.bfloat16, context), "8 heads": (8, torch.bfloat16, context),
    "8 heads, int8": (8, torch.int8, context), "8 heads, window": (8, torch.bfloat16, 4096),
}

def yours():
    ...  # about 2 lines

# %% check-3 tags=["check"]
def counted():
    caches = [torch.empty(16, 2, K, n, 64, dtype=d, device="meta") for K, d, n in variants.values()]
    return torch.tensor([budget // cache.nbytes for cache in caches])

lesson.check(yours).same_as(counted).peak_below("24 MiB")

# %% solution-3 tags=["solution"]
def yours():
    sizes = [2 * 16 * K * 64 * dtype.itemsize * n for K, dtype, n in variants.values()]
    return torch.tensor([budget // size for size in sizes])

# %% end
lesson.end()
