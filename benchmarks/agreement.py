"""Two independent ways to a program's peaks: predictions, and PyTorch's own allocator on a simulated GPU.

    make agreement                                            # every program, for GPUs of five capabilities
    python -m benchmarks.agreement --capability 8.0           # for one; prints the table and writes nothing

A prediction needs no CUDA build: its requests follow from memlab's rules and go to memlab's allocator. The measurement is the
CUDA build's own dispatcher, host code of kernels and allocator. A difference that no reason in `REASONS` covers is a bug of
one of the two, and the command fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CUDA = ROOT / ".venv/cuda/bin/python"
CAPABILITIES = ("7.5", "8.0", "8.9", "9.0", "12.0")
OTHERS_AT = "8.0"
TOTAL, CONTEXT = "80GiB", "500MiB"
RESULTS, TABLE = ROOT / "benchmarks/results/agreement.json", ROOT / "docs/agreement.md"
OF = ("allocated", "reserved")
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the peaks of a program differ, and by which share of the measured one at most: it excuses nothing else."""

    why: str
    most: float
    capability: str = ""
    """At this one alone, if there is one."""


_SECOND = Reason(
    "order of a backward through a backward: on CUDA the engine's own thread numbers the nodes of the first one, in a prediction "
    "the caller's does; with the caller's numbers the allocator's peaks are the predicted ones",
    0.001,
)
REASONS = {
    "gradient_penalty": _SECOND,
    "physics_second_derivative": _SECOND,
    "transformer_translation": Reason(
        "values: nn.Transformer asks the device whether its mask is causal, and the simulated GPU reads no; with yes, as on a "
        "real GPU, the allocator's peaks are the predicted ones",
        0.005,
    ),
    "transformers_llama_checkpointed": Reason(
        "values: transformers asks the device whether sequences are packed, and the simulated GPU reads yes; with no, as on a "
        "real GPU, the allocator's peaks are the predicted ones",
        0.001,
    ),
    "lbfgs_closure": Reason(
        "values: LBFGS ends at once on zeros; a prediction takes all its iterations, as a real GPU would", 1.0
    ),
    "amp_llama_checkpoint": Reason(
        "autocast frees its copies in the order of host addresses, which differs from run to run, also on one device; blocks "
        "are reused in another order, and *allocated* counts what is left of a block that is not split",
        0.003,
    ),
    "channels_last": Reason(
        "cuDNN has no convolutions in bfloat16 before compute capability 8.0: PyTorch unfolds columns, which predictions leave out",
        0.01, "7.5",
    ),
}  # fmt: skip
"""By program. Each was found by comparing the requests of both ways, one after the other."""


@dataclass(frozen=True, slots=True)
class Row:
    """A program on the GPU of one capability: its peaks in bytes, *allocated* and *reserved*, or why it has none."""

    name: str
    capability: str
    measured: tuple[int, ...] = ()
    predicted: tuple[int, ...] = ()
    error: str = ""

    @property
    def differs_by(self) -> tuple[int, ...]:
        """Predicted minus measured."""
        return tuple(one - other for one, other in zip(self.predicted, self.measured, strict=True))

    @property
    def share(self) -> float:
        """The larger difference as a share of the measured peak."""
        pairs = zip(self.differs_by, self.measured, strict=True)
        return max((abs(by) / peak for by, peak in pairs), default=0.0)

    @property
    def why(self) -> str:
        """The reason of a difference; "" where there is no difference, or none that covers it."""
        reason = REASONS.get(self.name)
        if reason is None or not any(self.differs_by) or self.share > reason.most:
            return ""
        return reason.why if reason.capability in ("", self.capability) else ""

    @property
    def is_explained(self) -> bool:
        """Whether the peaks agree to the byte, or a reason covers their difference."""
        return not self.error and (not any(self.differs_by) or bool(self.why))


# --- both ways ----------------------------------------------------------------------------------------------------------


def compare(folder: Path, capability: str, whose: str, programs: list[str]) -> Record:
    """Measure and predict the programs of the project ("ours") or of other people; what lies in `folder` is taken from there."""
    truth, found = (folder / f"{what}-{whose}-{capability}.json" for what in ("measured", "predicted"))
    simulated = [CUDA, "-m", "memlab", "simulate", "--total", TOTAL, "--context", CONTEXT, "--capability", capability]
    simulated += ["--", CUDA, "-m", "benchmarks.prediction"]
    # The libraries of the other programs are installed beside the CUDA build alone.
    here = [sys.executable, "-m", "benchmarks.prediction"] if whose == "ours" else simulated
    chosen = [word for name in programs for word in ("-p", name)] or ([] if whose == "ours" else ["--set", "others"])
    for file, command in (
        (truth, [*simulated, "measure", truth, *chosen]),
        (found, [*here, "predict", found, "--truth", truth, *chosen]),
    ):
        if not file.exists():
            subprocess.run(list(map(str, command)), cwd=ROOT, check=True)
    ways = [json.loads(file.read_text()) for file in (truth, found)]
    return {"measured": ways[0], "predicted": ways[1]}


def rows(pair: Record, capability: str) -> Iterator[Row]:
    """A row for each program that was measured."""
    for name, real in pair["measured"]["programs"].items():
        found = pair["predicted"]["programs"].get(name, {"error": "there is no prediction"})
        errors = [one["error"] for one in (real, found) if "error" in one]
        if errors:
            yield Row(name, capability, error="; ".join(errors))
        else:
            yield Row(name, capability, *(tuple(one[of] for of in OF) for one in (real, found)))


def has_third_party() -> bool:
    """Whether the libraries of the programs that other people wrote are there."""
    code = "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ('timm', 'diffusers', 'peft', 'transformers'))))"
    return subprocess.run([CUDA, "-c", code], check=False).returncode == 0


# --- the table ----------------------------------------------------------------------------------------------------------

Tables = dict[tuple[str, str], list[Row]]
"""By capability, and whose programs they are."""


def summary(tables: Tables) -> Iterator[str]:
    """How many programs agree, as Markdown."""
    yield "| capability | programs | *allocated* the same to the byte | *reserved* the same | differing | without a reason |"
    yield "|---|---|---|---|---|---|"
    for (capability, whose), table in tables.items():
        same = [sum(not row.error and not row.differs_by[of] for row in table) for of in range(len(OF))]
        differing = sum(bool(row.error) or any(row.differs_by) for row in table)
        unexplained = sum(not row.is_explained for row in table)
        of_others = "" if whose == "ours" else ", of other people"
        yield f"| {capability} | {len(table)}{of_others} | {same[0]} | {same[1]} | {differing} | {unexplained} |"


def differences(tables: Tables) -> Iterator[str]:
    """Every difference and its reason, as Markdown."""
    yield "| program | capability | *allocated*, bytes: predicted - measured | *reserved* | why |"
    yield "|---|---|---|---|---|"
    found = [row for table in tables.values() for row in table if row.error or any(row.differs_by)]
    for row in sorted(found, key=lambda row: (row.name, float(row.capability))):
        if row.error:
            yield f"| {row.name} | {row.capability} | | | **{row.error}** |"
            continue
        by = (
            f"{one:+,} ({one / peak:+.2%})" if one else "0"
            for one, peak in zip(row.differs_by, row.measured, strict=True)
        )
        yield f"| {row.name} | {row.capability} | {' | '.join(by)} | {row.why or '**no reason is known**'} |"


def programs(tables: Tables) -> Iterator[str]:
    """Every program: its measured peaks at one capability, and where both ways agree, as Markdown."""
    capabilities = list(dict.fromkeys(capability for capability, _ in tables))
    shown = OTHERS_AT if OTHERS_AT in capabilities else capabilities[0]
    yield f"| program | *allocated* at {shown}, bytes | *reserved* at {shown}, bytes | {' | '.join(capabilities)} |"
    yield "|---|---|---|" + "---|" * len(capabilities)
    of: dict[str, dict[str, Row]] = {}
    for table in tables.values():
        for row in table:
            of.setdefault(row.name, {})[row.capability] = row
    for name, at in of.items():
        peaks = [f"{peak:,}" for peak in at[shown].measured] if shown in at else []
        cells = []
        for capability in capabilities:
            row = at.get(capability)
            cells.append(
                "" if row is None else "failed" if row.error else f"{row.share:.2%}" if any(row.differs_by) else "="
            )
        yield f"| {name} | {' | '.join(peaks or ['', ''])} | {' | '.join(cells)} |"


def page(tables: Tables, how: list[str]) -> str:
    """The whole table as a page."""
    return "\n".join(
        [
            "# Predictions and the simulated GPU, program by program",
            "",
            "Two independent ways to the peaks of a program without a GPU: a [prediction](prediction.md), and PyTorch's own",
            f"allocator on a [simulated GPU](simulated_gpu.md) of {TOTAL} with a context of {CONTEXT}.",
            "`make agreement` writes this page.",
            "",
            *(f"- {line}" for line in how),
            "",
            *summary(tables),
            "",
            "## Differences",
            "",
            *differences(tables),
            "",
            "## Programs",
            "",
            "`=`: both peaks are the same to the byte; else the larger difference, as a share of the measured peak.",
            "",
            *programs(tables),
            "",
        ]
    )


def main() -> int:
    """Run both ways; 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", action="append", help="instead of all five; may be repeated")
    parser.add_argument("-p", "--program", action="append", default=[], help="instead of all; may be repeated")
    parser.add_argument(
        "--folder", type=Path, help="where the files of both ways are kept; those that are there are used"
    )
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.relative_to(ROOT)} and the results")
    asked = parser.parse_args()
    capabilities = asked.capability or CAPABILITIES
    wanted = [(capability, "ours") for capability in capabilities]
    how: list[str] = []
    if not asked.program and OTHERS_AT in capabilities:
        wanted.append((OTHERS_AT, "others"))
        how += (
            []
            if has_third_party()
            else ["The extra third-party is not installed in .venv/cuda: its programs are left out."]
        )
    tables: Tables = {}
    results: Record = {"date": time.strftime("%Y-%m-%d"), "gpu": {"total": TOTAL, "context": CONTEXT}, "peaks": {}}
    with tempfile.TemporaryDirectory() as made:
        (asked.folder or Path(made)).mkdir(parents=True, exist_ok=True)
        for capability, whose in wanted:
            pair = compare(asked.folder or Path(made), capability, whose, asked.program)
            table = tables[capability, whose] = list(rows(pair, capability))
            made_by = [f"{what} with {pair[what]['made_by']}" for what in ("measured", "predicted")]
            line = f"{'The' if whose == 'ours' else 'Other people’s'} programs: {', '.join(made_by)}."
            how += [] if line in how else [line]
            results["peaks"][f"{capability} {whose}"] = {
                row.name: row.error or [*row.measured, *row.predicted] for row in table
            }
    text = page(tables, how)
    print(text)
    if asked.write:
        TABLE.write_text(text)
        lines = json.dumps(results | {"made_by": how, "columns": "allocated, reserved; measured, then predicted"})
        RESULTS.write_text(lines.replace('], "', '],\n"').replace('{"', '{\n"') + "\n")
    return int(not all(row.is_explained for table in tables.values() for row in table))


if __name__ == "__main__":
    raise SystemExit(main())
