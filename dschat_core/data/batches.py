"""Which samples go into which optimizer step: a function of (seed, epoch, step) and of nothing else.

No state, no world size: a run resumes from its step number, and any number of ranks sees the same steps (rank r of
R takes rows r, r + R, … of a step). Samples are packed once, in random windows, best fit first; every epoch then
visits the packed rows in an order of its own, a keyed permutation that needs no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dschat_core.data.shards import as_arrays
from dschat_core.errors import ConfigError

PACKING_WINDOW = 10_000
_ROUNDS = 4
_MASK64 = (1 << 64) - 1


def permutation(seed: int, epoch: int, n: int) -> Callable[[int], int]:
    """A random bijection of 0 … n - 1 as a function: a Feistel network over the next power of four, cycle-walked."""
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    half_mask = (1 << half_bits) - 1
    keys = [_mix((seed & _MASK64) ^ _mix(epoch * _ROUNDS + turn + 1)) for turn in range(_ROUNDS)]

    def order(index: int) -> int:
        if not 0 <= index < n:
            raise IndexError(f"{index} is outside 0 … {n - 1}")
        while True:
            left, right = index >> half_bits, index & half_mask
            for key in keys:
                left, right = right, left ^ (_mix(right ^ key) & half_mask)
            index = left << half_bits | right
            if index < n:
                return index

    return order


def _mix(value: int) -> int:
    """The finalizer of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
    return value ^ value >> 31


def packed_rows(
    lengths: Sequence[int] | np.ndarray, max_length: int, *, window: int = PACKING_WINDOW
) -> list[list[int]]:
    """Samples put together into rows of at most `max_length` tokens: best fit, longest first, window by window.

    Args:
        lengths: tokens of each sample, each at least 1 and at most `max_length`.
    """
    rows: list[list[int]] = []
    for start in range(0, len(lengths), window):
        sizes = np.asarray(lengths[start : start + window])
        # Open rows by their free space; the bit mask finds the tightest row that still fits in one step.
        by_space: list[list[list[int]]] = [[] for _ in range(max_length + 1)]
        spaces = 0
        for offset in np.argsort(-sizes, kind="stable").tolist():
            size = int(sizes[offset])
            fitting = spaces >> size
            if fitting:
                space = size + (fitting & -fitting).bit_length() - 1
                row = by_space[space].pop()
                if not by_space[space]:
                    spaces ^= 1 << space
            else:
                space, row = max_length, []
                rows.append(row)
            row.append(start + offset)
            by_space[space - size].append(row)
            spaces |= 1 << (space - size)
    return rows


class BatchPlan:
    """The rows of every optimizer step.

    Args:
        lengths: tokens of each sample (reward: of the longer reply of each pair), (samples,).
        num_targets: what the loss of each sample is counted in: trained tokens (reward: 1 per pair), (samples,).
        global_batch_size: rows per optimizer step over all ranks; the last step of an epoch may hold fewer.
        packed: several samples in one row of `max_length` tokens; otherwise a row is one sample.

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
        packed: bool,
    ) -> None:
        lengths = np.asarray(lengths, dtype=np.int64)
        self._targets = np.asarray(num_targets, dtype=np.int64)
        if not len(lengths):
            raise ConfigError("there is no row to train on", why="the training part is empty", fix="add training data")
        longest = int(lengths.argmax())
        if lengths[longest] > max_length:
            raise ConfigError(
                f"row {longest} has {lengths[longest]} tokens, more than max_length={max_length}",
                why="the rows were cut for a longer limit",
                fix="set the stage's max_length and tokenization.max_length to the same value",
            )
        if packed:
            order = permutation(seed, -1, len(lengths))
            shuffled = np.fromiter((order(i) for i in range(len(lengths))), dtype=np.int64, count=len(lengths))
            positions, offsets = as_arrays(packed_rows(lengths[shuffled], max_length))
            self._samples, self._offsets = shuffled[positions], offsets
        else:
            self._samples, self._offsets = np.arange(len(lengths)), np.arange(len(lengths) + 1)
        self._seed = seed
        self.num_rows = len(self._offsets) - 1
        self.global_batch_size = global_batch_size
        self.steps_per_epoch = -(-self.num_rows // global_batch_size)
        self.fill = float(lengths.sum() / (self.num_rows * max_length))

    def step(self, k: int) -> list[list[int]]:
        """The rows of optimizer step k (from 0, over all epochs), each the list of its sample ids."""
        epoch, step = divmod(k, self.steps_per_epoch)
        order = permutation(self._seed, epoch, self.num_rows)
        first = step * self.global_batch_size
        chosen = [order(i) for i in range(first, min(first + self.global_batch_size, self.num_rows))]
        return [self._samples[self._offsets[row] : self._offsets[row + 1]].tolist() for row in chosen]

    def num_targets(self, k: int) -> int:
        """What the loss of step k is divided by: the targets of all its rows, on all ranks."""
        return int(sum(self._targets[row].sum() for row in self.step(k)))
