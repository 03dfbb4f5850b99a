"""What must not change while the package is rebuilt, computed through the public face alone.

    python tests/frozen/freeze.py predictions OUT.json [--share N/M]   # every program of benchmarks/programs, on five kinds of GPU
    python tests/frozen/freeze.py record FOLDER                        # runs of today, saved: on the CPU and predicted
    python tests/frozen/freeze.py record-cuda FOLDER                   # the same from a CUDA device, out-of-memory included
    python tests/frozen/freeze.py values FOLDER OUT.json               # what the saved runs say

The files were made with the last version before the rebuilding (commit aa1eb60). A figure that changes since is a fault,
or stands in tests/frozen/CHANGES.md: old, new, truth.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memlab
from memlab.units import GiB, MiB

sys.path.insert(0, str(Path(__file__).parent))
from jobs import JOBS, out_of_memory  # a plain name: the recorded lines bear it however this is started

GPUS = {"7.5": (16, 40), "8.0": (80, 108), "8.9": (8, 24), "9.0": (80, 132), "12.0": (32, 170)}
"""Compute capability -> GiB and multiprocessors of a GPU that has it."""
EVERY_SETTING = (
    "mlp_dropout_adam", "lstm_classifier", "resnet50_momentum", "gpt2_small", "bert_like", "unet_segmentation", "vit_adamw",
    "llama_like",
)  # fmt: skip
"""Programs that are predicted in every precision, with and without expandable segments; every 12th of the others too."""


def card(capability: str) -> Any:
    """A GPU with nothing left to default."""
    size, multiprocessors = GPUS[capability]
    major, minor = map(int, capability.split("."))
    total = size * GiB
    return memlab.Card(
        f"frozen sm_{major}{minor}", total, (major, minor), context_bytes=(300 * MiB, 500 * MiB),
        usable_bytes=total - 512 * MiB, usable_high_bytes=total - 256 * MiB, multiprocessors=multiprocessors,
    )  # fmt: skip


def cases() -> list[str]:
    """program|capability|precision|allocator settings."""
    from benchmarks.programs import PROGRAMS

    plain = [f"{name}|{capability}|fp32|" for name in PROGRAMS for capability in GPUS]
    names = [*EVERY_SETTING, *list(PROGRAMS)[::12]]
    settings = ("", "expandable_segments:True")
    more = [
        f"{name}|{capability}|{precision}|{conf}"
        for name in dict.fromkeys(names) for capability in ("7.5", "8.0", "9.0")
        for precision in ("fp32", "fp16", "bf16") for conf in settings
    ]  # fmt: skip
    return list(dict.fromkeys(plain + more))


def predicted(case: str) -> Any:
    """[low and high of allocated, of reserved, of the device; whether it fits] with 2.12, or the first words of the error."""
    import torch

    from benchmarks.programs import PROGRAMS

    name, capability, precision, conf = case.split("|")

    def step() -> None:
        dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
        with torch.autocast("cuda", dtype) if dtype else contextlib.nullcontext():
            PROGRAMS[name]()

    try:
        found = memlab.predict(step, card(capability), conf=conf, torch_version="2.12.1")
    except memlab.MemlabError as error:
        return f"{type(error).__name__}: {error}"[:60]
    return [*found.allocated_bytes, *found.reserved_bytes, *found.peak_device_bytes, found.fits]


def predictions(share: tuple[int, int] = (1, 1)) -> Iterator[tuple[str, Any]]:
    """Every case of this share with its figures."""
    part, parts = share
    for case in cases()[part - 1 :: parts]:
        yield case, predicted(case)


# --- recorded runs ------------------------------------------------------------------------------------------------------


def record(folder: Path) -> None:
    """Runs on the CPU, with and without lines, and predicted ones."""
    import torch

    for name, job in JOBS.items():
        torch.manual_seed(0)
        with memlab.track(name, lines=name in ("mlp", "leaking"), functions=[job], show=False) as run:
            job("cpu")
        run.save(folder / f"cpu-{name}.memlab")
        memlab.predict(lambda job=job: job("cuda"), card("8.9")).save(folder / f"predicted-{name}.memlab")


def record_cuda(folder: Path) -> None:
    """Runs on a CUDA device, and one that runs out of memory."""
    import torch

    for name, job in JOBS.items():
        with memlab.track(name, lines=name in ("mlp", "leaking"), functions=[job], show=False) as run:
            job("cuda")
        run.save(folder / f"cuda-{name}.memlab")
    torch.cuda.set_per_process_memory_fraction(0.05)
    with contextlib.suppress(torch.cuda.OutOfMemoryError), memlab.track("out_of_memory", show=False) as run:
        out_of_memory("cuda")
    run.save(folder / "cuda-out_of_memory.memlab")


def values(path: Path) -> dict[str, Any]:
    """What a saved run says, in numbers and names: every peak, who held it, its lines, what grew."""
    run = memlab.load(path)
    facts: dict[str, Any] = {"name": run.name, "exact": run.is_exact, "devices": []}
    facts["peaks"] = [run.peak_allocated_bytes, run.peak_reserved_bytes, run.peak_device_bytes]
    for device in run.devices:
        index = device.device.index
        levels = {
            level.of: [
                level.peak.low_bytes,
                level.peak.high_bytes,
                level.peak.row,
                level.start_bytes,
                level.end_bytes,
                level.left_bytes,
            ]
            for level in device.levels
        }
        facts["devices"].append({
            "levels": levels,
            "breakdowns": {by: share(run, by, "allocated", index) for by in ("category", "module", "line", "tensor", "phase")},
            "reserved": share(run, "category", "reserved", index),
            "modules": table(run, "modules", index),
            "lines": table(run, "lines", index),
            "leaks": [
                    [leak.kind, leak.of, leak.since, leak.iterations, leak.total_bytes, leak.bytes_per_iteration]
                    for leak in leaks(run, index)
                ],
        })  # fmt: skip
    facts["events"] = len(run.trace.events)
    return json.loads(json.dumps(facts))


def share(run: Any, by: str, of: str, device: int) -> Any:
    """A breakdown as a dictionary, or why there is none."""
    try:
        return dict(run.breakdown(by, of, device=device))
    except memlab.MemlabError:
        return None


def table(run: Any, what: str, device: int) -> Any:
    """The numbers of a table, column by column."""
    try:
        frame = getattr(run, what)(device=device).to_pandas()
    except memlab.MemlabError:
        return None
    return {
        "rows": len(frame),
        **{name: int(frame[name].sum()) for name in frame.columns if frame[name].dtype.kind in "iu"},
    }


def leaks(run: Any, device: int) -> Any:
    """What grew, or nothing."""
    try:
        return run.leaks(device=device)
    except memlab.MemlabError:
        return ()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predictions", "record", "record-cuda", "values"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--share", default="1/1", help="2/5: the second of five parts")
    asked = parser.parse_args()
    if asked.what == "predictions":
        part, _, parts = asked.share.partition("/")
        figures = {}
        for case, found in predictions((int(part), int(parts))):
            figures[case] = found
            print(case, found, file=sys.stderr, flush=True)
            asked.paths[0].write_text(
                "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in figures.items()) + "\n}\n"
            )
    elif asked.what == "values":
        found = {path.stem: values(path) for path in sorted(asked.paths[0].glob("*.memlab"))}
        asked.paths[1].write_text(json.dumps(found, indent=1) + "\n")
    else:
        asked.paths[0].mkdir(parents=True, exist_ok=True)
        (record if asked.what == "record" else record_cuda)(asked.paths[0])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
