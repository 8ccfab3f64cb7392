"""Length of a row in tokens of the rendered template.

Before there is a tokenizer the length is an estimate from below: a token per 4 bytes of UTF-8 and 5 per turn for the
template. So no row that fits is dropped here; tokenization counts exactly. Plain text is split there and has no limit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dschat_core.config import Dataset
from dschat_core.data.schemas import Row

BYTES_PER_TOKEN = 4
TOKENS_PER_TURN = 5

Measure = Callable[[Dataset, Row], int]


def estimated_tokens(kind: Dataset, row: Row) -> int:
    """Tokens of the row (of the longer reply of a pair), estimated; 0 for plain text."""
    if kind == "text":
        return 0
    sizes = [len(message["content"].encode()) for message in row["messages"]]
    if kind == "preferences":
        sizes.append(max(len(row["chosen"].encode()), len(row["rejected"].encode())))
    return sum(sizes) // BYTES_PER_TOKEN + TOKENS_PER_TURN * len(sizes)


def exact_measure(tokenizer_folder: Path) -> Measure:
    """A measure like `estimated_tokens`, by a tokenizer and its template."""
    from dschat_core.chat_template import encode_dialogue, encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)

    def measure(kind: Dataset, row: Row) -> int:
        if kind == "text":
            return 0
        if kind == "prompts":
            return len(encode_prompt(tokenizer, row["messages"]))
        replies = [row[side] for side in ("chosen", "rejected")] if kind == "preferences" else [None]
        dialogues = [
            row["messages"] + ([{"role": "assistant", "content": reply}] if reply is not None else [])
            for reply in replies
        ]
        return max(len(encode_dialogue(tokenizer, messages)[0]) for messages in dialogues)

    return measure
