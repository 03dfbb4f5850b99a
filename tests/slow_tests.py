"""Write slow_tests.txt from a JUnit report: `python tests/slow_tests.py REPORT.xml`."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

LIST = Path(__file__).with_name("slow_tests.txt")
LIMIT_S = 0.7
ALWAYS = ("frozen/", "test_")
"""What `make test` runs however long it takes: the frozen values, and the rules of the project."""


def slow_tests(report: Path) -> list[str]:
    """The functions whose tests take more than LIMIT_S on average, as folder/file.py::name."""
    times: dict[str, list[float]] = defaultdict(list)
    for case in ET.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/").removeprefix("tests/")
        times[f"{file}.py::{case.get('name', '').partition('[')[0]}"].append(float(case.get("time", 0)))
    return sorted(name for name, all_s in times.items()
                  if sum(all_s) / len(all_s) > LIMIT_S and not name.startswith(ALWAYS))  # fmt: skip


if __name__ == "__main__":
    head = [line for line in LIST.read_text().splitlines() if line.startswith("#")]
    LIST.write_text("\n".join([*head, *slow_tests(Path(sys.argv[1]))]) + "\n")
