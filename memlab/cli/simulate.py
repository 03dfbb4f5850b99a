"""`memlab simulate`: a command, or a Jupyter kernel, on a simulated GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from memlab.cli.parser import Parser
from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import machine
from memlab.simulated_gpu.machine import Machine, check_count
from memlab.units import GiB, format_bytes, parse_bytes

DESCRIPTION = """Run a command on a GPU that does not exist: memory is accounted to the byte, kernels compute nothing.
Needs Linux on x86-64 and the CUDA build of PyTorch; elsewhere use predictions (%%memtrack --predict)."""
EXAMPLES = """  memlab simulate --card "RTX 4060" -- jupyter lab
  memlab simulate --total 8GiB --capability 8.9 --devices 2 -- python train.py
  memlab simulate --card T4 --machine /tmp/gpu -- python one.py      (then: --machine /tmp/gpu -- python two.py)
  memlab simulate --install-kernel --card "RTX 4060"                 (--remove-kernel removes it)
`memlab cards` lists the cards."""


def main(arguments: Sequence[str]) -> int:
    """`memlab simulate ...`: does not return if it runs a command."""
    parser = make_parser()
    asked = parser.parse_args(arguments)
    with parser.refusing(1):
        try:
            if asked.install_kernel or asked.remove_kernel:
                return _change_kernels(asked)
            _run(asked)
        except KeyboardInterrupt:
            return 130


def make_parser() -> Parser:
    """The options of `memlab simulate`."""
    parser = Parser("simulate", "--card NAME [option ...] -- COMMAND ...", DESCRIPTION, EXAMPLES)
    gpu = parser.add_argument_group("the GPU").add_argument
    gpu("--card", metavar="NAME", help='a card that memlab knows, for example "RTX 4060"')
    gpu("--total", metavar="SIZE", help="instead of a card: the memory that PyTorch sees, for example 8GiB")
    gpu("--capability", metavar="X.Y", help="its compute capability, for example 8.9 (default: 8.6)")
    gpu("--context", metavar="SIZE", help="what each process takes at first use (default: as on such a card)")
    gpu("--devices", metavar="N", type=int, default=1, help="how many there are, 1 to 8 (default: 1)")
    gpu("--machine", metavar="FILE", help="a machine that several commands share; made if it is not there")
    kernel = parser.add_argument_group("a Jupyter kernel")
    action = kernel.add_mutually_exclusive_group()
    action.add_argument("--install-kernel", action="store_true", help="add a kernel on this GPU to Jupyter")
    removed = "remove the kernel of this GPU, or of all if none is named"
    action.add_argument("--remove-kernel", action="store_true", help=removed)
    kernel.add_argument("--json", action="store_true", help="the folders that were written or removed, as JSON")
    place = kernel.add_mutually_exclusive_group()
    place.add_argument("--user", action="store_true", help="for the user (default outside of environments)")
    place.add_argument("--sys-prefix", action="store_true", help="in this environment (default in a venv or conda)")
    place.add_argument("--prefix", metavar="FOLDER", help="in the environment that is in this folder")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")
    return parser


def _run(asked: argparse.Namespace) -> NoReturn:
    from memlab.simulated_gpu import launch

    command = asked.command[1:] if asked.command[:1] == ["--"] else asked.command
    if not command:
        raise SimulatedGpuError("there is no command to run: end with -- and a command, for example -- jupyter lab.")
    if asked.user or asked.sys_prefix or asked.prefix or asked.json:
        raise SimulatedGpuError(
            "--user, --sys-prefix, --prefix and --json are about a kernel: add --install-kernel or --remove-kernel."
        )
    if asked.machine is not None:
        is_described = asked.card or asked.total or asked.capability or asked.context or asked.devices != 1
        where = launch.shared_file(Path(asked.machine), _machine(asked) if is_described else None)
    else:
        where = launch.unnamed_file(_machine(asked))
    variables = launch.environment(os.environ, where)
    if sys.stderr.isatty():
        print(
            f"memlab simulate: {machine.read(Path(where))}: bytes are real, values and times are not", file=sys.stderr
        )
    launch.replace_process(command, variables)


def _machine(asked: argparse.Namespace) -> Machine:
    """The machine that the options describe."""
    from memlab.prediction.cards import find
    from memlab.simulated_gpu.from_card import card_of, device_of

    if asked.card and asked.total:
        raise SimulatedGpuError("--card and --total exclude each other: a card has its memory.")
    if asked.card and asked.capability:
        raise SimulatedGpuError("--card and --capability exclude each other: a card has its capability.")
    if not (asked.card or asked.total):
        raise SimulatedGpuError(
            'which GPU? Name one with --card "RTX 4060", or say --total 8GiB. memlab cards lists them.'
        )
    card = find(asked.card) if asked.card else card_of(parse_bytes(asked.total), _capability(asked.capability or "8.6"))
    context = None if asked.context is None else 0 if asked.context == "0" else parse_bytes(asked.context)
    check_count(asked.devices)
    return Machine((device_of(card, context),) * asked.devices)


def _capability(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,2})\.(\d)", text.strip())
    if found is None:
        raise SimulatedGpuError(f"a capability is two numbers such as 8.9, got {text[:80]!r}.")
    return int(found[1]), int(found[2])


# --- kernels ---


def _change_kernels(asked: argparse.Namespace) -> int:
    from memlab.simulated_gpu import kernelspec, launch

    if asked.command:
        raise SimulatedGpuError("a kernel takes no command: Jupyter starts it.")
    if asked.machine:
        raise SimulatedGpuError("a kernel has a machine of its own: leave out --machine.")
    prefix = asked.prefix or (None if asked.user else sys.prefix if asked.sys_prefix else kernelspec.default_prefix())
    if asked.remove_kernel:
        gone = kernelspec.remove(label_of(asked) if asked.card or asked.total else None, prefix)
        text = "\n".join(f"removed {folder}" for folder in gone) or "no kernel with a simulated GPU was found"
        print(json.dumps({"removed": [str(folder) for folder in gone]}) if asked.json else text)
        return 0
    label = label_of(asked)
    launch.environment(os.environ, "")  # compiles the library, and says here what is missing
    written = kernelspec.install(label, _options(asked), prefix)
    text = f'wrote {written}: "Python (simulated {label})" is in Jupyter\'s launcher'
    print(json.dumps({"written": str(written), "gpu": label}) if asked.json else text)
    return 0


def label_of(asked: argparse.Namespace) -> str:
    """A text for people: "RTX 4060, 8 GiB"."""
    from memlab.prediction.cards import find

    machine = _machine(asked)
    if asked.card:
        card = find(asked.card)
        name, total = card.name, card.total_bytes
    else:
        major, minor = machine.devices[0].compute_capability
        name, total = f"GPU {major}.{minor}", machine.devices[0].total_bytes
    size = f"{total // GiB} GiB" if total % GiB == 0 else format_bytes(total)
    name += "" if size.replace(" GiB", "GB") in name else f", {size}"
    context = f", context {asked.context}" if asked.context else ""
    return f"{f'{asked.devices} × ' if asked.devices > 1 else ''}{name}{context}"


def _options(asked: argparse.Namespace) -> list[str]:
    """The options that describe the same machine again."""
    given = {"--card": asked.card, "--total": asked.total, "--capability": asked.capability, "--context": asked.context}
    found = [part for option, value in given.items() if value for part in (option, value)]
    return [*found, "--devices", str(asked.devices)] if asked.devices > 1 else found
