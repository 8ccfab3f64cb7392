"""Tokenizing and writing shards in one process, against `datasets.map` with the same tokenizer and rows.

The rows are the demo's real conversations (12 MB of text, 16 MB of dialogues). Every run starts with a new encoder, so
that no cache is warm; loading the tokenizer, half a second once per shard of 64 MB, is not counted on either side.

python tests/benchmarks/bench_tokenization.py
"""

from __future__ import annotations

import os

# Before anything starts threads: figures are per CPU-second of one core.
os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import datasets
from common import print_figure
from transformers import AutoTokenizer

from dschat_core.config import DataRuntimeConfig, TokenizationConfig
from dschat_core.stages.tokenization import ShardTask, _encoder, make_shard, tokenization

VOCAB_SIZE = 32_000
MAX_LENGTH = 2048


ROOT = Path(__file__).parents[2]


def shard(
    name: str, target: float, part: Path, tokenizer: Path, out: Path, *, fast: bool = True, runs: int = 3
) -> float:
    """MB of the part's rows per CPU-second, made into one shard."""
    source = part / "rows.jsonl"
    size = source.stat().st_size
    task = ShardTask(part.name, 0, str(source), 0, size, str(out), str(tokenizer), fast, MAX_LENGTH, "truncate")
    figures = []
    for _ in range(runs):
        _encoder.cache_clear()
        _encoder(str(tokenizer), fast)
        start = time.process_time()
        make_shard(task)
        figures.append(size / 1e6 / (time.process_time() - start))
        shutil.rmtree(out)
    return print_figure(name, figures, "MB/CPU-s", target=target)


def mapped(part: Path, tokenizer: Any, folder: Path) -> float:
    """CPU-seconds that `datasets.map` takes for the same rows, written to its Arrow cache."""
    rows = datasets.load_dataset(
        "json", data_files=str(part / "rows.jsonl"), split="train", cache_dir=str(folder / "c")
    )

    def text(batch: dict[str, list[Any]]) -> dict[str, Any]:
        return {"input_ids": tokenizer(batch["text"], add_special_tokens=False)["input_ids"]}

    def dialogues(batch: dict[str, list[Any]]) -> dict[str, Any]:
        rendered = [tokenizer.apply_chat_template(turns, tokenize=False) for turns in batch["messages"]]
        return {"input_ids": tokenizer(rendered, add_special_tokens=False)["input_ids"]}

    start = time.process_time()
    rows.map(
        text if part.name == "text" else dialogues,
        batched=True,
        remove_columns=rows.column_names,
        load_from_cache_file=False,
        cache_file_name=str(folder / "mapped.arrow"),
    )
    return time.process_time() - start


def main() -> None:
    """Print the figures, one JSON line each."""
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts = {kind: folder / kind for kind in ("text", "dialogues")}
        subprocess.run([sys.executable, ROOT / "deployments" / "demo_data.py", folder / "data"], check=True, cwd=ROOT)
        for kind, part in parts.items():
            part.mkdir()
            shutil.copyfile(folder / "data" / f"{kind}.train.jsonl", part / "rows.jsonl")
        product = tokenization(
            TokenizationConfig(vocab_size=VOCAB_SIZE, runtime=DataRuntimeConfig(workers=1)), parts, folder / "made"
        )
        tokenizer = folder / "made" / "tokenizer"
        for kind, target in (("text", 12.0), ("dialogues", 6.0)):
            size = (parts[kind] / "rows.jsonl").stat().st_size / 1e6
            ours = shard(f"tokenization_{kind}", target, parts[kind], tokenizer, folder / "shards")
            shard(
                f"tokenization_{kind}_without_fastokens",
                1,
                parts[kind],
                tokenizer,
                folder / "shards",
                fast=False,
                runs=1,
            )
            theirs = [
                size / mapped(parts[kind], AutoTokenizer.from_pretrained(str(tokenizer)), folder) for _ in range(3)
            ]
            print_figure(f"datasets_map_{kind}", theirs, "MB/CPU-s")
            print_figure(
                f"tokenization_{kind}_vs_datasets_map", [ours / figure for figure in theirs], "ratio", target=10
            )
        print(json.dumps({"name": "tokens", **{k: v["tokens"] for k, v in product.facts["data"].items()}}))


if __name__ == "__main__":
    main()
