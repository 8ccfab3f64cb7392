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


def pack(
    rows: Sequence[Sequence[np.ndarray]],
    positions: Sequence[Sequence[np.ndarray]],
    targets: Sequence[Sequence[np.ndarray]] | None,
    *,
    device: torch.device,
) -> Inputs:
    """Lay sequences out as rows, side by side, each with positions from 0 and blind to the others.

    Args:
        rows: token ids (int64) of the sequences of each row.
        positions: per sequence, where the head is applied, counted from the sequence's start.
        targets: per sequence, the ids to predict there; None where scores are read.
    """
    width = max((sum(len(ids) for ids in row) for row in rows), default=0) or 1
    ids_BT = np.zeros((max(len(rows), 1), width), np.int64)
    place_BT = np.zeros_like(ids_BT)
    owner_BT = np.full_like(ids_BT, -1)
    found: list[np.ndarray] = []
    wanted: list[np.ndarray] = []
    for b, row in enumerate(rows):
        start = 0
        for n, ids in enumerate(row):
            end = start + len(ids)
            ids_BT[b, start:end] = ids
            place_BT[b, start:end] = np.arange(len(ids))
            owner_BT[b, start:end] = n
            found.append(positions[b][n] + (b * width + start))
            if targets is not None:
                wanted.append(targets[b][n])
            start = end
    shared = any(len(row) > 1 for row in rows)
    owner = torch.from_numpy(owner_BT).to(device) if shared else None
    return Inputs(
        input_ids_BT=torch.from_numpy(ids_BT).to(device),
        position_ids_BT=torch.from_numpy(place_BT).to(device) if shared else None,
        attention_mask_B1TT=None if owner is None else _block_causal(owner),
        positions_N=torch.from_numpy(_joined(found)).to(device),
        targets_N=torch.from_numpy(_joined(wanted)).to(device),
    )


def _tightest_rows(lengths: Sequence[int]) -> list[list[int]]:
    """The packing with the least padding among rows of one to two times the longest sequence."""
    options = [packed_rows(lengths, max(lengths) * quarters // 4) for quarters in range(4, 9)]
    return min(options, key=lambda rows: len(rows) * max(sum(lengths[index] for index in row) for row in rows))


def _block_causal(owner_BT: torch.Tensor) -> torch.Tensor:
    """True where a token may look: backwards, inside its own sequence. Padding sees itself, so no row is empty."""
    same_BTT = owner_BT.unsqueeze(-1) == owner_BT.unsqueeze(-2)
    return same_BTT.tril_().unsqueeze(1)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def pack_targets(rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], *, device: torch.device) -> Inputs:
    """A micro-batch for `next_token_loss`, from rows of (ids (T,), mask (T,)); mask[t] speaks of token t itself."""
    places = [[np.flatnonzero(mask[1:]) for _, mask in row] for row in rows]
    targets = [
        [ids[1:][where] for (ids, _), where in zip(row, found, strict=True)]
        for row, found in zip(rows, places, strict=True)
    ]
    return pack([[ids for ids, _ in row] for row in rows], places, targets, device=device)


def pack_last(sequences: Sequence[np.ndarray], *, device: torch.device) -> Inputs:
    """A micro-batch that reads one score per sequence, at its last token, in the order of `sequences`.

    Short sequences share a row; which one ends where is known from the lengths, never from the ids.
    """
    if not sequences:
        return pack([], [], None, device=device)
    lengths = [len(ids) for ids in sequences]
    layout = _tightest_rows(lengths)
    inputs = pack(
        [[sequences[index] for index in row] for row in layout],
        [[np.array([lengths[index] - 1]) for index in row] for row in layout],
        None,
        device=device,
    )
    order = np.argsort(np.concatenate([np.asarray(row) for row in layout]), kind="stable")
    positions_N = inputs.positions_N[torch.from_numpy(order).to(device)]
    return Inputs(
        inputs.input_ids_BT, inputs.position_ids_BT, inputs.attention_mask_B1TT, positions_N, inputs.targets_N
    )
