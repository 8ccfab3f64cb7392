"""Optimizer steps on real ranks: normalisation, equivalences, skipped steps, schedules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from dschat_core.config import OptimizerConfig, RuntimeConfig
from dschat_core.train import engine
from tests.helpers_training import run_ranks


def linear_engine(zero_stage: int = 1, precision: Any = "fp32", **optimizer: Any) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    return engine.build_engine(
        model,
        OptimizerConfig(**{"learning_rate": 1e-2, **optimizer}),
        RuntimeConfig(zero_stage=zero_stage),
        precision=precision,
        micro_batch_size=1,
    )


def weights(trained: Any) -> list[list[float]]:
    from deepspeed import zero

    with zero.GatheredParameters(list(trained.module.parameters())):
        return [p.detach().float().flatten().tolist() for p in trained.module.parameters()]


def _m1(zero_stage: int) -> float:
    """Loss sums of 10 over 2 tokens and 9 over 6 tokens: as two micro-batches of one rank, or one on each of two."""
    trained = engine.build_engine(
        torch.nn.Linear(1, 1, bias=False),
        OptimizerConfig(grad_clip=1e9),
        RuntimeConfig(zero_stage=zero_stage),
        precision="fp32",
        micro_batch_size=1,
    )
    sums = [10.0, 9.0][engine.rank() :: engine.world_size()]
    for index, value in enumerate(sums):
        loss = trained(torch.full((1, 1), value)).sum()
        engine.backward(trained, loss, count=8, is_last=index == len(sums) - 1)
    return engine.optimizer_step(trained, 0.0).grad_norm


@pytest.mark.parametrize("world_size", [1, 2])
def test_m1_two_sums_of_unequal_counts(world_size: int) -> None:
    """The gradient of weight·mean is the mean: 19 / 8, not (10/2 + 9/6) / 2."""
    assert run_ranks(world_size, _m1, 1) == [pytest.approx(2.375)] * world_size
    assert run_ranks(world_size, _m1, 0) == [pytest.approx(2.375)] * world_size


def _skips(zero_stage: int) -> list[Any]:
    trained = linear_engine(zero_stage)
    ids = torch.tensor([[1, 2], [3, 4]])
    found = []
    for bad in (1.0, math.nan, math.inf, 1.0):
        before = weights(trained)
        # Only one rank's loss is bad: all must skip.
        factor = bad if engine.rank() == engine.world_size() - 1 else 1.0
        engine.backward(trained, trained(ids).pow(3).sum() * factor, count=4, is_last=True)
        result = engine.optimizer_step(trained, 1e-2)
        found.append((result.skipped, weights(trained) == before, math.isfinite(result.grad_norm)))
    return found


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_r7_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(zero_stage: int) -> None:
    taken, skipped = (False, False, True), (True, True, False)
    assert run_ranks(2, _skips, zero_stage) == [[taken, skipped, skipped, taken]] * 2


def _trained_weights(zero_stage: int, precision: str, grad_clip: float, weight_decay: float) -> Any:
    trained = linear_engine(zero_stage, precision, grad_clip=grad_clip, weight_decay=weight_decay)
    for step in range(6):
        ids = torch.tensor([[step, 1], [3, 9 - step]])[engine.rank() :: engine.world_size()]
        loss = trained(ids).float().pow(3).sum()
        engine.backward(trained, loss, count=2, is_last=True)
        engine.optimizer_step(trained, 1e-2)
    return weights(trained)


def _plain_torch(grad_clip: float, weight_decay: float) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    adamw = torch.optim.AdamW(engine.parameter_groups(model, weight_decay), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(6):
        model.zero_grad()
        (model(torch.tensor([[step, 1], [3, 9 - step]])).pow(3).sum() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        adamw.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_zero_stage_is_plain_torch(zero_stage: int) -> None:
    found = run_ranks(2, _trained_weights, zero_stage, "fp32", 0.5, 0.1)
    expected = _plain_torch(0.5, 0.1)
    for mine, theirs in zip(found[0], expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
    # The comparison would notice a clip or a decay that is not applied.
    for other in (_plain_torch(1e9, 0.1), _plain_torch(0.5, 0.0)):
        gap = max((torch.tensor(a) - torch.tensor(b)).abs().max().item() for a, b in zip(other, expected, strict=True))
        assert gap > 1e-4


def test_bf16_trains_near_fp32() -> None:
    low, high = (run_ranks(2, _trained_weights, 1, precision, 0.5, 0.0)[0] for precision in ("bf16", "fp32"))
    for mine, theirs in zip(low, high, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=2e-2, atol=3e-2)


def test_parameter_groups_spare_norms_biases_and_embeddings() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10), torch.nn.LayerNorm(10))
    tied = copy.deepcopy(model)
    tied[1].weight = tied[0].weight
    for module, num_decayed in ((model, 1), (tied, 0)):
        decayed, spared = engine.parameter_groups(module, 0.1)
        assert (len(decayed["params"]), decayed["weight_decay"], spared["weight_decay"]) == (num_decayed, 0.1, 0.0)
        assert len(decayed["params"]) + len(spared["params"]) == len(list(module.parameters()))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.55, 0.1, 0.1]),
        ("cosine", [0.5, 1.0, 0.55, 0.1, 0.1]),
    ],
)
def test_schedules(schedule: Any, expected: list[float]) -> None:
    config = OptimizerConfig(learning_rate=2.0, schedule=schedule, warmup_share=0.2, min_lr_share=0.1)
    rates = [engine.learning_rate(config, step, 20) for step in (2, 4, 12, 20, 25)]
    assert rates == pytest.approx([2.0 * share for share in expected])
    assert engine.learning_rate(config, 4, 20, peak=6.0) == pytest.approx(6.0)


def test_cosine_lies_above_linear_at_first() -> None:
    rates = [
        engine.learning_rate(OptimizerConfig(schedule=name, warmup_share=0.0, min_lr_share=0.0), 25, 100)
        for name in ("cosine", "linear")
    ]
    assert rates[0] == pytest.approx(1e-5 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert rates[0] > rates[1]
