"""Which samples go into which optimizer step: a function of (seed, epoch, step) and of nothing else.

No state, no world size: a run resumes from its step number, and any number of ranks sees the same steps (rank r of
R takes rows r, r + R, … of a step). Two ways to fill a row:

`packed`    Samples share rows of `max_length` tokens. They are put together once, in random windows, best fit first;
            an epoch visits the rows in an order of its own, so that neighbours in a row stay neighbours, which costs
            nothing where they cannot see each other, and resuming needs no packing of an earlier epoch.
`bucketed`  A row is one sample, for what cannot share rows or is padded later. Inside a window of `BUCKET_STEPS` steps
            of the epoch's order, samples of like length come into the same step.

The epoch's order is a keyed permutation that needs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Literal, TypeVar

import numpy as np

from dschat_core.config import Stage, TrainingConfig
from dschat_core.data.shards import ShardReader
from dschat_core.errors import ConfigError
from dschat_core.seeds import derive_seed

Packing = Literal["packed", "bucketed"]
PACKING_WINDOW = 10_000
BUCKET_STEPS = 64
_ROUNDS = 4
_MASK64 = (1 << 64) - 1

Number = TypeVar("Number", int, np.ndarray)


# ── order ───────────────────────────────────────────────────────────────────────────────────────────────


def permutation(seed: int, epoch: int, n: int) -> Callable[[int], int]:
    """A random bijection of 0 … n - 1 as a function: a Feistel network over the next power of four, cycle-walked."""
    half_bits, keys = _network(seed, epoch, n)

    def order(index: int) -> int:
        if not 0 <= index < n:
            raise IndexError(f"{index} is outside 0 … {n - 1}")
        index = _feistel(index, keys, half_bits)
        while index >= n:
            index = _feistel(index, keys, half_bits)
        return index

    return order


def permuted(seed: int, epoch: int, n: int, positions: np.ndarray) -> np.ndarray:
    """`permutation(seed, epoch, n)` of many positions at once, int64; in the shape of `positions`."""
    half_bits, keys = _network(seed, epoch, n)
    if len(positions) and not 0 <= positions.min() <= positions.max() < n:
        raise IndexError(f"{positions.min()} … {positions.max()} is outside 0 … {n - 1}")
    found = _feistel(positions.astype(np.uint64), keys, half_bits)
    outside = np.flatnonzero(found >= n)
    while len(outside):
        found[outside] = _feistel(found[outside], keys, half_bits)
        outside = outside[found[outside] >= n]
    return found.astype(np.int64)


def _network(seed: int, epoch: int, n: int) -> tuple[int, list[int]]:
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    return half_bits, [_mix((seed & _MASK64) ^ _mix(epoch * _ROUNDS + turn + 1)) for turn in range(_ROUNDS)]


def _feistel(value: Number, keys: Sequence[int], half_bits: int) -> Number:
    """One pass of the network, of an int or of each entry of a uint64 array."""
    half_mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & half_mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & half_mask)
    return left << half_bits | right


def _mix(value: Number) -> Number:
    """The finalizer of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
    return value ^ value >> 31


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────


def packed_rows(
    lengths: Sequence[int] | np.ndarray, max_length: int, *, window: int = PACKING_WINDOW
) -> list[list[int]]:
    """Samples put together into rows of at most `max_length` tokens: best fit, longest first, window by window.

    Args:
        lengths: tokens of each sample, each at least 1 and at most `max_length`.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    windows = (np.arange(start, min(start + window, len(sizes))) for start in range(0, len(sizes), window))
    samples, offsets = _pack(sizes, windows, max_length)
    flat, ends = samples.tolist(), offsets.tolist()
    return [flat[start:end] for start, end in pairwise(ends)]


def _pack(lengths: np.ndarray, windows: Iterable[np.ndarray], max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples of all rows one after another (samples,) and where each row begins, int64 (rows + 1,).

    The last row that a window opens is the one it could not fill: its samples join the next window, without which
    short samples, a window of which makes few rows, would leave half a row empty in each.
    """
    samples = np.empty(len(lengths), dtype=np.uint32 if len(lengths) <= 2**32 else np.int64)
    offsets, end = [np.zeros(1, dtype=np.int64)], 0
    left = end_of_data = np.zeros(0, dtype=np.int64)
    for window in chain(windows, [end_of_data]):
        ids = np.concatenate([left, window])
        rows = _best_fit(lengths[ids], max_length)
        if window is not end_of_data:
            left = ids[rows.pop()]
        places = list(chain.from_iterable(rows))
        samples[end : end + len(places)] = ids[places]
        offsets.append(end + np.cumsum(np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))))
        end += len(places)
    return samples, np.concatenate(offsets)


def _best_fit(sizes: np.ndarray, max_length: int) -> list[list[int]]:
    """Best-fit decreasing (Johnson 1973): each sample, longest first, goes into the fullest row that it fits into."""
    rows: list[list[int]] = []
    # Open rows by their free space; the bit mask finds the tightest row that still fits in one step.
    by_space: dict[int, list[list[int]]] = {}
    spaces = 0
    order = np.argsort(-sizes, kind="stable")
    for index, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        fitting = spaces >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            same = by_space[space]
            row = same.pop()
            if not same:
                spaces ^= 1 << space
        else:
            space, row = max_length, []
            rows.append(row)
        row.append(index)
        space -= size
        if space:
            by_space.setdefault(space, []).append(row)
            spaces |= 1 << space
    return rows


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────


class BatchPlan:
    """The rows of every optimizer step.

    Memory: `packed` keeps 4 bytes per sample and 8 per row beside the arrays given (100 M samples in 12 M rows: 0.5 GB,
    and 70 s of one core to pack); `bucketed` keeps the rows of one window.

    Args:
        lengths: tokens of each sample (reward: of the longer reply of each pair), int64 (samples,).
        num_targets: what the loss of each sample is counted in: trained tokens (reward: 1 per pair), int64 (samples,).
        global_batch_size: rows per optimizer step over all ranks; the last step of an epoch may hold fewer.
        packing: how rows are made of samples, see the top of this module.

    Attributes:
        num_rows: rows of an epoch.
        steps_per_epoch: optimizer steps that take each row once.
        fill: the share of `num_rows * max_length` tokens that samples fill.

    Raises:
        ConfigError: no sample, or one that is longer than `max_length`.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        num_targets: np.ndarray,
        *,
        seed: int,
        max_length: int,
        global_batch_size: int,
        packing: Packing,
    ) -> None:
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._targets = np.asarray(num_targets, dtype=np.int64)
        num_samples = len(self._lengths)
        if not num_samples:
            raise ConfigError("there is no row to train on", why="the training part is empty", fix="add training data")
        longest = int(self._lengths.argmax())
        if self._lengths[longest] > max_length:
            raise ConfigError(
                f"row {longest} has {self._lengths[longest]} tokens, more than max_length={max_length}",
                why="the rows were cut for a longer limit",
                fix="set the stage's max_length and tokenization.max_length to the same value",
            )
        self._seed = seed
        self._packed: tuple[np.ndarray, np.ndarray] | None = None
        if packing == "packed":
            starts = range(0, num_samples, PACKING_WINDOW)
            windows = (np.arange(start, min(start + PACKING_WINDOW, num_samples)) for start in starts)
            shuffled = (permuted(seed, -1, num_samples, window) for window in windows)
            self._packed = _pack(self._lengths, shuffled, max_length)
        self._window: tuple[tuple[int, int], np.ndarray] | None = None
        self.num_rows = num_samples if self._packed is None else len(self._packed[1]) - 1
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = -(-self.num_rows // global_batch_size)
        self.fill = float(self._lengths.sum() / (self.num_rows * max_length))

    def step(self, k: int) -> list[list[int]]:
        """The rows of optimizer step k (from 0, over all epochs), each the list of its sample ids."""
        return [row.tolist() for row in self._samples(k)]

    def num_targets(self, k: int) -> int:
        """What the loss of step k is divided by: the targets of all its rows, on all ranks."""
        return int(self._targets[np.concatenate(self._samples(k))].sum())

    def _samples(self, k: int) -> list[np.ndarray]:
        epoch, step = divmod(k, self.steps_per_epoch)
        if self._packed is None:
            return list(self._bucketed(epoch, step)[:, None])
        samples, offsets = self._packed
        rows = self._in_order(epoch, step, 1)
        return [samples[a:b] for a, b in zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)]

    def _in_order(self, epoch: int, step: int, count: int) -> np.ndarray:
        """The rows of `count` steps in the epoch's own order."""
        first = step * self.global_batch_size
        end = min(first + count * self.global_batch_size, self.num_rows)
        return permuted(self._seed, epoch, self.num_rows, np.arange(first, end))

    def _bucketed(self, epoch: int, step: int) -> np.ndarray:
        """The rows of one step, of like length; the steps of a window come in random order, not from short to long."""
        num_full = self.num_rows // self.global_batch_size
        if step >= num_full:
            # The incomplete step stays the last: sorted in, it would always hold the longest rows.
            return self._in_order(epoch, step, 1)
        window, turn = divmod(step, BUCKET_STEPS)
        count = min(BUCKET_STEPS, num_full - window * BUCKET_STEPS)
        if self._window is None or self._window[0] != (epoch, window):
            rows = self._in_order(epoch, window * BUCKET_STEPS, count)
            self._window = (epoch, window), rows[np.argsort(self._lengths[rows], kind="stable")]
        bucket = permutation(self._seed ^ _mix(window), epoch, count)(turn)
        return self._window[1][bucket * self.global_batch_size : (bucket + 1) * self.global_batch_size]


def packed_plan(reader: ShardReader, section: TrainingConfig, stage: Stage) -> BatchPlan:
    """The packed rows that pretraining or sft trains on, in their order."""
    return BatchPlan(
        reader.lengths,
        reader.num_targets,
        seed=derive_seed(section.seed, stage, "order"),
        max_length=section.max_length,
        global_batch_size=section.global_batch_size,
        packing="packed",
    )


class GlobalSampler:
    """This rank's rows of a plan, with the interface of `torch.utils.data.Sampler` (and of a batch sampler).

    `DataLoader(dataset, batch_sampler=GlobalSampler(…))`: a batch is one row. `DataLoader(dataset, batch_size=n,
    sampler=GlobalSampler(…))`: a batch is n rows, and `dataset[…]` is asked for a row, a list of sample ids.

    All ranks get the same number of lists, and no sample comes twice in an epoch: where the rows of a step run out, a
    rank gets an empty list, which is computed for the sake of the collectives and weighs nothing.

    One cursor, `consumed`, counts the rows that all ranks together have trained on since the run began. The loop moves
    it with `advance`, since a loader's workers fetch rows long before they are trained on. Started at the same cursor,
    any number of ranks continues the same sequence of rows.

    Args:
        start: the cursor to start from.
    """

    def __init__(self, plan: BatchPlan, rank: int, world_size: int, *, start: int = 0) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside 0 … {world_size - 1}")
        self._plan, self._rank, self._world_size = plan, rank, world_size
        self.consumed = start

    def __iter__(self) -> Iterator[list[int]]:
        """From the cursor to the end of its epoch."""
        cursor = self.consumed
        epoch_end = cursor - cursor % self._plan.num_rows + self._plan.num_rows
        while cursor < epoch_end:
            rows = self._plan.step(self._step(cursor))[-self._left_in_step(cursor) :]
            for first in range(0, len(rows), self._world_size):
                yield from rows[first + self._rank : first + self._rank + 1] or [[]]
            cursor += len(rows)

    def __len__(self) -> int:
        """Lists from the cursor to the end of its epoch, the same on every rank."""
        in_step = self._left_in_step(self.consumed)
        later = self._plan.num_rows - self.consumed % self._plan.num_rows - in_step
        full, rest = divmod(later, self._plan.global_batch_size)
        return self._lists(in_step) + full * self._lists(self._plan.global_batch_size) + self._lists(rest)

    def advance(self, lists: int = 1) -> None:
        """Every rank has trained on this many more of its lists."""
        while lists > 0:
            rows = self._left_in_step(self.consumed)
            taken = min(lists, self._lists(rows))
            self.consumed += min(rows, taken * self._world_size)
            lists -= taken

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, unless the cursor is somewhere inside it already."""
        if self.consumed // self._plan.num_rows != epoch:
            self.consumed = epoch * self._plan.num_rows

    def state_dict(self) -> dict[str, int]:
        """The cursor, and what it counts in; the same on every rank."""
        return {"consumed": self.consumed, "num_rows": self._plan.num_rows}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved cursor, whatever the number of ranks was. Raises ConfigError for another plan's."""
        if state["num_rows"] != self._plan.num_rows:
            raise ConfigError(
                f"the cursor is of a plan of {state['num_rows']:,} rows, this one has {self._plan.num_rows:,}",
                why="the data, max_length or the seed changed since it was saved",
                fix="resume with the data and config that the run began with, or start a new run",
            )
        self.consumed = state["consumed"]

    def _step(self, cursor: int) -> int:
        epoch, row = divmod(cursor, self._plan.num_rows)
        return epoch * self._plan.steps_per_epoch + row // self._plan.global_batch_size

    def _left_in_step(self, cursor: int) -> int:
        """Rows from the cursor to the end of its step, at least 1."""
        row = cursor % self._plan.num_rows
        size = self._plan.global_batch_size
        return min(size - row % size, self._plan.num_rows - row)

    def _lists(self, rows: int) -> int:
        return -(-rows // self._world_size)
