# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("20 capstone", needs="700 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% guess guesses=["6 GiB"]
need = lesson.guess("What does a step need on the device?", between=("1 GiB", "64 GiB"))

# %% lab
lab = memlab.Lab("gpt", size="card", card=lesson.card, steps=2)
plain = lab.run()
print(need.compare(sum(plain.peak_device_bytes) // 2, plain))
lesson.holds("it does not fit as it is", plain.fits == "no", plain)
plain

# %% account
B, T, C, L, V = 8, 1024, 768, 12, 50_257
P = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
whole = plain.for_card("RTX 4090")
held = whole.breakdown()
kept = 4 * B * T * (16 * L * C + 2 * C + 2 * V)
lesson.account("The peak, on a card where it fits", whole, [
    ("activations: layers, two of scores", "4 BT (16 L C + 2 C + 2 V)", kept, held["activation"]),
    ("temporary: two of scores", "2 x 4 BTV", 8 * B * T * V, held["temporary"]),
    ("AdamW's moments", "2 x 4 P", 8 * P, held["optimizer"]),
    ("parameters", "4 P", 4 * P, held["parameter"]),
])

# %% guess-technique guesses=["checkpoint", "backward"]
options = ["attention", "checkpoint", "chunked_loss", "autocast_bf16"]
alone = lesson.guess("Which of them makes it fit, alone?", choices=options)
where = lesson.guess("And when is the new peak?", choices=["forward", "backward", "optimizer"])

# %% advise
advice = memlab.advise("gpt", card=lesson.card, size="card", techniques=options)
print(alone.compare(advice.recommended[0], advice))
enough = advice.reaches and len(advice.recommended) == 1
lesson.holds("one change is enough, and the advisor finds it", enough, advice)
advice

# %% apply-advice
chosen = lab.run(techniques=list(advice.recommended))
larger = chosen.for_card("RTX 4090")
print(where.compare(larger.devices[0].at["phase"], larger))
lesson.saves(" + ".join(advice.recommended), whole, larger)

# %% score guesses=["16"]
def score(rows, *techniques):
    run = lab.run(techniques=list(techniques), settings={"batch": rows})
    points = rows - 2 * len(techniques) if run.fits == "yes" else 0
    print(f"{rows:3} rows, {' + '.join(techniques)}: fits {run.fits}, {points} points")
    return run

question = "With chunked_loss and checkpoint: which is the most that fits?"
more = lesson.guess(question, choices=["12", "16", "32", "64"])

# %% rows
runs = {}
for rows in (64, 16, 32):
    runs[rows] = score(rows, "chunked_loss", "checkpoint")
most = max(rows for rows, run in runs.items() if run.fits == "yes")
print(more.compare(str(most), runs[most]))
lesson.headline("points with two techniques", most - 4)
lesson.sweep("rows", {rows: runs[rows].for_card("RTX 4090") for rows in sorted(runs)})

# %% show-lab
lab

# %% price
from torch.utils.checkpoint import checkpoint

with torch.device("meta"):
    block_of_layers = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))
    scores = nn.Sequential(nn.Linear(C, V), nn.LogSoftmax(-1))
    hidden = torch.empty(T, C, requires_grad=True)
keeping = lambda part: lambda: part(hidden).sum().backward()
recomputing = lambda part: checkpoint(part, hidden, use_reentrant=False).sum().backward()
for what, part in (("checkpoint", block_of_layers), ("chunked_loss", scores)):
    again = lambda: recomputing(part)
    print(lesson.price(what, keeping(part), again, at_most=1.34))

# %% exercise tags=["exercise"]
words, width, rows = 16_384, 192, 1536

def block():
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

embed = nn.Embedding(words, width).to(device)
body = nn.Sequential(*[block() for _ in range(4)]).to(device)
tokens, labels = torch.randint(words, (2, rows), device=device)

def whole_step():
    embed.zero_grad()
    body.zero_grad()
    nn.functional.cross_entropy(body(embed(tokens)) @ embed.weight.T, labels).backward()
    return embed.weight.grad, body[0][0].weight.grad

def yours():
    ...  # about 10 lines: torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False)

# %% check tags=["check"]
lesson.check(yours).same_as(whole_step, relative=1e-3).peak_below("115 MiB")

# %% solution tags=["solution"]
from torch.utils.checkpoint import checkpoint

def loss_of(hidden, labels):
    scores = hidden @ embed.weight.T
    return nn.functional.cross_entropy(scores, labels, reduction="sum")

def yours():
    embed.zero_grad()
    body.zero_grad()
    x = embed(tokens)
    for one in body:
        x = checkpoint(one, x, use_reentrant=False)
    loss = 0
    for hidden, some in zip(x.split(192), labels.split(192)):
        loss = loss + checkpoint(loss_of, hidden, some, use_reentrant=False)
    (loss / rows).backward()
    return embed.weight.grad, body[0][0].weight.grad

# %% all-guesses
lesson.guesses_so_far()

# %% end
lesson.end()
