# %% setup
%reset -f
%load_ext memlab
import tempfile, memlab, numpy, torch
from pathlib import Path
from memlab.lesson import Lesson

lesson = Lesson("13 feeding", needs="500 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% images-and-guess guesses=["108 MiB", "prefetch"]
N, S, B, MiB = 1024, 96, 128, 2**20
image = 3 * S * S  # bytes
folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "images.bin")
seed = torch.Generator().manual_seed(0)
noise = torch.randint(0, 256, (N, 3, S // 8, S // 8), dtype=torch.uint8, generator=seed)
noise.repeat_interleave(8, 2).repeat_interleave(8, 3).numpy().tofile(path)
mapped = numpy.memmap(path, dtype="uint8", mode="r", shape=(N, 3, S, S))
print(f"{path.stat().st_size / MiB:.1f} MiB on the disk")

question = "All images read and converted to float32 between 0 and 1: the peak on the host?"
peak = lesson.guess(question, between=("8 MiB", "2 GiB"))
ways = ["pinned", "prefetch", "bytes", "none"]
most = lesson.guess("Which way of copying holds a whole batch more on the GPU?", choices=ways)

# %% decoded
%%memtrack --name decoded --device cpu
raw = torch.from_numpy(numpy.fromfile(path, dtype="uint8")).view(N, 3, S, S)
data = raw.float() / 255
del raw, data

# %% account
run = memlab.runs["decoded"]
print(peak.compare(run.peak_allocated_bytes, run))
expected = {"other": N * image + 2 * 4 * N * image}  # bytes; floats before and after the division
display(lesson.account("All of it in memory", run, expected))

def epoch():
    for k in range(0, N, B):
        (torch.from_numpy(mapped[k : k + B].copy()).float() / 255).mean()

with memlab.track("mapped", device="cpu", show=False) as batches:
    epoch()
print(lesson.saves(f"a mapped file and batches of {B}", run, batches))
ready = torch.zeros(N, 3, S, S)
in_memory = lambda: [part.mean() for part in ready.split(B)]
print(lesson.price("converting in each epoch", in_memory, epoch, at_most=15, of="seconds"))
ready = None

# %% feed
def feed(how):
    ready, layer = None, torch.nn.Linear(S, 8).cuda()  # of each row of pixels
    kind = torch.uint8 if how == "bytes" else torch.float32
    host = torch.zeros(256, 3, S, S, dtype=kind, pin_memory=(how != "plain"))
    side = torch.cuda.Stream()
    for k in range(3):
        x = ready if how == "prefetch" and k > 0 else host.to("cuda", non_blocking=True)
        if how == "prefetch":
            torch.cuda.current_stream().wait_stream(side)
            x.record_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                ready = host.to("cuda", non_blocking=True)
        with torch.no_grad():
            layer(x.float().div_(255).sub_(0.5).div_(0.25) if how == "bytes" else x)
        if how != "no del":
            del x

# %% to-gpu
def on_gpu(how):
    if device == "cpu":
        return lesson.predict(lambda: feed(how), name=how)
    with memlab.track(how, show=False) as run:  # torch.cuda.max_memory_allocated() is the same
        feed(how)
    return run

gpu = {how: on_gpu(how) for how in ("plain", "no del", "pinned", "prefetch", "bytes")}
base, batch = gpu["plain"].peak_allocated_bytes, 4 * 256 * image
more = {how: (one.peak_allocated_bytes - base) / batch for how, one in gpu.items()}
for how in more:
    lesson.headline(f"{how}: batches more on the GPU", round(more[how], 2))
whole = [how for how in ways[:3] if more[how] >= 0.99]
print(most.compare(whole[0] if whole else "none", *gpu.values()))
as_said = more["pinned"] == 0 and 0.2 < more["bytes"] < 0.3
lesson.holds("bytes take a quarter more, pinned batches nothing", as_said, *gpu.values())

# %% picture
def picture(width=90):
    box = '<rect x="{:.0f}" y="{}" width="{:.0f}" height="18" fill="{}" stroke="#808080"/>'.format
    text = '<text x="{}" y="{}" font-size="13" fill="#808080">{}</text>'.format
    svg = [text(80, 14, "host"), text(200, 14, "GPU: this batch, and what is there besides")]
    for y, (how, extra) in zip(range(22, 200, 28), more.items()):
        colour = "#72b7b2" if how == "plain" else "#4c78a8"
        host = width / 4 if how == "bytes" else width
        svg += [text(4, y + 14, how), box(80, y, host, colour), box(200, y, width, "#4c78a8")]
        svg += [box(200 + width, y, width * extra, "#f58518")] if extra > 0.01 else []
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="166">{"".join(svg)}</svg>'

alt = "Five ways to feed a GPU. Each has one batch there; in addition: "
alt += ", ".join(f"{how} {extra:.2f}" for how, extra in more.items()) + " batches."
display({"image/svg+xml": picture(), "text/plain": alt}, raw=True)

# %% profile
%env KINETO_LOG_LEVEL=99
a = torch.randn(512, 512, device=device)

def one_by_one():
    return [(a @ a).sum().item() for _ in range(50)]

def together():
    return torch.stack([(a @ a).sum() for _ in range(50)]).tolist()

for fetch in (one_by_one, together):
    with torch.profiler.profile() as profile:
        fetch()
    rows = {row.key: row.count for row in profile.key_averages()}
    waits = rows.get("aten::item", 0)
    lesson.headline(f"fetched {fetch.__name__}: times the host waits", waits)
    print(f"{fetch.__name__}: {waits} calls of item()")
    assert rows["aten::mm"] == 50
lesson.headline("operators that torch.profiler names", len(rows))
print(profile.key_averages().table("self_cpu_time_total", row_limit=4, max_src_column_width=0))

# %% exercise-1 tags=["exercise"]
four = ["plain", "no del", "prefetch", "bytes"]
mixed = torch.randperm(4, generator=torch.Generator().manual_seed(4)).tolist()
truth = {name: four[k] for name, k in zip("ABCD", mixed)}
sign = {"alloc": "+", "free": "-"}

for name, how in truth.items():  # MiB, of blocks above 1 MiB
    events = gpu[how].trace.to_pandas()
    large = events[(events.requested_bytes > MiB) & events.kind.isin(list(sign))]
    sizes = zip(large.kind, large.requested_bytes)
    print(name, *(f"{sign[kind]}{size / MiB:.1f}" for kind, size in sizes))

def recognized():
    ...  # 1 line: {"A": "plain", "B": ...}

# %% check-1 tags=["check"]
lesson.check(recognized).same_as(lambda: truth).peak_below("28 MiB")

# %% solution-1 tags=["solution"]
def recognized():
    return {"A": "prefetch", "B": "no del", "C": "bytes", "D": "plain"}

# %% exercise-2 tags=["exercise"]
def means(x):
    return x.mean((0, 2, 3))

def repaired():
    ...  # about 6 lines; wasteful() is in the next cell

# %% check-2 tags=["check"]
def wasteful():
    total = torch.zeros(3, device=device)
    for k in range(0, N, 256):
        x = torch.from_numpy(mapped[k : k + 256].copy()).to(device)
        x = (x.float() / 255 - 0.5) / 0.25
        total += means(x)
    return total

lesson.check(repaired).same_as(wasteful).peak_below("48 MiB")

# %% solution-2 tags=["solution"]
def repaired():
    total = torch.zeros(3, device=device)
    for k in range(0, N, 256):
        x = torch.from_numpy(mapped[k : k + 256].copy()).to(device).float()
        total += means(x.div_(255).sub_(0.5).div_(0.25))
        del x
    return total

# %% exercise-3 tags=["exercise"]
budget, pixels = 300 * MiB, 3 * 224 * 224

def chosen():
    ...  # about 2 lines

# %% check-3 tags=["check"]
def counted():
    kinds = torch.float32, torch.uint8
    floats, raw = (torch.empty(pixels, dtype=t, device="meta").nbytes for t in kinds)
    each = (floats, 2 * floats, 2 * raw + floats, 2 * raw + 2 * floats)
    return torch.tensor([budget // one for one in each])

lesson.check(chosen).same_as(counted).peak_below("28 MiB")

# %% solution-3 tags=["solution"]
def chosen():
    bytes_per_pixel = torch.tensor([4, 8, 2 + 4, 2 + 8])
    return budget // (pixels * bytes_per_pixel)

# %% end
lesson.end()
