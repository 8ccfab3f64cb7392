"""Reading chat JSONL with all checks and a hash of every line, plain and packed; and rows into the form that is kept.

python tests/benchmarks/bench_reading.py [--megabytes 64]
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import xxhash
import zstandard
from common import dialogues, measure

from dschat_core.config import Dataset
from dschat_core.data.reading import read_records
from dschat_core.data.schemas import normalise

MAX_LINE_BYTES = 8 * 2**20
NUM_ROWS = 50_000


def chat_lines(megabytes: float, exchanges: int) -> Iterator[bytes]:
    """JSON lines until there is so much of them; a third of the replies have a list, code or an address in them."""
    said = (": https://example.org/a ", ':\n1. "first": ', "\n```python\nd = {'a': [1, 2]}\n```\n")
    total = 0
    turns: list[dict[str, str]] = []
    for index, row in enumerate(dialogues(2**31)):
        turns += row["messages"]
        if index % 3 == 0:
            turns[-1]["content"] = turns[-1]["content"].replace(" ", said[index // 3 % 3], 1)
        if len(turns) < 2 * exchanges:
            continue
        line = json.dumps({"messages": turns}, ensure_ascii=False).encode() + b"\n"
        turns = []
        total += len(line)
        yield line
        if total >= megabytes * 1e6:
            return


def read(path: Path) -> None:
    """Every line parsed, checked and hashed; a refused line means that the benchmark's data is not what it should be."""
    for record in read_records(str(path), max_line_bytes=MAX_LINE_BYTES):
        if record.value is None:
            raise ValueError(f"line {record.line}: {record.reason}")
        xxhash.xxh3_128_digest(record.raw)


def normalise_all(kind: Dataset, records: list[dict[str, Any]]) -> None:
    """Every record as a row of the data set."""
    for record in records:
        normalise(kind, record)


def records_by_form(count: int) -> dict[str, tuple[Dataset, list[dict[str, Any]]]]:
    """The same dialogues in each form that they come in."""
    rows = [row["messages"] for row in islice(dialogues(count), count)]
    said = [(user["content"], assistant["content"]) for user, assistant in rows]
    return {
        "messages": ("dialogues", [{"messages": turns} for turns in rows]),
        "sharegpt": (
            "dialogues",
            [{"conversations": [{"from": "human", "value": u}, {"from": "gpt", "value": a}]} for u, a in said],
        ),
        "alpaca": ("dialogues", [{"instruction": u, "input": "", "output": a} for u, a in said]),
        "input_output": ("dialogues", [{"input": u, "output": a} for u, a in said]),
        "preferences": ("preferences", [{"prompt": u, "chosen": a, "rejected": a + "?"} for u, a in said]),
    }


def main() -> None:
    """Print the figures, one JSON line each; MB are of the uncompressed file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=64, help="size of the uncompressed file")
    megabytes = parser.parse_args().megabytes
    with tempfile.TemporaryDirectory() as folder:
        short = Path(folder) / "short.jsonl"
        with short.open("wb") as file:
            file.writelines(chat_lines(megabytes, exchanges=1))
        short_amount = short.stat().st_size / 1e6
        plain = Path(folder) / "chat.jsonl"
        with plain.open("wb") as file:
            file.writelines(chat_lines(megabytes, exchanges=4))
        amount = plain.stat().st_size / 1e6
        gz, zst = plain.with_suffix(".jsonl.gz"), plain.with_suffix(".jsonl.zst")
        with plain.open("rb") as source, gzip.open(gz, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(source, packed, 2**20)
        with plain.open("rb") as source, zstandard.open(zst, "wb") as packed:
            shutil.copyfileobj(source, packed, 2**20)
        # Dialogues of eight turns and about 1 kB; the short ones have two and 260 bytes, so that objects cost most.
        measure("reading", "MB/CPU-s", 120, amount, lambda: read(plain))
        measure("reading_short", "MB/CPU-s", 120, short_amount, lambda: read(short))
        measure("reading_gz", "MB/CPU-s", 60, amount, lambda: read(gz))
        measure("reading_zst", "MB/CPU-s", 100, amount, lambda: read(zst))
    for form, (kind, records) in records_by_form(NUM_ROWS).items():
        measure(
            f"normalise_{form}",
            "rows/CPU-s",
            200_000,
            NUM_ROWS,
            lambda kind=kind, rows=records: normalise_all(kind, rows),
        )


if __name__ == "__main__":
    main()
