"""Predictions against measurements: the programs of `benchmarks.programs`, peak by peak.

    python -m benchmarks.prediction measure truth.json --tight     # where CUDA is: a GPU, or the simulated GPU
    python -m benchmarks.prediction predict predicted.json --truth truth.json      # anywhere, also without CUDA
    python -m benchmarks.prediction compare truth.json predicted.json [another.json] --out FILE.json --table FILE.md

`measure` reads PyTorch's own counters, and for `--set libraries` lists every request. `--tight` runs each program again with
less memory than it took and with a little more, for the question whether it fits. `--values`, on a simulated GPU:
a program is first computed by the host's kernels, and what it read then is what it reads when it is measured (`benchmarks.values`);
it is predicted with the values that memlab assumes, and with those that were read. On a simulated GPU each program runs in a
process of its own; on a real one a process runs several, while they leave nothing behind. It compares memory, and nothing of time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import values
from benchmarks.programs import PROGRAMS
from memlab.trace.trace import is_simulated_gpu

SHARES = (0.7, 0.85, 0.95, 1.0, 1.05, 1.2)
"""Limits of memory that are tried, as shares of the peak of *reserved*."""
NOT_COMPARABLE = {"lbfgs_closure": "its loop depends on values, which a simulated GPU does not compute"}
"""Programs whose measurement on a simulated GPU says nothing, and why; they are in the table and not in the figures."""
PEAKS = ("allocated", "reserved")
VALUES_HEAD = """## Programs whose memory depends on values

Measured by `python -m benchmarks.prediction measure --values`: what the programs read on the simulated GPU was computed by the
host's kernels before. The prediction assumes values, and is then given, for each line that it names, the most that was read there.

"""
MOST_REQUESTS = 100_000
Record = dict[str, Any]

ONE_AT_A_TIME = threading.Lock()
"""For forks: a child must inherit neither the end of another's pipe, which would seem open when the other has ended, nor a lock
of a stream; and for what is done with records."""


def in_child(work: Iterable[Callable[[], Record]]) -> Iterator[Record]:
    """What each gives in a forked child, until one leaves memory behind; output is discarded, an error becomes a record."""
    with ONE_AT_A_TIME:
        read, write = os.pipe()
        child = os.fork()
        if child:
            os.close(write)
    if not child:
        try:
            os.close(read)
            with os.fdopen(write, "w") as pipe, contextlib.redirect_stdout(io.StringIO()):
                for one in work:
                    try:
                        record = one()
                    except BaseException as error:
                        record = {"error": f"{type(error).__name__}: {error}"[:300]}
                    print(json.dumps(record), file=pipe, flush=True)
                    if not is_clean():
                        break
        finally:
            os._exit(0)
    with os.fdopen(read) as pipe:
        lines = 0
        for lines, line in enumerate(pipe, 1):  # noqa: B007 (their number, after the loop)
            yield json.loads(line)
    os.waitpid(child, 0)
    if not lines:
        yield {"error": "the process died"}


def is_clean() -> bool:
    """Free what PyTorch keeps and set its counters back; whether nothing is left on a GPU that is in use."""
    if not torch.cuda.is_initialized():
        return False
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    return torch.cuda.memory_reserved() == 0


def each(work: list[tuple[str, Callable[[], Record]]], done: Callable[[str, Record], None], how: How) -> None:
    """Hands what each piece of work finds to `done`, which is called in one thread at a time."""

    def one_after_the_other(rest: list[tuple[str, Callable[[], Record]]]) -> None:
        while rest:
            now = rest[: how.in_one_process]
            for record in in_child([call for _, call in now]):
                (name, _), *rest = rest
                with ONE_AT_A_TIME:
                    print(f"{name}: {record.get('error') or record['allocated']}", file=sys.stderr, flush=True)
                    done(name, record)

    with ThreadPoolExecutor(how.jobs) as pool:
        list(pool.map(one_after_the_other, [work[number :: how.jobs] for number in range(how.jobs)]))


@dataclass(frozen=True, slots=True)
class How:
    """How many processes at a time, and how many programs in each: CUDA takes seconds to begin on a real GPU."""

    jobs: int
    in_one_process: int = 1


def program(name: str) -> Callable[[], None]:
    """A program; those that other people wrote are imported in the child that runs them: some libraries ask for CUDA."""
    for module in MORE.values():
        if name not in PROGRAMS:
            registered(module)
    return PROGRAMS[name]


MORE = {
    "libraries": ("library_calls",),
    "others": ("rebuilt", "third_party"),
    "transformers": ("hugging_face",),
    "values": ("data_dependent", "detection"),
}
"""Sets of programs beside ours, and their modules: calls of cuDNN and cuSPARSE, what others wrote (twice), what needs values."""


def registered(modules: Iterable[str]) -> Record:
    """Import modules of programs, those whose libraries are there; the names of their programs."""
    wanted = {f"benchmarks.programs.{module}" for module in modules}
    for module in sorted(wanted):
        try:
            importlib.import_module(module)
        except (ModuleNotFoundError, RuntimeError) as error:  # torchvision may be built for another PyTorch
            print(f"without the programs of {module}: {error}", file=sys.stderr)
    return {"names": [name for name, body in PROGRAMS.items() if body.__module__ in wanted]}


# --- measured -----------------------------------------------------------------------------------------------------------


def measured(name: str, limit_bytes: int | None = None) -> Record:
    """The counters after a program, which may take `limit_bytes` at most."""
    torch.cuda.init()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit_bytes is None else limit_bytes / total)
    run, full = program(name), False
    try:
        run()
    except torch.cuda.OutOfMemoryError:
        full = True
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "retries": stats["num_alloc_retries"],
        "out_of_memory": full,
        "limit": limit_bytes,
    }


def listed(name: str) -> Record:
    """The counters, and what was asked for, in order: workspaces are among it."""
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_REQUESTS, clear_history=True)
    record = measured(name)
    traced = torch.cuda.memory._snapshot()["device_traces"][0]
    return record | {"requests": [entry["size"] for entry in traced if entry["action"] == "alloc"]}


def with_values(name: str) -> Record:
    """The counters after a program that reads what it would compute; and how much it read, with the least and most of each line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "reads")

        def compute() -> Record:
            reads = values.computed(program(name))
            torch.save([tuple(one) for one in reads], file)
            found: dict[str, list[Any]] = {}
            for one in reads:
                if not isinstance(one.value, torch.Tensor):
                    low, high = found.get(one.key, (one.value, one.value))
                    found[one.key] = [min(low, one.value), max(high, one.value)]
            return {"reads": len(reads), "values": found, "allocated": "computed"}

        (record,) = in_child([compute])
        if "error" in record:
            return record
        with values.given([values.Read(*one) for one in torch.load(file, weights_only=False)]):
            return record | measured(name)


def device_facts() -> Record:
    """What the device says of itself."""
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "total_bytes": facts.total_memory,
        "capability": [facts.major, facts.minor],
        "multiprocessors": facts.multi_processor_count,
    }


def measure(names: list[str], look: Callable[[str], Record], tight: bool, jobs: int, file: Path) -> None:
    """Every program with all the memory there is, then with the shares of what it took; written as it is found."""
    (device,) = in_child([device_facts])
    how = How(jobs, 1 if is_simulated_gpu(device["name"]) else len(names) * len(SHARES))
    programs: dict[str, Record] = {}

    def took(name: str, record: Record) -> None:
        programs[name] = {**record, "limited": []}
        written(file, device=device, programs=programs)

    def was_full(name: str, record: Record) -> None:
        if "error" not in record:
            programs[name]["limited"].append([record["limit"], record["out_of_memory"]])
            written(file, device=device, programs=programs)

    each([(name, functools.partial(look, name)) for name in names], took, how)
    limits = [
        (name, functools.partial(measured, name, round(record["reserved"] * share)))
        for name, record in programs.items()
        for share in SHARES
        if tight and "reserved" in record
    ]
    each(limits, was_full, how)


def written(file: Path, **found: Any) -> None:
    """Replaces the file at once: whatever ends the command leaves what was found so far."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"made_by": made_by(), **found}) + "\n")
    new.replace(file)


# --- predicted ----------------------------------------------------------------------------------------------------------


def predicted(name: str, device: Record, limits: list[int], torch_version: str, given: Record | None = None) -> Record:
    """The forecast for a card like the device and that PyTorch, given some values, and whether it fits where there is less."""
    from memlab.fake_cuda import FakeCuda
    from memlab.prediction.cards import Card
    from memlab.prediction.forecast import forecast
    from memlab.prediction.probe import FakeCudaProbe

    def card(total: int) -> Card:
        capability = tuple(device["capability"])
        return Card(device["name"], total, capability, (0, 0), total, total, device["multiprocessors"])

    begin = time.perf_counter()
    with FakeCuda(card(device["total_bytes"]), torch_version=torch_version, given=given or {}) as fake:
        probe = FakeCudaProbe(fake)
        probe.start()
        program(name)()
        trace = probe.stop()
    took_s = time.perf_counter() - begin
    conf = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    found = forecast(trace, card(device["total_bytes"]), conf)
    facts = found.trace.made_by.device(0)
    return {
        "allocated": facts.end_peak_allocated_bytes,
        "reserved": facts.end_peak_reserved_bytes,
        "allocated_interval": found.allocated_bytes,
        "reserved_interval": found.reserved_bytes,
        "limited": [[limit, forecast(trace, card(max(limit, 64 << 20)), conf).fits] for limit in limits],
        "assumptions": found.assumptions,
        "assumed": {key: one.decides for key, one in fake.assumed.items()},
        "took_s": took_s,
    }


def predicted_twice(name: str, read: Record, *how: Any) -> Record:
    """The forecast with what memlab assumes, and that with the most that each of its lines read, unless it ends a loop."""
    values.seed()
    record = predicted(name, *how)
    given = {key: read[key][1] for key, decides in record["assumed"].items() if key in read and decides != "length"}
    values.seed()
    return {**record, "given": given, "with_given": predicted(name, *how, given) if given else record}


def predict(names: list[str], truth: Record, jobs: int, file: Path) -> None:
    """Every program that was measured, for the PyTorch that measured it."""
    import memlab.prediction.forecast  # noqa: F401 (imported once, before the forks)
    from memlab.prediction.torch_versions import checked_version

    version = checked_version(truth["made_by"].split(",")[0].removeprefix("torch "))
    programs: dict[str, Record] = {}

    def found(name: str, record: Record) -> None:
        programs[name] = record
        written(file, programs=programs)

    def work(name: str) -> Callable[[], Record]:
        real = truth["programs"].get(name, {})
        limits = [limit for limit, _ in real.get("limited", [])]
        if "values" in real:
            return functools.partial(predicted_twice, name, real["values"], truth["device"], limits, version)
        return functools.partial(predicted, name, truth["device"], limits, version)

    each([(name, work(name)) for name in names], found, How(jobs))


# --- compared -----------------------------------------------------------------------------------------------------------


def rows(truth: Record, predictions: Record) -> Iterator[Record]:
    """A row for each program that both have."""
    for name, real in truth["programs"].items():
        found = predictions["programs"].get(name)
        if found is None or "error" in real:
            continue
        if "error" in found:
            yield {"name": name, "error": found["error"]}
            continue
        answers = [
            (fits, full)
            for (_, fits), (_, full) in zip(found["limited"], real["limited"], strict=False)
            if full is not None
        ]
        yield {
            "name": name,
            "inside": [found[f"{of}_interval"][0] <= real[of] <= found[f"{of}_interval"][1] for of in PEAKS],
            "allocated": real["allocated"],
            "reserved": real["reserved"],
            "errors": [found[of] / real[of] - 1 for of in PEAKS],
            "allocated_error": found["allocated"] / real["allocated"] - 1,
            "reserved_error": found["reserved"] / real["reserved"] - 1,
            "answers": len(answers),
            "close": sum(fits == "close" for fits, _ in answers),
            "wrong": sum((fits, full) in (("yes", True), ("no", False)) for fits, full in answers),
            "reads": real.get("reads", 0),
            "assumed": found.get("assumed", {}),
            "given_errors": [found.get("with_given", found)[of] / real[of] - 1 for of in PEAKS],
        }


def share(values: list[float], part: float) -> float:
    """The value that this part of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(part * (len(ordered) - 1)))] if ordered else float("nan")


def summary(table: list[Record]) -> Iterator[str]:
    """The figures of a comparison."""
    good = [row for row in table if "error" not in row and row["name"] not in NOT_COMPARABLE]
    for number, of in enumerate(PEAKS):
        errors = [abs(row[f"{of}_error"]) for row in good]
        exact, inside = sum(error == 0 for error in errors), sum(row["inside"][number] for row in good)
        yield (
            f"peak {of}: median error {statistics.median(errors):.2%}, 95th percentile {share(errors, 0.95):.2%}, "
            f"largest {max(errors):.2%}; exact in {exact} of {len(errors)}, in the predicted interval in {inside}"
        )
    answers, close, wrong = (sum(row[key] for row in good) for key in ("answers", "close", "wrong"))
    yield f"fits or not: {answers} questions, {answers - close - wrong} right, {close} too close to call, {wrong} wrong"
    failed = [row for row in table if "error" in row]
    yield f"programs: {len(table)}, of which {len(failed)} could not be predicted"
    yield from (f"not in these figures: {name}, {why}" for name, why in NOT_COMPARABLE.items())


def lines(truth: Record, predictions: list[Record]) -> Iterator[str]:
    """The table as Markdown."""
    yield f"Measured: {truth['device']['name']}, {truth['made_by']}. Predicted: {'; '.join(one['made_by'] for one in predictions)}."
    tables = [list(rows(truth, one)) for one in predictions]
    for one, table in zip(predictions, tables, strict=True):
        yield f"\nPredicted with {one['made_by']}:\n"
        yield from (f"- {line}" for line in summary(table))
    if len(predictions) > 1:
        yield f"\nThe same figures with both: {same(predictions)}."
    columns = (
        "allocated, MiB",
        "reserved, MiB",
        "error of allocated",
        "error of reserved",
        "in the intervals",
        "fits: close, wrong",
    )
    yield f"\n| program | {' | '.join(columns)} |"
    yield "|---|---|---|---|---|---|---|"
    for row in tables[0]:
        if "error" in row:
            yield f"| {row['name']} | – | – | {row['error']} | | | |"
            continue
        sizes = f"{row['allocated'] / 2**20:.1f} | {row['reserved'] / 2**20:.0f}"
        errors = f"{row['allocated_error']:+.2%} | {row['reserved_error']:+.2%}"
        inside = ", ".join("yes" if one else "no" for one in row["inside"])
        yield f"| {row['name']} | {sizes} | {errors} | {inside} | {row['close']}, {row['wrong']} of {row['answers']} |"


def lines_of_values(truth: Record, predictions: list[Record]) -> Iterator[str]:
    """The table of programs that were measured with values, as Markdown; each is in one of the predictions."""
    made = "; ".join(f"{one['made_by']} ({len(one['programs'])} programs)" for one in predictions)
    yield f"Measured: {truth['device']['name']}, {truth['made_by']}. Predicted: {made}.\n"
    columns = (
        "values read",
        "allocated, MiB",
        "in the interval",
        "error of allocated",
        "reserved",
        "assumed values that decide",
        "error, if they are given",
        "reserved",
    )
    yield f"| program | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}"
    for row in (row for one in predictions for row in rows(truth, one)):
        if "error" in row:
            yield f"| {row['name']} | | | | {row['error']} | | | | |"
            continue
        decisive = [key for key, decides in row["assumed"].items() if decides]
        errors, given = ([f"{one:+.2%}" for one in row[of]] for of in ("errors", "given_errors"))
        named = "; ".join(decisive[:3]) + (f" and {len(decisive) - 3} more" if len(decisive) > 3 else "")
        cells = (
            row["reads"],
            f"{row['allocated'] / 2**20:.1f}",
            "yes" if row["inside"][0] else "no",
            *errors,
            named or "–",
            *given,
        )
        yield f"| {row['name']} | {' | '.join(map(str, cells))} |"


def same(predictions: list[Record]) -> str:
    """How many programs have the same peaks in all predictions."""
    first, *others = (one["programs"] for one in predictions)
    agree = [
        name
        for name, record in first.items()
        if all(
            (other.get(name, {}).get("allocated"), other.get(name, {}).get("reserved"))
            == (record.get("allocated"), record.get("reserved"))
            for other in others
        )
    ]
    rest = sorted(set(first) - set(agree))
    return f"{len(agree)} of {len(first)}" + (f", and not {', '.join(rest)}" if rest else "")


# --- the command --------------------------------------------------------------------------------------------------------


def made_by() -> str:
    """The versions."""
    return f"torch {torch.__version__}, Python {platform.python_version()}"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "predict", "compare"))
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--tight", action="store_true")
    parser.add_argument("--truth", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path)
    parser.add_argument("-p", "--program", action="append")
    parser.add_argument("--set", choices=MORE, help="instead of ours: calls of libraries, or what other people wrote")
    parser.add_argument("--values", action="store_true", help="measure with values; compare what was")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    names = asked.program or list(PROGRAMS)
    if asked.set and not asked.program:
        find = functools.partial(registered, MORE[asked.set])
        # Imported once: the libraries of these do not ask for CUDA.
        more = find() if asked.set == "values" else next(in_child([find]))
        names = more["names"]
    gc.collect()
    if asked.what == "compare":
        truth, *predictions = (json.loads(file.read_text()) for file in asked.files)
        text = "\n".join(lines_of_values(truth, predictions) if asked.values else lines(truth, predictions)) + "\n"
        print(text)
        if asked.table is not None and asked.values:
            asked.table.write_text(
                f"{asked.table.read_text().partition(VALUES_HEAD)[0].rstrip()}\n\n{VALUES_HEAD}{text}"
            )
        elif asked.table is not None:
            asked.table.write_text(f"# Predicted and measured, program by program\n\n{text}")
        if asked.out is not None:
            together = {"measured": truth, "predicted": predictions}
            asked.out.write_text(json.dumps(together) + "\n")
        return
    if asked.what == "predict" and asked.truth is None:
        parser.error("predict needs --truth FILE: the card and the limits are those of the measurement")
    if asked.what == "measure":
        look = with_values if asked.values else listed if asked.set == "libraries" else measured
        measure(names, look, asked.tight, asked.jobs, asked.files[0])
    else:
        predict(names, json.loads(asked.truth.read_text()), asked.jobs, asked.files[0])


if __name__ == "__main__":
    main()
