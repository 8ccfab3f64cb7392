"""The token baselines against hand-made counts."""

from __future__ import annotations

import numpy as np
import pytest

from dschat_core.data.ngrams import token_baselines


def rows(*texts: list[int]) -> list[np.ndarray]:
    return [np.array(text) for text in texts]


def test_unigram_is_add_one() -> None:
    found = token_baselines(rows([0, 1, 1, 2]), rows([3, 1, 0]), vocab_size=4)
    # Counts + 1: 2, 3, 2, 1 of 8. The first token is no target.
    assert found.num_targets == 2
    assert found.unigram_nats == pytest.approx(-np.log(3 / 8) - np.log(2 / 8))


def test_bigram_interpolates_by_witten_bell() -> None:
    found = token_baselines(rows([0, 1, 0, 1, 0, 2]), rows([0, 1]), vocab_size=3)
    # After 0: 1 twice, 2 once, so 3 counts and 2 followers; P(1 | 0) = (2 + 2 · P(1)) / 5 with P(1) = 3 / 9.
    assert found.bigram_nats == pytest.approx(-np.log((2 + 2 * 3 / 9) / 5))


def test_an_unseen_context_falls_back_to_the_unigram() -> None:
    found = token_baselines(rows([0, 1, 0]), rows([2, 0]), vocab_size=3)
    assert found.bigram_nats == pytest.approx(found.unigram_nats)


def test_pairs_do_not_span_rows() -> None:
    found = token_baselines(rows([0], [1], [0], [1]), rows([0, 1]), vocab_size=2)
    assert found.bigram_nats == pytest.approx(found.unigram_nats)


@pytest.mark.parametrize("context", [0, 1, 2, 3])
def test_probabilities_sum_to_one(context: int) -> None:
    train = rows([0, 1, 2, 1, 0, 0, 2, 1])
    total = sum(np.exp(-token_baselines(train, rows([context, token]), vocab_size=4).bigram_nats) for token in range(4))
    assert total == pytest.approx(1.0)


def test_bigram_beats_unigram_where_order_matters() -> None:
    found = token_baselines(rows([0, 1, 2, 3] * 50), rows([0, 1, 2, 3] * 5), vocab_size=4)
    assert found.bigram_nats < 0.2 * found.unigram_nats
