"""The models of courses: perceptrons, recurrent networks, recommenders, siblings, actors and critics."""

# Code as it is found in notebooks: a forward has no docstring there, and nobody types it.
# ruff: noqa: D102
# mypy: ignore-errors

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.programs.registry import program, tokens, train


def perceptron(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers of these widths."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), between()]
    return nn.Sequential(*layers[:-1])


@program
def mlp_sgd() -> None:
    model = perceptron(1024, 4096, 4096, 4096, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(8192, 1024, device="cuda"), torch.randint(10, (8192,), device="cuda")
    train(model, optimizer, lambda: (x, y), F.cross_entropy)


@program
def mlp_dropout_adam() -> None:
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.BatchNorm1d(2048), nn.GELU(), nn.Dropout(0.2)) for _ in range(8)]
    model = nn.Sequential(*layers, nn.Linear(2048, 100)).to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        x, y = torch.randn(4096, 2048).cuda(), torch.randint(0, 100, (4096,)).cuda()
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.3f}")


@program
def lenet_momentum() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    ).to("cuda")  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.rand(8192, 1, 28, 28).to("cuda"), torch.randint(10, (8192,)).to("cuda")

    train(model, optimizer, batch, F.cross_entropy)


class Recurrent(nn.Module):
    """An embedding, a recurrent network and a head on its last state."""

    def __init__(self, cell: type[nn.RNNBase], bidirectional: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(20_000, 256)
        self.recurrent = cell(256, 512, num_layers=2, batch_first=True, dropout=0.3, bidirectional=bidirectional)
        self.head = nn.Linear(1024 if bidirectional else 512, 5)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embed(ids))
        return self.head(states[:, -1])


def _sentences(count: int = 128, length: int = 200) -> tuple[Tensor, Tensor]:
    return torch.randint(20_000, (count, length)).to("cuda"), torch.randint(5, (count,)).to("cuda")


@program
def lstm_classifier() -> None:
    model = Recurrent(nn.LSTM).cuda()
    train(model, torch.optim.Adam(model.parameters()), _sentences, F.cross_entropy)


@program
def gru_bidirectional() -> None:
    model = Recurrent(nn.GRU, bidirectional=True).cuda()
    train(model, torch.optim.RMSprop(model.parameters()), _sentences, F.cross_entropy)


class Translator(nn.Module):
    """A recurrent encoder, and a decoder that attends to it word by word."""

    def __init__(self, words: int = 8000, width: int = 512) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder, self.cell = nn.GRU(width, width, batch_first=True), nn.GRUCell(2 * width, width)
        self.head = nn.Linear(2 * width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(self.source(source))
        state, steps = last[0], []
        for word in self.target(target).unbind(1):
            weights = torch.softmax(torch.einsum("bw,btw->bt", state, memory), -1)
            context = torch.einsum("bt,btw->bw", weights, memory)
            state = self.cell(torch.cat([word, context], -1), state)
            steps.append(self.head(torch.cat([state, context], -1)))
        return torch.stack(steps, 1)


@program
def seq2seq_attention() -> None:
    model = Translator().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    for _ in range(2):
        source, target = (torch.randint(8000, (64, 30), device="cuda") for _ in range(2))
        loss = F.cross_entropy(model(source, target).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


class Recommender(nn.Module):
    """Tables of embeddings, their pairwise products, and a perceptron on top."""

    def __init__(self, tables: int = 12, rows: int = 50_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = perceptron(13, 512, 256, width)
        self.top = perceptron(width + (tables + 1) * tables // 2, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.dense(dense)
        parts = torch.stack([bottom, *(table(ids) for table, ids in zip(self.tables, sparse, strict=True))], 1)
        products = parts @ parts.transpose(1, 2)
        return self.top(torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], 1)).squeeze(1)


@program
def recommender_embeddings() -> None:
    model = Recommender().cuda()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)

    def batch() -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.randint(50_000, (12, 16_384, 4), device="cuda")
        return torch.rand(16_384, 13, device="cuda"), ids, torch.rand(16_384, device="cuda")

    train(model, optimizer, batch, F.binary_cross_entropy_with_logits)


@program
def matrix_factorisation() -> None:
    users, items = nn.Embedding(200_000, 64).cuda(), nn.Embedding(100_000, 64).cuda()
    optimizer = torch.optim.Adam([*users.parameters(), *items.parameters()], lr=0.01)
    for _ in range(3):
        user, item = torch.randint(200_000, (65_536,)).cuda(), torch.randint(100_000, (65_536,)).cuda()
        rating = torch.rand(65_536, device="cuda")
        loss = F.mse_loss((users(user) * items(item)).sum(-1), rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def siamese_contrastive() -> None:
    tower = nn.Sequential(
        nn.Conv2d(1, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(2048, 128),
    ).cuda()  # fmt: skip
    optimizer = torch.optim.Adam(tower.parameters())
    for _ in range(3):
        left, right = (torch.randn(256, 1, 56, 56, device="cuda") for _ in range(2))
        same = torch.randint(2, (256,), device="cuda").float()
        distance = F.pairwise_distance(tower(left), tower(right))
        loss = (same * distance.pow(2) + (1 - same) * F.relu(1 - distance).pow(2)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


@program
def text_convolution() -> None:
    embed = nn.Embedding(30_000, 300).cuda()
    widths = nn.ModuleList(nn.Conv1d(300, 256, width, padding="same") for width in (3, 5, 7)).cuda()
    head = nn.Linear(768, 20).cuda()
    optimizer = torch.optim.Adadelta([*embed.parameters(), *widths.parameters(), *head.parameters()])
    for _ in range(3):
        ids, y = torch.randint(30_000, (128, 256), device="cuda"), torch.randint(20, (128,), device="cuda")
        x = embed(ids).transpose(1, 2)
        found = torch.cat([F.relu(width(x)).amax(-1) for width in widths], 1)
        loss = F.cross_entropy(head(F.dropout(found, 0.5)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def dilated_audio() -> None:
    class Layer(nn.Module):
        def __init__(self, dilation: int) -> None:
            super().__init__()
            self.both = nn.Conv1d(64, 128, 2, dilation=dilation)
            self.skip, self.pad = nn.Conv1d(64, 64, 1), dilation

        def forward(self, x: Tensor) -> Tensor:
            signal, gate = self.both(F.pad(x, (self.pad, 0))).chunk(2, 1)
            return x + self.skip(torch.tanh(signal) * torch.sigmoid(gate))

    layers = [Layer(2**i) for _ in range(2) for i in range(8)]
    model = nn.Sequential(nn.Conv1d(1, 64, 1), *layers, nn.ReLU(), nn.Conv1d(64, 256, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())

    def batch() -> tuple[Tensor, Tensor]:
        return torch.rand(8, 1, 8000, device="cuda"), torch.randint(256, (8, 8000), device="cuda")

    train(model, optimizer, batch, F.cross_entropy, steps=2)


@program
def graph_convolution() -> None:
    nodes, edges = 50_000, 400_000
    layers = nn.ModuleList(nn.Linear(before, after) for before, after in ((256, 256), (256, 256), (256, 40))).cuda()
    optimizer = torch.optim.AdamW(layers.parameters(), lr=0.01, weight_decay=5e-4)
    x = torch.randn(nodes, 256).to("cuda")
    source, target = torch.randint(nodes, (2, edges)).to("cuda")
    y = torch.randint(40, (nodes,)).to("cuda")
    for _ in range(2):
        hidden = x
        for layer in layers:
            messages = layer(hidden)[source]
            hidden = torch.zeros(nodes, messages.shape[1], device="cuda").index_add(0, target, messages)
            hidden = F.dropout(F.relu(hidden), 0.5)
        loss = F.nll_loss(F.log_softmax(hidden, -1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def actor_critic() -> None:
    body = perceptron(512, 2048, 2048).cuda()
    actor, critic = nn.Linear(2048, 18).cuda(), nn.Linear(2048, 1).cuda()
    parameters = [*body.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.RMSprop(parameters, lr=7e-4, momentum=0.9, centered=True)
    observations = torch.zeros(128, 128, 512, device="cuda")
    rewards = torch.zeros(128, 128, device="cuda")
    for _ in range(2):
        with torch.no_grad():
            for t in range(128):
                observations[t] = torch.randn(128, 512, device="cuda")
                rewards[t] = critic(body(observations[t])).squeeze(-1)
        hidden = body(observations.view(-1, 512))
        value, choice = critic(hidden).squeeze(-1), F.log_softmax(actor(hidden), -1)
        advantage = rewards.view(-1) - value
        loss = -(choice[:, 0] * advantage.detach()).mean() + advantage.pow(2).mean() + (choice.exp() * choice).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@program
def language_model_lstm() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(33_000, 650)
            self.cells = nn.LSTM(650, 650, num_layers=2, batch_first=True)
            self.head = nn.Linear(650, 33_000)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            hidden, state = self.cells(self.embed(ids), state)
            return self.head(hidden), state

    model, batch = Words().to("cuda"), tokens(20, 70, 33_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = (torch.zeros(2, 20, 650, device="cuda"), torch.zeros(2, 20, 650, device="cuda"))
    for _ in range(3):
        ids, target = batch()
        state = (state[0].detach(), state[1].detach())
        logits, state = model(ids, state)
        loss = F.cross_entropy(logits.flatten(0, 1), target.reshape(-1))
        model.zero_grad()
        loss.backward()
        optimizer.step()


@program
def video_convolution() -> None:
    layers = [nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU(), nn.MaxPool3d(2))
              for a, b in ((3, 32), (32, 64), (64, 128))]  # fmt: skip
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(128, 400)).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batch() -> tuple[Tensor, Tensor]:
        return torch.rand(4, 3, 16, 112, 112, device="cuda"), torch.randint(400, (4,), device="cuda")

    train(model, optimizer, batch, F.cross_entropy, steps=2)
