# %% setup
%reset -f
%load_ext memlab
import memlab
import torch
from torch import nn
from memlab.lesson import Lesson

lesson = Lesson("06 in place", needs="400 MiB")
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.allow_tf32 = False  # with it cuDNN copies tensors to another layout

# %% unet
class UNet(nn.Module):
    def __init__(self, W):
        super().__init__()
        sizes = [(3, W), (W, 2 * W), (2 * W, 2 * W), (4 * W, W), (2 * W, W), (W, 2)]
        self.convs = nn.ModuleList([nn.Conv2d(*size, 3, padding=1) for size in sizes])

    def forward(self, x):
        down1, down2, deep, up2, up1, head = self.convs
        conv1 = torch.relu(down1(x))
        conv2 = torch.relu(down2(torch.max_pool2d(conv1, 2)))
        conv3 = torch.relu(deep(torch.max_pool2d(conv2, 2)))
        wide3 = nn.functional.interpolate(conv3, scale_factor=2.0)
        both2 = torch.cat([wide3, conv2], 1)
        conv4 = torch.relu(up2(both2))
        wide4 = nn.functional.interpolate(conv4, scale_factor=2.0)
        both1 = torch.cat([wide4, conv1], 1)
        return head(torch.relu(up1(both1)))

# %% guess guesses=[20, 40]
B, W, S = 3, 32, 192
net = UNet(W).to(device)
x = torch.rand(B, 3, S, S, device=device)
images = torch.rand(4, 3, 128, 128, device=device)
predicting = lesson.guess("What does it save of the peak of a prediction, in percent?")
training = lesson.guess("What does it save of the peak of a training step, in percent?")

# %% prediction
%%memtrack --name prediction
with torch.no_grad():
    net(x)

# %% account
run = memlab.runs["prediction"]
N = 4 * B * W * S * S
P = sum(p.numel() for p in net.parameters())
expected = {
    "temporary": N * 67 // 8,  # what has a name, the last ReLU's result and its input
    "parameter": 4 * P,
    "input and other": 4 * 3 * B * S * S + images.nbytes,
}
lesson.account("The peak of a prediction", run, expected)

# %% tidy-unet guesses=["the last torch.cat"]
class Tidy(UNet):
    def forward(self, x):
        down1, down2, deep, up2, up1, head = self.convs
        conv1 = torch.relu(down1(x))
        conv2 = torch.relu(down2(torch.max_pool2d(conv1, 2)))
        x = torch.relu(deep(torch.max_pool2d(conv2, 2)))
        x = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), conv2], 1)
        del conv2
        x = torch.relu(up2(x))
        x = torch.cat([nn.functional.interpolate(x, scale_factor=2.0), conv1], 1)
        del conv1
        return head(torch.relu(up1(x)))

tidy = Tidy(W).to(device)
places = ["going down", "the last torch.cat", "the head"]
where = lesson.guess("Where will the peak of a prediction be then?", choices=places)

# %% measure-both
def measured(model, x, trains):
    with memlab.track("del", show=False) as run, torch.set_grad_enabled(trains):
        loss = model(x).square().mean()
        if trains:
            loss.backward()
    model.zero_grad()
    return run

was = measured(net, x, trains=False)
now = measured(tidy, x, trains=False)
trained = measured(net, x, trains=True)
tidied = measured(tidy, x, trains=True)
lesson.price("one name and del", lambda: net(x), lambda: tidy(x), at_most=1.0)

# %% compare-guesses
print(predicting.compare(100 - 100 * now.peak_bytes / was.peak_bytes, was, now))
print(training.compare(100 - 100 * tidied.peak_bytes / trained.peak_bytes, trained, tidied))
is_cat = now.devices[0].at["module"] == "tidy"
print(where.compare("the last torch.cat" if is_cat else "the head", now))
print(lesson.saves_nothing("del, in training (a tenth at most)", trained, tidied, at_most=0.1))
lesson.saves("one name and del, in prediction", was, now)

# %% keeps
def keeps(layer):
    x = torch.rand(4, 16, 128, 128, device=device, requires_grad=True)
    with memlab.track("keeps", show=False) as run:
        loss = layer(x * 2).sum()
    return run.devices[0].levels[0].left_bytes / x.nbytes, run

# %% layers-keep
layers = [nn.ReLU(), nn.LeakyReLU(), nn.GELU(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.Dropout()]
shares = []
for layer in layers:
    share, run = keeps(layer)
    shares.append(share)
    print(f"{type(layer).__name__:10} {share:5.2f}")
lesson.holds("each of them keeps a quarter of its input or more", min(shares) > 0.24, run)

# %% activations-in-place
def stack(act):
    layers = []
    for width in (3, 16, 16, 16, 16, 16, 16, 16):
        layers += [nn.Conv2d(width, 16, 3, padding=1), act()]
    return nn.Sequential(*layers).to(device)

def in_place(module):
    if "ReLU" in type(module).__name__:
        module.inplace = True

def both_ways(act, trains=True):
    new = measured(stack(act), images, trains)
    over = measured(stack(act).apply(in_place), images, trains)
    return new, over

print(lesson.saves_nothing("ReLU in place", *both_ways(nn.ReLU)))
print(lesson.saves_nothing("ReLU in place, in a prediction", *both_ways(nn.ReLU, trains=False)))
print(lesson.saves_nothing("ReLU6 in place", *both_ways(nn.ReLU6)))
lesson.saves("LeakyReLU in place", *both_ways(nn.LeakyReLU))

# %% del-loss
model = stack(nn.ReLU)

def loop(trains, tidy):
    with memlab.track("loop", show=False) as run:
        for _ in range(2):
            output = model(images)
            loss = output.square().mean()
            if trains:
                loss.backward()
            if tidy:
                del output, loss
    return run

print(lesson.saves_nothing("del loss, after backward", loop(True, False), loop(True, True)))
lesson.saves("del loss, where nothing went backward", loop(False, False), loop(False, True))

# %% exercise tags=["exercise"]
convs = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(10)]).to(device)

def block(x, enter, leave, first, second):
    h = nn.functional.leaky_relu(enter(x), 0.1, inplace=first)
    return h + leave(nn.functional.leaky_relu(h, 0.1, inplace=second))

def yours():
    ...  # 1 line

# %% check tags=["check"]
start = torch.rand(4, 16, 128, 128, device=device)

def whole(first=False, second=False, x=start):
    for enter, leave in zip(convs[::2], convs[1::2]):
        x = block(x, enter, leave, first, second)
    return torch.autograd.grad(x.square().mean(), convs[0].weight)[0]

lesson.check(yours).same_as(whole, relative=1e-5).peak_below(22 * start.nbytes)

# %% solution tags=["solution"]
def yours():
    return whole(first=True)

# %% end
lesson.end()
