"""A tokenized row as a person reads it: its text in pieces, control tokens and trained tokens told apart."""

from __future__ import annotations

import codecs
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dschat_core.chat_template import ChatTokenizer
from dschat_core.data.shards import ShardReader

NEWLINE = "↵\n"
# They change the order in which a line is shown, and so what it seems to say.
BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens that make readable text together: one token, or those that share characters.

    `control` marks a token that no user's text can become. All tokens of a piece are trained, or none is.
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
    """Tokens as pieces; those that hold parts of the same character come together, bytes that are no UTF-8 are U+FFFD."""
    added, spell = _spelling(tokenizer)
    found: list[Piece] = []
    taken: list[int] = []
    data = b""

    def flush() -> None:
        nonlocal taken, data
        if taken:
            found.append(Piece(tuple(taken), data.decode(errors="replace"), trained, False))
        taken, data = [], b""

    trained = False
    for token, is_trained in zip(ids, mask, strict=True):
        is_control = token in added and added[token].special
        spelled = spell(token)
        if is_control or bool(is_trained) != trained or (taken and _state(data + spelled) == "broken"):
            flush()
        trained = bool(is_trained)
        if is_control:
            found.append(Piece((token,), spelled.decode(), trained, True))
            continue
        taken.append(token)
        data += spelled
        if _state(data) != "cut":
            flush()
    flush()
    return found


def _state(data: bytes) -> Literal["whole", "cut", "broken"]:
    """Whether bytes are UTF-8, may become it with those to come, or cannot be."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(data)
    except UnicodeDecodeError:
        return "broken"
    return "cut" if decoder.getstate()[0] else "whole"


@lru_cache(maxsize=4)
def _spelling(tokenizer: ChatTokenizer) -> tuple[dict[int, Any], Any]:
    """The added tokens by id, and the function from another token's id to the bytes it stands for."""
    markup = tokenizer.markup
    added = markup.get_added_tokens_decoder()
    is_byte_level = markup.decoder is not None and b"ByteLevel" in markup.decoder.__getstate__()
    byte_of = {char: byte for byte, char in _byte_level_alphabet().items()}

    def spell(token: int) -> bytes:
        if token in added:
            return str(added[token].content).encode()
        text = markup.id_to_token(token)
        if text is None:
            return f"<id {token}>".encode()
        if is_byte_level:
            return bytes(byte_of[char] for char in text)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("▁", " ").encode()

    return added, spell


def _byte_level_alphabet() -> dict[int, str]:
    """The character that stands for each byte in a byte-level BPE (GPT-2): itself where it prints, else one from 256 on."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in prints]
    return {byte: chr(byte) for byte in prints} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def visible(text: str) -> str:
    """A text that is safe to show and hides nothing: newlines are marked, control characters spelled out."""
    return "".join(map(_visible_character, text))


def _visible_character(char: str) -> str:
    if char == "\n":
        return NEWLINE
    if char == "\t" or (unicodedata.category(char) != "Cc" and char not in BIDI_CONTROLS):
        return char
    # Sent as they are, they would move a terminal's cursor or worse.
    return chr(0x2400 + ord(char)) if ord(char) < 0x20 else f"<U+{ord(char):04X}>"


def as_record(kind: str, row: int, found: Sequence[Piece], meta: Any = None) -> dict[str, Any]:
    """A row for `--json`."""
    tokens = [asdict(piece) for piece in found]
    return {
        "kind": kind,
        "row": row,
        "num_tokens": num_tokens(found),
        "num_trained": num_trained(found),
        "tokens": tokens,
        "meta": meta,
    }


def num_tokens(found: Sequence[Piece]) -> int:
    """Tokens of all pieces."""
    return sum(len(piece.ids) for piece in found)


def num_trained(found: Sequence[Piece]) -> int:
    """Trained tokens of all pieces."""
    return sum(len(piece.ids) for piece in found if piece.trained)


def runs_of(found: Sequence[Piece]) -> list[Piece]:
    """Neighbours that look alike as one piece: what a page or a terminal colours."""
    runs: list[Piece] = []
    for piece in found:
        if runs and not piece.control and not runs[-1].control and piece.trained == runs[-1].trained:
            runs[-1] = Piece(runs[-1].ids + piece.ids, runs[-1].text + piece.text, piece.trained, False)
        else:
            runs.append(piece)
    return runs


def split_pair(
    chosen: Sequence[Piece], rejected: Sequence[Piece]
) -> tuple[Sequence[Piece], Sequence[Piece], Sequence[Piece]]:
    """The two rows of a preference pair as what they share, and what follows in each: (prompt, chosen, rejected)."""
    end = 0
    while end < min(len(chosen), len(rejected)) and chosen[end] == rejected[end] and not chosen[end].trained:
        end += 1
    return chosen[:end], chosen[end:], rejected[end:]


def spread(rows: int, count: int) -> list[int]:
    """Indices of `count` rows spread evenly over a part, the first among them."""
    return np.unique(np.linspace(0, max(rows - 1, 0), min(count, rows)).astype(int)).tolist()
