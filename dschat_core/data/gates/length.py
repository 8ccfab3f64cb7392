"""Length of a row in tokens of the rendered template, and what is left of a row that is too long.

Without a tokenizer the length is an estimate: a token per 4 bytes of UTF-8 and 5 per turn for the template;
tokenization counts exactly. Plain text is measured too, but has no limit: tokenization splits it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from dschat_core.config import Dataset, LengthGate
from dschat_core.data.gates.block import Block, Finding, GateShard
from dschat_core.data.schemas import Row

BYTES_PER_TOKEN = 4
TOKENS_PER_TURN = 5

# Tokens of each row (of a pair: with its longer reply), int64 (rows,).
Measure = Callable[[Dataset, Sequence[Row]], np.ndarray]


def estimated_tokens(kind: Dataset, rows: Sequence[Row]) -> np.ndarray:
    """Tokens of each row, estimated from its bytes, int64 (rows,)."""
    if kind == "text":
        return np.array([len(row["text"].encode()) // BYTES_PER_TOKEN for row in rows], dtype=np.int64)
    turns = [[message["content"] for message in row["messages"]] for row in rows]
    if kind == "preferences":
        for contents, row in zip(turns, rows, strict=True):
            contents.append(max(row["chosen"], row["rejected"], key=lambda reply: len(reply.encode())))
    return np.array(
        [len("".join(contents).encode()) // BYTES_PER_TOKEN + TOKENS_PER_TURN * len(contents) for contents in turns],
        dtype=np.int64,
    )


def exact_measure(tokenizer_folder: Path) -> Measure:
    """A measure like `estimated_tokens`, by a tokenizer and its template."""
    from dschat_core.chat_template import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)

    @lru_cache(maxsize=4096)
    def markup_tokens(roles: tuple[str, ...], generation: bool) -> int:
        return sum(map(len, tokenizer.shape(roles, add_generation_prompt=generation)))

    def measure(kind: Dataset, rows: Sequence[Row]) -> np.ndarray:
        if kind == "text":
            documents = tokenizer.encode_texts([row["text"] for row in rows])
            return np.array([len(tokenizer.encode_document(ids)) for ids in documents], dtype=np.int64)
        dialogues = [row["messages"] for row in rows]
        if kind == "preferences":
            dialogues = [
                [*row["messages"], {"role": "assistant", "content": row[side]}]
                for row in rows
                for side in ("chosen", "rejected")
            ]
        sizes = iter(map(len, tokenizer.encode_texts([turn["content"] for turns in dialogues for turn in turns])))
        found = np.array(
            [
                sum(islice(sizes, len(turns))) + markup_tokens(tuple(turn["role"] for turn in turns), kind == "prompts")
                for turns in dialogues
            ],
            dtype=np.int64,
        )
        return found.reshape(-1, 2).max(axis=1, initial=0) if kind == "preferences" else found

    return measure


def length(block: Block, section: LengthGate, tokens: np.ndarray) -> GateShard:
    """Rows of more than `max_tokens`; `stats` counts rows by the power of two that their tokens do not exceed."""
    edges = 2 ** np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    found, counts = np.unique(edges, return_counts=True)
    stats = Counter({str(edge): int(count) for edge, count in zip(found.tolist(), counts.tolist(), strict=True)})
    if block.kind == "text":
        return GateShard(stats=stats)
    over = np.flatnonzero(tokens > section.max_tokens).tolist()
    return GateShard([Finding(row, "too_long", {"tokens": int(tokens[row])}) for row in over], stats)


def windows(
    roles: Sequence[str],
    measure: Callable[[int, int], int],
    limit: int,
    *,
    mode: Literal["truncate", "split"] = "truncate",
) -> list[tuple[int, int]]:
    """What to keep of a dialogue that is too long, always whole turns from a user's turn on.

    truncate: the longest end that fits; where the last exchange alone does not fit, of the dialogue before it.
    split: consecutive pieces that fit, each as long as can be; an exchange that alone does not fit is left out.
    A dialogue that ends on a user turn (a prompt) keeps that turn, or nothing.

    Args:
        roles: of each message; a system message, if any, is the first, and belongs to every piece.
        measure: (start, end) → tokens of the system message and messages start … end - 1, rendered; it must not grow
            when the range shrinks.
        limit: tokens that a piece may have.

    Returns:
        (start, end) of each piece, in order, without the system message; empty where nothing fits.
    """
    starts = [i for i, role in enumerate(roles) if role == "user"]
    if not starts:
        return []
    if roles[-1] == "user":
        return _longest_end(starts, len(roles), measure, limit)
    ends = [i + 1 for i, role in enumerate(roles) if role == "assistant"]
    if mode == "truncate":
        for last in reversed(range(len(ends))):
            if found := _longest_end(starts[: last + 1], ends[last], measure, limit):
                return found
        return []
    pieces: list[tuple[int, int]] = []
    at = 0
    while at < len(starts):
        # Doubling first: what is measured stays near what fits, however long the dialogue.
        bound = 1
        while at + bound < len(starts) and measure(starts[at], ends[at + bound - 1]) <= limit:
            bound *= 2
        exchanges = range(at, min(at + bound, len(starts)))
        fitting = bisect_left(exchanges, True, key=lambda last: measure(starts[at], ends[last]) > limit)
        if fitting:
            pieces.append((starts[at], ends[at + fitting - 1]))
        at += max(1, fitting)
    return pieces


def _longest_end(
    starts: Sequence[int], end: int, measure: Callable[[int, int], int], limit: int
) -> list[tuple[int, int]]:
    # Asked first, as it is little to measure and often decides.
    if measure(starts[-1], end) > limit:
        return []
    return [(starts[bisect_left(starts, True, key=lambda start: measure(start, end) <= limit)], end)]


def shortened(kind: Dataset, row: Row, section: LengthGate, measure: Measure) -> list[Row]:
    """The rows that take the place of one that is too long; none where nothing fits. Replies are never cut."""
    messages = row["messages"]
    system = messages[:1] if messages[0]["role"] == "system" else []

    def piece(start: int, end: int) -> Row:
        return {**row, "messages": system + messages[start:end]}

    found = windows(
        [message["role"] for message in messages],
        lambda start, end: int(measure(kind, [piece(start, end)])[0]),
        section.max_tokens,
        mode="split" if section.action == "split" else "truncate",
    )
    return [piece(start, end) for start, end in found]
