"""The replies of one PPO iteration: a row each, padded into batches, and the file that keeps some of them.

Legend: B rows, L prompt and reply, T reply.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from dschat_core.train.generate import positions
from dschat_core.train.ppo_math import log_probs_and_entropy


@dataclass
class Rollout:
    """One prompt and its reply; the arrays hold one float32 per reply token.

    `slot` is the row's place in its iteration and `prompt_id` the prompt's in the data set. `score` is the reward
    model's normalised score, or the reward function's value, before clipping and penalties.
    """

    slot: int
    prompt_id: int
    prompt: np.ndarray
    reply: np.ndarray
    ended: bool
    score: float = 0.0
    logp: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    logp_ref: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    values: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    advantages: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))
    returns: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def num_tokens(self) -> int:
        """Prompt and reply."""
        return len(self.prompt) + len(self.reply)


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, up to where the reply begins, and as messages."""

    ids: np.ndarray
    messages: list[dict[str, str]]


@dataclass(frozen=True)
class Batch:
    """Prompts padded on the left and replies on the right, so that every reply starts in the same column."""

    ids_BL: torch.Tensor
    mask_BL: torch.Tensor
    position_BL: torch.Tensor
    reply_BT: torch.Tensor
    reply_mask_BT: torch.Tensor

    def column(self, rows: Sequence[Rollout], name: str) -> torch.Tensor:
        """A per-token array of the rows it was made of as (B, T) fp32, 0 at padding."""
        num_rows, width = self.reply_BT.shape
        return pad_right([getattr(row, name) for row in rows], width, num_rows=num_rows).to(self.ids_BL.device)


def collate(rows: Sequence[Rollout], *, pad_id: int, device: torch.device) -> Batch:
    """Pad the rows into one batch. No rows make a batch of one row of zero weight: its reply mask is empty."""
    prompts = [row.prompt for row in rows] or [np.array([pad_id])]
    replies = [row.reply for row in rows] or [np.array([pad_id])]
    width, limit = max(map(len, prompts)), max(map(len, replies))
    ids_BL = np.full((len(prompts), width + limit), pad_id, np.int64)
    mask_BL = np.zeros(ids_BL.shape, bool)
    for i, (prompt, reply) in enumerate(zip(prompts, replies, strict=True)):
        start, end = width - len(prompt), width + len(reply)
        ids_BL[i, start:width] = prompt
        ids_BL[i, width:end] = reply
        mask_BL[i, start:end] = True
    ids, mask = torch.from_numpy(ids_BL).to(device), torch.from_numpy(mask_BL).to(device)
    reply_mask = mask[:, width:] if rows else torch.zeros_like(mask[:, width:])
    return Batch(ids, mask, positions(mask), ids[:, width:], reply_mask)


def pad_right(arrays: Sequence[np.ndarray], width: int, *, num_rows: int | None = None) -> torch.Tensor:
    """(rows, width) fp32, 0 at padding and in rows beyond the arrays."""
    padded = np.zeros((num_rows or len(arrays), width), np.float32)
    for i, array in enumerate(arrays):
        padded[i, : len(array)] = array
    return torch.from_numpy(padded)


def reply_log_probs(model: Any, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of the reply's tokens, entropy), each (B, T), under `model` at `temperature`."""
    num_tokens = batch.reply_BT.shape[1]
    output = model(
        input_ids=batch.ids_BL,
        attention_mask=batch.mask_BL,
        position_ids=batch.position_BL,
        use_cache=False,
        logits_to_keep=num_tokens + 1,
    )
    # The logits that predict reply token t stand one column before it.
    return log_probs_and_entropy(output.logits[:, :-1], batch.reply_BT, temperature)


class RolloutLog:
    """`rollouts.jsonl`: the best, the worst and some random replies of an iteration, for people to read.

    A line is {iteration, pick: best|worst|random, prompt_id, prompt (messages), reply, score, ended, length, kl}:
    the score before clipping and penalties, the length in tokens, the reply's log π − log π_ref in nats. Written by
    rank 0 (`path=None` on the others: every call is a no-op there); a resumed attempt cuts off what lies beyond its
    checkpoint.
    """

    def __init__(self, path: Path | None, resume_iteration: int, decode: Callable[[np.ndarray], str]) -> None:
        self._decode = decode
        self._file = None
        if path is not None:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["iteration"] <= resume_iteration]
            path.write_text("".join(kept), encoding="utf-8")
            self._file = path.open("a", encoding="utf-8")

    def write(self, iteration: int, rows: Sequence[Rollout], prompts: Sequence[Prompt], *, count: int = 3) -> None:
        """Keep `count` replies of each kind."""
        if self._file is None:
            return
        ranked = sorted(rows, key=lambda row: (-row.score, row.slot))
        chosen = np.random.default_rng(iteration).choice(len(rows), min(count, len(rows)), replace=False)
        picks = {"best": ranked[:count], "worst": ranked[::-1][:count], "random": [rows[i] for i in sorted(chosen)]}
        for pick, kept in picks.items():
            for row in kept:
                line = {
                    "iteration": iteration,
                    "pick": pick,
                    "prompt_id": row.prompt_id,
                    "prompt": prompts[row.prompt_id].messages,
                    "reply": self._decode(row.reply),
                    "score": row.score,
                    "ended": row.ended,
                    "length": len(row.reply),
                    "kl": float((row.logp - row.logp_ref).sum()),
                }
                self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
