"""The order of the samples: complete, seeded, the same on any number of ranks and after any interruption."""

from __future__ import annotations

from collections import Counter
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat_core.data.batches import (
    BUCKET_STEPS,
    BatchPlan,
    GlobalSampler,
    Packing,
    packed_rows,
    permutation,
    permuted,
)
from dschat_core.errors import ConfigError

# ── the permutation ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 65, 1000])
def test_permutation_is_a_bijection_that_differs_by_seed_and_epoch(n: int) -> None:
    orders = [
        [order(i) for i in range(n)] for order in (permutation(0, 0, n), permutation(0, 1, n), permutation(1, 0, n))
    ]
    assert all(sorted(order) == list(range(n)) for order in orders)
    if n >= 64:
        assert len({tuple(order) for order in orders}) == 3
        assert [permutation(0, 0, n)(i) for i in range(n)] == orders[0]


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**64 - 1), epoch=st.integers(-1, 10**6), n=st.integers(1, 3000))
def test_the_permutation_of_an_array_is_a_bijection_equal_to_that_of_its_entries(seed: int, epoch: int, n: int) -> None:
    found = permuted(seed, epoch, n, np.arange(n))
    assert found.dtype == np.int64
    assert np.array_equal(np.sort(found), np.arange(n))
    order = permutation(seed, epoch, n)
    assert found[:: max(1, n // 50)].tolist() == [order(i) for i in range(0, n, max(1, n // 50))]


def test_permutation_needs_no_memory_and_knows_its_bounds() -> None:
    n = 10**15
    order = permutation(0, 0, n)
    assert len({order(i) for i in range(1000)}) == 1000
    assert permuted(0, 0, n, np.arange(n - 1000, n)).tolist() == [order(i) for i in range(n - 1000, n)]
    for outside in (n, -1):
        with pytest.raises(IndexError):
            order(outside)
        with pytest.raises(IndexError):
            permuted(0, 0, n, np.array([0, outside]))


def test_the_order_of_a_seed_is_the_same_in_every_version() -> None:
    """A run is resumed by its step number, so an order that changed would train on some rows twice."""
    assert [permutation(0, 0, 10)(i) for i in range(10)] == PINNED_ORDER
    assert permuted(0, 0, 10, np.arange(10)).tolist() == PINNED_ORDER


PINNED_ORDER = [8, 1, 2, 7, 3, 5, 4, 6, 0, 9]


def test_permutation_has_no_drift() -> None:
    # Positions of a random order are uncorrelated with its indices; 4 standard errors of 1 / sqrt(n).
    n = 10_000
    assert abs(np.corrcoef(np.arange(n), permuted(5, 3, n, np.arange(n)))[0, 1]) < 0.04


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), max_size=200), extra=st.integers(0, 100), window=st.sampled_from([1, 7, 50])
)
def test_packing_keeps_every_sample_once_within_the_limit(lengths: list[int], extra: int, window: int) -> None:
    max_length = max(lengths, default=1) + extra
    rows = packed_rows(lengths, max_length, window=window)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[i] for i in row) <= max_length for row in rows)


def test_packing_takes_the_tightest_row() -> None:
    assert packed_rows([6, 5, 4, 4], 10) == [[0, 2], [1, 3]]
    assert packed_rows([10, 10], 10) == [[0], [1]]
    assert packed_rows([], 10) == []


def test_packing_looks_no_further_than_a_window_but_for_its_unfilled_row() -> None:
    assert packed_rows([1, 1, 1, 1], 10, window=2) == [[0, 1, 2, 3]]
    # The row of 6 lacks a 4, which comes a window later; only the row begun last waits for it.
    assert packed_rows([6, 7, 4, 3], 10, window=2) == [[1], [0, 2], [3]]


@pytest.mark.parametrize(("mean", "sigma"), [(60, 0.6), (250, 0.8), (800, 1.0)])
def test_rows_of_2048_are_filled_to_998_in_a_thousand(mean: int, sigma: float) -> None:
    drawn = np.random.default_rng(mean).lognormal(np.log(mean) - sigma**2 / 2, sigma, 100_000)
    lengths = np.clip(drawn.astype(np.int64), 4, 2048)
    plan = BatchPlan(lengths, lengths, seed=0, max_length=2048, global_batch_size=32, packing="packed")
    assert plan.fill >= 0.998


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────

PACKINGS: tuple[Packing, ...] = ("packed", "bucketed")


def make_plan(num_samples: int, packing: Packing, *, seed: int = 0, batch: int = 8) -> BatchPlan:
    lengths = np.random.default_rng(num_samples).integers(2, 50, num_samples)
    return BatchPlan(lengths, lengths - 1, seed=seed, max_length=64, global_batch_size=batch, packing=packing)


def epoch_of(plan: BatchPlan, epoch: int) -> list[list[list[int]]]:
    return [plan.step(epoch * plan.steps_per_epoch + step) for step in range(plan.steps_per_epoch)]


@pytest.mark.parametrize("packing", PACKINGS)
def test_d12_every_sample_once_an_epoch_and_steps_for_any_world_size(packing: Packing) -> None:
    lengths = np.full(7, 5)
    plan = BatchPlan(lengths, lengths - 1, seed=0, max_length=10, global_batch_size=2, packing=packing)
    epochs = [epoch_of(plan, epoch) for epoch in range(3)]
    for steps in epochs:
        assert Counter(i for rows in steps for row in rows for i in row) == Counter(range(7))
    assert epochs[0] != epochs[1]
    # However many ranks share a step, together they take each of its rows once.
    for world in (1, 2, 3):
        rows = plan.step(0)
        assert sorted(row for rank in range(world) for row in rows[rank::world]) == sorted(rows)


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(1, 700), packing=st.sampled_from(PACKINGS), batch=st.integers(1, 9), epoch=st.integers(0, 3)
)
def test_an_epoch_has_every_sample_once_in_full_steps(
    num_samples: int, packing: Packing, batch: int, epoch: int
) -> None:
    plan = make_plan(num_samples, packing, batch=batch)
    steps = epoch_of(plan, epoch)
    assert sorted(i for rows in steps for row in rows for i in row) == list(range(num_samples))
    assert [len(rows) for rows in steps[:-1]] == [batch] * (len(steps) - 1)
    assert 1 <= len(steps[-1]) <= batch
    assert sum(map(len, steps)) == plan.num_rows


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_step_does_not_depend_on_the_steps_asked_for_before(packing: Packing) -> None:
    plan = make_plan(2000, packing)
    steps = [plan.step(k) for k in range(2 * plan.steps_per_epoch)]
    for k in np.random.default_rng(0).permutation(len(steps))[:50].tolist():
        assert plan.step(k) == steps[k]
        assert make_plan(2000, packing).step(k) == steps[k]


@pytest.mark.parametrize("packing", PACKINGS)
def test_targets_of_a_step_are_those_of_its_rows(packing: Packing) -> None:
    lengths = np.random.default_rng(0).integers(2, 50, 300)
    targets = lengths // 2
    plan = BatchPlan(lengths, targets, seed=3, max_length=64, global_batch_size=8, packing=packing)
    for step in (0, plan.steps_per_epoch - 1, plan.steps_per_epoch + 1):
        assert plan.num_targets(step) == sum(targets[i] for row in plan.step(step) for i in row)
    assert plan.fill == pytest.approx(lengths.sum() / (plan.num_rows * 64))


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_seed_decides_the_plan_alone(packing: Packing) -> None:
    def steps(seed: int) -> list[list[list[int]]]:
        plan = make_plan(300, packing, seed=seed)
        return [plan.step(k) for k in range(5)]

    assert steps(1) == steps(1)
    assert steps(1) != steps(2)


def test_packed_epochs_reorder_the_same_rows() -> None:
    plan = make_plan(300, "packed")
    first, second = ([row for rows in epoch_of(plan, epoch) for row in rows] for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second)


def test_bucketed_steps_hold_rows_of_like_length_in_random_order() -> None:
    lengths = np.random.default_rng(0).integers(10, 1000, 8 * BUCKET_STEPS * 5)
    plan = BatchPlan(lengths, lengths, seed=0, max_length=1000, global_batch_size=8, packing="bucketed")
    steps = [lengths[[row[0] for row in rows]] for rows in epoch_of(plan, 0)]
    padding = 1 - lengths.sum() / sum(8 * step.max() for step in steps)
    assert padding < 0.02  # in random order it is 0.44
    widths = np.array([step.max() for step in steps])
    assert abs(np.corrcoef(np.arange(len(widths)), widths)[0, 1]) < 0.25
    # Neighbours in a step are sorted, so a rank's micro-batches are of like length too.
    assert all((np.diff(step) >= 0).all() for step in steps)


def test_the_incomplete_step_comes_last_and_is_not_the_longest_rows() -> None:
    lengths = np.arange(1, 1004)
    plan = BatchPlan(lengths, lengths, seed=0, max_length=1003, global_batch_size=10, packing="bucketed")
    last = {row[0] for epoch in range(10) for row in epoch_of(plan, epoch)[-1]}
    assert len(plan.step(plan.steps_per_epoch - 1)) == 3
    assert min(last) < 500


def test_a_row_beyond_the_limit_and_no_row_at_all_are_refused() -> None:
    more: dict[str, Any] = {"seed": 0, "max_length": 10, "global_batch_size": 1, "packing": "packed"}
    with pytest.raises(ConfigError, match="row 1 has 20 tokens, more than max_length=10"):
        BatchPlan(np.array([5, 20]), np.array([1, 1]), **more)
    with pytest.raises(ConfigError, match="no row to train on"):
        BatchPlan(np.array([]), np.array([]), **more)


# ── the sampler ─────────────────────────────────────────────────────────────────────────────────────────


def merged(plan: BatchPlan, world_size: int, start: int, lists: int | None = None) -> list[list[int]]:
    """What ranks 0 … world_size - 1 are given from a cursor on, in turn; an empty list is left out."""
    ranks = [list(islice(GlobalSampler(plan, rank, world_size, start=start), lists)) for rank in range(world_size)]
    assert len({len(rank) for rank in ranks}) == 1
    return [row for turn in zip_longest(*ranks) for row in turn if row]


@settings(max_examples=80, deadline=None)
@given(
    num_samples=st.integers(1, 300),
    packing=st.sampled_from(PACKINGS),
    batch=st.integers(1, 12),
    world_size=st.integers(1, 5),
    data=st.data(),
)
def test_from_any_cursor_any_number_of_ranks_continues_the_same_sequence(
    num_samples: int, packing: Packing, batch: int, world_size: int, data: Any
) -> None:
    """Interrupted at a cursor that one number of ranks reached, and continued by another."""
    plan = make_plan(num_samples, packing, batch=batch)
    epoch = data.draw(st.integers(0, 2))
    whole = [row for rows in epoch_of(plan, epoch) for row in rows]
    sampler = GlobalSampler(plan, 0, data.draw(st.integers(1, 5)), start=epoch * plan.num_rows)
    sampler.advance(data.draw(st.integers(0, len(sampler) - 1)))
    assert merged(plan, world_size, sampler.consumed) == whole[sampler.consumed - epoch * plan.num_rows :]


@settings(max_examples=80, deadline=None)
@given(
    num_samples=st.integers(1, 300), batch=st.integers(1, 12), world_size=st.integers(1, 5), lists=st.integers(0, 400)
)
def test_the_cursor_counts_what_all_ranks_were_given(num_samples: int, batch: int, world_size: int, lists: int) -> None:
    plan = make_plan(num_samples, "packed", batch=batch)
    samplers = [GlobalSampler(plan, rank, world_size) for rank in range(world_size)]
    assert len({len(sampler) for sampler in samplers}) == 1
    assert [len(list(sampler)) for sampler in samplers] == [len(samplers[0])] * world_size
    lists = min(lists, len(samplers[0]))
    given_rows = sum(bool(row) for sampler in samplers for row in islice(sampler, lists))
    for sampler in samplers:
        left = len(sampler) - lists
        sampler.advance(lists)
        assert sampler.state_dict() == {"consumed": given_rows, "num_rows": plan.num_rows}
        if left:
            assert len(sampler) == left


def test_d12_seven_rows_on_two_ranks_are_equal_lists_and_no_row_twice() -> None:
    lengths = np.full(7, 5)
    plan = BatchPlan(lengths, lengths, seed=0, max_length=5, global_batch_size=4, packing="packed")
    ranks = [list(GlobalSampler(plan, rank, 2)) for rank in (0, 1)]
    assert [len(rank) for rank in ranks] == [4, 4]
    assert ranks[1][-1] == []
    assert sorted(row[0] for rank in ranks for row in rank if row) == list(range(7))


def test_the_training_loop_and_the_sampler_share_one_order() -> None:
    """What rank r of the loop takes from a step is what its sampler gives."""
    plan = make_plan(100, "packed", batch=6)
    for world_size in (1, 2, 4):
        for rank in range(world_size):
            of_loop = [row for rows in epoch_of(plan, 0) for row in rows[rank::world_size]]
            assert [row for row in GlobalSampler(plan, rank, world_size) if row] == of_loop


def test_epochs_follow_each_other_and_set_epoch_keeps_a_cursor_inside_the_epoch() -> None:
    plan = make_plan(100, "packed")
    sampler = GlobalSampler(plan, 0, 2)
    first = list(sampler)
    assert list(sampler) == first  # fetched, not yet trained on
    sampler.advance(len(sampler))
    assert sampler.consumed == plan.num_rows
    second = list(sampler)
    assert second != first
    sampler.advance(3)
    sampler.set_epoch(1)
    assert list(sampler) == second[3:]
    sampler.set_epoch(0)
    assert list(sampler) == first
    sampler.advance(len(first) + 3)
    assert list(sampler) == second[3:]


def test_a_cursor_is_saved_and_not_taken_for_another_plan() -> None:
    plan = make_plan(100, "packed")
    sampler = GlobalSampler(plan, 1, 2)
    sampler.advance(5)
    again = GlobalSampler(plan, 0, 4)
    again.load_state_dict(sampler.state_dict())
    assert again.consumed == sampler.consumed > 0
    with pytest.raises(ConfigError, match="the cursor is of a plan of"):
        GlobalSampler(make_plan(90, "packed"), 0, 1).load_state_dict(sampler.state_dict())
    with pytest.raises(ValueError, match="rank 2 is outside"):
        GlobalSampler(plan, 2, 2)


class Samples:
    """A map-style data set that gives back what it is asked for."""

    def __getitem__(self, sample: Any) -> Any:
        return sample

    def __len__(self) -> int:
        return 60


def as_is(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_in_a_torch_loader_interrupted_and_resumed_at_another_world_size(num_workers: int) -> None:
    """Workers fetch ahead; what counts is what was trained on."""
    from torch.utils.data import DataLoader

    plan = make_plan(60, "packed", batch=4)

    def loaders(world_size: int, start: int) -> tuple[list[GlobalSampler], list[Any]]:
        samplers = [GlobalSampler(plan, rank, world_size, start=start) for rank in range(world_size)]
        options: dict[str, Any] = {"num_workers": num_workers, "collate_fn": as_is}
        if num_workers:
            options["multiprocessing_context"] = "fork"
        return samplers, [DataLoader(Samples(), batch_sampler=sampler, **options) for sampler in samplers]

    seen: list[list[int]] = []
    start = 0
    for world_size, lists in ((2, 3), (4, 1), (1, None)):
        samplers, given_loaders = loaders(world_size, start)
        assert {len(loader) for loader in given_loaders} == {len(samplers[0])}
        for turn in islice(zip(*given_loaders, strict=True), lists):
            seen += [batch for batch in turn if batch]
            for sampler in samplers:
                sampler.advance()
        assert len({sampler.consumed for sampler in samplers}) == 1
        start = samplers[0].consumed
    assert seen == [row for rows in epoch_of(plan, 0) for row in rows]
    assert start == plan.num_rows


def test_in_a_torch_loader_as_sampler_a_batch_is_several_rows() -> None:
    from torch.utils.data import DataLoader

    plan = make_plan(60, "packed", batch=4)
    sampler = GlobalSampler(plan, 0, 1)
    loader = DataLoader(Samples(), batch_size=4, sampler=sampler, collate_fn=as_is)
    assert list(loader) == epoch_of(plan, 0)
