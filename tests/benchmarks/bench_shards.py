"""Reading shards and packing samples: rows of 2048 tokens per CPU-second, the fill of packed rows, writing.

Run: python tests/benchmarks/bench_shards.py

The part read has 200 MB of tokens in lognormal documents, as dialogues have them, with a mask of alternating turns,
and is read in the order of a training epoch, a micro-batch of 8 packed rows at a time.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from common import measure, print_figure

from dschat_core.data.batches import BatchPlan, packed_rows, permuted
from dschat_core.data.shards import ShardReader, ShardWriter, write_index
from dschat_core.train.objectives import lay_out

MAX_LENGTH = 2048
MICRO_BATCH = 8
NUM_TOKENS = 104_000_000
VOCAB_SIZE = 32_000
WRITE_ROWS = 4000
MEAN_LENGTHS = {"short_dialogues": 60, "dialogues": 250, "text": 900}


def document_lengths(mean: int, num_tokens: int) -> np.ndarray:
    """Lognormal lengths; what exceeds a row is cut into whole rows and a rest, as tokenization cuts text."""
    draw = np.random.default_rng(mean)
    drawn = np.maximum(draw.lognormal(np.log(mean) - 0.32, 0.8, num_tokens // mean).astype(np.int64), 8)
    rests = drawn % MAX_LENGTH
    return draw.permutation(np.concatenate([rests[rests > 1], np.full(int((drawn // MAX_LENGTH).sum()), MAX_LENGTH)]))


def documents(lengths: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Random ids of these lengths in four shards: values, offsets, and a mask of alternating turns of 20 tokens."""
    shards = []
    for number, mine in enumerate(np.array_split(lengths, 4)):
        offsets = np.concatenate([[0], np.cumsum(mine)])
        values = np.random.default_rng(number).integers(0, VOCAB_SIZE, offsets[-1], dtype=np.uint16)
        shards.append((values, offsets, np.arange(offsets[-1]) // 20 % 2 == 1))
    return shards


def write(folder: Path, shards: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> None:
    """A part of these shards, in batches of some thousand rows, hashed and synced."""
    infos = []
    for number, (values, offsets, mask) in enumerate(shards):
        writer = ShardWriter(folder, number, vocab_size=VOCAB_SIZE, masks="rows")
        for first in range(0, len(offsets) - 1, WRITE_ROWS):
            mine = offsets[first : first + WRITE_ROWS + 1]
            tokens = slice(mine[0], mine[-1])
            writer.add_batch(values[tokens], mine - mine[0], mask=mask[tokens], num_bytes=np.diff(mine), meta=None)
        infos.append(writer.close())
    write_index(folder, infos, vocab_size=VOCAB_SIZE, masks="rows", has_meta=False)


def micro_batches(reader: ShardReader, num_rows: int) -> list[list[list[int]]]:
    """The first packed rows of an epoch, MICRO_BATCH at a time."""
    plan = BatchPlan(
        reader.lengths,
        reader.num_targets,
        seed=0,
        max_length=MAX_LENGTH,
        global_batch_size=MICRO_BATCH,
        packing="packed",
    )
    return [plan.step(k) for k in range(min(num_rows // MICRO_BATCH, plan.steps_per_epoch))]


def read(reader: ShardReader, batches: list[list[list[int]]]) -> None:
    """Tokens, masks and document lengths of every row."""
    for rows in batches:
        reader.gather([sample for row in rows for sample in row])


def read_laid_out(reader: ShardReader, batches: list[list[list[int]]]) -> None:
    """The same, as training takes it: rows side by side with positions and document boundaries."""
    for rows in batches:
        ids_T, mask_T, lengths_S = reader.gather([sample for row in rows for sample in row])
        layout = lay_out(lengths_S, [len(row) for row in rows])
        layout.rows(ids_T, 0), layout.places(), layout.owners(), np.flatnonzero(layout.rows(mask_T, False))


def main() -> None:
    for name, mean in MEAN_LENGTHS.items():
        with tempfile.TemporaryDirectory() as folder:
            lengths = document_lengths(mean, NUM_TOKENS)
            write_it = partial(write, Path(folder), documents(lengths))
            if name == "dialogues":
                megabytes = 2 * NUM_TOKENS / 1e6
                measure("shards_written", "MB tokens/CPU-s", 200, megabytes, write_it)
            else:
                write_it()
            reader = ShardReader(folder)
            batches = micro_batches(reader, 20_000)
            amount = len(batches) * MICRO_BATCH
            read(reader, batches)  # the maps' pages, so that the first run counts like the others
            for kind, function, target in (("read", read, 50_000), ("read_laid_out", read_laid_out, 30_000)):
                run = partial(function, reader, batches)
                measure(f"packed_rows_{kind}_{name}", "rows of 2048/CPU-s", target, amount, run)
    for name, mean in MEAN_LENGTHS.items():
        lengths = document_lengths(mean, mean * 1_000_000)
        rows = packed_rows(lengths, MAX_LENGTH)
        fill = float(lengths.sum() / (len(rows) * MAX_LENGTH))
        print_figure(f"packing_fill_{name}", [fill], "share", target=0.998)
        plan = partial(
            BatchPlan, lengths, lengths, seed=0, max_length=MAX_LENGTH, global_batch_size=32, packing="packed"
        )
        measure(f"packing_{name}", "samples/CPU-s", 500_000, len(lengths), plan)
    positions = np.arange(1_000_000)
    order = partial(permuted, 0, 0, 100_000_000, positions)
    measure("permutation", "positions/CPU-s", 10_000_000, len(positions), order)


if __name__ == "__main__":
    main()
