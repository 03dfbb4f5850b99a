# %% setup
%reset -f
import importlib.util, pickle, memlab, torch
from pathlib import Path
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("17 freezing", needs="300 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% rows-and-guess guesses=[10, "parameter"]
H, L, R, W = 256, 6, 8, 128

def rows_of(*modules):
    x, y = [], []
    for label, module in enumerate(modules):
        source = Path(importlib.util.find_spec(module).origin).read_bytes()[:75_008]
        text = torch.frombuffer(bytearray(source), dtype=torch.uint8).view(-1, W)
        pairs = (31 * text[:, 1:] + text[:, :-1].long()) % H
        counts = torch.zeros(len(text), H).scatter_add_(1, pairs, torch.ones(pairs.shape))
        x.append(counts.sqrt())
        y.append(torch.full((len(text),), label))
    mixed = torch.randperm(sum(map(len, x)), generator=torch.Generator().manual_seed(0))
    return torch.cat(x)[mixed].to(device), torch.cat(y)[mixed].to(device)

old = rows_of("argparse", "_pydecimal", "turtle", "typing")
new = rows_of("tarfile", "inspect", "difflib", "mailbox")
kinds = ["parameter", "gradient", "optimizer", "activation"]
question = "Only the last layer is trained with Adam: what is left of the peak, in percent?"
head_left = lesson.guess(question)
where = lesson.guess("What dominates the peak with adapters?", choices=kinds)

# %% network
P, B, cut = L * (8 * H * H + 5 * H), 512, len(new[0]) * 4 // 5

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))

def train(net, x, y, steps, lr, rows=B):
    adam = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr, foreach=False)
    for step in range(steps):
        some = torch.arange(step * rows, (step + 1) * rows, device=x.device) % cut
        adam.zero_grad()
        nn.functional.cross_entropy(net(x[some]), y[some]).backward()
        adam.step()

# %% four-ways
class Adapter(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block, self.down, self.up = block, nn.Linear(H, R), nn.Linear(R, H)
        nn.init.zeros_(self.up.weight), nn.init.zeros_(self.up.bias)

    def forward(self, x):
        y = self.block(x)
        return y + self.up(nn.functional.gelu(self.down(y)))

def prepared(way, blocks=L):  # adapters behind the last `blocks` blocks
    torch.manual_seed(0)
    net = pickle.loads(saved).requires_grad_(way == "all")
    net[-1] = nn.Linear(H, 4)
    net[-2].requires_grad_(way in ("all", "last block"))
    for k in range(L - blocks, L if way == "adapters" else 0):
        net[k] = Adapter(net[k])
    return net.to(device)

# %% train-all-ways
torch.manual_seed(0)
base = nn.Sequential(*[Block() for _ in range(L)], nn.Linear(H, 4)).to(device)
train(base, *old, 30, 5e-4, rows=128)
saved, base, runs, right = pickle.dumps(base), None, {}, {}
ways = {"all": 5e-4, "head": 1e-2, "last block": 1e-3, "adapters": 5e-3}
for way, lr in ways.items():
    net = prepared(way)
    train(net, *new, 30, lr, rows=128)
    with torch.no_grad():
        right[way] = (net(new[0][cut:]).argmax(1) == new[1][cut:]).float().mean().item()
    with memlab.track(way, show=False) as runs[way]:
        train(net, *new, 2, lr)
    trained, net = sum(p.numel() for p in net.parameters() if p.requires_grad), None
    size = f"peak {runs[way].peak_allocated_bytes / 2**20:3.0f} MiB"
    print(f"{way:10} {trained:9,} trained, {size}, {right[way]:.0%} of the held-out rows right")
if device == "cuda":  # PyTorch's own counter, for all of them
    print(torch.cuda.max_memory_allocated())

# %% compare-ways
full, slim, head = runs["all"], runs["adapters"], runs["head"]
N = len(old[0]) + len(new[0])
print(head_left.compare(100 * head.peak_allocated_bytes / full.peak_allocated_bytes, full, head))
print(where.compare(max(kinds, key=lambda kind: slim.breakdown().get(kind, 0)), slim))
print(lesson.saves("adapters", full, slim))
print(lesson.saves("training the head only", full, head))
off = lambda way: max(0.0, right["all"] - right[way])
lesson.accuracy("share of rows that adapters lose", off("adapters"), at_most=0.1)
lesson.accuracy("share of rows that the head loses", off("head"), at_most=0.25)
step = lambda way: lambda: prepared(way)(new[0][:B]).sum().backward()
for way, most in (("head", 0.35), ("adapters", 0.75)):
    print(lesson.price(f"training {way}", step("all"), step(way), at_most=most))

# %% account
A = L * (2 * H * R + R + H) + 4 * H + 4  # parameters of adapters and head
expected = {
    "activation": 4 * B * (L - 1) * (5 * H + 2 * R),
    "parameter": 4 * (P + A),
    "temporary": 4 * 9 * B * H,  # gradients that pass through
    "input and other": 4 * N * (H + 2),  # both data sets, of N rows
}
lesson.account("A step with adapters", slim, expected)

# %% where-adapters
few = {}
svg = '<svg xmlns="http://www.w3.org/2000/svg" width="480" height="94" fill="#808080">'
box = '<rect x="{}" y="{}" width="{}" height="22" fill="{}" stroke="#808080"/>'.format
for row, n in enumerate((L, L // 2, 1)):
    with memlab.track(f"last {n}", show=False) as few[n]:
        train(prepared("adapters", n), *new, 2, 5e-3)
    for k in range(L):
        svg += box(4 + 40 * k, 6 + 30 * row, 28, "#4c78a8" if k >= L - n else "none")
        svg += box(32 + 40 * k, 6 + 30 * row, 6, "#f58518") if k >= L - n else ""
    kept = few[n].breakdown().get("activation", 0) / 2**20
    label = f'<text x="252" font-size="13" y="{22 + 30 * row}">{kept:.1f} MiB kept at the peak'
    svg += label + "</text>"
alt = "Three rows of six blocks: adapters behind all, the last three and the last one."
display({"image/svg+xml": svg + "</svg>", "text/plain": alt}, raw=True)
lesson.saves("adapters behind the last block only", few[L], few[1], at_least=0.2)

# %% exercise-1 tags=["exercise"]
rows = 1 << 17  # so many that one tensor of H numbers each takes 128 MiB
trained = {"everything": "", "the last layer": "4", "the first layer": "0", "biases": "bias"}

def small():
    layers = nn.Linear(H, H), nn.GELU(), nn.Linear(H, H), nn.GELU(), nn.Linear(H, H)
    return nn.Sequential(*layers)  # its parameters: 0.weight, 0.bias, 2.weight, ..., 4.bias

def kept():
    ...  # 1 line: a number of tensors of rows x H for each name in `trained`, as a dict

# %% check-1 tags=["check"]
def saved_for_backward():
    numbers = {}
    for name, part in trained.items():
        net, shapes = small().to("meta"), []  # shapes without memory
        for parameter, p in net.named_parameters():
            p.requires_grad_(part in parameter)
        note = lambda tensor: shapes.append(tuple(tensor.shape))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda nothing: nothing):
            net(torch.empty(rows, H, device="meta"))
        numbers[name] = shapes.count((rows, H))
    return numbers

lesson.check(kept).same_as(saved_for_backward).peak_below("90 MiB")

# %% solution-1 tags=["solution"]
def kept():
    # the inputs of three linear layers and of two GELUs; that of the last linear layer;
    # that of the first and of both GELUs after it; of both GELUs, as no weight is trained
    return {"everything": 5, "the last layer": 1, "the first layer": 3, "biases": 2}

# %% exercise-2 tags=["exercise"]
net = pickle.loads(saved).to(device)
some = new[0][:cut], new[1][:cut]

def frozen():
    ...  # about 4 lines; dropped() is in the next cell

# %% check-2 tags=["check"]
def dropped():
    net.zero_grad()
    nn.functional.cross_entropy(net(some[0]), some[1]).backward()
    for p in net[:-1].parameters():
        p.grad = None
    return net[-1].weight.grad

lesson.check(frozen).same_as(dropped, relative=1e-4).peak_below("90 MiB")

# %% solution-2 tags=["solution"]
def frozen():
    net.zero_grad()
    net[:-1].requires_grad_(False)
    nn.functional.cross_entropy(net(some[0]), some[1]).backward()
    return net[-1].weight.grad

# %% exercise-3 tags=["exercise"]
budgets = torch.tensor([16, 24, 48, 80]) * 2**20

def chosen():
    ...  # about 2 lines

# %% check-3 tags=["check"]
def counted():
    with torch.device("meta"):
        weights = sum(p.nbytes for p in Block().parameters())
        kept = sum(torch.empty(B, width).nbytes for width in (H, 4 * H, 4 * H))
    needs = [weights * (L + 3 * n) + kept * n for n in range(L + 1)]
    return torch.tensor([sum(need <= budget for need in needs) - 1 for budget in budgets])

lesson.check(chosen).same_as(counted).peak_below("90 MiB")

# %% solution-3 tags=["solution"]
def chosen():
    each = 12 * P // L + 36 * B * H
    return ((budgets - 4 * P) // each).clamp(0, L)

# %% end
lesson.end()
