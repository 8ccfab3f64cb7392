"""What pretraining and sft share: packed rows, the next-token objective, its held-out loss, and the product."""

from __future__ import annotations

from collections.abc import Sequence
from math import log as ln
from pathlib import Path
from typing import Any

import numpy as np

from dschat_core.artifacts import Product
from dschat_core.cluster.job import Job
from dschat_core.config import TrainingConfig
from dschat_core.data.batches import packed_plan, packed_rows, permutation
from dschat_core.data.shards import ShardReader
from dschat_core.seeds import derive_seed
from dschat_core.train import engine
from dschat_core.train.loop import (
    Objective,
    copy_metrics,
    file_names,
    heldout_sums,
    num_parameters,
    resolve_micro_batch_size,
    train,
)
from dschat_core.train.objectives import AtPositions, Inputs, next_token_loss, pack_masked


def train_next_token(job: Job, section: TrainingConfig, model: Any, *, train_part: str, heldout_part: str) -> Product:
    """Train `model` on the masked tokens of a part and write the product."""
    reader, heldout = ShardReader(job.input(train_part)), ShardReader(job.input(heldout_part))
    plan = packed_plan(reader, section, job.stage)
    engine.log(
        f"{job.stage}: {num_parameters(model):,} parameters, {len(reader):,} rows packed into {plan.num_rows:,}, "
        f"{plan.steps_per_epoch:,} steps an epoch, {plan.fill:.1%} full"
    )
    chosen = heldout_rows(heldout, section)
    micro_batch_size = resolve_micro_batch_size(section)
    num_bytes = int(sum(heldout.num_bytes[row].sum() for row in chosen))

    def evaluate(trained: Any) -> dict[str, float]:
        loss, targets = heldout_sums(
            trained,
            chosen,
            micro_batch_size,
            lambda rows: collate(heldout, rows),
            lambda logits, inputs, _: (float(next_token_loss(logits, inputs.targets_N)), len(inputs.targets_N)),
        )
        found = {"eval_loss": loss / max(1.0, targets)}
        return found | ({"eval_bits_per_byte": loss / ln(2) / num_bytes} if num_bytes else {})

    done = train(
        job,
        section,
        AtPositions(model),
        plan,
        Objective(
            collate=lambda rows: collate(reader, rows),
            loss=lambda trained, inputs: next_token_loss(trained(inputs), inputs.targets_N),
            evaluate=evaluate,
            tokens=lambda row: int(reader.lengths[list(row)].sum()),
        ),
    )
    out = Path(job.output_dir)
    engine.export_model(done.engine, model, job.input("tokenizer"), out / "model")
    return Product({"model": file_names(out, "model"), "metrics": [copy_metrics(job)]}, done.facts)


def collate(reader: ShardReader, rows: Sequence[Sequence[int]]) -> Inputs:
    """The micro-batch of these packed rows of sample ids."""
    samples = [sample for row in rows for sample in row]
    return pack_masked(*reader.gather(samples), [len(row) for row in rows], device=engine.device())


def heldout_rows(reader: ShardReader, section: TrainingConfig) -> list[list[int]]:
    """Packed rows of at most `eval_rows` held-out samples, drawn once and the same in every evaluation."""
    order = permutation(derive_seed(section.seed, "heldout"), 0, max(1, len(reader)))
    drawn = [order(index) for index in range(min(section.eval_rows, len(reader)))]
    samples = [sample for sample in drawn if reader.lengths[sample] <= section.max_length]
    if not samples:
        return []
    packed = packed_rows(reader.lengths[np.asarray(samples)], section.max_length)
    return [[samples[index] for index in row] for row in packed]
