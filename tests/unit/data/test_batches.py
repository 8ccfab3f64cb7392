"""The order of the samples: complete, seeded, the same on any number of ranks."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dschat_core.data.batches import BatchPlan, packed_rows, permutation
from dschat_core.errors import ConfigError


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
def test_permutation_is_a_bijection_that_differs_by_seed_and_epoch(n: int) -> None:
    orders = [
        [order(i) for i in range(n)] for order in (permutation(0, 0, n), permutation(0, 1, n), permutation(1, 0, n))
    ]
    assert all(sorted(order) == list(range(n)) for order in orders)
    if n >= 64:
        assert len({tuple(order) for order in orders}) == 3
        assert [permutation(0, 0, n)(i) for i in range(n)] == orders[0]


def test_permutation_needs_no_memory_and_knows_its_bounds() -> None:
    order = permutation(0, 0, 10**15)
    assert len({order(i) for i in range(1000)}) == 1000
    with pytest.raises(IndexError):
        order(10**15)


def test_permutation_has_no_drift() -> None:
    # Positions of a random order are uncorrelated with its indices; 4 standard errors of 1 / sqrt(n).
    n = 10_000
    order = permutation(5, 3, n)
    assert abs(np.corrcoef(np.arange(n), [order(i) for i in range(n)])[0, 1]) < 0.04


def test_packing_keeps_every_sample_within_the_limit_and_fills_the_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 5000)
    rows = packed_rows(lengths, 256)
    assert sorted(i for row in rows for i in row) == list(range(5000))
    assert max(lengths[row].sum() for row in rows) <= 256
    assert lengths.sum() / (len(rows) * 256) > 0.99


def test_packing_takes_the_tightest_row() -> None:
    assert packed_rows([6, 5, 4, 4], 10) == [[0, 2], [1, 3]]
    assert packed_rows([10, 10], 10) == [[0], [1]]


def test_packing_stays_within_windows() -> None:
    assert packed_rows([1, 1, 1, 1], 10, window=2) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("packed", [True, False])
def test_d12_every_sample_once_an_epoch_and_steps_for_any_world_size(packed: bool) -> None:
    lengths = np.full(7, 5)
    plan = BatchPlan(lengths, lengths - 1, seed=0, max_length=10, global_batch_size=2, packed=packed)
    epochs = [
        [plan.step(epoch * plan.steps_per_epoch + step) for step in range(plan.steps_per_epoch)] for epoch in range(3)
    ]
    for steps in epochs:
        assert Counter(i for rows in steps for row in rows for i in row) == Counter(range(7))
    assert epochs[0] != epochs[1]
    # However many ranks share a step, together they take each of its rows once.
    for world in (1, 2, 3):
        rows = plan.step(0)
        assert sorted(row for rank in range(world) for row in rows[rank::world]) == sorted(rows)


def test_targets_of_a_step_are_those_of_its_rows() -> None:
    lengths = np.random.default_rng(0).integers(2, 50, 300)
    targets = lengths // 2
    plan = BatchPlan(lengths, targets, seed=3, max_length=64, global_batch_size=8, packed=True)
    for step in (0, plan.steps_per_epoch - 1, plan.steps_per_epoch + 1):
        assert plan.num_targets(step) == sum(targets[i] for row in plan.step(step) for i in row)
    assert plan.fill == pytest.approx(lengths.sum() / (plan.num_rows * 64))


def test_a_seed_decides_the_plan_alone() -> None:
    lengths = np.random.default_rng(0).integers(2, 50, 300)

    def steps(seed: int) -> list[list[list[int]]]:
        plan = BatchPlan(lengths, lengths, seed=seed, max_length=64, global_batch_size=8, packed=True)
        return [plan.step(k) for k in range(5)]

    assert steps(1) == steps(1)
    assert steps(1) != steps(2)


def test_a_row_beyond_the_limit_and_no_row_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match="row 1 has 20 tokens, more than max_length=10"):
        BatchPlan(np.array([5, 20]), np.array([1, 1]), seed=0, max_length=10, global_batch_size=1, packed=False)
    with pytest.raises(ConfigError, match="no row to train on"):
        BatchPlan(np.array([]), np.array([]), seed=0, max_length=10, global_batch_size=1, packed=True)
