# %% setup
%reset -f
%load_ext memlab
import collections, functools, importlib, memlab, re, torch
from pydoc_data.topics import topics
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from memlab.lesson import Lesson
lesson = Lesson("20 capstone", needs="700 MiB")

# %% text
B, T, C, L, V = 8, 128, 96, 4, 8192
words = re.findall(r"\s*\w+|\s*[^\w\s]+", " ".join(topics.values()))
ids = {word: k for k, (word, _) in enumerate(collections.Counter(words).most_common(V - 1), 1)}
data = torch.tensor([ids.get(word, 0) for word in words])

def batch():
    rows = data[torch.randint(len(data) - T, (B, 1)) + torch.arange(T + 1)].to(lesson.device)
    return rows[:, :-1], rows[:, 1:]

# %% block
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attention(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

# %% gpt
class GPT(nn.Module):
    def __init__(self, layers=L, width=C, heads=6, words=V, context=T):
        super().__init__()
        self.token, self.position = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight

    def features(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens):
        return self.head(self.features(tokens))

    def loss(self, tokens, targets):
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

# %% train
def gradients(model, tokens, targets):
    loss = model.loss(tokens, targets)
    loss.backward()
    return loss.item()

def train(make, steps, gradients=gradients, optimizer=torch.optim.AdamW, lr=3e-3):
    torch.manual_seed(0)
    model = make().to(lesson.device)
    optimizer = optimizer(model.parameters(), lr)
    for _ in range(steps):
        loss = gradients(model, *batch())
        optimizer.step()
        optimizer.zero_grad()
    return loss

# %% guess guesses=["blocks checkpointed", "chunked_loss"]
edits = ["blocks checkpointed", "loss in pieces", "batch in parts", "Adafactor"]
most = lesson.guess("Which edit of this code saves most, alone?", choices=edits)
techniques = ["checkpoint", "chunked_loss", "adafactor", "autocast_bf16"]
alone = lesson.guess("Which makes GPT-2 small fit into 8 GiB, alone?", choices=techniques)

# %% plain
%memtrack --name plain train(GPT, 2)
P = sum(p.numel() for p in GPT().parameters())
plain, held = memlab.runs["plain"], memlab.runs["plain"].breakdown()
lesson.account("The peak of the plain GPT", plain, [
    ("activations: layers, one of scores", "4 BT (16 LC + 2 C + V)",
     4 * B * T * (16 * L * C + 2 * C + V), held["activation"]),
    ("temporary: two of scores", "2 x 4 BTV", 8 * B * T * V, held["temporary"]),
    ("AdamW's moments, parameters", "8 P + 4 P", 12 * P, held["optimizer"] + held["parameter"])])

# %% edit-blocks
class Checkpointed(GPT):
    def features(self, tokens):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # edited
        return self.norm(x)

board = lesson.scoreboard("40 MiB").score("plain", functools.partial(train, GPT))
board.score("blocks checkpointed", functools.partial(train, Checkpointed))

# %% edit-loss
class Chunked(GPT):
    def piece(self, x, targets):
        return F.cross_entropy(self.head(x), targets, reduction="sum")

    def loss(self, tokens, targets):
        total, x = 0, self.features(tokens).flatten(0, 1)
        for part, some in zip(x.split(128), targets.flatten().split(128)):
            total = total + checkpoint(self.piece, part, some, use_reentrant=False)
        return total / len(x)

class Both(Checkpointed, Chunked):
    pass

board.score("loss in pieces", functools.partial(train, Chunked))
board.score("both", functools.partial(train, Both))

# %% edit-loop
def in_parts(model, tokens, targets, parts=4):
    losses = []
    for some in zip(tokens.chunk(parts), targets.chunk(parts)):
        losses.append(gradients(model, *some))
    for p in model.parameters():
        p.grad /= parts
    return sum(losses) / parts

adafactor = dict(optimizer=torch.optim.Adafactor, lr=1e-2)
board.score("batch in parts", functools.partial(train, GPT, gradients=in_parts))
board.score("both, batch in parts", functools.partial(train, Both, gradients=in_parts))
board.score("Adafactor", functools.partial(train, GPT, **adafactor))
board.score("both, Adafactor", functools.partial(train, Both, **adafactor))

# %% price
print(most.compare(min(edits, key=lambda name: board[name].peak_bytes), board["plain"]))
small = board["blocks checkpointed"].peak_bytes > 0.75 * plain.peak_bytes
lesson.holds("checkpoints alone save less than a quarter of the peak", small, plain)
lesson.saves("both edits", plain, board["both"])
waits = board["both, batch in parts"].peak_bytes > board["both"].peak_bytes
print(lesson.holds("on top of both, the batch in parts makes the peak larger", waits, plain))
lesson.price("both edits", lambda: train(GPT, 1), lambda: train(Both, 1), at_most=1.34)

# %% trainer
class ForTrainer(nn.Module):
    def __init__(self):
        super().__init__()
        self.gpt = GPT()

    def forward(self, tokens, targets):
        return {"loss": self.gpt.loss(tokens, targets)}

    def gradient_checkpointing_enable(self, **options):  # the switch calls this
        self.gpt.__class__ = Checkpointed
    activation_checkpointing_enable = gradient_checkpointing_enable  # its name in version 6

def with_trainer(steps, **switches):
    torch.manual_seed(0)
    model = ForTrainer()
    pairs = [pair for _ in range(steps) for pair in zip(*batch())]
    rows = [dict(tokens=x.cpu(), targets=y.cpu()) for x, y in pairs]
    return trained(model, rows, dict(max_steps=steps, learning_rate=3e-3) | switches)

# %% switches
def trained(model, rows, switches):
    from transformers import Trainer, TrainingArguments
    quiet = dict(report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1)
    where = dict(output_dir="trainer", use_cpu=lesson.device == "cpu")
    switches = {"per_device_train_batch_size": B, **quiet, **where, **switches}
    one = Trainer(model, TrainingArguments(**switches), train_dataset=rows)
    one.train()
    return [row["loss"] for row in one.state.log_history if "loss" in row][-1]

parts = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4)
adafactor = dict(optim="adafactor", learning_rate=1e-2)
for switches in ({}, dict(gradient_checkpointing=True), parts, adafactor):
    if not importlib.util.find_spec("transformers"):
        print("not measurable here: Trainer needs `pip install transformers accelerate`")
        break
    board.score(f"Trainer({', '.join(switches)})", functools.partial(with_trainer, **switches))
board

# %% lab
def gpt2(rows):
    model = GPT(layers=12, width=768, heads=12, words=50_257, context=1024)
    tokens, targets = torch.randint(50_257, (2, rows, 1024))
    loss = lambda scores, targets: F.cross_entropy(scores.flatten(0, 1), targets.flatten())
    return model, torch.optim.AdamW(model.parameters()), (tokens, targets), loss

batches = {f"{rows} rows": functools.partial(gpt2, rows) for rows in (8, 16, 32)}
lab = memlab.Lab(workloads=batches, card=lesson.card, steps=2)
tried = {name: lab.run(techniques=[name]) for name in techniques}
fits = [name for name, run in tried.items() if run.fits == "yes"]
print(alone.compare(fits[0], *tried.values()))
lesson.holds("one switch alone is enough for 8 rows", len(fits) == 1, *tried.values())
larger = lab.run(workload="32 rows", techniques=["chunked_loss", "checkpoint"])
print(lesson.holds("with two, 32 rows fit", larger.fits == "yes", larger))
lab

# %% exercise tags=["exercise"]
tokens, targets = (one.clone() for one in batch())
targets[:, :112] = -100  # 112 words of a question, 16 of the answer: only those are learned

class Answers(GPT):
    ...  # about 3 lines: whose scores does the loss need?

def yours():
    ...  # 1 line: learned(Answers) of the next cell

# %% check tags=["check"]
def learned(make=GPT):
    torch.manual_seed(0)
    model = make().to(lesson.device)
    model.loss(tokens, targets).backward()
    return model.token.weight.grad, model.blocks[0].qkv.weight.grad

lesson.check(yours).same_as(learned, relative=1e-3).peak_below("40 MiB")

# %% solution tags=["solution"]
class Answers(Checkpointed):
    def loss(self, tokens, targets):
        scores = self.head(self.features(tokens)[:, 112:])
        return F.cross_entropy(scores.flatten(0, 1), targets[:, 112:].flatten())

def yours():
    return learned(Answers)

# %% end
display(lesson.guesses_so_far())
lesson.end()
