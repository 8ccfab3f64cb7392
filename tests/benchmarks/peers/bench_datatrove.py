"""Deduplicating and tokenizing one file of dialogues, by this project and by datatrove, in CPU-seconds.

datatrove needs an environment of its own, since it pins packages that break this project's:

    python -m venv /tmp/datatrove && /tmp/datatrove/bin/pip install "datatrove[processing,multilingual]==0.10.1"
    python tests/benchmarks/peers/bench_datatrove.py /tmp/datatrove/bin/python [--rows 500000] [--words split]

Both sides start as fresh processes, read the same JSON lines, write the kept rows, and then token shards of what they
kept; user and system time of the processes and their children count, start-up included. Each side does what its own
documentation tells, on one worker:

- datatrove: exact deduplication (signature, find, filter), then MinHash (signature, buckets, cluster, filter) on what is
  left; word 5-grams, 14 buckets of 8 hashes, pairs not verified. `--words split` takes Python's `str.split` instead of
  spaCy, its default for English, in its favour. Then `DocumentTokenizer` on the plain text of the turns.
- this project: exact and near in one pass, character shingles, every pair verified by its Jaccard similarity. Then the
  `tokenization` stage: chat template, mask of the trained tokens, hashed shards.

Both tokenize with the same byte-level BPE, trained on the file beforehand. Prints one JSON line per figure, the ratios
last.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

BLOCK_LINES = 2000
TRAINING_ROWS, VOCAB_SIZE = 20_000, 8000
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}


def ours(file: Path, out: Path) -> None:
    """Keep the first of each cluster, by this project."""
    import numpy as np
    import orjson

    from dschat_core.data.gates.duplicates import Signatures, comparable, find_first, signatures

    forms: list[str] = []
    parts: list[Signatures] = []
    with file.open("rb") as lines:
        while block := list(islice(lines, BLOCK_LINES)):
            block_forms = [comparable(_text(orjson.loads(line))) for line in block]
            parts.append(signatures(block_forms))
            forms += block_forms
    keys, bands, widths = (np.concatenate([getattr(part, name) for part in parts]) for name in Signatures.__slots__)
    first = find_first(keys, bands, widths, forms, near_jaccard=0.8)
    keep = (first == np.arange(len(first))).tolist()
    with file.open("rb") as lines, (out / "kept.jsonl").open("wb") as kept:
        kept.writelines(line for line, stays in zip(lines, keep, strict=True) if stays)


def datatrove(file: Path, out: Path, words: str) -> None:
    """Keep the first of each cluster, by datatrove."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import (
        ExactDedupConfig,
        ExactDedupFilter,
        ExactDedupSignature,
        ExactFindDedups,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.typeshelper import Languages
    from datatrove.utils.word_tokenizers import WordTokenizer

    class Split(WordTokenizer):
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

        def sent_tokenize(self, text: str) -> list[str]:
            return [text]

        def span_tokenize(self, text: str) -> list[tuple[int, int]]:
            return [(0, len(text))]

    def document(_: Any, row: dict[str, Any], path: str, at: int | str) -> dict[str, Any]:
        return {"text": _text(row), "id": f"{path}/{at}"}

    def content(row: Any) -> str:
        return row.text

    def run(*steps: Any, tasks: int = 1) -> None:
        LocalPipelineExecutor(
            pipeline=list(steps), tasks=tasks, workers=1, logging_dir=str(out / f"logs{next(stage)}")
        ).run()

    stage = iter(range(100))
    exact = ExactDedupConfig(content_getter=content)
    source = {"data_folder": str(file.parent), "glob_pattern": file.name, "adapter": document}
    run(JsonlReader(**source), ExactDedupSignature(str(out / "exact"), exact))
    run(ExactFindDedups(str(out / "exact"), str(out / "exact-found"), exact))
    unique = JsonlWriter(str(out / "unique"), compression=None)
    run(JsonlReader(**source), ExactDedupFilter(str(out / "exact-found"), exact), unique)
    language = Split() if words == "split" else Languages.english
    run(JsonlReader(str(out / "unique")), MinhashDedupSignature(str(out / "minhash"), language=language))
    run(MinhashDedupBuckets(str(out / "minhash"), str(out / "buckets")), tasks=14)  # one per bucket
    run(MinhashDedupCluster(str(out / "buckets"), str(out / "removed")))
    kept = JsonlWriter(str(out / "kept"), output_filename="kept.jsonl", compression=None)
    run(JsonlReader(str(out / "unique")), MinhashDedupFilter(str(out / "removed")), kept)


def ours_tokens(file: Path, out: Path, tokenizer: Path) -> None:
    """Shards of the kept rows, by this project's stage."""
    from dschat_core.config import DataRuntimeConfig, TokenizationConfig
    from dschat_core.stages.tokenization import ROWS, tokenization

    rows = out / "rows"
    rows.mkdir()
    (rows / ROWS).hardlink_to(file)
    section = TokenizationConfig(base_model=str(tokenizer), runtime=DataRuntimeConfig(workers=1))
    tokenization(section, {"dialogues": rows, "base_model": tokenizer}, out)


def datatrove_tokens(file: Path, out: Path, tokenizer: Path) -> None:
    """Shards of the kept rows, by datatrove."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(str(file.parent), glob_pattern=file.name),
        DocumentTokenizer(str(out / "tokens"), str(tokenizer / "tokenizer.json"), shuffle_documents=False),
    ]
    LocalPipelineExecutor(pipeline=steps, tasks=1, workers=1, logging_dir=str(out / "logs")).run()


def make_tokenizer(file: Path, folder: Path) -> None:
    """Train the tokenizer of both sides on the first rows of the file."""
    import orjson

    from dschat_core.data.tokenizing import save_tokenizer, train_tokenizer

    with file.open("rb") as lines:
        texts = [_text(orjson.loads(line)) for line in islice(lines, TRAINING_ROWS)]
    save_tokenizer(train_tokenizer(texts, vocab_size=VOCAB_SIZE), folder, max_length=2048)


def _text(row: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in row["messages"])


def print_figure(name: str, value: float, unit: str, target: float | None = None) -> None:
    """One line of JSON, in the form of the other benchmarks."""
    print(json.dumps({"name": name, "value": value, "unit": unit, "target": target, "runs": [value]}), flush=True)


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a command and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    finished = subprocess.run(command, env={**os.environ, **ONE_THREAD}, capture_output=True, text=True, check=False)
    if finished.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{finished.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(peer_python: str, rows: int, words: str) -> None:
    """Make the file, run both sides on it, print their figures."""
    script = str(Path(__file__).resolve())
    with tempfile.TemporaryDirectory(prefix="dschat-peers-") as scratch:
        folder = Path(scratch)
        file = folder / "dialogues.jsonl"
        maker = str(Path(script).parents[1] / "bench_duplicates.py")
        subprocess.run([sys.executable, maker, "--write", str(file), "--rows", str(rows)], check=True)
        make_tokenizer(file, folder / "tokenizer")
        seconds: dict[tuple[str, str], float] = {}
        for side, python in (("ours", sys.executable), ("datatrove", peer_python)):
            out = folder / side
            (out / "shards").mkdir(parents=True)
            run = [python, script, "--words", words, "--side"]
            seconds["dedup", side] = cpu_seconds([*run, side, str(file), str(out)])
            (kept,) = out.rglob("kept.jsonl")
            count = kept.read_bytes().count(b"\n")
            tokens = [*run, f"{side}-tokens", str(kept), str(out / "shards"), str(folder / "tokenizer")]
            seconds["tokens", side] = cpu_seconds(tokens)
            print_figure(f"peer_dedup_{side}", rows / seconds["dedup", side], "dialogues/CPU-s")
            print_figure(f"peer_dedup_{side}_kept", count / rows, "share")
            print_figure(f"peer_tokens_{side}", count / seconds["tokens", side], "dialogues/CPU-s")
        for step in ("dedup", "tokens"):
            print_figure(f"peer_{step}_ratio", seconds[step, "datatrove"] / seconds[step, "ours"], "times")
        total = {side: seconds["dedup", side] + seconds["tokens", side] for side in ("ours", "datatrove")}
        print_figure("peer_total_ratio", total["datatrove"] / total["ours"], "times", 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="the Python of datatrove's environment")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--words", choices=["default", "split"], default="default")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    paths = [Path(path) for path in arguments.paths]
    match arguments.side:
        case "ours":
            ours(*paths)
        case "datatrove":
            datatrove(*paths, arguments.words)
        case "ours-tokens":
            ours_tokens(*paths)
        case "datatrove-tokens":
            datatrove_tokens(*paths)
        case _:
            compare(arguments.paths[0], arguments.rows, arguments.words)


if __name__ == "__main__":
    main()
