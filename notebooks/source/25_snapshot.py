# %% setup
%reset -f
%load_ext memlab
import contextlib, pickle, tempfile, memlab, torch
from collections import Counter
from pathlib import Path
from torch import nn
from memlab.lesson import Lesson
lesson, MiB = Lesson("25 snapshot", needs="900 MiB"), 2**20
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% train-and-guess guesses=[10, "240 MiB"]
B, H, L, V, K = 4096, 1024, 4, 2048, 12
history = []

def train(keep=lambda out: out, rows=B, device="cuda"):
    blocks = [layer for _ in range(L) for layer in (nn.Linear(H, H), nn.GELU())]
    model = nn.Sequential(*blocks, nn.Linear(H, V)).to(device)
    for _ in range(K):
        x = torch.randn(rows, H, device=device)
        out = model(x)
        out.square().mean().backward()
        model.zero_grad()
        history.append(keep(out))

kept = lesson.guess("The list holds K outputs: which share of the peak, in percent?")
room = "One segment of 320 MiB, 80 MiB of it allocated, in ten blocks of 8. The largest free block?"
largest = lesson.guess(room, between=("1 MiB", "1 GiB"))

# %% record
def record(step, name, limit=8192 * MiB):
    path, memory = Path(tempfile.mkdtemp()) / f"{name}.pickle", torch.cuda.memory
    if device == "cpu":
        card = memlab.Card("a card", limit, (8, 9), context_bytes=0)
        return lesson.predict(step, name, card).save(path)
    torch.cuda.empty_cache()
    share = (memory.memory_reserved() + limit) / torch.cuda.mem_get_info()[1]
    memory.set_per_process_memory_fraction(min(1.0, share))
    memory._record_memory_history(stacks="python")
    with contextlib.suppress(torch.OutOfMemoryError):
        try:
            step()
        finally:
            memory._dump_snapshot(str(path))
    memory._record_memory_history(enabled=None)
    memory.set_per_process_memory_fraction(1.0)
    history.clear()
    return path

# %% dictionary
path = record(train, "train")
snapshot = pickle.loads(path.read_bytes())  # our own file: more below
trace, segments = snapshot["device_traces"][0], snapshot["segments"]
blocks = [block for segment in segments for block in segment["blocks"]]
print(Counter(entry["action"] for entry in trace))
print(Counter(block["state"] for block in blocks))
where = lambda e: [f"{f['name']}:{f['line']}" for f in e["frames"][:2]] or e["user_metadata"]
print(where(max((e for e in trace if e["action"] == "alloc"), key=lambda e: e["size"])))

# %% replay
def rounded(entry):
    return -(-entry["size"] // 512) * 512

def replay(trace, blocks):
    sign = {"alloc": 1, "free_requested": -1}
    changes = [sign.get(entry["action"], 0) * rounded(entry) for entry in trace]
    level = sum(b["size"] for b in blocks if b["state"] == "active_allocated") - sum(changes)
    return [level := level + change for change in changes]

# %% compare-peak
levels, run = replay(trace, blocks), memlab.load(path)
print(f"by hand {max(levels):,} bytes, memlab {run.peak_allocated_bytes:,} bytes")
lesson.holds("the replay has memlab's peak", max(levels) == run.peak_allocated_bytes, run)
run

# %% alive
def alive(trace):
    last = {}  # the last that happened to each address
    for entry in trace:
        if entry["action"] in ("alloc", "free_requested"):
            last[entry["addr"]] = entry
    return [entry for entry in last.values() if entry["action"] == "alloc"]

held, end, out = alive(trace[: levels.index(max(levels)) + 1]), alive(trace), 4 * B * V

# %% account
size = lambda *sizes: sum(rounded(entry) for entry in held if entry["size"] in sizes)
stays = sum(rounded(e) for e in held if e["size"] == out and any(e is one for one in end))
print(kept.compare(100 * stays / max(levels), run))
lesson.account("Training that keeps its outputs", run, [
    ("outputs in the list", "K 4 B V", K * out, stays),
    ("temporaries of the loss", "4 x 4 B V", 4 * out, size(out) - stays),
    ("batch, results of layers", "(1 + 2 L) 4 B H", (1 + 2 * L) * 4 * B * H, size(4 * B * H)),
    ("weights", "4 (L H + V) H", 4 * (L * H + V) * H, size(4 * H * H, 4 * V * H))])

# %% leak
def stairs(trace):
    return Counter(rounded(entry) for entry in alive(trace) if rounded(entry) >= MiB)

number = lambda out: out.norm().item()
numbers = memlab.load(record(lambda: train(number), "numbers"))
print({f"{size / MiB:g} MiB": count for size, count in stairs(trace).items()})
print(run.leaks())
print(lesson.holds("there is a stair for each output in the list", stairs(trace)[out] == K, run))
print(lesson.saves("a number instead of the output", run, numbers))
outputs = lambda: train(rows=8, device=device)
norms = lambda: train(number, 8, device)
print(lesson.price("a number instead of the output", outputs, norms, at_most=1.0))
history.clear()
if device == "cuda":  # cuBLAS's workspaces hold segments, with gaps that the next cell would use
    torch._C._cuda_clearCublasWorkspaces()

# %% serve
def serve():
    take = lambda mib: torch.empty(mib * MiB, dtype=torch.uint8, device="cuda")
    take(320)  # freed at once
    requests = [(take(24), take(8)) for _ in range(10)]
    answers = [answer for work, answer in requests]
    del requests
    return take(64), answers

path = record(serve, "serve", limit=336 * MiB)

# %% out-of-memory
failed, snapshot = memlab.load(path), pickle.loads(path.read_bytes())
trace, segments = snapshot["device_traces"][0], snapshot["segments"]
oom = [entry for entry in trace if entry["action"] == "oom"][-1]
print(f"asked for {oom['size'] / MiB:g} MiB:", where(oom) or "a prediction has no stacks")
print("held by", Counter(str(where(entry)) for entry in alive(trace)))
free = [b["size"] for one in segments for b in one["blocks"] if b["state"] == "inactive"]
print(f"free {sum(free) / MiB:g} MiB in {len(free)} blocks, the largest {max(free) / MiB:g} MiB")
print(largest.compare(max(free), failed))
lesson.holds("each free block is too small", max(free) < oom["size"] < sum(free), failed)
allocated, reserved = (level.end_bytes for level in failed.devices[0].levels[:2])
lesson.holds("memlab has the same free bytes", reserved - allocated == sum(free), failed)

# %% stranger
class Trap:
    def __reduce__(self):
        return print, ("this was called by the file",)

path = path.with_name("stranger.pickle")
path.write_bytes(pickle.dumps({"segments": Trap(), "device_traces": []}))
pickle.loads(path.read_bytes())
refusal = ""
try:
    memlab.load(path)
except memlab.MemlabError as error:
    print(refusal := str(error))
lesson.holds("memlab.load refuses it and executes nothing", "nothing was executed" in refusal)

# %% exercise guesses=["a leak"] tags=["exercise"]
def evaluate(device=device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(device)
    total = torch.zeros((), device=device)
    for _ in range(12):
        total = total + model(torch.randn(2048, 512, device=device)).square().mean()
    return total

path = record(lambda: history.append(evaluate("cuda")), "case")
case, seen = memlab.load(path), pickle.loads(path.read_bytes())["device_traces"][0]
wrong = lesson.guess("What is wrong?", choices=["a leak", "one large tensor", "memory in pieces"])

def yours():
    ...  # about 7 lines

# %% check tags=["check"]
repeats = max(stairs(seen).values())  # blocks of one size that were never freed
print(case, wrong.compare(wrong.answer.options[0 if repeats >= 12 else 1], case), sep="\n")
lesson.check(yours).same_as(evaluate, relative=1e-5).peak_below("40 MiB")

# %% solution tags=["solution"]
@torch.no_grad()
def yours():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)).to(device)
    total = torch.zeros((), device=device)
    for _ in range(12):
        total = total + model(torch.randn(2048, 512, device=device)).square().mean()
    return total

# %% end
lesson.end()
