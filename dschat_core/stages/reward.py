"""Reward: a scalar head on the sft model, trained so that the chosen reply outscores the rejected one.

Bradley-Terry (as in Stiennon et al. 2020 and Ouyang et al. 2022): loss = −log σ(r_chosen − r_rejected), averaged over
pairs, r read at the last token of the dialogue. Afterwards held-out chosen replies define score 0 and deviation 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dschat_core.artifacts import Product
from dschat_core.chat_template import load_tokenizer
from dschat_core.cluster.job import Job
from dschat_core.config import RewardConfig
from dschat_core.data.batches import BatchPlan, permutation
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
from dschat_core.train.models import load_with_scalar_head
from dschat_core.train.objectives import AtPositions, Inputs, bradley_terry_loss, pack_last
from dschat_core.train.reward_model import save_normalisation


def reward(job: Job) -> Product:
    """Train on part `preferences`, from input `model`; returns parts `model` and `metrics`. Run by every rank."""
    section: RewardConfig = job.config()
    tokenizer = load_tokenizer(job.input("tokenizer"))
    model = load_with_scalar_head(job.input("model"), tokenizer, max_length=section.max_length, seed=section.seed)
    reader, heldout = ShardReader(job.input("preferences")), ShardReader(job.input("preferences_heldout"))
    longer_P = reader.lengths.reshape(-1, 2).max(axis=1)
    plan = BatchPlan(
        longer_P,
        np.ones_like(longer_P),
        seed=derive_seed(section.seed, job.stage, "order"),
        max_length=section.max_length,
        global_batch_size=section.global_batch_size,
        packing="bucketed",
    )
    engine.log(
        f"reward: {num_parameters(model):,} parameters, {len(longer_P):,} pairs, {plan.steps_per_epoch:,} steps an epoch"
    )
    evaluated = _heldout_pairs(heldout, section)
    micro_batch_size = resolve_micro_batch_size(section)

    done = train(
        job,
        section,
        AtPositions(model),
        plan,
        Objective(
            collate=lambda rows: collate_pairs(reader, rows),
            loss=lambda trained, inputs: bradley_terry_loss(*_halves(trained(inputs))),
            evaluate=lambda trained: _loss_and_accuracy(trained, heldout, evaluated, micro_batch_size),
            tokens=lambda row: int(sum(reader.lengths[2 * pair : 2 * pair + 2].sum() for pair in row)),
        ),
    )
    pairs = [[pair] for pair in range(len(heldout) // 2)]
    facts = _heldout_facts(done.engine, heldout, pairs, micro_batch_size)
    out = Path(job.output_dir)
    engine.export_model(done.engine, model, job.input("tokenizer"), out / "model")
    if engine.is_main():
        save_normalisation(out / "model", facts["score_mean"], facts["score_std"])
    engine.barrier()
    return Product({"model": file_names(out, "model"), "metrics": [copy_metrics(job)]}, done.facts | facts)


def collate_pairs(reader: ShardReader, rows: Sequence[Sequence[int]]) -> Inputs:
    """The micro-batch of these pairs: scores of all chosen sequences, then of all rejected ones."""
    pairs = [pair for row in rows for pair in row]
    ids, _, lengths = reader.gather([2 * pair + side for side in (0, 1) for pair in pairs])
    return pack_last(np.split(ids, np.cumsum(lengths)[:-1]) if pairs else [], device=engine.device())


def _halves(scores_N1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    chosen_P, rejected_P = scores_N1.squeeze(-1).chunk(2) if len(scores_N1) else (scores_N1.squeeze(-1),) * 2
    return chosen_P, rejected_P


def _heldout_pairs(reader: ShardReader, section: RewardConfig) -> list[list[int]]:
    num_pairs = len(reader) // 2
    order = permutation(derive_seed(section.seed, "heldout"), 0, max(1, num_pairs))
    return [[order(index)] for index in range(min(section.eval_rows, num_pairs))]


def _loss_and_accuracy(
    trained: Any, reader: ShardReader, rows: Sequence[Sequence[int]], micro_batch_size: int
) -> dict[str, float]:
    def measure(scores_N1: torch.Tensor, _: Inputs, chunk: Sequence[Sequence[int]]) -> tuple[float, float, float]:
        chosen_P, rejected_P = _halves(scores_N1)
        return float(bradley_terry_loss(chosen_P, rejected_P)), _wins(chosen_P - rejected_P), len(chunk)

    loss, wins, num = heldout_sums(trained, rows, micro_batch_size, lambda r: collate_pairs(reader, r), measure)
    return {"eval_loss": loss / max(1.0, num), "eval_accuracy": wins / max(1.0, num)}


def _wins(margins_P: torch.Tensor) -> float:
    """Pairs won; a tie is half a win, so that a constant score has accuracy 0.5."""
    return float((margins_P > 0).sum() + 0.5 * (margins_P == 0).sum())


def _heldout_facts(
    trained: Any, reader: ShardReader, rows: Sequence[Sequence[int]], micro_batch_size: int
) -> dict[str, Any]:
    """Accuracy over all held-out pairs, by kind and of a guess by length alone; mean and deviation of chosen scores."""
    kinds = sorted({_kind(reader, pair) for row in rows for pair in row})

    def measure(scores_N1: torch.Tensor, _: Inputs, chunk: Sequence[Sequence[int]]) -> list[float]:
        chosen_P, rejected_P = (half.double() for half in _halves(scores_N1))
        found = [float(chosen_P.sum()), float(chosen_P.square().sum())]
        margins = (chosen_P - rejected_P).cpu()
        pairs = [pair for row in chunk for pair in row]
        for kind in kinds:
            mine = [index for index, pair in enumerate(pairs) if _kind(reader, pair) == kind]
            gaps = [int(reader.lengths[2 * pairs[i]] - reader.lengths[2 * pairs[i] + 1]) for i in mine]
            found += [_wins(margins[mine]), _wins(torch.tensor(gaps)), len(mine)]
        return found

    total, squares, *by_kind = heldout_sums(
        trained, rows, micro_batch_size, lambda r: collate_pairs(reader, r), measure
    )
    num_pairs = max(1, len(rows))
    mean = total / num_pairs
    deviation = max(squares / num_pairs - mean * mean, 0.0) ** 0.5
    wins, longer, counts = by_kind[0::3], by_kind[1::3], by_kind[2::3]
    return {
        "num_heldout_pairs": len(rows),
        "accuracy": sum(wins) / num_pairs,
        "accuracy_length_only": sum(longer) / num_pairs,
        "accuracy_by_kind": {kind: won / count for kind, won, count in zip(kinds, wins, counts, strict=True)},
        "score_mean": mean,
        # A model that scores everything the same cannot be normalised; its scores stay as they are.
        "score_std": deviation if deviation > 1e-6 else 1.0,
    }


def _kind(reader: ShardReader, pair: int) -> str:
    return str((reader.meta[2 * pair].get("kind") if reader.meta else None) or "other")
