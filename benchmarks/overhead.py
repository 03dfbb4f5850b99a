"""How much slower a step gets while a memory tool watches it: one command, one table.

    python -m benchmarks.overhead                         # the CPU workloads, and GPT-2 small where CUDA is available
    python -m benchmarks.overhead -w resnet -t memlab -t "dispatch mode that does nothing" -n 21
    python -m benchmarks.overhead -w gpt2 -t "memlab and its report" --steps 20      # a whole cell of 20 steps

Each workload and tool gets a process of its own. In it, stretches of bare steps and of watched steps alternate; a
ratio is the CPU time (all threads) of a watched stretch over the mean of the bare ones around it. The time to begin and
end watching is kept apart ("begin + end"), except where a tool must begin anew for each step. Tools that are absent are
skipped, with the reason. It compares time only, not what the tools find.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memlab import workloads

CPU_WORKLOADS = ("vgg", "resnet", "transformer", "unet")
STRETCH_S = 0.25
RESULTS = Path(__file__).parent / "results"
Step = Callable[[], float]


class Skip(Exception):
    """Why a tool cannot be measured here."""


# --- the tools: each takes the step and returns what to enter around a stretch of steps -------------------------------


def _module(name: str) -> Any:
    try:
        return __import__(name)
    except Exception as error:  # old packages fail in many ways on a new Python
        raise Skip(f"{name} cannot be imported ({type(error).__name__}: {error})") from error


def memlab(step: Step) -> AbstractContextManager[Any]:
    module = _module("memlab")
    if not hasattr(module, "track"):
        raise Skip("memlab.track does not exist yet")
    return module.track(show=False)


@contextlib.contextmanager
def report(step: Step) -> Iterator[None]:
    with memlab(step) as run:
        yield
    str(run.report())


def nothing(step: Step) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


class Passing(TorchDispatchMode):
    """The floor of every tool that watches operators from Python."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func._op(*args, **kwargs) if kwargs else func._op(*args)


def dispatch_mode(step: Step) -> AbstractContextManager[Any]:
    return Passing()


@contextlib.contextmanager
def tracker(step: Step) -> Iterator[None]:
    from memlab.probes.storage_tracker import StorageTracker

    probe = StorageTracker()
    probe.start()
    try:
        yield
    finally:
        probe.stop()


@contextlib.contextmanager
def history(step: Step) -> Iterator[None]:
    if not torch.cuda.is_available():
        raise Skip("needs CUDA")
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


def profiler(step: Step) -> AbstractContextManager[Any]:
    return torch.profiler.profile(profile_memory=True, with_stack=True)


def mem_tracker(step: Step) -> AbstractContextManager[Any]:
    from torch.distributed._tools.mem_tracker import MemTracker

    return MemTracker()


@contextlib.contextmanager
def pytorch_memlab(step: Step) -> Iterator[None]:
    if not torch.cuda.is_available():
        raise Skip("without CUDA it records nothing")
    line_profiler = _module("pytorch_memlab").LineProfiler(step)
    line_profiler.enable()
    try:
        yield
    finally:
        line_profiler.disable()


@contextlib.contextmanager
def memray(step: Step) -> Iterator[None]:
    module = _module("memray")
    with tempfile.TemporaryDirectory() as folder, module.Tracker(Path(folder) / "recording.bin"):
        yield


TOOLS: dict[str, Callable[[Step], AbstractContextManager[Any]]] = {
    "memlab": memlab,
    "memlab and its report": report,
    "memlab's tracker alone": tracker,
    "dispatch mode that does nothing": dispatch_mode,
    "allocator history alone": history,
    "torch.profiler (memory, stacks)": profiler,
    "MemTracker": mem_tracker,
    "pytorch_memlab": pytorch_memlab,
    "memray": memray,
    "nothing (noise)": nothing,
}
ANEW_EACH_STEP = {"MemTracker"}  # it refuses a second forward of a root module
CPU_ONLY = {"memlab's tracker alone", "dispatch mode that does nothing", "memray"}


# --- measuring, in a process of its own -------------------------------------------------------------------------------


def cpu_s(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def repeat(step: Step, count: int) -> Callable[[], None]:
    def work() -> None:
        for _ in range(count):
            step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    return work


def watched_s(tool: str, step: Step, count: int) -> tuple[float, float]:
    """CPU seconds of `count` watched steps, and of beginning and ending to watch."""
    if tool in ANEW_EACH_STEP:

        def anew() -> float:
            with TOOLS[tool](step):
                return step()

        return cpu_s(repeat(anew, count)), 0.0
    start = time.process_time()
    with TOOLS[tool](step):
        inside = cpu_s(repeat(step, count))
    return inside, time.process_time() - start - inside


def measure(workload: str, tool: str, repeats: int, steps: int | None) -> dict[str, Any]:
    """The ratios of one tool on one workload, in stretches of `steps` steps, or of as many as take `STRETCH_S`."""
    torch.set_num_threads(1)
    step = getattr(workloads, workload)()
    repeat(step, 3)()
    count = steps or max(1, round(STRETCH_S / cpu_s(step)))
    try:
        watched_s(tool, step, 1)
    except Skip as reason:
        return {"skipped": str(reason)}
    bare, ratios, wholes, edges = [cpu_s(repeat(step, count))], [], [], []
    for _ in range(repeats):
        watched, edge = watched_s(tool, step, count)
        bare.append(cpu_s(repeat(step, count)))
        ratios.append(2 * watched / (bare[-2] + bare[-1]))
        wholes.append(2 * (watched + edge) / (bare[-2] + bare[-1]))
        edges.append(edge)
    step_s = statistics.median(bare) / count
    times = {"step_s": step_s, "steps": count, "edge_s": statistics.median(edges)}
    return {"ratios": ratios, "ratios_with_edges": wholes, **times}


# --- the table --------------------------------------------------------------------------------------------------------


def in_a_process(workload: str, tool: str, repeats: int, steps: int | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.overhead", "--measure", workload, tool, "-n", str(repeats)]
    command += ["--steps", str(steps)] if steps else []
    root = Path(__file__).parent.parent
    env = os.environ | {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"skipped": f"failed with status {done.returncode}: {last[:200]}"}


def cell(result: dict[str, Any]) -> str:
    if "skipped" in result:
        return "-"
    low, middle, high = statistics.quantiles(result["ratios"], n=4)
    whole = statistics.median(result["ratios_with_edges"])
    return f"{middle:.2f} ({low:.2f} to {high:.2f}); {whole:.2f}"


def markdown(results: dict[str, dict[str, dict[str, Any]]], facts: dict[str, str]) -> str:
    names = list(next(iter(results.values())))
    lines = [f"| slowdown | {' | '.join(names)} | begin + end |", "|---" * (len(names) + 2) + "|"]
    skipped: list[str] = []
    for tool, row in results.items():
        edges = [r["edge_s"] * 1e3 for r in row.values() if "edge_s" in r and tool not in ANEW_EACH_STEP]
        edge = f"{min(edges):.0f} to {max(edges):.0f} ms" if edges else "-"
        lines.append(f"| {tool} | {' | '.join(cell(r) for r in row.values())} | {edge} |")
        skipped += [f"- {tool}, {name}: {r['skipped']}" for name, r in row.items() if "skipped" in r]
    bare = [next((f"{r[n]['step_s'] * 1e3:.1f} ms" for r in results.values() if "step_s" in r[n]), "-") for n in names]
    lines += [f"| *bare step, CPU time* | {' | '.join(bare)} | |", ""]
    steps = [next((str(r[n]["steps"]) for r in results.values() if "steps" in r[n]), "-") for n in names]
    lines += [
        "Median (quartiles) of CPU time watched / bare, alternating in one process, one compute thread; behind the",
        f"semicolon with begin and end, which here are spread over {', '.join(steps)} steps.",
        "",
    ]
    lines += [f"- {name}: {text}" for name, text in facts.items()]
    return "\n".join(lines + (["", "Not measured:", "", *skipped] if skipped else [])) + "\n"


def facts(repeats: int) -> dict[str, str]:
    """Where and how this was measured."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores, {platform.system()}",
        "accelerator": device,
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": shlex.join(["python", "-m", "benchmarks.overhead", *sys.argv[1:]]),
        "stretches": f"{repeats} per figure",
        "date": time.strftime("%Y-%m-%d"),
    }


def chosen(tools: list[str], names: list[str]) -> Iterator[tuple[str, str]]:
    for tool in tools:
        for name in names:
            yield tool, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-w", "--workload", action="append", choices=[*CPU_WORKLOADS, "gpt2"])
    parser.add_argument("-t", "--tool", action="append", choices=list(TOOLS))
    parser.add_argument("-n", "--repeats", type=int, default=9, help="stretches per figure (at least 3)")
    parser.add_argument("--steps", type=int, help=f"steps per stretch (default: as many as take {STRETCH_S} s)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of overhead-*.json and overhead-*.md")
    parser.add_argument("--measure", nargs=2, metavar=("WORKLOAD", "TOOL"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        with contextlib.redirect_stdout(io.StringIO()):
            result = measure(*asked.measure, asked.repeats, asked.steps)
        print(json.dumps(result), flush=True)
        os._exit(0)  # a tool's exit handlers are not what is measured
    cuda = torch.cuda.is_available()
    names = asked.workload or (["gpt2"] if cuda else list(CPU_WORKLOADS))
    tools = asked.tool or [
        t for t in TOOLS if not (cuda and t in CPU_ONLY) and (cuda or t != "allocator history alone")
    ]
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for tool, name in chosen(tools, names):
        result = results.setdefault(tool, {})[name] = in_a_process(name, tool, asked.repeats, asked.steps)
        print(f"{tool}, {name}: {cell(result)} {result.get('skipped', '')}", file=sys.stderr, flush=True)
    about = facts(asked.repeats)
    table = markdown(results, about)
    keep(asked.out, f"overhead-{'cuda' if cuda else 'cpu'}", {"facts": about, "results": results}, table)


def keep(folder: Path, name: str, record: dict[str, Any], table: str) -> None:
    """Write the figures and their table, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
