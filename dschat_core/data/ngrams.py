"""Unigram and bigram models over token ids: the baselines a language model has to beat.

Counted on the training text, smoothed by interpolation (Witten-Bell: a context that was followed by many different
tokens is trusted less), and scored on the same target tokens as the models, so that the bits per byte compare.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenBaselines:
    """Sums of negative log-likelihoods over the target tokens, in nats."""

    num_targets: int
    unigram_nats: float
    bigram_nats: float


def token_baselines(
    train_rows: Iterable[np.ndarray], heldout_rows: Iterable[np.ndarray], *, vocab_size: int
) -> TokenBaselines:
    """Score the tokens at positions 1… of the held-out rows by models counted on the training rows.

    Args:
        train_rows: one array of token ids per row, at least one token in all.
        heldout_rows: the same; a pair never spans two rows.
        vocab_size: number of token ids, all of which get some probability.
    """
    train, train_pairs = _tokens_and_pairs(train_rows, vocab_size)
    _, pairs = _tokens_and_pairs(heldout_rows, vocab_size)
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    unigram = counts / counts.sum()

    known, pair_counts = np.unique(train_pairs, return_counts=True)
    followers = np.bincount(known // vocab_size, minlength=vocab_size).astype(float)
    context = np.bincount(known // vocab_size, weights=pair_counts, minlength=vocab_size)

    first, second = pairs // vocab_size, pairs % vocab_size
    place = np.searchsorted(known, pairs).clip(max=max(len(known) - 1, 0))
    seen = np.where(known[place] == pairs, pair_counts[place], 0) if len(known) else np.zeros(len(pairs))
    # An unseen context has neither counts nor followers: the max keeps 0 / 0 out, and the unigram takes over.
    mass = np.maximum(context + followers, 1.0)
    backoff = np.where(context > 0, followers / mass, 1.0)
    bigram = seen / mass[first] + backoff[first] * unigram[second]
    return TokenBaselines(len(pairs), -float(np.log(unigram[second]).sum()), -float(np.log(bigram).sum()))


def _tokens_and_pairs(rows: Iterable[np.ndarray], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, and all neighbours within a row as one number `first * vocab_size + second`."""
    kept = [np.asarray(row, dtype=np.int64) for row in rows]
    tokens = np.concatenate([np.empty(0, np.int64), *kept])
    pairs = np.concatenate([np.empty(0, np.int64), *(row[:-1] * vocab_size + row[1:] for row in kept)])
    return tokens, pairs
