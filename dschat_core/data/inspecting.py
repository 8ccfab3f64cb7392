"""A tokenized row as a person reads it: its text in pieces, control tokens and trained tokens told apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dschat_core.chat_template import ChatTokenizer
from dschat_core.data.shards import ShardReader


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that make readable text together: one token, or those that share a character.

    `trained` is true where all of them are; `control` marks a token that no user's text can become.
    """

    ids: tuple[int, ...]
    text: str
    trained: bool
    control: bool


def inspect_row(reader: ShardReader, tokenizer: ChatTokenizer, row: int) -> list[Piece]:
    """A row of a part in pieces. Raises IndexError if there is no such row."""
    ids, mask, _ = reader.gather([row])
    return pieces(tokenizer, ids.tolist(), mask.tolist())


def pieces(tokenizer: ChatTokenizer, ids: Sequence[int], mask: Sequence[bool]) -> list[Piece]:
    """Tokens as pieces; a character whose bytes lie in several tokens is shown once, whole."""
    controls = _controls(tokenizer)
    found: list[Piece] = []
    start = 0
    while start < len(ids):
        end = start + 1
        if ids[start] in controls:
            found.append(Piece((ids[start],), controls[ids[start]], bool(mask[start]), True))
        else:
            # A character of UTF-8 has at most four bytes, each a token at worst; what is broken stays broken.
            limit = min(len(ids), start + 4)
            while "\ufffd" in _text(tokenizer, ids[start:end]) and end < limit and ids[end] not in controls:
                end += 1
            if "\ufffd" in _text(tokenizer, ids[start:end]):
                end = start + 1
            found.append(Piece(tuple(ids[start:end]), _text(tokenizer, ids[start:end]), all(mask[start:end]), False))
        start = end
    return found


@lru_cache(maxsize=4)
def _controls(tokenizer: ChatTokenizer) -> dict[int, str]:
    return {index: token.content for index, token in tokenizer.markup.get_added_tokens_decoder().items()}


def _text(tokenizer: ChatTokenizer, ids: Sequence[int]) -> str:
    return tokenizer.markup.decode(list(ids), skip_special_tokens=False)


def as_record(kind: str, row: int, found: Sequence[Piece], meta: Any = None) -> dict[str, Any]:
    """A row for `--json`."""
    num_tokens = sum(len(piece.ids) for piece in found)
    trained = sum(len(piece.ids) for piece in found if piece.trained)
    tokens = [asdict(piece) for piece in found]
    return {"kind": kind, "row": row, "num_tokens": num_tokens, "num_trained": trained, "tokens": tokens, "meta": meta}


def runs_of(found: Sequence[Piece]) -> list[Piece]:
    """Neighbours that look alike as one piece: what a page or a terminal colours."""
    runs: list[Piece] = []
    for piece in found:
        if runs and not piece.control and not runs[-1].control and piece.trained == runs[-1].trained:
            runs[-1] = Piece(runs[-1].ids + piece.ids, runs[-1].text + piece.text, piece.trained, False)
        else:
            runs.append(piece)
    return runs


def spread(rows: int, count: int) -> list[int]:
    """Indices of `count` rows spread evenly over a part, the first among them."""
    return np.unique(np.linspace(0, max(rows - 1, 0), min(count, rows)).astype(int)).tolist()
