"""Which names a cell makes anew: what they held before could be freed first, and nothing would change."""

from __future__ import annotations

import types

import IPython  # noqa: F401  # as in a notebook: it tells magics from operators
import pytest

from memlab.api.cell_names import names_made_anew

EARLIER = """
net = optimizer = loss = x = out = 1
def shows(): return net
def asks(): return shows()
class Trainer:
    def fit(self): return optimizer
    @staticmethod
    def helps(): return loss
class Faster(Trainer): pass
trainer, faster = Trainer(), Faster()
class Strange:
    @property
    def __class__(self): raise RuntimeError("nothing may ask")
    def __getattr__(self, name): raise RuntimeError("nothing may ask")
strange = Strange()
"""


@pytest.mark.parametrize(
    ("cell", "made"),
    {
        "net = make()\noptimizer = net.step\nfor x in range(3):\n    loss = net(x)\n    loss.backward()": "net optimizer x loss",
        "for _ in range(3):\n    loss = f()\nprint(loss)": "",  # no turn, and the old loss is printed
        "if flag:\n    net = make()\nnet.step()": "",
        "net = net.half()": "",
        "loss += 1": "",
        "with open('f') as x:\n    x.read()": "x",
        "print(f'{loss}')\nloss = 1": "",
        "[net for _ in out]\nnet = 1": "",
        "net = 1\n[net for _ in range(3)]": "net",
        "def f():\n    return net\nnet = 1": "",
        "net = 1\ndef f():\n    return net": "net",
        "def f():\n    global net\n    net = 2\nnet = 1": "",
        "del net\nnet = 1": "",
        "asks()\nnet = 1\nloss = 2": "loss",
        "trainer.fit()\noptimizer = 1": "",
        "Trainer.helps()\nloss = 1": "",
        "strange\nnet = 1": "net",
        "faster.fit()\noptimizer = 1": "",
        "Trainer().fit()\noptimizer = 1": "",
        "globals()['net']\nnet = 1": "",
        "try:\n    net = 1\nexcept Exception:\n    net": "",
        "while (x := next(out)):\n    print(x)": "",
        "loss: float\nloss": "",
        "loss: float = 1.0\nloss": "loss",
        "match out:\n    case [x, *_]:\n        net = 1\n        net": "net",
        "net, (loss, *out) = make()\nout": "net loss out",
        "%matplotlib inline\nnet = 1": "net",
        "net = 1\nprint('%d'\n      % net)": "net",
        "%matplotlib inline\nnet = 1\nprint('%d'\n      % net)": "net",
        "!echo 'it (\nnet = 1": "net",
        "net = 1\nif net:\n    net?": "net",
        "files = !ls -1 \\\n  -a\nnet = 1": "net",
        "%%time\nnet = 1": "net",
        "net = ": "",
        "unknown = 1": "",
    }.items(),
)
def test_the_names_that_a_cell_makes_anew(cell: str, made: str):
    main = types.ModuleType("__main__")
    exec(EARLIER, vars(main))
    assert names_made_anew(cell, vars(main)) == made.split()
