"""`memlab predict`: what a script would take on a GPU, without one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlab.cli import language_model
from memlab.cli.language_model import REFERENCE
from memlab.cli.parser import UNKNOWN, WRONG_USAGE, Parser, given, status_of
from memlab.errors import MemlabError
from memlab.scripts.script import Script
from memlab.scripts.torchrun import remove_leftovers
from memlab.units import number_of, one_line

if TYPE_CHECKING:
    from memlab.api.predict import ThisRank
    from memlab.api.prediction import Prediction

_PLACE = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?\n *(?P<code>.*)')
INSTALLED = re.compile(r"site-packages|dist-packages|lib[\\/]python3|<frozen ")
"""What is in the paths of files that are not the user's."""
LONGEST = 400
_PER_DEVICE = ("allocated_bytes", "reserved_bytes", "device_bytes")
_OURS = f'File "{Path(__file__).parent.parent}{os.sep}'
RAISED = "the step raised in the dry run"
"""How an error of what is predicted begins; here that is a script."""
NOTHING = 'there is nothing to predict: the script allocated nothing on a GPU. Let it use the device "cuda".'
DESCRIPTION = """Predict what a script would take on a GPU, without one: it runs on tensors without data in a child process.
Nothing that it writes comes back. Exit status: 0 fits, 1 does not fit, 2 wrong usage, 3 too close to call or unknown."""
EXAMPLES = """  memlab predict --card "RTX 4060" --steps 2 train.py --batch 32
  memlab predict train.py                      (on every card that memlab knows)
  memlab predict --card 24GiB --json -m tools.train
  memlab predict --card T4 --devices 2 train.py  (a model on cuda:0 and cuda:1)
  memlab predict --card "A100 80GB" --nproc-per-node 8 --nnodes 2 train.py
  memlab predict hf:ORG/NAME --help            (a language model by its name)"""


def main(arguments: Sequence[str]) -> int:
    """`memlab predict [--card CARD] [--steps N] SCRIPT [ARGS...]`; whether it fits as exit status."""
    if language_model.asks_for_model(arguments):
        return language_model.main(arguments)
    parser = _parser()
    asked = parser.parse_args(arguments)
    script = parser.script_of(asked)
    if asked.steps is not None and asked.steps < 1:
        parser.error(f"--steps is a number of optimizer steps, 1 or more, got {asked.steps}")
    with parser.refusing():
        script.check()
        remove_leftovers()
        jobs, mesh = _jobs(asked)
        how = _how(asked, jobs)
        if asked.out is not None:
            from memlab.trace.file import savable

            savable(asked.out)  # not only after the script has run
    with parser.refusing(UNKNOWN):
        from memlab.api.predict import StepToPredict, configured, predict_both_ends, predict_ranks
        from memlab.prediction.assumptions import AssumeError

        work = functools.partial(_work, script, asked.steps, asked.json)
        try:
            if len(jobs) > 1:
                return _scaling(work, script.name, jobs, how, asked)
            what = StepToPredict(work, name=script.name, conf=configured(None, how["torch_version"]), **how)
            found = predict_ranks(what, jobs[0], asked.limit, mesh) if jobs else predict_both_ends(what, asked.limit)
        except AssumeError as error:
            parser.exit(WRONG_USAGE, f"{parser.prog}: {error}\n")
        except MemlabError as error:
            if asked.traceback:
                print(_traceback(error), end="", file=sys.stderr)
            raise MemlabError(_said(error, asked.traceback)) from None
        try:
            return _answer(found, asked)
        finally:
            if asked.out is not None:  # after the answer, which a full disk must not cost
                found.save(asked.out)


def _parser() -> Parser:
    usage = (
        "[OPTIONS] SCRIPT [ARGS...]  |  memlab predict [OPTIONS] -m MODULE [ARGS...]  |  memlab predict MODEL [OPTIONS]"
    )
    parser = Parser("predict", usage, DESCRIPTION, EXAMPLES)
    add = parser.add_argument
    every = '"RTX 4060", 24GiB (default: every card known, and 0 if it fits on any)'
    add("--card", metavar="NAME|SIZE", type=given, help=every)
    add("--steps", metavar="N", type=int, help="predict so many optimizer steps, then end (default: the whole script)")
    add("--devices", metavar="N", type=int, default=1, help="so many of the card, as cuda:0, cuda:1, ... (default: 1)")
    ranks = "as one of so many ranks on a machine, each with a GPU of its own"
    add("--nproc-per-node", metavar="N", type=given, help=ranks)
    add("--nnodes", metavar="M", type=given, help="and on so many machines; several numbers, 1,2,4, give a table")
    mesh = "the mesh that the ranks form, as init_device_mesh gets it: its corners are predicted"
    add("--mesh", metavar="4,2", type=given, help=mesh)
    add("--lines", action="store_true", help="what each line of the script held, in what --out keeps; slower")
    assume = "take this for a value that the report lists as assumed; may be repeated"
    add("--assume", metavar="KEY=VALUE", action="append", default=[], help=assume)
    add("--out", metavar="FILE", type=given, help="keep the prediction: memlab show, compare and check read it")
    parser.add_prediction()
    add("--traceback", action="store_true", help="if the script raises: where, as python shows it")
    add("--json", action="store_true", help="one line of JSON; what the script prints goes to stderr")
    parser.add_script()
    return parser


def _jobs(asked: Any) -> tuple[list[ThisRank], tuple[int, ...]]:
    """The first ranks of the jobs that were asked for, the smallest first, and the mesh that the ranks form."""
    from memlab.api.predict import first_rank

    mesh = tuple(_numbers("--mesh is the shape of a mesh of ranks such as 4,2", asked.mesh)) if asked.mesh else ()
    if asked.nproc_per_node is None and asked.nnodes is None:
        return ([first_rank(math.prod(mesh), None)] if mesh else []), mesh
    local, nodes = (
        sorted(set(_numbers(f"{option} is a number of 1 or more, or several such as 1,2,4", text or "1")))
        for option, text in (("--nproc-per-node", asked.nproc_per_node), ("--nnodes", asked.nnodes))
    )
    if len(local) > 1 and len(nodes) > 1:
        raise MemlabError("--nproc-per-node and --nnodes both have several numbers; give several of one.")
    jobs = [first_rank(each * count, each) for each in local for count in nodes]
    if mesh and [job.world_size for job in jobs] != [math.prod(mesh)]:
        asks = "--nproc-per-node times --nnodes is another number, or several"
        raise MemlabError(f"--mesh {asked.mesh:.80} has {number_of(math.prod(mesh), 'rank')}, and {asks}.")
    return jobs, mesh


def _how(asked: Any, jobs: Sequence[ThisRank]) -> dict[str, Any]:
    """What the options say of the prediction, checked, by the names of StepToPredict."""
    from memlab.api.predict import devices_of
    from memlab.prediction.assumptions import parsed
    from memlab.prediction.cards import find
    from memlab.prediction.torch_versions import checked_version

    how = {
        "card": find(asked.card or REFERENCE),
        "given": parsed(asked.assume),
        "torch_version": checked_version(asked.torch),
        "devices": devices_of(asked.devices),
        "functions": () if asked.lines else None,
    }
    if jobs and asked.devices > 1:
        raise MemlabError("--devices goes with one process: of a job each rank has one GPU.")
    if asked.assume and len(jobs) > 1:
        raise MemlabError("--assume goes with one number of ranks, not with a table of several.")
    return how


def _numbers(what: str, text: str) -> list[int]:
    """The numbers, 1 or more, between commas; `what` says in the error what the option takes."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise MemlabError(f"{what}, got {text!r:.80}.")
    return list(map(int, words))


def _traceback(error: MemlabError) -> str:
    """The traceback in the script; "" if all of it is in memlab, as where the script exited."""
    entries = "\n".join(getattr(error, "__notes__", ())).split("\n\n")
    shown = [entry for entry in entries if not entry.lstrip().startswith(_OURS)]
    return "\n".join(shown) if any(entry.lstrip().startswith("File ") for entry in shown) else ""


def _said(error: MemlabError, is_whole: bool) -> str:
    """What is said of an error: one line, and if it was raised in the script the line of the script that led to it."""
    said = one_line(str(error).replace(f"{RAISED}: MemlabError: ", ""), LONGEST)
    places = list(_PLACE.finditer(_traceback(error)))
    if is_whole or not places:
        return said.replace(RAISED, "the script raised in the dry run")
    of_the_user = [one for one in places if not INSTALLED.search(one["file"])]
    place = (of_the_user or places)[-1]
    function = f", in {place['function']}()" if place["function"] not in (None, "<module>") else ""
    where = f"the script raised in the dry run at {Path(place['file']).name}:{place['line']}{function}"
    return f"{said.replace(RAISED, where)}\n    {place['code']}\n--traceback shows all of it."


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


def _scaling(work: Callable[[], None], name: str, jobs: Sequence[ThisRank], how: dict[str, Any], asked: Any) -> int:
    """Print the table of several jobs; its status."""
    from memlab.api.scaling import scaling

    where = {"local_world_size": jobs[-1].local_world_size, "torch_version": how["torch_version"]}
    sizes = [job.world_size for job in jobs]
    table = scaling(work, how["card"], name=name, limit_s=asked.limit, world_sizes=sizes, **where)
    if not any(row.allocated_bytes[1] for row in table.rows):
        raise MemlabError(NOTHING)
    print(table.to_pandas().to_json(orient="records") if asked.json else table.text)
    return status_of(row.fits for row in table.rows)


def _answer(found: Prediction, asked: Any) -> int:
    """Print what was predicted, for the card or for every one; its status."""
    from memlab.api.fit import fit
    from memlab.api.prediction import asks_for_nothing

    raised = found.trace.notes.get("raised") is True
    if asks_for_nothing(found.forecast) and not raised:
        raise MemlabError(NOTHING)
    if asked.card is None:
        table = fit(found)
        print(table.to_pandas().to_json(orient="records") if asked.json else table.text)
        return UNKNOWN if raised else status_of(row.fits for row in table.rows)
    is_known = not raised or found.fits == "no"
    print(json.dumps(_facts(found, is_known)) if asked.json else found.report().text)
    return status_of([found.fits]) if is_known else UNKNOWN


def _facts(found: Prediction, is_known: bool) -> dict[str, Any]:
    """What --json prints of a prediction for a card."""
    names = ("allocated_bytes", "reserved_bytes", "peak_device_bytes", "margin_bytes")
    facts: dict[str, Any] = {"card": found.card.name, "torch": found.torch_version}
    facts["fits"] = found.fits if is_known else "unknown"
    facts |= {name: list(getattr(found, name)) for name in names}
    if len(found.trace.made_by.devices) > 1:
        facts["devices"] = [
            {"device": one.index, "fits": one.fits, **{name: list(getattr(one, name)) for name in _PER_DEVICE}}
            for one in found.by_device.values()
        ]
    if found.ranks:
        facts["world_size"] = found.job.world_size if found.job is not None else 1
        facts["ranks"] = {rank: list(one.peak_device_bytes) for rank, one in found.ranks.items()}
    facts |= {"out_of_memory": found.out_of_memory, "assumptions": list(found.assumptions)}
    facts["assumed"] = [dataclasses.asdict(one) for one in found.assumptions.values]
    if (least := found.trace.notes.get("fewest")) is not None:
        facts["fewest"] = least
    return facts
