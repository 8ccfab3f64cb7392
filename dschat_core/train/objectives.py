"""What the stages optimise, computed only where it is needed.

A transformer's head is by far its widest layer, so hidden states are gathered at the positions that carry loss before
the head sees them; the loss is the same number. Losses are sums: the loop divides by the units of the whole step.

Legend: B rows, T tokens of a row, N positions that matter in the batch, V vocabulary, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from dschat_core.data.batches import packed_rows


@dataclass(frozen=True)
class Inputs:
    """One micro-batch: sequences packed into rows that cannot see each other.

    `position_ids_BT` and `attention_mask_B1TT` (True: may look) are None where every row holds one sequence: plain
    causal attention is then exact, since padding lies to the right. `positions_N` index the flattened (B, T).
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor | None
    attention_mask_B1TT: torch.Tensor | None
    positions_N: torch.Tensor
    targets_N: torch.Tensor  # the ids to predict there; empty where scores are read

    @property
    def num_slots(self) -> int:
        """Tokens computed, padding included."""
        return self.input_ids_BT.numel()


class AtPositions(nn.Module):
    """A Hugging Face model whose head (LM head or `score`) is applied at chosen positions only.

    `model` stays reachable for export and generation; the wrapper exists so that the engine sees one forward.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs) -> torch.Tensor:
        """Outputs in fp32: (N, V) logits, or (N, 1) scores."""
        hidden_BTH = self.model.base_model(
            input_ids=inputs.input_ids_BT,
            position_ids=inputs.position_ids_BT,
            attention_mask=inputs.attention_mask_B1TT,
            use_cache=False,
        ).last_hidden_state
        head = self.model.score if hasattr(self.model, "score") else self.model.get_output_embeddings()
        outputs: torch.Tensor = head(hidden_BTH.flatten(0, 1)[inputs.positions_N]).float()
        return outputs


def next_token_loss(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over the targets, in nats; 0 (with a gradient of 0) where there is none."""
    return F.cross_entropy(logits_NV, targets_N, reduction="sum")


def bradley_terry_loss(chosen_P: torch.Tensor, rejected_P: torch.Tensor) -> torch.Tensor:
    """−log P(chosen beats rejected) summed over the pairs, with P the logistic of the scores' difference."""
    return -F.logsigmoid(chosen_P - rejected_P).sum()


@dataclass(frozen=True)
class Layout:
    """Where the tokens of joined sequences lie when each row holds several of them, side by side."""

    starts_B: np.ndarray  # each row's first token among the joined ones
    ends_B: np.ndarray
    lengths_S: np.ndarray
    sizes_B: np.ndarray  # sequences in each row
    width: int

    @property
    def is_shared(self) -> bool:
        """Whether any row holds more than one sequence."""
        return bool((self.sizes_B > 1).any())

    def rows(self, values_T: np.ndarray, padding: int) -> np.ndarray:
        """One value per token as (B, T), padded to the right; at least one row, so that an empty batch is a batch."""
        rows_BT = np.full((max(1, len(self.starts_B)), self.width), padding, values_T.dtype)
        for b, (start, end) in enumerate(zip(self.starts_B.tolist(), self.ends_B.tolist(), strict=True)):
            rows_BT[b, : end - start] = values_T[start:end]
        return rows_BT

    def places(self) -> np.ndarray:
        """Position of each token in its own sequence, int64 (B, T); 0 in the padding."""
        places_T = np.arange(self.lengths_S.sum())
        places_T -= np.repeat(np.cumsum(self.lengths_S) - self.lengths_S, self.lengths_S)
        return self.rows(places_T, 0)

    def owners(self) -> np.ndarray:
        """Which sequence each token belongs to, int32 (B, T); -1 in the padding."""
        return self.rows(np.repeat(np.arange(len(self.lengths_S), dtype=np.int32), self.lengths_S), -1)

    def last_slots(self) -> np.ndarray:
        """Where in the flattened (B, T) each sequence ends, int64 (S,)."""
        shift_B = np.arange(len(self.starts_B)) * self.width - self.starts_B
        return np.cumsum(self.lengths_S) - 1 + np.repeat(shift_B, self.sizes_B)


def lay_out(lengths_S: np.ndarray, row_sizes: Sequence[int]) -> Layout:
    """Rows of `row_sizes` sequences each, of sequences that are `lengths_S` tokens long; no step per sequence."""
    sizes_B = np.asarray(row_sizes, dtype=np.int64)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths_S)])
    last_B = np.cumsum(sizes_B)
    starts_B, ends_B = bounds[last_B - sizes_B], bounds[last_B]
    return Layout(starts_B, ends_B, lengths_S, sizes_B, width=int((ends_B - starts_B).max(initial=1)))


def _tightest_rows(lengths: Sequence[int]) -> list[list[int]]:
    """The packing with the least padding among rows of one to two times the longest sequence."""
    options = [packed_rows(lengths, max(lengths) * quarters // 4) for quarters in range(4, 9)]
    return min(options, key=lambda rows: len(rows) * max(sum(lengths[index] for index in row) for row in rows))


def _block_causal(owner_BT: torch.Tensor) -> torch.Tensor:
    """True where a token may look: backwards, inside its own sequence. Padding sees itself, so no row is empty."""
    same_BTT = owner_BT.unsqueeze(-1) == owner_BT.unsqueeze(-2)
    return same_BTT.tril_().unsqueeze(1)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _inputs(
    layout: Layout, ids_BT: np.ndarray, positions_N: np.ndarray, targets_N: np.ndarray, device: torch.device
) -> Inputs:
    shared = layout.is_shared
    return Inputs(
        input_ids_BT=torch.from_numpy(ids_BT).to(device),
        position_ids_BT=torch.from_numpy(layout.places()).to(device) if shared else None,
        attention_mask_B1TT=_block_causal(torch.from_numpy(layout.owners()).to(device)) if shared else None,
        positions_N=torch.from_numpy(positions_N).to(device),
        targets_N=torch.from_numpy(targets_N).to(device),
    )


def pack_masked(
    ids_T: np.ndarray, mask_T: np.ndarray, lengths_S: np.ndarray, row_sizes: Sequence[int], *, device: torch.device
) -> Inputs:
    """A micro-batch for `next_token_loss` from joined sequences, as `ShardReader.gather` gives them.

    Args:
        mask_T: whether a token itself is predicted, from those before it; never true of a sequence's first.
        lengths_S: tokens of each sequence, int64.
        row_sizes: sequences in each row.
    """
    layout = lay_out(lengths_S, row_sizes)
    ids_BT = layout.rows(ids_T, 0)
    slots_N = np.flatnonzero(layout.rows(mask_T, False))
    return _inputs(layout, ids_BT, slots_N - 1, ids_BT.reshape(-1)[slots_N], device)


def pack_targets(rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], *, device: torch.device) -> Inputs:
    """A micro-batch for `next_token_loss`, from rows of (ids (T,), mask (T,)); mask[t] speaks of token t itself."""
    samples = [sample for row in rows for sample in row]
    return pack_masked(
        _joined([ids for ids, _ in samples], np.int64),
        _joined([np.concatenate([[False], mask[1:]])[: len(mask)] for _, mask in samples], bool),
        np.array([len(ids) for ids, _ in samples], np.int64),
        [len(row) for row in rows],
        device=device,
    )


def pack_last(sequences: Sequence[np.ndarray], *, device: torch.device) -> Inputs:
    """A micro-batch that reads one score per sequence, at its last token, in the order of `sequences`.

    Short sequences share a row; which one ends where is known from the lengths, never from the ids.
    """
    lengths = [len(ids) for ids in sequences]
    rows = _tightest_rows(lengths) if lengths else []
    order = [index for row in rows for index in row]
    layout = lay_out(np.array(lengths, np.int64)[order], [len(row) for row in rows])
    positions_S = np.empty(len(order), np.int64)
    positions_S[order] = layout.last_slots()
    ids_BT = layout.rows(_joined([sequences[index] for index in order], np.int64), 0)
    return _inputs(layout, ids_BT, positions_S, np.zeros(0, np.int64), device)
