"""Children that use PyTorch are named in the report of their parent; helpers are not."""

from __future__ import annotations

import textwrap

import pytest
from processes import python

HEAD = """
import os, subprocess, sys, time
import torch, memlab

def work(rank=0, seconds=2.5):
    kept = [torch.randn(1000, 1000) for _ in range(4)]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        kept[0] = kept[0] @ kept[1] / 1000

def shown(run):
    print("FACTS", run.is_exact, run.peak_bytes, *(gap.name for gap in run.gaps), sep="|")
    print(run.report().text)

"""


def reported(tmp_path, body: str) -> tuple[bool, int, list[str], str]:
    """Whether the run is exact, its peak, the names of its gaps, and its report."""
    script = tmp_path / "script.py"
    script.write_text(HEAD + "if __name__ == '__main__':\n" + textwrap.indent(textwrap.dedent(body), "    "))
    out = python(script, OMP_NUM_THREADS="1")
    line, _, text = out[out.index("FACTS|") :].partition("\n")
    _, is_exact, peak, *gaps = line.split("|")
    return is_exact == "True", int(peak), gaps, text


CHILDREN = {
    "spawn": "torch.multiprocessing.spawn(work, nprocs=2)",
    "subprocess": """
        code = f"import sys; sys.path.insert(0, {sys.path[0]!r}); import script; script.work()"
        subprocess.run([sys.executable, "-c", code])""",
    "fork": """
        pid = os.fork()
        if not pid:
            work(); os._exit(0)
        os.waitpid(pid, 0)""",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("how", CHILDREN)
def test_a_parent_whose_children_did_the_work_does_not_claim_an_exact_peak(tmp_path, how):
    block = textwrap.indent(textwrap.dedent(CHILDREN[how]), "    ")
    is_exact, peak, gaps, text = reported(tmp_path, f"with memlab.track(show=False) as run:\n{block}\nshown(run)")
    assert (is_exact, peak) == (False, 0)
    assert "work in child processes" in gaps
    count = "2 child processes" if how == "spawn" else "1 child process"
    assert f"The work was done elsewhere: {count} with PyTorch ran" in text
    assert "exactly" not in text
    assert text.startswith("Peak ≥ 0 B allocated")


HELPERS = {
    "data loader": """
        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8
            def __getitem__(self, index):
                work(seconds=0.5)
                return torch.zeros(3)
        with memlab.track(show=False) as run:
            for batch in torch.utils.data.DataLoader(Data(), num_workers=2, batch_size=2):
                pass
        """,
    "programs without PyTorch": """
        with memlab.track(show=False) as run:
            subprocess.run(["sleep", "0.7"])
            subprocess.run([sys.executable, "-c", "x = bytearray(10**8); sum(range(30_000_000))"])
        """,
    "a compiler": """
        with memlab.track(show=False) as run:
            torch.compile(lambda x: (x.sin() + x.cos()).sum())(torch.randn(1000))
        """,
}


@pytest.mark.parametrize("what", HELPERS)
def test_helpers_are_not_mentioned(tmp_path, what):
    is_exact, _, gaps, _ = reported(tmp_path, f"{textwrap.dedent(HELPERS[what])}\nshown(run)")
    assert is_exact
    assert not any("child" in name for name in gaps)


def test_children_next_to_work_here_are_a_gap_and_the_peak_is_exact(tmp_path):
    is_exact, peak, gaps, text = reported(
        tmp_path,
        """
        with memlab.track(show=False) as run:
            big = torch.zeros(100_000_000)
            child = torch.multiprocessing.spawn(work, (1.0,), nprocs=1, join=False)
            work(seconds=4)
            child.join()
        shown(run)
        """,
    )
    assert is_exact
    assert peak >= 400_000_000
    assert gaps[-1] == "child processes"
    assert "The work was done elsewhere" not in text
