"""Recurrent layers and cells, in training and not."""

from __future__ import annotations

import torch
from torch import nn

from kernel_calls import NAMES as DT
from kernel_calls import Setup, T, f16, f32, packed

CASES: dict[str, Setup] = {}


def rnn(name, make, shape, dtypes=(f32, f16), train=True, grad=True, wrap=lambda m, x: m(x)[0]):
    for dt in dtypes:

        def setup(dt=dt):
            m = make().to("cuda", dt)
            m.train(train)
            x = T(*shape, dtype=dt, grad=grad)

            def body():
                m.zero_grad()
                x.grad = None
                with torch.set_grad_enabled(grad):
                    o = wrap(m, x)
                if grad:
                    o.sum().backward()
                del o
                m.zero_grad()
                x.grad = None

            body()
            return body

        CASES[f"{name} {DT[dt]}"] = setup


S_ = (16, 8, 32)
rnn("lstm", lambda: nn.LSTM(32, 64), S_)
rnn("lstm bf", lambda: nn.LSTM(32, 64, batch_first=True), S_)
rnn("lstm 2l", lambda: nn.LSTM(32, 64, 2), S_)
rnn("lstm bi", lambda: nn.LSTM(32, 64, bidirectional=True), S_)
rnn("lstm 2l bi drop", lambda: nn.LSTM(32, 64, 2, bidirectional=True, dropout=0.2), S_)
rnn("lstm nobias", lambda: nn.LSTM(32, 64, bias=False), S_)
rnn("lstm proj", lambda: nn.LSTM(32, 64, proj_size=16), S_)
rnn("lstm eval", lambda: nn.LSTM(32, 64), S_, train=False, grad=False)
rnn("lstm nograd train", lambda: nn.LSTM(32, 64), S_, grad=False)
rnn("lstm long", lambda: nn.LSTM(128, 256), (100, 32, 128))
rnn("lstm h", lambda: nn.LSTM(32, 64), S_, wrap=lambda m, x: m(x, (x.new_zeros(1, 8, 64), x.new_zeros(1, 8, 64)))[0])
rnn("lstm last", lambda: nn.LSTM(32, 64), S_, wrap=lambda m, x: m(x)[1][0])
rnn("gru", lambda: nn.GRU(32, 64), S_)
rnn("gru 2l bi", lambda: nn.GRU(32, 64, 2, bidirectional=True), S_)
rnn("gru nobias", lambda: nn.GRU(32, 64, bias=False), S_)
rnn("rnn", lambda: nn.RNN(32, 64), S_)
rnn("rnn relu", lambda: nn.RNN(32, 64, nonlinearity="relu"), S_)
rnn("lstm packed", lambda: nn.LSTM(32, 64), S_, wrap=packed)
rnn("lstmcell", lambda: nn.LSTMCell(32, 64), (8, 32), wrap=lambda m, x: m(x)[0])
rnn("grucell", lambda: nn.GRUCell(32, 64), (8, 32), wrap=lambda m, x: m(x))
rnn("rnncell", lambda: nn.RNNCell(32, 64), (8, 32), wrap=lambda m, x: m(x))
# Gradients of biases are sums, which take scratch where there are many rows.
rnn("lstmcell of many rows", lambda: nn.LSTMCell(128, 512), (4096, 128), wrap=lambda m, x: m(x)[0])
rnn("grucell of many rows", lambda: nn.GRUCell(128, 512), (4096, 128), wrap=lambda m, x: m(x))
rnn("rnncell of many rows", lambda: nn.RNNCell(128, 512), (4096, 128), wrap=lambda m, x: m(x))


for name, build in {
    "build lstm": lambda: nn.LSTM(32, 64, 2), "build gru": lambda: nn.GRU(32, 64),
    "build lstm half": lambda: nn.LSTM(32, 64, 2).half(),
}.items():  # fmt: skip
    CASES[name] = lambda build=build: lambda: build().cuda() and None
