"""Advice on a cell that was measured on a GPU, which other tensors of the notebook fill in the meantime."""

from __future__ import annotations

import re

import pytest
from kernel import Kernel, kernel
from simulated_machines import machine_at

pytestmark = pytest.mark.simulated

START = "%load_ext memlab\nimport torch, memlab\nfrom torch import nn"
CELL = """%%memtrack --name mine --no-live --quiet
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    optimizer.zero_grad()
    model(torch.randn(512, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("advise")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in machine_at(folder / "machine.json", total_mb=2048, context_mb=128).items():
            patch.setenv(name, value)
        with kernel(folder, START) as found:
            yield found


def test_what_the_notebook_holds_now_is_said_and_what_comes_of_deleting_it(notebook: Kernel):
    notebook.ok(CELL)
    ask = "memlab.advise(memlab.runs['mine'], '200MiB', techniques=['fused'])"
    notebook.ok(f"advice = {ask}")
    assert "Run again" not in notebook.value("advice.text")
    notebook.ok("other = nn.Linear(1 << 14, 1 << 13, bias=False).cuda()")
    notebook.ok(f"advice = {ask}")
    text = notebook.value("advice.text")
    held = r"allocated, with 512\.0 MiB from before the cell; the first time it was .*, with 0 B from before the cell\."
    assert re.search(f"Run again, the cell peaks at .* {held}", text)
    (peak,) = re.findall(
        "Without `other`, which the cell does not use, the peak of the device was predicted as (.*?):", text
    )
    notebook.ok("del other")
    notebook.ok(f"advice = {ask}")
    assert "Run again" not in notebook.value("advice.text")
    assert peak == notebook.value("str(advice.findings.before_bytes)")
