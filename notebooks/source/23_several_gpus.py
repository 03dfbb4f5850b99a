# %% setup
%reset -f
%env TORCH_CPP_LOG_LEVEL=ERROR
%load_ext memlab
import memlab, torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("23 several GPUs", needs="500 MiB", card="A100 80GB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% rank
L, H, B = 3, 512, 32

def block(width):
    up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    return nn.Sequential(up, nn.GELU(), down)

class Rank:
    def __init__(self, r, sharded):
        torch.manual_seed(0)  # the same weights everywhere
        self.net = nn.Sequential(*[block(H) for _ in range(L)]).to(device)
        self.params = list(self.net.parameters())
        mine = self.params[r::2] if sharded else self.params
        self.adam = torch.optim.Adam(mine, fused=True)  # fused: without temporary tensors

# %% train
x = torch.randn(2 * B, H, device=device)

def train(sharded):
    first, second = ranks = [Rank(r, sharded) for r in range(2)]
    for _ in range(2):
        for rank, rows in zip(ranks, x.chunk(2)):
            rank.net.zero_grad()
            rank.net(rows).square().mean().backward()
        for p, q in zip(first.params, second.params):  # all-reduce: both get the mean
            p.grad.add_(q.grad).div_(2)
            q.grad.copy_(p.grad)
        first.adam.step(), second.adam.step()
        for i, (p, q) in enumerate(zip(first.params, second.params)):
            if sharded:  # the owner of each weight sends it to the other
                q.data.copy_(p) if i % 2 == 0 else p.data.copy_(q)
    return first.params

# %% guess guesses=[50, "16", 55]
kinds = ["0.25", "16", "20"]
left = lesson.guess("Two ranks: ZeRO-1's peak, in percent of the peak of plain data parallelism?")
ddp_holds = lesson.guess("DDP over 64 GPUs: bytes per parameter on each?", choices=kinds)
share = lesson.guess("FSDP over 64 GPUs: the activations' share of the peak, in percent?")

# %% account
both = {}
for name, sharded in {"replicas": False, "moments sharded": True}.items():
    with memlab.track(name, show=False) as both[name]:
        train(sharded)
replicas, halves = both.values()
if device == "cuda":  # PyTorch's own counter of the same figure
    print(torch.cuda.max_memory_allocated())
P = 8 * L * H * H
print(left.compare(100 * halves.peak_bytes / replicas.peak_bytes, replicas, halves))
print(lesson.saves("half of the moments", replicas, halves, at_least=0.2))
expected = {
    "parameter": 2 * 4 * P,  # of both ranks
    "gradient": 2 * 4 * P,
    "optimizer": 2 * 8 * P // 2,  # half of the moments on each
}
lesson.account("Two ranks with ZeRO-1", halves, expected)

# %% start
import os
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

class Big:
    L, H, B = 32, 4608, 1024
    P = 8 * L * H * H

def start():
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # torchrun sets it
    with torch.device("meta"):
        model = nn.Sequential(*[block(Big.H) for _ in range(Big.L)])
    return model, torch.randn(Big.B, Big.H, device="cuda")

# %% job
def job(kind):
    model, rows = start()
    if kind == "FSDP2":
        for part in (*model, model):
            fully_shard(part)
        model.to_empty(device="cuda")  # a real script loads or initializes the weights here
    else:
        model = DDP(model.to_empty(device="cuda"), gradient_as_bucket_view=kind != "DDP")
    if kind == "ZeRO-1":
        adam = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, fused=True)
    else:
        adam = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(2):
        adam.zero_grad()
        model(rows).square().mean().backward()
        adam.step()

# %% predict-64
def over(N, kind):
    return memlab.predict(lambda: job(kind), lesson.card, world_size=N, name=f"{kind}, {N} ranks")

runs = {kind: over(64, kind) for kind in ("DDP", "DDP with views", "ZeRO-1", "FSDP2")}
for kind, run in runs.items():
    low, card = run.allocated_bytes.low / Big.P, run.card.name
    print(f"{kind:14} {low:4.1f} P or {run.allocated_bytes}, fits the {card}: {run.fits}")
ddp, views, zero, fsdp = (run.for_card("B200") for run in runs.values())  # where all fit
print(ddp_holds.compare(str(round(ddp.peak_bytes / Big.P)), ddp))
print(share.compare(100 * fsdp.breakdown()["activation"] / fsdp.peak_bytes, fsdp))
print(lesson.saves("gradients as views of buckets", ddp, views, at_least=0.1))
print(lesson.saves("ZeRO-1", views, zero))
print(lesson.saves("FSDP2", zero, fsdp))
no_help = [run.fits for run in runs.values()] == ["no", "no", "yes", "yes"]
lesson.holds("64 GPUs with DDP hold no larger model than one", no_help, *runs.values())

# %% account-fsdp
P, N, whole, row = Big.P, 64, 4 * Big.P // Big.L, 4 * Big.B * Big.H  # a block, an activation
expected = {
    "optimizer": 8 * P // N, "parameter": 4 * P // N + whole,  # shards, and one block
    "gradient": 2 * whole + whole // N,  # of two blocks, and one shard
    "activation": (Big.L - 2) * 9 * row,
    "temporary": whole + 5 * row,  # the buffer of the exchange, gradients of activations
}
lesson.account("One of 64 ranks, FSDP2", fsdp, expected)

# %% ranks
ranks = {8: over(8, "FSDP2"), 64: runs["FSDP2"], 512: over(512, "FSDP2")}
kept = {run.breakdown()["activation"] for run in ranks.values()}
print(lesson.holds("as many activations on 8 ranks as on 512", len(kept) == 1, *ranks.values()))
more = over(512, "ZeRO-1")
few = [run.breakdown().get("optimizer", 0) for run in (runs["ZeRO-1"], *more.ranks.values())]
said = "ZeRO-1 on 512 ranks: the first has its moments of 64 ranks, the last has none"
print(lesson.holds(said, few[0] == few[1] > 100 * few[2], runs["ZeRO-1"], more))
lesson.sweep("ranks", ranks)

# %% price
once = 4 * Big.P * 63 / 64
moved = {"DDP": 2 * once, "ZeRO-1": 2 * once + once, "FSDP2": once + once + once}
for kind, received in moved.items():
    print(f"{kind:6} {received / 2**30:.1f} GiB, {received / moved['DDP']:.1f} times those of DDP")
off = max((p - q).abs().max().item() for p, q in zip(train(sharded=False), train(sharded=True)))
lesson.accuracy("the weights after two steps of ZeRO-1", off, at_most=0)
lesson.price("ZeRO-1", lambda: train(False), lambda: train(True), at_most=1)

# %% exercise tags=["exercise"]
rows = torch.randn(64, 2048, device=device)

def half(i):  # half of a 2048 x 2048 weight
    made = torch.empty(1024, 2048)
    return made.uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(i)).to(device)

mine = [half(i).requires_grad_() for i in range(8)]

def yours():
    ...  # about 15 lines: torch.autograd.Function, torch.utils.checkpoint.checkpoint

# %% check tags=["check"]
def gathered():
    weights = [torch.cat([part, half(8 + i)]) for i, part in enumerate(mine)]
    h = rows
    for weight in weights:
        h = nn.functional.gelu(h @ weight.T)
    return torch.autograd.grad(h.square().mean(), mine)

lesson.check(yours).same_as(gathered, relative=1e-4).peak_below("180 MiB")

# %% solution tags=["solution"]
from torch.utils.checkpoint import checkpoint

class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, i):
        return torch.cat([part, half(8 + i)])

    @staticmethod
    def backward(ctx, gradient):
        return gradient[:1024].clone(), None

def layer(h, part, i):
    return nn.functional.gelu(h @ Gather.apply(part, i).T)

def yours():
    h = rows
    for i, part in enumerate(mine):
        h = checkpoint(layer, h, part, i, use_reentrant=False)
    return torch.autograd.grad(h.square().mean(), mine)

# %% end
lesson.end()
