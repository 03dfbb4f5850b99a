# %% setup
%reset -f
import multiprocessing, sys, time, memlab, psutil, torch
from torch.utils.data import DataLoader, Dataset
from memlab.lesson import Lesson

lesson, MiB = Lesson("26 host memory", needs="500 MiB"), 2**20

# %% captions-and-guess guesses=[0, "4"]
N, text = 200_000, "image {:07}.jpg shows {} on a {}".format
things = ["a cat", "a bicycle", "two chairs"]
captions = [text(k, things[k % 3], things[k % 2]) for k in range(N)]
can_fork = "fork" in multiprocessing.get_all_start_methods()

question = "A worker only reads the list: which share of it does it copy, in percent?"
copied = lesson.guess(question)
question = "2 workers, prefetch_factor=2: how many batches are made before you take one?"
waiting = lesson.guess(question, choices=["0", "1", "2", "4"])

# %% tensors
joined = lengths = starts = None  # free what an earlier run of this cell has left
with memlab.track("tensors", device="cpu", show=False) as run:
    joined = torch.frombuffer(bytearray("".join(captions), "ascii"), dtype=torch.uint8).clone()
    lengths = torch.tensor([0, *map(len, captions)])
    starts = lengths.cumsum(0)
T, held = len(joined), sum(map(sys.getsizeof, captions)) + 8 * N
print(f"as a list {held / MiB:.1f} MiB: {held / N:.0f} bytes each, for {T / N:.0f} characters")
expected = {"other": T + 2 * 8 * (N + 1)}  # characters, lengths and starts
display(lesson.account("Captions as tensors", run, expected))
tensors = joined.nbytes + starts.nbytes
assert tensors < 0.6 * held

# %% worker
def own_bytes():
    return psutil.Process().memory_full_info().uss

class Reading(Dataset):
    def __init__(self, read):
        self.read = read

    def __getitem__(self, k):
        before = own_bytes()
        self.read()
        return torch.tensor(own_bytes() - before)

def copied_by(read):
    settings = {"batch_size": None, "sampler": [0], "multiprocessing_context": "fork"}
    return next(iter(DataLoader(Reading(read), num_workers=1, **settings))).item()

# %% copied
data, places = joined.numpy(), starts.numpy()

def read_list():
    return sum(len(one) for one in captions)

def read_tensors():
    ends = zip(places[:-1], places[1:])
    return sum(len(data[start:end].tobytes()) for start, end in ends)

if can_fork:
    by = {read.__name__: copied_by(read) for read in (read_list, read_tensors)}
    print({name: f"{count / MiB:.1f} MiB" for name, count in by.items()})
    print(copied.compare(min(100, 100 * by["read_list"] / held), psutil.Process()))
    is_so = by["read_tensors"] < 0.1 * held < 0.6 * held < by["read_list"]
    sentence = "a worker copies most of a list, next to nothing of tensors"
    print(lesson.holds(sentence, is_so, psutil.Process()))
lesson.price("tensors instead of a list", read_list, read_tensors, at_most=40, of="seconds")

# %% picture
def picture(pages=8):
    box = '<rect x="{}" y="{}" width="30" height="22" fill="{}" stroke="#808080"/>'.format
    text = '<text x="{}" y="{}" font-size="13" fill="#808080">{}</text>'.format
    svg = [text(4, 22, "parent"), text(4, 60, "worker, list"), text(4, 98, "worker, tensor")]
    for k in range(pages):
        svg += [box(110 + 34 * k, y, c) for y, c in ((6, "#4c78a8"), (44, "#f58518"))]
        svg += [box(110 + 34 * k, 82, "#f58518" if k == 0 else "none")]
    svg += [text(388, 60, "copied: counts are written"), text(388, 98, "shared, but for the head")]
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="560" height="112">{"".join(svg)}</svg>'

alt = "Eight pages of the parent. A worker that reads a list copies all, of a tensor only its head."
display({"image/svg+xml": picture(), "text/plain": alt}, raw=True)

# %% waiting-batches
made = multiprocessing.Value("q")  # a counter that all processes share

class Batches(Dataset):
    def __getitem__(self, k):
        with made.get_lock():
            made.value += 1
        return torch.zeros(128, 3, 96, 96)

settings = {"batch_size": None, "sampler": range(64), "multiprocessing_context": "fork"}
for ahead in (1, 2, 4) if can_fork else ():
    made.value, give_up = 0, time.monotonic() + 20
    batches = iter(DataLoader(Batches(), num_workers=2, prefetch_factor=ahead, **settings))
    while made.value < 2 * ahead and time.monotonic() < give_up:
        time.sleep(0.3)  # longer than they need to make more
    lesson.headline(f"2 workers x {ahead}: batches that wait", made.value)
    assert made.value == 2 * ahead  # and nobody took one
    print(waiting.compare(str(made.value))) if ahead == 2 else None
    first = next(batches)
    assert first.is_shared()
    first = batches = None  # the workers end

# %% pinned
if torch.cuda.is_available():
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    pinned = torch.empty(33 * MiB, dtype=torch.uint8, pin_memory=True)
    took = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    print(f"33 MiB pinned take {took // MiB} MiB of host memory")
    assert took == 64 * MiB  # rounded up to a power of two
    pinned = None
else:
    lesson.not_measurable("33 MiB pinned", "without CUDA nothing can be pinned")

# %% exercise-1 tags=["exercise"]
def captions_of_each_length():
    ...  # 1 line; padded() is in the next cell

# %% check-1 tags=["check"]
def padded():
    grid = starts[:-1, None] + torch.arange(int(starts.diff().max()))  # a row for each caption
    is_inside = grid < starts[1:, None]
    rows = joined[grid.clamp(max=T - 1)].where(is_inside, 0)
    return torch.bincount((rows != 0).sum(1))

lesson.check(captions_of_each_length).same_as(padded).peak_below("32 MiB")

# %% solution-1 tags=["solution"]
def captions_of_each_length():
    return torch.bincount(starts.diff())

# %% exercise-2 tags=["exercise"]
def batch(k):
    torch.manual_seed(k)
    return torch.rand(64, 3, 64, 64)

def kept():
    ...  # about 1 line; slices() is in the next cell

# %% check-2 tags=["check"]
def slices():
    return [batch(k)[0] for k in range(24)]

lesson.check(kept).same_as(slices).peak_below("24 MiB")

# %% solution-2 tags=["solution"]
def kept():
    return [batch(k)[0].clone() for k in range(24)]

# %% exercise-3 tags=["exercise"]
budget, process, listed = 8192 * MiB, 300 * MiB, 1024 * MiB

def chosen():
    ...  # about 6 lines

# %% check-3 tags=["check"]
def counted():
    floats = torch.empty(256, 3, 224, 224, device="meta").nbytes
    room = lambda nbytes: nbytes + (1 << (nbytes - 1).bit_length())  # shared, and pinned
    each = (2 * room(floats) + listed, 2 * room(floats), 2 * room(floats // 4))
    return torch.tensor([budget // (process + one) for one in each])

lesson.check(chosen).same_as(counted).peak_below("24 MiB")

# %% solution-3 tags=["solution"]
def chosen():
    floats = 4 * 256 * 3 * 224 * 224
    waiting = 2 * (floats + 256 * MiB)
    of_bytes = 2 * (floats // 4 + 64 * MiB)
    each = torch.tensor([waiting + listed, waiting, of_bytes])
    return budget // (process + each)

# %% end
lesson.end()
