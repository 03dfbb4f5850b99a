# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("05 inference", needs="600 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"

# %% build-model
def conv(inputs, outputs):
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]

def vgg19():
    return nn.Sequential(
        *conv(3, 64), *conv(64, 64), nn.MaxPool2d(2),
        *conv(64, 128), *conv(128, 128), nn.MaxPool2d(2),
        *conv(128, 256), *conv(256, 256), *conv(256, 256), *conv(256, 256), nn.MaxPool2d(2),
        *conv(256, 512),
    )

B, S = 2, 192
head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(512, 10)]
net = nn.Sequential(vgg19(), *head).to(device)
vgg = net[0]
P = sum(p.numel() for p in net.parameters())
batches = torch.randn(3, B, 3, S, S, device=device)
labels = torch.zeros(B, dtype=torch.long, device=device)

# %% training
%%memtrack --name training
for x in batches[:2]:
    net.zero_grad()
    nn.functional.cross_entropy(net(x), labels).backward()

# %% guess guesses=["40 MiB", "first batch"]
trained = memlab.runs["training"].peak_allocated_bytes
size = lesson.guess("Peak of testing three batches?", between=("16 MiB", "2 GiB"))
choices = ["first batch", "second batch", "last batch"]
when = lesson.guess("When is the peak of testing?", choices=choices)

# %% testing
%%memtrack --name testing
scores = None  # free what an earlier run of this cell has left
net.eval()
scores = [net(x) for x in batches]

# %% account
testing = memlab.runs["testing"]
by_module = testing.breakdown(by="module")
kinds = (nn.ReLU, nn.MaxPool2d)  # their results are kept
kept = sum(by_module.get(f"net.0.{k}", 0) for k, m in enumerate(vgg) if type(m) in kinds)
R = B * S**2 * (2 * 64 + 2 * 128 // 4 + 4 * 256 // 16 + 512 // 64)
M = B * S**2 * (64 // 4 + 128 // 16 + 256 // 64)

print(size.compare(testing.peak_allocated_bytes, testing))
done = round(kept / (4 * R + 12 * M))  # batches whose activations are there
print(when.compare(choices[done - 1], testing))
is_twice = testing.peak_allocated_bytes > 2 * trained
lesson.holds("testing takes twice what training took", is_twice, testing)
expected = {
    "activation": 3 * 4 * R + 3 * (4 + 8) * M,  # results of ReLUs, maxima and their places
    "parameter and gradient": 2 * 4 * P,
    "input": 4 * 3 * B * 3 * S * S,
}
lesson.account("The peak of testing", testing, expected)

# %% guess-no-grad guesses=["the first, widest layers"]
scores = None
choices = ["the first, widest layers", "the last layers", "the scores"]
where = lesson.guess("Where is the peak under no_grad?", choices=choices)
widest = 4 * B * 64 * S * S  # bytes that the first layers put out

# %% no-grad
with memlab.track("without a graph") as light, torch.no_grad():
    scores = [net(x) for x in batches]
block = int(light.devices[0].at["module"].rsplit(".", 1)[-1])  # its place in vgg
print(where.compare(choices[0] if block < 5 else choices[1], light))
more = light.breakdown()["temporary"] - 2 * widest  # on a GPU cuDNN's workspace
is_so = more == 0 or (more > 0 and device == "cuda")
lesson.holds("two of the widest tensors are there at once", is_so, light)
print(lesson.saves("no_grad", testing, light))
lesson.price("no_grad", lambda: net(x), torch.no_grad()(lambda: net(x)), at_most=1.0)

# %% switches
import warnings

warnings.simplefilter("ignore")  # volatile says that it was removed

def peak(way, model, images, switch=torch.enable_grad):
    with memlab.track("switch", show=False) as run, switch():
        kept = [model(x) for x in images]
    print(f"batches: {len(images)}  {way:15} {run.peak_allocated_bytes / 2**20:6.1f} MiB")
    return run

for images in (batches[:1, :1], batches[:2, :1]):
    train = peak("train()", net.train(), images)
    evaluate = peak("eval()", net.eval(), images)
    volatile = peak("volatile=True", net, torch.autograd.Variable(images, volatile=True))
    no_grad = peak("no_grad", net, images, torch.no_grad)
    inference = peak("inference_mode", net, images, torch.inference_mode)
lesson.saves_nothing("eval() where hardly any dropout is", train, evaluate)
lesson.saves_nothing("volatile=True", evaluate, volatile)
lesson.saves_nothing("inference_mode instead of no_grad", no_grad, inference)

# %% dropout
dropping = nn.Sequential(*6 * [nn.Linear(512, 512), nn.GELU(), nn.Dropout()])  # the same six times
dropping.to(device)
rows = [torch.randn(4096, 512, device=device)]
train = peak("train(), dropout", dropping.train(), rows)
evaluate = peak("eval(), dropout", dropping.eval(), rows)
masks = 0.25 if device == "cpu" else 0.05  # a float for each element; on a GPU a byte
lesson.saves("eval() of six layers with dropout", train, evaluate, at_least=masks)

# %% feature-lists
def features(layers, x):
    kept = []
    for index, layer in enumerate(layers):
        x = layer(x)
        if index in (1, 6, 11, 20):
            kept.append(x)
    return kept

def lists(mode):
    with mode():
        layers = vgg19().cuda()
        content = features(layers, torch.randn(1, 3, 500, 500, device="cuda"))
        style = features(layers, torch.randn(1, 3, 500, 500, device="cuda"))
    return content, style

with_graph = lesson.predict(lambda: lists(torch.enable_grad), name="with graph")
without = lesson.predict(lambda: lists(torch.no_grad), name="lists alone")
lesson.saves("no_grad around feature lists", with_graph, without)

# %% backward-in-no-grad
def step(around_forward, around_backward):
    net.zero_grad()
    with around_forward():
        loss = nn.functional.cross_entropy(net(batches[0]), labels)
    with around_backward():
        loss.backward()

runs = {}
for mode in (torch.enable_grad, torch.no_grad):
    with memlab.track(f"backward in {mode.__name__}", show=False) as runs[mode]:
        step(torch.enable_grad, mode)
print(lesson.saves_nothing("backward inside no_grad", *runs.values()))
try:
    step(torch.no_grad, torch.enable_grad)
except RuntimeError as error:
    print("Forward inside, backward outside:", error)

# %% exercise tags=["exercise"]
content, style, start = torch.rand(3, 1, 3, 224, 224, device=device)

def whole():
    image = start.clone().requires_grad_()
    wanted = features(vgg, content)[-1:] + features(vgg, style)[:-1]
    made = features(vgg, image)
    loss = sum(nn.functional.mse_loss(a, b) for a, b in zip(made[-1:] + made[:-1], wanted))
    return torch.autograd.grad(loss, image)[0]

def yours():
    ...  # 6 lines, one of them new

# %% check tags=["check"]
lesson.check(yours).same_as(whole, relative=1e-4).peak_below("220 MiB")

# %% solution tags=["solution"]
def yours():
    image = start.clone().requires_grad_()
    with torch.no_grad():
        wanted = features(vgg, content)[-1:] + features(vgg, style)[:-1]
    made = features(vgg, image)
    loss = sum(nn.functional.mse_loss(a, b) for a, b in zip(made[-1:] + made[:-1], wanted))
    return torch.autograd.grad(loss, image)[0]

# %% end
lesson.end()
