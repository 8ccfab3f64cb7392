"""Tokenizing and writing shards in one process, against `datasets.map` with the same tokenizer and rows.

python tests/benchmarks/bench_tokenization.py
"""

from __future__ import annotations

import os

# Before anything starts threads: figures are per CPU-second of one core.
os.environ |= {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

import json
import shutil
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from common import measure, print_figure, write_dialogues, write_texts
from transformers import AutoTokenizer

from dschat_core.config import DataRuntimeConfig, TokenizationConfig
from dschat_core.stages.tokenization import ShardTask, make_shard, tokenization

VOCAB_SIZE = 32_000
MAX_LENGTH = 2048


def shard(part: Path, tokenizer: Path, out: Path, *, fast: bool = True) -> None:
    """One shard of all rows of a part."""
    source = part / "rows.jsonl"
    make_shard(
        ShardTask(
            part.name, 0, str(source), 0, source.stat().st_size, str(out), str(tokenizer), fast, MAX_LENGTH, "truncate"
        )
    )
    shutil.rmtree(out)


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
        for part in parts.values():
            part.mkdir()
        text_bytes = write_texts(parts["text"] / "rows.jsonl", 12)
        dialogue_bytes = write_dialogues(parts["dialogues"] / "rows.jsonl", 40_000)
        product = tokenization(
            TokenizationConfig(vocab_size=VOCAB_SIZE, runtime=DataRuntimeConfig(workers=1)), parts, folder / "made"
        )
        tokenizer = folder / "made" / "tokenizer"
        for kind, amount, target in (("text", text_bytes, 12), ("dialogues", dialogue_bytes, 6)):
            out = folder / "shards"
            ours = measure(
                f"tokenization_{kind}", "MB/CPU-s", target, amount / 1e6, partial(shard, parts[kind], tokenizer, out)
            )
            measure(
                f"tokenization_{kind}_without_fastokens",
                "MB/CPU-s",
                1,
                amount / 1e6,
                partial(shard, parts[kind], tokenizer, out, fast=False),
                runs=1,
            )
            theirs = mapped(parts[kind], AutoTokenizer.from_pretrained(str(tokenizer)), folder)
            print_figure(f"tokenization_{kind}_vs_datasets_map", [ours * theirs / (amount / 1e6)], "ratio", target=10)
        print(json.dumps({"name": "tokens", **{k: v["tokens"] for k, v in product.facts["data"].items()}}))


if __name__ == "__main__":
    main()
