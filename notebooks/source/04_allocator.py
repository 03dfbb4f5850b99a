# %% setup
%reset -f
%load_ext memlab
import memlab, torch
from torch import nn
from memlab.allocator import CachingAllocator, OutOfMemory
from memlab.lesson import Lesson

lesson = Lesson("04 allocator", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"
MiB = 2**20

# %% rounding
allocator = CachingAllocator(total_bytes=8192 * MiB)
for requested in (1, 1_000, 600_000, 1_500_000, 9 * MiB, 11_500_000, 100_000_000):
    allocated_before = allocator.allocated_bytes
    reserved_before = allocator.reserved_bytes
    allocator.malloc(requested)
    allocated = allocator.allocated_bytes - allocated_before
    reserved = allocator.reserved_bytes - reserved_before
    print(f"requested {requested:11,}   allocated {allocated:11,}   reserved {reserved:11,} more")

# %% train
def train(empty_cache=False):
    layers = []
    for _ in range(6):
        layers += [nn.Linear(1024, 1024), nn.GELU()]
    model = nn.Sequential(*layers).cuda()
    for rows in (8192, 4096, 12288, 6144, 16384, 8192):
        model(torch.randn(rows, 1024, device="cuda")).square().mean().backward()
        model.zero_grad()
        if empty_cache:
            torch.cuda.empty_cache()

# %% guess guesses=[10, "lower"]
left = lesson.guess("Still reserved when it has returned, in percent of the most that was?")
question = "empty_cache() after every step: the peak of allocated is ..."
myth = lesson.guess(question, choices=["lower", "the same", "higher"])

# %% predict-plain
plain = lesson.predict(train, name="plain")
plain

# %% compare-left
percent = 100 * plain.devices[0].levels[1].end_bytes / plain.peak_reserved_bytes
print(left.compare(percent, plain))
used = round(sum(plain.peak_device_bytes) / 2 / plain.peak_allocated_bytes, 1)
lesson.headline("used on the GPU, over what tensors take, predicted", used)
if device == "cuda":
    with memlab.track("on this GPU"):
        train()

# %% empty-cache
emptied = lesson.predict(lambda: train(empty_cache=True), name="emptied")
asked = {}
for run in (plain, emptied):
    asked[run.name] = (run.to_pandas().kind == "segment_alloc").sum()  # the driver, for a segment
    reserved = run.peak_reserved_bytes / MiB
    print(f"{run.name}: reserved {reserved:.0f} MiB, asked {asked[run.name]} times")
is_more = asked["emptied"] > asked["plain"]
lesson.holds("emptied, the driver is asked more often", is_more, plain, emptied)
change = emptied.peak_allocated_bytes - plain.peak_allocated_bytes
outcome = "lower" if change < 0 else "higher" if change > 0 else "the same"
print(myth.compare(outcome, plain, emptied))
lesson.saves_nothing("empty_cache() after every step", plain, emptied)

# %% fragmentation
def story(conf=""):
    allocator = CachingAllocator(total_bytes=3072 * MiB, context_bytes=200 * MiB, conf=conf)
    validation = allocator.malloc(1500 * MiB)
    allocator.free(validation)
    for _ in range(15):
        allocator.malloc(9 * MiB)
    try:
        allocator.malloc(1500 * MiB)
    except OutOfMemory as error:
        return allocator, str(error)
    return allocator, "fits"

# %% guess-fits guesses=["no"]
fits = lesson.guess("3 GiB, 135 MiB are in use. Do 1500 MiB fit?", choices=["yes", "no"])

# %% out-of-memory
full, message = story()
print(message.split("If reserved")[0])  # what follows there is advice
print(fits.compare("yes" if message == "fits" else "no", full))
failed = message != "fits"
few = full.allocated_bytes < full.total_bytes / 20
lesson.holds("with a twentieth allocated it is out of memory", failed and few, full)

hole = full.reserved_bytes - full.allocated_bytes
lesson.account("The GPU at that moment", full.total_bytes, [
    ("in use", "15 x 9 MiB", 15 * 9 * MiB, full.allocated_bytes),
    ("the hole", "(1500 - 15 x 9) MiB", (1500 - 15 * 9) * MiB, hole),
    ("context", "200 MiB", 200 * MiB, full.context_bytes),
    ("free at the driver", "the rest", (3072 - 1500 - 200) * MiB, full.free_bytes),
], full)

# %% settings
settings = ["expandable_segments:True", "max_split_size_mb:64", "garbage_collection_threshold:0.6"]
for conf in settings:
    allocator, message = story(conf)
    print(f"{conf:32} {message[:18]:18} {allocator.reserved_bytes / MiB:.0f} MiB reserved")
expandable = memlab.predict(train, lesson.card, name="expandable", conf="expandable_segments:True")
lesson.saves("expandable segments", plain, expandable, of="reserved")

# %% exercise tags=["exercise"]
pieces = [torch.full((128, 2048), float(k), device=device) for k in range(64)]

def whole():
    cache = pieces[0]
    for piece in pieces[1:]:
        cache = torch.cat([cache, piece])
    return cache

def yours():
    ...  # about 4 lines

# %% check tags=["check"]
lesson.check(yours).same_as(whole).peak_below("170 MiB")

# %% solution tags=["solution"]
def yours():
    cache = torch.empty(len(pieces) * 128, 2048, device=device)
    for k, piece in enumerate(pieces):
        cache[128 * k : 128 * (k + 1)] = piece
    return cache

# %% end
lesson.end()
