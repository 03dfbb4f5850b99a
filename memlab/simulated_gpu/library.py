"""The library that stands for all of CUDA's: compiled once per state of its sources into the user's cache, found under every name.

A folder `<key>` in the cache has the library, and a link to it for each name that PyTorch loads. The key depends on the
sources and on what PyTorch imports beyond csrc/symbols.txt, so one library serves all versions that the list covers. The
folder is built under another name and renamed: it is there whole or not at all, and several processes may build it at once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from memlab.errors import SimulatedGpuError
from memlab.simulated_gpu import cuda_symbols, elf, stubs
from memlab.simulated_gpu.cuda_symbols import CudaSymbols
from memlab.simulated_gpu.this_process import LIBRARY as NAME
from memlab.units import one_line

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "lib"
"""Where a wheel has the compiled library, with the key of its sources in the file `key`."""
_COMPILE = ("-O2", "-fPIC", "-fno-builtin", "-w", "-c")
_COMPILERS = ("cc", "gcc", "clang")
_LIMIT_S = 300.0
_STALE_S = 3600.0


def folder_for(wanted: CudaSymbols) -> Path:
    """The folder with the library for a PyTorch that imports these symbols; it is made if it is not there."""
    known = cuda_symbols.listed(SOURCES / "symbols.txt")
    more = wanted.beyond(known)
    folder, symbols = cache() / key(more), known | wanted
    if not _is_whole(folder, symbols):
        _make(folder, symbols, is_listed=not more)
    return folder


def _is_whole(folder: Path, symbols: CudaSymbols) -> bool:
    """Whether all names are there and the library loads: a crash of the machine or a full disk may have cut it short."""
    try:
        _check(folder / NAME)
    except SimulatedGpuError:
        return False
    return all((folder / name).exists() for name in _links(symbols))


def _links(symbols: CudaSymbols) -> frozenset[str]:
    return symbols.libraries.union(cuda_symbols.FOUND_BY_NAME)


def cache() -> Path:
    """The folder of compiled libraries, in the user's cache."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise SimulatedGpuError("there is no home folder for a cache: set XDG_CACHE_HOME.") from None
    if any(character in str(base) for character in ":;$"):
        raise SimulatedGpuError(
            f"the linker cannot search a folder with : ; or $ in its name, such as {str(base)!r}: set XDG_CACHE_HOME."
        )
    return base.absolute() / "memlab" / "simulated_gpu"


def key(more: CudaSymbols) -> str:
    """The state of the sources and the symbols beyond the list."""
    digest = hashlib.sha256(repr((_COMPILE, sorted(more.nodes.items()), sorted(more.libraries))).encode())
    for path in (*sorted(SOURCES.iterdir()), Path(stubs.__file__), Path(__file__)):
        digest.update(f"{path.name} {path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _make(folder: Path, symbols: CudaSymbols, is_listed: bool) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob("unfinished-*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder.parent))
    except OSError as error:
        text = f"cannot write {str(folder.parent)!r}: {error.strerror}. Set XDG_CACHE_HOME to a folder that can be written."
        raise SimulatedGpuError(text) from None
    try:
        if not (is_listed and _take_prebuilt(work, folder.name)):
            compile_into(work, symbols)
            _check(work / NAME)
        for name in _links(symbols):
            (work / name).symlink_to(NAME)
        work.chmod(0o755)
        if folder.exists() and not _is_whole(folder, symbols):  # somebody removed a part of it
            shutil.rmtree(folder, ignore_errors=True)
        work.rename(folder)
    except OSError as error:
        if not (folder / NAME).exists():  # else another process was faster
            raise SimulatedGpuError(f"cannot write {str(folder)!r}: {error.strerror}.") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _take_prebuilt(work: Path, wanted: str) -> bool:
    """Copy the library of a wheel, if there is one that was made of these sources and loads here."""
    try:
        if (PREBUILT / "key").read_text(encoding="ascii").strip() != wanted:
            return False
        shutil.copyfile(PREBUILT / NAME, work / NAME)
        _check(work / NAME)
    except (OSError, ValueError, SimulatedGpuError):
        (work / NAME).unlink(missing_ok=True)
        return False
    return True


def _check(library: Path) -> None:
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise SimulatedGpuError(f"the compiled library does not load: {one_line(str(error))}.") from None


# --- compiling ---


def prebuild(into: Path = PREBUILT) -> None:
    """Compile the library for the listed symbols, for a wheel."""
    into.mkdir(parents=True, exist_ok=True)
    compile_into(into, cuda_symbols.listed(SOURCES / "symbols.txt"))
    (into / "key").write_text(key(CudaSymbols({}, frozenset())), encoding="ascii")


def compile_into(folder: Path, symbols: CudaSymbols) -> None:
    """Compile csrc, with a stub for each symbol that it does not define, into one library with all version nodes."""
    compiler = _compiler()
    with tempfile.TemporaryDirectory(prefix="memlab-") as name:
        work = Path(name)
        run = functools.partial(_run, work)
        run([*compiler, *_COMPILE, *map(str, sorted(SOURCES.glob("*.c")))])
        objects = sorted(work.glob("*.o"))
        missing = set(symbols.nodes).difference(*map(elf.defined, objects))
        (work / "stubs.c").write_text(stubs.c_text(missing), encoding="ascii")
        run([*compiler, *_COMPILE, "stubs.c"])
        (work / "nodes.map").write_text(stubs.version_script(symbols.nodes), encoding="ascii")
        linked = [*map(str, objects), "stubs.o", "-lpthread", "-ldl", "-lm"]
        run([*compiler, "-shared", "-o", NAME, f"-Wl,-soname,{NAME}", "-Wl,--version-script=nodes.map", *linked])
        shutil.copyfile(work / NAME, folder / NAME)


def _compiler() -> Sequence[str]:
    """The command of a C compiler: $CC, else the first there is."""
    try:
        own = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise SimulatedGpuError(
            f"CC is {os.environ['CC']!r}, which is no command ({error}): set or unset it."
        ) from None
    if own:
        if shutil.which(own[0]) is None:
            raise SimulatedGpuError(f"there is no compiler {own[0]!r}, which CC names: install it, or unset CC.")
        return own
    found = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise SimulatedGpuError(
            f"no C compiler was found ({', '.join(_COMPILERS)}): install one, for example gcc, or set CC."
        )
    return [found]


def _run(work: Path, command: Sequence[str]) -> None:
    """Run a command in a folder; where it fails, its messages are kept in a log."""
    try:
        done = subprocess.run(
            command, cwd=work, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SimulatedGpuError(f"the C compiler {command[0]!r} could not be run: {one_line(str(error))}.") from None
    if done.returncode:
        messages = done.stdout + done.stderr
        first = next((line for line in messages.splitlines() if "error" in line), f"exit status {done.returncode}")
        descriptor, log = tempfile.mkstemp(prefix="memlab-simulated-gpu-", suffix=".log")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{shlex.join(command)}\n{messages}")
        raise SimulatedGpuError(
            f"the simulated GPU could not be compiled: {one_line(first.strip())}. All messages are in {log!r}."
        )
