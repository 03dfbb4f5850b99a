"""`memlab run`: a script, unchanged, under the memory sampler."""

from __future__ import annotations

import re
from collections.abc import Sequence

from memlab.cli.parser import Parser, given
from memlab.errors import MemlabError
from memlab.scripts.measured_script import MeasuredScript
from memlab.scripts.recording import Wanted, folder
from memlab.units import parse_bytes

DEVICE = re.compile(r"auto|(?:cpu|cuda|mps|xpu)(?::\d{1,3})?")
"""What a device is called; whether there is one is not known before the script has imported torch."""
DESCRIPTION = """Run a script as python does, measure its memory from the import of torch on, and report at its end (on stderr).
Output, arguments, signals and exit status are the script's own. After an out-of-memory error a page is kept that says
what happened. SIGUSR1 makes a running script report what was measured so far, and go on. In a terminal the last row shows
what is allocated now."""
EXAMPLES = """  memlab run train.py --epochs 3
  memlab run --steps 10 --skip 2 --out runs -m tools.train --config small.yaml
  memlab run --budget 20GiB --json train.py
  memlab run --nproc-per-node 4 --out runs train.py      (by torchrun, all ranks side by side)"""


def main(arguments: Sequence[str]) -> int:
    """`memlab run [OPTIONS] SCRIPT [ARGS...]`; the script's exit status, or 1 if it ended well above its budget."""
    parser = Parser(
        "run", "[OPTIONS] SCRIPT [ARGS...]  |  memlab run [OPTIONS] -m MODULE [ARGS...]", DESCRIPTION, EXAMPLES
    )
    add = parser.add_argument
    add("--name", metavar="NAME", type=given, help="the name of the run (default: that of the script)")
    add("--device", metavar="D", type=given, help="cpu, cuda, cuda:1, mps or xpu (default: whatever the script uses)")
    add("--lines", action="store_true", help="what each line of the script held; slower")
    add("--shapes", action="store_true", help="the shape of what was allocated; slower")
    add("--budget", metavar="SIZE", type=given, help="exit with 1 if the peak of allocated memory is higher: 20GiB")
    add("--skip", metavar="N", type=int, default=0, help="begin after so many optimizer steps")
    add("--steps", metavar="N", type=int, help="measure so many optimizer steps; the script goes on")
    add("--out", metavar="DIR", type=given, help="keep the run and a page about it in this folder")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="the report as one line of JSON")
    quiet = "no report and no live line on stderr; what --out keeps is as ever"
    output.add_argument("--quiet", action="store_true", help=quiet)
    ranks = "run it by torchrun on so many ranks of this machine: a number, gpu or cpu"
    add("--nproc-per-node", metavar="N", help=ranks)
    parser.add_script()
    asked = parser.parse_args(arguments)
    script = parser.script_of(asked)
    with parser.refusing():
        script.check()
        if asked.budget is not None:
            parse_bytes(asked.budget)
        if asked.device is not None and not DEVICE.fullmatch(asked.device):
            raise MemlabError(f"--device is cpu, cuda, cuda:1, mps or xpu, got {asked.device!r:.80}.")
        wanted = Wanted(
            name=asked.name or script.name, device=asked.device, lines=asked.lines, shapes=asked.shapes, budget=asked.budget,
            skip=asked.skip, steps=asked.steps, out=folder(asked.out), as_json=asked.json, quiet=asked.quiet,
        )  # fmt: skip
        count = asked.nproc_per_node
        if count is not None and count not in ("gpu", "cpu", "auto") and not (count.isdecimal() and int(count) > 0):
            raise MemlabError(
                f"--nproc-per-node is a number of ranks, 1 or more, or gpu, cpu or auto, got {count!r:.80}."
            )
    if count is None:
        return MeasuredScript(script, wanted).execute()
    from memlab.scripts.torchrun import Launch  # torchrun's part, which most runs need not

    return Launch(
        count, wanted.name, _options_of_ranks(wanted), script.words, wanted.out, asked.budget, wanted.as_json
    ).execute()


def _options_of_ranks(wanted: Wanted) -> tuple[str, ...]:
    """What each rank is told; the budget is that of all of them, as a rank that exits with 1 would end the others."""
    options = ["--name", wanted.name, "--skip", str(wanted.skip)]
    options += ["--steps", str(wanted.steps)] if wanted.steps is not None else []
    options += ["--device", wanted.device] if wanted.device is not None else []
    options += ["--lines"] if wanted.lines else []
    options += ["--shapes"] if wanted.shapes else []
    return tuple(options)
