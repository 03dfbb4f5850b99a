"""`memlab.who`: what it says in text, HTML and frames."""

from __future__ import annotations

import gc
import re

import pytest
import torch
from html_text import Words
from notebook import notebook  # noqa: F401

from memlab.api.who import Who, who
from memlab.errors import MemlabError


@pytest.fixture
def training(notebook):
    notebook.run("""
        model = torch.nn.Linear(30, 40)
        x = torch.ones(6, 30)
        loss = (model(x) ** 2).mean()
        loss.backward()
    """)
    return notebook


def test_the_text_tells_of_every_storage(training):
    found = who()
    text = str(found)
    assert text.startswith(f"memlab who · {len(found.storages)} storages · ")
    assert text == repr(found)
    (row,) = (line for line in text.splitlines() if line.endswith("model.weight (+1 more)"))
    assert row.split() == ["4.69", "KiB", "(40,", "30)", "float32", "parameter", "cpu", "model.weight", "(+1", "more)"]


def test_frames_behind_all_of_it(training):
    found = who()
    frame = found.to_pandas()
    assert ", ".join(frame.columns) == "storage_bytes, shape, dtype, category, device, path, others, address"
    assert frame.storage_bytes.sum() == found.total_bytes
    assert set(frame.path) >= {"model.weight", "model.weight.grad", "x"}
    for by in ("shape", "dtype", "category", "device"):
        grouped = found.by(by)
        assert grouped.to_pandas().storage_bytes.sum() == found.total_bytes
        assert grouped.to_pandas()["count"].sum() == len(found.storages)
        assert list(grouped.to_pandas().index) == list(grouped)
        assert f"memlab who · by {by}" in str(grouped) and " more with " not in str(grouped)
        assert grouped.html
    assert found.by("category")["gradient"].nbytes == 4960
    with pytest.raises(MemlabError, match="cannot group by 'size'"):
        found.by("size")


def test_one_tensor(training):
    found = who(training.value("x"), name="x")
    assert found.paths[0] == "x"
    assert str(found).startswith("memlab who · x · 720 B, (6, 30) float32 on cpu, other · kept alive by ")
    assert list(found.to_pandas().path) == list(found.paths)
    assert "1  x" in str(found)


def test_a_tensor_without_memory_and_one_without_a_name(notebook):
    assert "It holds no memory of its own." in str(who(torch.ones(3, device="meta")))
    notebook.run(
        "from torch.testing._internal.two_tensor import TwoTensor\nt = TwoTensor(torch.ones(3), torch.ones(3))"
    )
    assert "kept alive by" in str(who(notebook.value("t")))


def test_a_long_path_keeps_its_end(notebook):
    inner = torch.ones(9)
    for number in range(15):
        inner = {f"number {number} of the table": inner}
    notebook.names["table"] = inner
    (path,) = (one.path for one in who().storages if one.path.startswith("table"))
    assert len(path) > 300 and path.endswith("['number 0 of the table']")
    for found in (who(), who(notebook.value(path))):
        row = next(line for line in str(found).splitlines() if " table['number 14" in line)
        assert row.endswith("…" + path[-99:])


def test_earlier_names_of_attributes_still_work(training):
    found = who()
    assert found.census is found.live
    assert found.listing.text() == found.text and found.by("dtype").listing.text() == found.by("dtype").text


def test_something_that_holds_tensors(training):
    found = who(training.value("[model]"), name="it")
    assert "what it keeps alive · 4 storages" in str(found)
    with pytest.raises(MemlabError, match="this is a dict without a tensor that has memory"):
        who({})


def test_a_device_is_refused_that_is_none():
    for device in ("nowhere", object(), "cuda:x"):
        with pytest.raises(MemlabError, match="not a device"):
            who(device=device)


def test_no_name_of_the_users_gets_into_html_or_steers_a_terminal(notebook):
    evil = "<script>alert(1)</script>\x1b[2J\n&"
    notebook.names["d"] = {evil: torch.ones(123)}
    notebook.names[evil] = torch.ones(124)
    found = who()
    assert "<script" not in found.html
    assert set(Words(found.html).tags) <= {"div", "b", "table", "thead", "tbody", "tr", "th", "td", "span"}
    text = str(found)
    assert "\x1b" not in text
    assert all(len(line) < 400 for line in text.splitlines())
    assert "\x1b" not in str(who(notebook.value("d"), name=evil))


def test_long_tables_are_cut_and_say_so(notebook):
    notebook.run("many = {f'{i} of 100': torch.ones(7) for i in range(100)}")
    text = str(who())
    assert "more with" in text
    assert len(text.splitlines()) < 60
    assert len(who().to_pandas()) >= 100
    assert len(who().html) < 30_000


def test_what_a_list_gathers_is_one_row(notebook):
    notebook.run("""
        net = torch.nn.Linear(1000, 10)
        few = [torch.ones(77) for _ in range(3)]
        batches = [{'x': torch.ones(50 + i)} for i in range(30)]
        losses = [net(torch.ones(8, 1000)).sum() for _ in range(20)]
    """)
    found = who()
    rows = {line.split("  ")[-1].strip(): line for line in str(found).splitlines()}
    assert rows["losses[…]"].split()[:4] == ["80", "B", "20", "()"]
    assert rows["losses[…].grad_fn -> ..."].split()[:3] == ["625.0", "KiB", "20"]
    assert "various" in rows["batches[…]['x']"]
    assert {"few[0]", "few[1]", "few[2]"} <= set(rows)
    assert {f"losses[{i}]" for i in range(20)} <= set(found.to_pandas().path)  # the frame has them all
    assert "losses[…]" in found.html


def test_layers_and_what_one_graph_keeps_are_a_row_for_each_shape(notebook):
    notebook.run("""
        net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(12)), torch.nn.Linear(16, 7))
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(64, 16)).sum().backward()
        optimizer.step()
        y = net(torch.ones(64, 16))
    """)
    lines = [re.split(r"  +", line.strip()) for line in str(who()).splitlines()]
    counts = {line[-1]: int(line[1]) for line in lines if len(line) == 7 and line[1].isdecimal()}
    weights = ["net.*.weight", "net.*.weight.grad", "optimizer.state[net.*.weight]['exp_avg']"]
    assert [counts[path] for path in weights] == [12, 12, 12]
    (kept,) = (path for path in counts if path.startswith("y.grad_fn"))
    assert counts[kept] == 12 and kept.endswith("saved mat1")
    assert "net.12.weight" in str(who())  # of another shape


def test_a_tensor_says_what_its_graph_keeps(notebook):
    notebook.run("""
        net = torch.nn.Linear(1000, 10)
        x = torch.ones(8, 1000)
        loss = net(x * 2).exp().sum()
        plain = torch.ones(3)
    """)
    found = who(notebook.value("loss"), name="loss")
    kept = 8 * 1000 * 4 + 8 * 10 * 4  # what the linear layer saved of x * 2, and the result of exp
    assert found.graph_bytes == kept
    assert "This tensor keeps 31.56 KiB through its graph: 2 storages. `.detach()`" in str(found)
    assert "through its graph" in found.html
    notebook.run("named = net(x).sum()")
    text = str(who(notebook.value("named")))
    assert "through its graph: 1 storage, 1 of them (31.25 KiB) under other names too." in text
    assert who(notebook.value("plain")).notes == ()
    assert who(notebook.value("net.weight.sum()")).graph_bytes == 0


def test_what_no_name_leads_to_is_said(notebook):
    gc.disable()
    try:
        notebook.run("ring = [torch.ones(500)]\nring.append(ring)\ndel ring")
        text = str(who())
    finally:
        gc.enable()
    assert "(no name leads here)" in text
    assert "cycles that wait for gc.collect()" in text
    assert "1.95 KiB by a list" in text


def test_the_answer_is_made_of_texts_and_numbers(training):
    def plain(thing: object) -> bool:
        return all(map(plain, thing)) if isinstance(thing, tuple) else isinstance(thing, str | int | float | None)

    found: Who = who(training.value("x"))
    assert plain(found.paths)
    for one in found.storages:
        assert all(plain(getattr(one, name)) for name in one.__slots__)
