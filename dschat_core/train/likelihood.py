"""Log-likelihoods of given tokens under a causal model, for measuring only (no gradients).

Legend: B rows, T tokens (padded), N target tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

# Logits of one batch: 2**24 float32 are 64 MB, and larger batches are no faster on a CPU.
MAX_LOGITS = 2**24


def token_nats(
    model: Any, rows: Sequence[np.ndarray], targets: Sequence[np.ndarray], *, temperature: float = 1.0
) -> list[np.ndarray]:
    """Negative log-probability of each row's target tokens, in nats.

    Args:
        model: a Hugging Face causal LM; its dropout is off while it measures.
        rows: token ids, one array per row.
        targets: bool arrays of the rows' lengths; position 0 has no context and is never a target.
        temperature: divides the logits, as in sampling.

    Returns:
        One float64 array per row, in the order of `rows`: the values at its targets, left to right.
    """
    vocab_size = model.config.vocab_size
    nats: list[np.ndarray] = [np.empty(0)] * len(rows)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in length_batches([len(row) for row in rows], max(1, MAX_LOGITS // vocab_size)):
                width = max(len(rows[index]) for index in batch)
                if width < 2:
                    continue
                # Padding lies to the right, where a causal model cannot see it: no attention mask is needed.
                ids = np.zeros((len(batch), width), np.int64)
                wanted = np.zeros((len(batch), width), bool)
                for place, index in enumerate(batch):
                    ids[place, : len(rows[index])] = rows[index]
                    wanted[place, 1 : len(rows[index])] = targets[index][1:]
                ids_BT = torch.from_numpy(ids).to(device)
                wanted_BT = torch.from_numpy(wanted).to(device)
                logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
                logits_NV = logits_BTV[wanted_BT[:, 1:]].float() / temperature
                chosen_N1 = ids_BT[wanted_BT].unsqueeze(-1)
                nats_N = (torch.logsumexp(logits_NV, -1) - logits_NV.gather(-1, chosen_N1).squeeze(-1)).double()
                ends = np.cumsum(wanted.sum(-1))[:-1]
                for index, values in zip(batch, np.split(nats_N.cpu().numpy(), ends), strict=True):
                    nats[index] = values
    finally:
        model.train(was_training)
    return nats


def length_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Row numbers in batches of similar length, each of at most `max_tokens` padded tokens (or of a single row)."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        # Rows come by rising length, so the row at hand sets the width of its batch.
        if batches and (len(batches[-1]) + 1) * lengths[index] <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches
