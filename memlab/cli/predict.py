"""`memlab predict`: what a script would take on a GPU, without one."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.cli.parser import UNKNOWN, Parser, add_script, given, script_of
from memlab.errors import MemlabError
from memlab.scripts.script import Script
from memlab.units import number_of

if TYPE_CHECKING:
    from memlab.api.predict import Prediction, ThisRank

FITS, DOES_NOT_FIT = 0, 1
STATUS = {"yes": FITS, "no": DOES_NOT_FIT, "close": UNKNOWN}
_OURS = f'File "{Path(__file__).parent.parent}{os.sep}'
REFERENCE = "H200"
"""Without a card the script is predicted for this one, whose memory is the largest of those with common kernels."""

RAISED = "the step raised in the dry run"
"""How an error of what is predicted begins; here that is a script."""
NOTHING = 'there is nothing to predict: the script allocated nothing on a GPU. Let it use the device "cuda".'
DESCRIPTION = """Predict what a script would take on a GPU, without one: it runs on tensors without data in a child process.
Nothing that it writes comes back. Exit status: 0 fits, 1 does not fit, 2 wrong usage, 3 too close to call or unknown."""
EXAMPLES = """  memlab predict --card "RTX 4060" --steps 2 train.py --batch 32
  memlab predict train.py                      (on every card that memlab knows)
  memlab predict --card 24GiB --json -m tools.train
  memlab predict --card "A100 80GB" --nproc-per-node 8 --nnodes 2 train.py"""


def main(arguments: Sequence[str]) -> int:
    """`memlab predict [--card CARD] [--steps N] SCRIPT [ARGS...]`; whether it fits as exit status."""
    usage = "[OPTIONS] SCRIPT [ARGS...]  |  memlab predict [OPTIONS] -m MODULE [ARGS...]"
    parser = Parser("predict", usage, DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    add(
        "--card",
        metavar="NAME|SIZE",
        type=given,
        help='"RTX 4060", 24GiB (default: every card known, and 0 if it fits on any)',
    )
    add("--steps", metavar="N", type=int, help="predict so many optimizer steps, then end (default: the whole script)")
    add(
        "--nproc-per-node",
        metavar="N",
        type=given,
        help="as one of so many ranks on a machine, each with a GPU of its own",
    )
    add("--nnodes", metavar="M", type=given, help="and on so many machines; several numbers, 1,2,4, give a table")
    add(
        "--mesh",
        metavar="4,2",
        type=given,
        help="the mesh that the ranks form, as init_device_mesh gets it: its corners are predicted",
    )
    add("--out", metavar="FILE", type=given, help="keep the prediction: memlab show, compare and check read it")
    add("--limit", metavar="SECONDS", type=float, help="give up after so long")
    add("--json", action="store_true", help="one line of JSON; what the script prints goes to stderr")
    add_script(parser)
    asked = parser.parse_args(arguments)
    script = script_of(asked, parser)
    if asked.steps is not None and asked.steps < 1:
        parser.error(f"--steps is a number of optimizer steps, 1 or more, got {asked.steps}")
    with parser.refusing():
        script.check()
        from memlab.prediction.cards import find

        mesh = _mesh(asked.mesh)
        jobs = _jobs(asked, mesh)
        card = find(asked.card or REFERENCE)
        if asked.limit is not None and not asked.limit > 0:
            raise MemlabError(f"--limit is a number of seconds above 0, got {asked.limit}.")
        if asked.out is not None:
            from memlab.trace.file import savable

            savable(asked.out)  # not only after the script has run
    with parser.refusing(UNKNOWN):
        from memlab.api.predict import configured, predict_ranks, predict_step
        from memlab.api.scaling import scaling

        work = functools.partial(_work, script, asked.steps, asked.json)
        try:
            if not jobs:
                found = predict_step(work, card, script.name, configured(None), asked.limit)
            elif len(jobs) == 1:
                found = predict_ranks(work, card, script.name, configured(None), jobs[0], asked.limit, mesh=mesh)
            else:
                sizes, local = [job.world_size for job in jobs], jobs[-1].local_world_size
                table = scaling(
                    work, card, world_sizes=sizes, local_world_size=local, name=script.name, limit_s=asked.limit
                )
                if not any(row.allocated_bytes[1] for row in table.rows):
                    raise MemlabError(NOTHING)
                print(table.to_pandas().to_json(orient="records") if asked.json else table.text)
                return _of_table(row.fits for row in table.rows)
        except MemlabError as error:
            print(_where_it_raised(error), end="", file=sys.stderr)
            said = (
                str(error).replace(f"{RAISED}: MemlabError: ", "").replace(RAISED, "the script raised in the dry run")
            )
            raise MemlabError(said) from None
        if asked.out is not None:
            found.save(asked.out)
        return _answer(found, asked)


def _mesh(text: str | None) -> tuple[int, ...]:
    words = () if text is None else text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise MemlabError(f"--mesh is the shape of a mesh of ranks such as 4,2, got {text!r:.80}.")
    return tuple(map(int, words))


def _jobs(asked: Any, mesh: tuple[int, ...]) -> list[ThisRank]:
    """The first ranks of the jobs that were asked for, as torchrun's options say them; the smallest first."""
    from memlab.api.predict import first_rank

    if asked.nproc_per_node is None and asked.nnodes is None:
        return [first_rank(math.prod(mesh), None)] if mesh else []
    local, nodes = _numbers("--nproc-per-node", asked.nproc_per_node), _numbers("--nnodes", asked.nnodes)
    if len(local) > 1 and len(nodes) > 1:
        raise MemlabError("--nproc-per-node and --nnodes both have several numbers; give several of one.")
    jobs = [first_rank(each * count, each) for each in local for count in nodes]
    if mesh and [job.world_size for job in jobs] != [math.prod(mesh)]:
        asks = "--nproc-per-node times --nnodes is another number, or several"
        raise MemlabError(f"--mesh {asked.mesh:.80} has {number_of(math.prod(mesh), 'rank')}, and {asks}.")
    return jobs


def _numbers(option: str, text: str | None) -> list[int]:
    words = (text or "1").split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise MemlabError(f"{option} is a number of 1 or more, or several such as 1,2,4, got {text!r:.80}.")
    return sorted({int(word) for word in words})


def _of_table(answers: Iterable[str]) -> int:
    """The exit status for several cards or jobs: whether it fits on any."""
    found = set(answers)
    return FITS if "yes" in found else UNKNOWN if "close" in found else DOES_NOT_FIT


def _where_it_raised(error: MemlabError) -> str:
    """The traceback in the script; "" if all of it is in memlab, as where the script exited."""
    entries = "\n".join(getattr(error, "__notes__", ())).split("\n\n")
    shown = [entry for entry in entries if not entry.lstrip().startswith(_OURS)]
    return "\n".join(shown) if any(entry.lstrip().startswith("File ") for entry in shown) else ""


def _work(script: Script, steps: int | None, prints_aside: bool) -> None:
    """The script in the child; it ends after its steps as if it had exited. `prints_aside`: what it prints goes to stderr."""
    hooks = []
    if steps is not None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        taken: dict[int, int] = {}

        def count(optimizer: Any, args: Any, kwargs: Any) -> None:
            taken[id(optimizer)] = taken.get(id(optimizer), 0) + 1
            if taken[id(optimizer)] == steps:
                raise SystemExit(0)

        hooks.append(register_optimizer_step_post_hook(count))
    try:
        with contextlib.redirect_stdout(sys.stderr if prints_aside else sys.stdout):
            script.run()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise MemlabError(f"the script ended with status {ended.code!s:.100}.") from None
    finally:
        for hook in hooks:
            hook.remove()


def _answer(found: Prediction, asked: Any) -> int:
    from memlab.api.fit import fit
    from memlab.api.predict import asks_for_nothing

    raised = found.trace.notes.get("raised") is True
    if asks_for_nothing(found.forecast) and not raised:
        raise MemlabError(NOTHING)
    if asked.card is None:
        table = fit(found)
        print(table.to_pandas().to_json(orient="records") if asked.json else table.text)
        return UNKNOWN if raised else _of_table(row.fits for row in table.rows)
    if asked.json:
        names = ("allocated_bytes", "reserved_bytes", "peak_device_bytes", "margin_bytes")
        sizes = {name: list(getattr(found, name)) for name in names}
        facts: dict[str, Any] = {
            "card": found.card.name,
            "fits": "unknown" if raised and found.fits != "no" else found.fits,
            **sizes,
        }
        if found.ranks:
            facts["world_size"] = found.job.world_size if found.job is not None else 1
            facts["ranks"] = {rank: list(one.peak_device_bytes) for rank, one in found.ranks.items()}
        print(json.dumps({**facts, "out_of_memory": found.out_of_memory, "assumptions": list(found.assumptions)}))
    else:
        print(found.report().text)
    return UNKNOWN if raised and found.fits != "no" else STATUS[found.fits]
