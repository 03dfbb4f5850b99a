"""Start a command on a simulated machine: its environment, and the file that is the machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import cuda_symbols, library, machine, torch_build
from memlab.simulated_gpu.machine import Machine
from memlab.simulated_gpu.this_process import VARIABLE


def environment(base: Mapping[str, str], machine_file: str) -> dict[str, str]:
    """The environment in which this interpreter's PyTorch finds the simulated machine; the library is compiled if need be."""
    torch = torch_build.suitable(torch_build.installed())
    linkages = torch.linkages()
    wanted = cuda_symbols.imported(linkages)
    folder = library.folder_for(wanted)
    names = sorted(wanted.libraries)
    preloaded = names if torch_build.libraries_beside(torch, linkages, names) else []
    return prepared(base, machine_file, folder, preloaded)


def prepared(base: Mapping[str, str], machine_file: str, folder: Path, preloaded: Sequence[str] = ()) -> dict[str, str]:
    """The same, for a known library. Names that are loaded before the program beat the folders that PyTorch's files name."""
    preload = dict.fromkeys([*preloaded, *base.get("LD_PRELOAD", "").replace(":", " ").split()])
    return {
        **base,
        VARIABLE: machine_file,
        "PATH": _first(str(Path(sys.executable).parent), base.get("PATH", os.defpath), os.pathsep),
        "LD_LIBRARY_PATH": _first(str(folder), base.get("LD_LIBRARY_PATH", ""), ":"),
        "TRITON_LIBCUDA_PATH": str(folder),
        **({"LD_PRELOAD": " ".join(preload)} if preloaded else {}),
    }


def _first(folder: str, path: str, separator: str) -> str:
    others = [part for part in path.split(separator) if part and part != folder]
    return separator.join([folder, *others])


def unnamed_file(described: Machine) -> str:
    """The file of a machine that lives as long as this process and what it becomes by exec."""
    descriptor = os.memfd_create("memlab-simulated-gpu", 0)  # no MFD_CLOEXEC: the command holds it open
    os.write(descriptor, described.to_bytes())
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def shared_file(path: Path, described: Machine | None) -> str:
    """The file of a machine that several commands share: made if it is not there, else it must be the same machine."""
    path = path.absolute()
    if not os.path.exists(path):  # noqa: PTH110  Path.exists raises if the name is too long or the folder is closed
        if described is None:
            raise SimulatedGpuError(
                f'there is no machine {str(path)!r} yet: say what it has, for example --card "RTX 4060".'
            )
        _write_new(path, described)
    found = machine.read(path)
    if described is not None and found != described:
        raise SimulatedGpuError(
            f"{str(path)!r} is another machine ({found}): leave out what it should have, or remove it."
        )
    return str(path)


def _write_new(path: Path, described: Machine) -> None:
    """Write it under another name and link it, so that a file under its own name is complete and never replaced."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        unfinished.write_bytes(described.to_bytes())
        with contextlib.suppress(FileExistsError):  # another command was faster
            path.hardlink_to(unfinished)
        unfinished.unlink()
    except OSError as error:
        raise SimulatedGpuError(f"cannot write {str(path)!r}: {error.strerror or error}.") from None


def replace_process(command: Sequence[str], variables: Mapping[str, str]) -> NoReturn:
    """Become the command: it keeps this process's number, so that the file of its machine stays where it is."""
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        hint = f" Write python {command[0]}." if command[0].endswith(".py") else ""
        hint = hint or (" Install it: pip install jupyterlab." if command[0].startswith("jupyter") else "")
        raise SimulatedGpuError(f"there is no command {command[0]!r:.200}.{hint}")
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(program, list(command), dict(variables))
    except OSError as error:
        raise SimulatedGpuError(f"cannot run {program!r}: {error.strerror or error}.") from None
