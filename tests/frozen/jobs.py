"""Small steps of several kinds, each a function of the device. Recorded runs name these lines: do not move them."""

import torch
import torch.utils.checkpoint
from torch import nn


def mlp(device):
    net = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 64)).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        target = torch.zeros(64, dtype=torch.long, device=device)
        loss = nn.functional.cross_entropy(net(torch.randn(64, 256, device=device)), target)
        loss.backward()
        optimizer.step()


def convolutions(device):
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        net(torch.randn(8, 3, 32, 32, device=device)).sum().backward()
        optimizer.step()


def attention(device):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, device=device)
    inputs = torch.randn(4, 32, 64, device=device, requires_grad=True)
    for _ in range(2):
        torch.utils.checkpoint.checkpoint(layer, inputs, use_reentrant=False).sum().backward()


def leaking(device):
    net = nn.Linear(128, 128).to(device)
    losses = []
    for _ in range(8):
        loss = net(torch.randn(32, 128, device=device)).square().mean()
        losses.append(loss)
        loss.backward(retain_graph=True)


def inference(device):
    net = nn.LSTM(32, 64, batch_first=True).to(device)
    with torch.no_grad():
        kept = [net(torch.randn(4, 16, 32, device=device))[0] for _ in range(4)]
    del kept


def out_of_memory(device):
    net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(12))).to(device)
    hidden = torch.randn(4096, 2048, device=device)
    for _ in range(20):
        hidden = net(hidden).relu()


JOBS = {job.__name__: job for job in (mlp, convolutions, attention, leaking, inference)}
