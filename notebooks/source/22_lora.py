# %% setup
%reset -f
import memlab, pickle, torch
from pydoc_data.topics import topics
from torch import nn
from torch.utils.checkpoint import checkpoint
from memlab.lesson import Lesson
lesson = Lesson("22 LoRA", needs="250 MiB")

# %% text
sonnets = """
Shall I compare thee to a summer's day? Thou art more lovely and more temperate:
Rough winds do shake the darling buds of May, and summer's lease hath all too short a date:
Sometime too hot the eye of heaven shines, and often is his gold complexion dimm'd;
And every fair from fair sometime declines, by chance or nature's changing course untrimm'd;
But thy eternal summer shall not fade, nor lose possession of that fair thou owest;
Nor shall Death brag thou wander'st in his shade, when in eternal lines to time thou growest:
So long as men can breathe or eyes can see, so long lives this, and this gives life to thee.
When, in disgrace with fortune and men's eyes, I all alone beweep my outcast state,
And trouble deaf heaven with my bootless cries, and look upon myself, and curse my fate,
Wishing me like to one more rich in hope, featured like him, like him with friends possess'd,
Desiring this man's art and that man's scope, with what I most enjoy contented least;
Yet in these thoughts myself almost despising, haply I think on thee, and then my state,
Like to the lark at break of day arising from sullen earth, sings hymns at heaven's gate;
For thy sweet love remember'd such wealth brings that then I scorn to change my state with kings.
"""

# %% model
device = "cuda" if torch.cuda.is_available() else "cpu"
H, L, B, R = 512, 3, 64, 8
P = L * 8 * H * H

class Block(nn.Module):
    def __init__(self, H):
        super().__init__()
        self.wide, self.narrow = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))

def windows(text, starts):  # 16 characters each, and the one that follows
    codes = torch.frombuffer(bytearray(text, "ascii", "replace"), dtype=torch.uint8)
    rows = codes[starts[:, None] + torch.arange(17)].long().to(device)
    return rows[:, :16], rows[:, 16]

# %% train
held_out = windows(sonnets[-330:], torch.arange(0, 330 - 16, 2))

def error(net, x=held_out[0], y=held_out[1]):
    return nn.functional.cross_entropy(net(x), y)

def train(net, text, steps, lr):
    torch.manual_seed(1)
    losses, trained = [], [p for p in net.parameters() if p.requires_grad]
    adam = torch.optim.Adam(trained, lr, foreach=False)
    for step in range(steps):
        adam.zero_grad()
        error(net, *windows(text, torch.randint(len(text) - 16, (B,)))).backward()
        adam.step()
        if step % 5 == 4:
            with torch.no_grad():
                losses.append(error(net).item())
    return losses

# %% pretrain-and-guess guesses=[10, 30]
torch.manual_seed(0)
blocks = [Block(H) for _ in range(L)]
base = nn.Sequential(nn.Embedding(128, H // 16), nn.Flatten(), *blocks, nn.Linear(H, 128))
train(base.to(device), " ".join(topics.values()), 50, 1e-3)
saved, start = pickle.dumps(base), error(base).item()
base = blocks = None  # its bytes are left: each way of tuning begins with a copy
flops = lesson.guess("With LoRA, what is left of the FLOPs of a step, in percent?")
four = lesson.guess("With frozen weights in 4 bits, what is left of LoRA's peak, in percent?")

# %% lora
class LoRA(nn.Module):
    def __init__(self, frozen, rows, columns):
        super().__init__()
        self.frozen = frozen
        self.A = nn.Parameter(torch.randn(R, columns, device=device) / columns**0.5)
        self.B = nn.Parameter(torch.zeros(rows, R, device=device))

    def forward(self, x):
        return self.frozen(x) + x @ self.A.T @ self.B.T

def adapt(block, H, freeze=nn.Identity()):
    block.wide = LoRA(freeze(block.wide), 4 * H, H)
    block.narrow = LoRA(freeze(block.narrow), H, 4 * H)

def adapted(*freeze):
    torch.manual_seed(0)
    net = pickle.loads(saved).requires_grad_(False)
    for block in net[2:-1]:
        adapt(block, H, *freeze)
    return net

# %% tune-lora
losses = {}
off = lambda way, other: (torch.tensor(losses[way][-1]) / losses[other][-1] - 1).abs().item()

def tune(name, net, lr=2e-3, steps=30):
    losses[name] = [start, *train(net, sonnets[:-330], steps, lr)]
    with memlab.track(name, show=False) as run:
        train(net, sonnets[:-330], 2, lr)
    return run

full, lora = tune("all weights", pickle.loads(saved), 2e-4), tune("LoRA", adapted())
if device == "cuda":  # PyTorch's own counter: the larger of both peaks
    print(torch.cuda.max_memory_allocated())
for kind in ("parameter", "gradient", "optimizer"):
    each = [run.breakdown().get(kind, 0) / P for run in (full, lora)]
    print(f"{kind:9} {each[0]:.2f} bytes per weight, with LoRA {each[1]:.2f}")
print(lesson.saves("LoRA", full, lora))
step = lambda make: lambda: error(make()).backward()
whole, slim = step(lambda: pickle.loads(saved)), step(adapted)
print(lesson.price("LoRA", whole, slim, at_most=0.75))
print(flops.compare(100 * lesson.headlines["LoRA: times the FLOPs"]))

# %% four-bit
class FourBit(nn.Module):
    def __init__(self, linear):
        super().__init__()
        blocks = linear.weight.detach().unflatten(1, (-1, 64))
        scale = blocks.abs().amax(-1, keepdim=True) / 7
        codes = (blocks / scale).round().add(8).to(torch.uint8)  # 1 to 15
        self.register_buffer("packed", codes[..., ::2] * 16 + codes[..., 1::2])
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def weight(self):
        codes = torch.stack((self.packed // 16, self.packed % 16), -1).flatten(-2)
        return codes.to(self.scale.dtype).sub_(8).mul_(self.scale).flatten(1)

    def forward(self, x):
        return nn.functional.linear(x, self.weight(), self.bias)

exact = pickle.loads(saved)[2].wide
rounded = FourBit(exact).weight() - exact.weight
lesson.accuracy("weights in 4 bits", (rounded.norm() / exact.weight.norm()).item(), at_most=0.2)
exact = rounded = None

# %% qlora
class Again(FourBit):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)

obvious, qlora = tune("4 bits", adapted(FourBit), steps=0), tune("QLoRA", adapted(Again))
print(four.compare(100 * obvious.peak_allocated_bytes / lora.peak_allocated_bytes, lora, obvious))
print(lesson.saves_nothing("4 bits alone", lora, obvious, at_most=0.1))
print(lesson.saves("dequantizing again in backward", lora, qlora))
lesson.accuracy("QLoRA's loss, next to full fine-tuning", off("QLoRA", "all weights"), at_most=0.1)

# %% account
expected = {
    "activation": 4 * B * L * (9 * H + 2 * R),
    "temporary": 5 * 4 * H * H + 4 * 5 * B * H,  # one layer dequantized
    "buffer": P // 2 + 4 * P // 64,  # weights and scales
    "optimizer": 8 * 10 * H * R * L,  # moments of A and B
    "parameter": 4 * (10 * H * R * L + 5 * H * L + 136 * H + 128),  # A, B, biases, head
}
lesson.account("A step with QLoRA", qlora, expected)

# %% loss-curves
svg = "<svg xmlns='http://www.w3.org/2000/svg' width='560' height='160' font-family='sans-serif'>"
for n, (way, run) in enumerate({"all weights": full, "LoRA": lora, "QLoRA": qlora}.items(), 1):
    c, y = ("#47a", "#f82", "#5a4")[n - 1], [1150 - 360 * loss for loss in losses[way]]
    line = " ".join(f"{20 + 45 * k},{v:.0f}" for k, v in enumerate(y))
    svg += f"<polyline points='{line}' fill='none' stroke='{c}' stroke-width='{8 - 2 * n}'/>"
    way += f": {losses[way][-1]:.2f}, {run.peak_allocated_bytes / 2**20:.0f} MiB"
    svg += f"<text x='320' y='{20 * n}' fill='{c}'>{way}</text>"
display({"image/svg+xml": svg + "</svg>", "text/plain": "Three curves of the loss."}, raw=True)

# %% predict-large
def tuned(rows, *freeze, H=4096, L=48):  # in bfloat16, on the card
    def step():
        net = nn.Sequential()
        for _ in range(L):
            net.append(Block(H).to("cuda", torch.bfloat16).requires_grad_(False))
            adapt(net[-1], H, *freeze)
        net.to("cuda", torch.bfloat16)
        adam = torch.optim.Adam([p for p in net.parameters() if p.requires_grad])
        x = torch.empty(rows, H, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):
            adam.zero_grad()
            net(x).square().mean().backward()
            adam.step()
    return step

large = [lesson.predict(tuned(*way)) for way in ((512,), (512, Again), (2048, Again))]
print(lesson.price("QLoRA instead of LoRA", slim, step(lambda: adapted(Again)), at_most=1.01))
fits = [run.fits for run in large] == ["no", "yes", "no"]
lesson.holds("512 rows fit with QLoRA and not with LoRA; 2,048 rows do not", fits, *large)

# %% exercise tags=["exercise"]
torch.manual_seed(0)
layers = [FourBit(nn.Linear(1024, 1024).requires_grad_(False)).to(device) for _ in range(8)]
x = torch.randn(1024, 1024, device=device, requires_grad=True)

def yours():
    ...  # about 12 lines, with a class before it; obvious_way() is in the next cell

# %% check tags=["check"]
def obvious_way():
    y = x
    for layer in layers:
        y = layer(y)
    return torch.autograd.grad(y.square().mean(), x)[0]

lesson.check(yours).same_as(obvious_way, relative=1e-4).peak_below("46 MiB")

# %% solution tags=["solution"]
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.weight(), None

def yours():
    y = x
    for layer in layers:
        y = Product.apply(y, layer)
    return torch.autograd.grad(y.square().mean(), x)[0]

# %% end
lesson.end()
