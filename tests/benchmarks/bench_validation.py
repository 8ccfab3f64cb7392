"""Whole validation: all gates with the lexicon detector, in one process; and the memory that a million dialogues take.

python tests/benchmarks/bench_validation.py [--rows 1000000]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import measure, print_figure, write_dialogues

from dschat_core.config import DataConfig, DataRuntimeConfig, DataSource, ValidationConfig
from dschat_core.stages.validation import validation

SECTION = ValidationConfig(runtime=DataRuntimeConfig(workers=1))


def validate(path: Path, folder: Path) -> None:
    """Validate one file of dialogues into a new folder."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        validation(SECTION, DataConfig(dialogues=DataSource(train=(str(path),))), Path(out))


def main() -> None:
    """Print the figures, one JSON line each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000, help="dialogues of the memory figure; 0: leave it out")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        validate(arguments.child, arguments.child.parent)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "speed.jsonl"
        write_dialogues(path, 50_000)
        measure("validation", "dialogues/CPU-s", 8000, 50_000, lambda: validate(path, folder))
        if arguments.rows:
            large = folder / "large.jsonl"
            write_dialogues(large, arguments.rows)
            # A process of its own: the peak of this one says nothing about the stage.
            done = subprocess.run(
                [sys.executable, __file__, "--child", str(large)], capture_output=True, text=True, check=True
            )
            print_figure(
                f"validation_rss_{arguments.rows}", [float(done.stdout)], "GiB", target=2.0, lower_is_better=True
            )


if __name__ == "__main__":
    main()
