# %% setup
%reset -f
import tempfile, memlab, torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks, save_on_cpu
from torch.utils.checkpoint import checkpoint
from memlab.lesson import Lesson

lesson = Lesson("27 offloading", needs="400 MiB")

# %% step-and-guess guesses=[30, 40]
device = "cuda" if torch.cuda.is_available() else "cpu"
MiB, H, L, B = 2**20, 384, 6, 8192
P = L * (8 * H * H + 5 * H)

def network(device=device):
    blocks = [nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)) for _ in range(L)]
    return nn.Sequential(*blocks).to(device)

def step(hooks, rows=B, device="cuda"):
    model, x = network(device), torch.randn(rows, H, device=device)
    with hooks:
        loss = model(x).square().mean()
    loss.backward()

off = lesson.guess("Activations on the host: what is left of the peak, in percent?")
adam_off = lesson.guess("Adam's moments and step on the host: what is left, in percent?")

# %% activations
def on_gpu(step, name):
    if device == "cpu":
        return lesson.predict(step, name=name)
    with memlab.track(name, show=False) as run:  # torch.cuda.max_memory_allocated() is the same
        step()
    return run

plain = on_gpu(lambda: step(torch.enable_grad()), "plain")
moved = on_gpu(lambda: step(save_on_cpu(pin_memory=True)), "activations on the host")
print(off.compare(100 * moved.peak_allocated_bytes / plain.peak_allocated_bytes, plain, moved))
print(lesson.saves("activations on the host", plain, moved))
moved

# %% account
expected = {
    "temporary": 12 * 4 * B * H,  # fetched tensors, gradients that pass through
    "parameter": 4 * P,
    "gradient": 4 * (P - 4 * H * H),  # all but one layer's
    "other": 2 * 8_519_680,  # two workspaces of cuBLAS
    "input": 4 * B * H,
}
lesson.account("A step with its activations on the host", moved, expected)

# %% what-travels
net, x = network(), torch.randn(2048, H, device=device)
own = {p.untyped_storage().data_ptr() for p in net.parameters()}
saved = {"activations": 0, "weights": 0}

def count(tensor):
    is_weight = tensor.untyped_storage().data_ptr() in own
    saved["weights" if is_weight else "activations"] += tensor.nbytes
    return tensor.detach()

with saved_tensors_hooks(count, lambda tensor: tensor):
    net(x[:256]).square().mean()
print({name: f"{nbytes / MiB:.0f} MiB for 256 rows" for name, nbytes in saved.items()})
assert saved["weights"] > saved["activations"]

# %% adam
def train(on_host, rows=512):
    model, batch = network("cuda"), torch.randn(rows, H, device="cuda")
    weights = list(model.parameters())
    masters = [nn.Parameter(p.detach().cpu()) for p in weights] if on_host else weights
    adam = torch.optim.Adam(masters, foreach=False)
    for _ in range(2):
        model(batch).square().mean().backward()
        for master, p in zip(masters, weights) if on_host else ():
            master.grad, p.grad = p.grad.cpu(), None
        adam.step()
        for master, p in zip(masters, weights) if on_host else ():
            p.data.copy_(master)
        adam.zero_grad()

on_card = on_gpu(lambda: train(False), "Adam")
on_host = on_gpu(lambda: train(True), "Adam on the host")
print(adam_off.compare(100 * on_host.peak_bytes / on_card.peak_bytes, on_card, on_host))
lesson.saves("Adam on the host", on_card, on_host)

# %% picture
def picture(blocks=4, size=40):
    box = '<rect x="{}" y="{}" width="{}" height="{}" fill="{}" stroke="#808080"/>'.format
    text = '<text x="{}" y="{}" font-size="13" fill="#808080">{}</text>'.format
    svg = [text(4, 34, "GPU"), text(90, 14, "forward"), text(255, 14, "backward")]
    svg += [text(400, 104, "Adam's step"), text(4, 120, "moments")]
    svg += [box(60 + k * size, 20, size - 4, 20, "#4c78a8") for k in range(2 * blocks)]
    for k in range(blocks - 1):  # saved by block k, until its backward
        y, start, end = 50 + 14 * k, 100 + k * size, 60 + (2 * blocks - 1 - k) * size
        svg += [text(4, y + 10, f"host, {k + 1}"), box(start, y, end - start, 10, "#f58518")]
    svg += [box(70, 110, 330, 10, "#72b7b2"), box(400, 110, 60, 10, "#54a24b")]
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="480" height="128">{"".join(svg)}</svg>'

alt = "Block 1's activations wait longest, the last block's not at all; moments until Adam."
display({"image/svg+xml": picture(), "text/plain": alt}, raw=True)

# %% price
def passing(hooks):
    with hooks:
        loss = net(x[:256]).square().mean()
    loss.backward()

def recomputing():
    y = x[:256]
    for block in net:
        y = checkpoint(block, y, use_reentrant=False)
    y.square().mean().backward()

plainly = lambda: passing(torch.enable_grad())
fetching = lambda: passing(save_on_cpu(pin_memory=device == "cuda"))
print(lesson.price("save_on_cpu", plainly, fetching, at_most=50, of="seconds"))
print(lesson.price("checkpointing instead", plainly, recomputing, at_most=1.4))
net.zero_grad()

# %% exercise-1 tags=["exercise"]
def in_files():
    ...  # about 10 lines, in: with tempfile.TemporaryDirectory() as folder

# %% check-1 tags=["check"]
def in_memory():
    net.zero_grad()
    net(x).square().mean().backward()
    return net[0][0].weight.grad

limit = 12 * P + 75 * MiB
lesson.check(in_files).same_as(in_memory, relative=1e-5).peak_below(limit)

# %% solution-1 tags=["solution"]
def in_files():
    net.zero_grad()
    names = iter(range(10_000))
    with tempfile.TemporaryDirectory() as folder:
        def pack(tensor):
            torch.save(tensor, name := f"{folder}/{next(names)}")
            return name

        with saved_tensors_hooks(pack, torch.load):
            loss = net(x).square().mean()
        loss.backward()
    return net[0][0].weight.grad

# %% exercise-2 tags=["exercise"]
packed = []

def half(tensor):
    return tensor.to(torch.bfloat16)

def repaired():
    ...  # about 5 lines; with_a_list() is in the next cell

# %% check-2 tags=["check"]
def with_a_list():
    net.zero_grad()
    packed.clear()

    def pack(tensor):
        packed.append(tensor)
        return half(tensor)

    with saved_tensors_hooks(pack, lambda tensor: tensor.float()):
        loss = net(x).square().mean()
    loss.backward()
    packed.clear()
    return net[0][0].weight.grad

lesson.check(repaired).same_as(with_a_list, relative=1e-4).peak_below(limit + 40 * MiB)

# %% solution-2 tags=["solution"]
def repaired():
    net.zero_grad()
    with saved_tensors_hooks(half, lambda tensor: tensor.float()):
        loss = net(x).square().mean()
    loss.backward()
    return net[0][0].weight.grad

# %% exercise-3 tags=["exercise"]
from torch.utils.flop_counter import FlopCounterMode

rate, bus, widths = 50e12, 25e9, (1024, 4096, 8192, 16384)

def chosen():
    ...  # about 3 lines: FLOPs and bytes of one row

# %% check-3 tags=["check"]
def hides(H):
    row, nbytes = torch.empty(1, H, device="meta", requires_grad=True), []
    up, down = (nn.Linear(*size, device="meta") for size in ((H, 4 * H), (4 * H, H)))
    pack = lambda tensor: nbytes.append(tensor.nbytes if len(tensor) == 1 else 0)
    with FlopCounterMode(display=False) as flops, saved_tensors_hooks(pack, lambda none: none):
        down(nn.functional.gelu(up(row)))
    return sum(nbytes) / bus <= flops.get_total_flops() / rate

lesson.check(chosen).same_as(lambda: torch.tensor([*map(hides, widths)]).int()).peak_below(limit)

# %% solution-3 tags=["solution"]
def chosen():
    H = torch.tensor(widths)
    flops, nbytes = 16 * H * H, 4 * 9 * H
    return (nbytes / bus <= flops / rate).int()

# %% end
lesson.end()
