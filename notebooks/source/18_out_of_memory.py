# %% setup
%reset -f
%load_ext memlab
import subprocess, sys, memlab, torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("18 out of memory", needs="300 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% guess guesses=["free memory in pieces"]
old = (
    "CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 7.93 GiB total capacity; "
    "6.94 GiB already allocated; 10.56 MiB free; 7.28 GiB reserved in total by PyTorch)"
)
choices = ["too many tensors", "free memory in pieces", "another process"]
cause = lesson.guess("Why did it fail?", choices=choices)

# %% explain
explained = memlab.explain_oom(old)
explained

# %% account
MiB = 2**20
size = {term.name: term.amount.middle for term in explained.explanation.terms}
rest = size["capacity"] - size["reserved"] - size["free"]
places = [size["allocated"], size["cached"], rest]
print(cause.compare(choices[places.index(max(places))], explained))
tensors, cached = (round(100 * size[one] / size["capacity"]) for one in ("allocated", "cached"))
lesson.headline("held by tensors when it failed, in percent of the GPU", tensors)
too_many = cached < 5 < 80 < tensors
lesson.holds(f"tensors held {tensors} % of the GPU, the cache {cached} %", too_many, explained)
for name, nbytes in zip(("tensors", "cache", "context and others"), places):
    print(f"{name:18} {nbytes / MiB:6.0f} MiB")

# %% newer-wording guesses=["first"]
start = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 7.79 GiB "
first = (
    "of which 1.12 GiB is free. Process 4711 has 2.50 GiB memory in use. Including non-PyTorch "
    "memory, this process has 4.16 GiB memory in use. Of the allocated memory 3.80 GiB is "
    "allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated."
)
second = (
    "of which 307.00 MiB is free. Including non-PyTorch memory, this process has 7.49 GiB memory "
    "in use. Of the allocated memory 7.10 GiB is allocated by PyTorch, and 150.00 MiB is "
    "reserved by PyTorch but unallocated."
)
new = {"first": start + first, "second": start + second}
neighbor = lesson.guess("Which of them fails because of a neighbor?", choices=list(new))

# %% explain-newer
read = {name: memlab.explain_oom(message) for name, message in new.items()}
for name, one in read.items():
    print(name, "-", one.explanation.title)
verdicts = {one.explanation.verdict: name for name, one in read.items()}
print(neighbor.compare(verdicts["others"], *read.values()))
read["first"]

# %% guess-phase guesses=["backward"]
def step(rows=65_536):
    layers = []
    for _ in range(12):
        layers += [nn.Linear(2048, 2048), nn.GELU()]
    model = nn.Sequential(*layers).cuda()
    model(torch.randn(rows, 2048, device="cuda")).square().mean().backward()

phase = lesson.guess("When does it run out?", choices=["building the model", "forward", "backward"])

# %% predict
stopped = lesson.predict(step, name="stopped")
print(phase.compare(stopped.devices[0].at["phase"], stopped))
known = stopped.fits == "no" and "Tried to allocate" in stopped.out_of_memory
lesson.holds("it does not fit, and the message is known before", known, stopped)
rows = 4 * 65_536 * 2048  # bytes of one tensor of all rows
expected = {
    "activation": 14 * rows,  # results of layers
    "input": rows,
    "parameter": 12 * 4 * (2048**2 + 2048),
}
display(lesson.account("When it ran out, predicted", stopped, expected))
stopped

# %% catch
try:
    torch.empty(1 << 45, device=device)
except RuntimeError as error:
    print(memlab.explain_oom(error).text.splitlines()[0])
    line = error.__traceback__.tb_lineno

# %% traceback-line
assert line == 2  # of that cell: the traceback names the line that asked
if device == "cuda":
    lesson.headline("CUDA_LAUNCH_BLOCKING", "the right line without it")
else:
    lesson.not_measurable("CUDA_LAUNCH_BLOCKING", "nothing is asynchronous on a CPU")

# %% rows
for rows in (8_192, 16_384, 32_768):
    fewer = lesson.predict(lambda: step(rows), name=f"{rows} rows")
    low, high = fewer.peak_device_bytes
    print(f"{rows:6} rows: fits: {fewer.fits:5} needs {low / 2**30:.1f} to {high / 2**30:.1f} GiB")
print(lesson.saves("half of the rows", memlab.runs["32768 rows"], memlab.runs["16384 rows"]))
with torch.device("meta"):
    layer, batch = nn.Linear(2048, 2048), torch.empty(32_768, 2048)
whole_batch = lambda: layer(batch).sum().backward()
halves = lambda: [layer(part).sum().backward() for part in batch.chunk(2)]
lesson.price("two halves, one after the other", whole_batch, halves, at_most=1)

# %% old-advice
program = """
import os, torch
{first}
os.environ["CUDA_VISIBLE_DEVICES"] = ""
print(torch.zeros(1).cuda().device)
"""
cases = {"after the import": "", "after the first use": "torch.zeros(1).cuda()"}
seen = []
for when, first in cases.items() if device == "cuda" else ():
    command = [sys.executable, "-c", program.format(first=first)]
    seen.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    print(f"set {when}: {seen[-1] or 'no GPU'}")
if seen:
    lesson.headline("GPU that is used when it was set after the import", seen[0] or "none")
    assert seen == ["", "cuda:0"]  # set before the first use it counts, and only then
    assert torch.zeros(1, device="cuda").device.index == 0  # by default one GPU is used
else:
    lesson.not_measurable("GPUs that are seen, and used by default", "there is none")

# %% exercise tags=["exercise"]
new["third"] = (
    "CUDA out of memory. Tried to allocate 1.46 GiB. GPU 0 has a total capacity of 3.00 GiB "
    "of which 1.34 GiB is free. Including non-PyTorch memory, this process has 1.66 GiB memory "
    "in use. Of the allocated memory 135.00 MiB is allocated by PyTorch, and 1.33 GiB is "
    "reserved by PyTorch but unallocated."
)

def yours():
    ...  # about 6 lines: torch.tensor of a row of three numbers for each message

# %% check tags=["check"]
def subtracted():
    rows = []
    for message in new.values():
        terms = memlab.explain_oom(message).explanation.terms
        size = {term.name: term.amount.middle / MiB for term in terms}
        tensors, cache = size["allocated"], size["cached"]
        rows.append((tensors, cache, size["capacity"] - size["free"] - tensors - cache))
    return torch.tensor(rows)

lesson.check(yours).same_as(subtracted, relative=0.005).peak_below("16 MiB")

# %% solution tags=["solution"]
def yours():
    rows = [  # tensors, cache, capacity less free
        (3.80 * 1024, 120, (7.79 - 1.12) * 1024),
        (7.10 * 1024, 150, 7.79 * 1024 - 307),
        (135, 1.33 * 1024, (3.00 - 1.34) * 1024),
    ]
    return torch.tensor([(tensors, cache, used - tensors - cache) for tensors, cache, used in rows])

# %% end
lesson.end()
