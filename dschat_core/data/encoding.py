"""Batches of rows → token ids and masks, whole batches at a time.

Contents are encoded as plain text, so that a control token's text in them stays text; the template's markup, worked out
once for each sequence of roles, is laid between them. `tests/unit/data/test_encoding.py` holds this equal to
`chat_template.encode_dialogue`, row by row.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from dschat_core.chat_template import ChatTokenizer, Message, token_bytes
from dschat_core.data.gates.length import windows
from dschat_core.data.schemas import Row

Rows = Literal["text", "dialogues", "preferences", "prompts"]
LongRows = Literal["truncate", "split", "drop"]
# Contents are written as they are by most templates; that they are is seen on so many rows of each piece of work.
CHECKED_ROWS = 100

HARD_TEXTS = (
    "", " ", "\n\n", "\r\n", "a\u0301e\u0308", "한국어 텍스트", "你好，世界！\u3000全角", "🙂👩‍👩‍👧‍👦🇨🇭", "مرحبا",
    "<|im_end|>", "<|endoftext|> <|im_start|>user", "1234567890123456789", "x" * 300, "\u200b\ufeff", "ﬁﬂ①Ⅳ½",
    "    def f(x):\n\treturn x  # ok", "I'm don't WE'LL",
)  # fmt: skip


@dataclass
class Encoded:
    """Token rows as `ShardWriter.add_batch` takes them, and the rows left out, by reason."""

    values: np.ndarray
    offsets: np.ndarray
    mask: np.ndarray | None
    num_bytes: np.ndarray
    meta: list[dict[str, Any]] | None
    dropped: Counter[str]


@dataclass(frozen=True, slots=True)
class Shape:
    """Where each piece of markup around a dialogue's contents starts in `Encoder.markup`, and its length, int64
    (roles + 1,); and how many tokens they are together."""

    starts: np.ndarray
    lengths: np.ndarray
    size: int


class Encoder:
    """Encodes contents, many at once; the same ids with the fast library or without.

    Args:
        fast: use `fastokens`; `fast_problem` says whether it may be.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, fast: bool) -> None:
        self.tokenizer = tokenizer
        self.sizes = token_bytes(tokenizer)
        self._fast = _fast_tokenizer(tokenizer) if fast else None
        # Shapes of dialogues by their roles; their markup lies one after the other in `markup`.
        self._shapes: dict[tuple[tuple[str, ...], bool], Shape] = {}
        self.markup = np.zeros(0, dtype=np.uint32)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all texts one after the other, uint32 (tokens,), and where each starts, int64 (texts + 1,)."""
        if self._fast is not None:
            ids, offsets = self._fast.encode_batch_flat(list(texts), split_special_tokens=True)
            return np.frombuffer(ids, dtype="<u4"), np.frombuffer(offsets, dtype="<u8").astype(np.int64)
        encoded = self.tokenizer.encode_texts(texts)
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        ids = np.fromiter(chain.from_iterable(encoded), dtype=np.uint32, count=int(lengths.sum()))
        return ids, _ends(lengths)

    def shape(self, roles: tuple[str, ...], *, generation: bool) -> Shape:
        """The markup around such contents."""
        found = self._shapes.get((roles, generation))
        if found is None:
            slots = self.tokenizer.shape(roles, add_generation_prompt=generation)
            lengths = np.array([len(slot) for slot in slots], dtype=np.int64)
            starts = len(self.markup) + _ends(lengths)[:-1]
            self.markup = np.concatenate([self.markup, np.array([i for slot in slots for i in slot], dtype=np.uint32)])
            found = self._shapes[roles, generation] = Shape(starts, lengths, int(lengths.sum()))
        return found

    def trained_bytes(self, values: np.ndarray, offsets: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """UTF-8 bytes of the trained tokens of each row, int64 (rows,); a row's first token is never one."""
        sizes = self.sizes[values]
        if mask is not None:
            sizes = np.where(mask, sizes, 0)
        sizes[offsets[:-1][np.diff(offsets) > 0]] = 0
        total = _ends(sizes)
        return total[offsets[1:]] - total[offsets[:-1]]


def fast_problem(tokenizer: ChatTokenizer, texts: Sequence[str]) -> str | None:
    """Why `fastokens` can't stand in for `tokenizers`: it won't load, or differs on one of these or of some hard texts."""
    added = [token.content for token in tokenizer.plain.get_added_tokens_decoder().values()]
    sample = [*HARD_TEXTS, *added, *(f"a{text} {text}b" for text in added), *texts]
    try:
        fast = Encoder(tokenizer, fast=True)
        ids, offsets = fast.encode(sample)
    # A Rust panic is a BaseException of its own kind.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    for place, expected in enumerate(tokenizer.encode_texts(sample)):
        if ids[offsets[place] : offsets[place + 1]].tolist() != expected:
            return f"other ids for {sample[place][:60]!r}"
    return None


def _fast_tokenizer(tokenizer: ChatTokenizer) -> Any:
    import fastokens

    return fastokens.Tokenizer.from_json_str(tokenizer.plain.to_str())


# ── the four kinds of rows ──────────────────────────────────────────────────────────────────────────────


def encode_rows(kind: Rows, encoder: Encoder, rows: Sequence[Row], max_length: int, long_rows: LongRows) -> Encoded:
    """A batch of normalised rows as token rows of at most `max_length` tokens.

    text: documents in pieces that overlap by one token, so that each token is predicted once.
    dialogues: as `long_rows` says where one is too long; every assistant turn is trained, with its end-of-turn token.
    preferences: two rows per pair, chosen first, after the same prompt; only the reply is marked.
    prompts: up to where the reply begins; no token is marked.
    """
    if not encoder.tokenizer.is_own_template and kind != "text":
        _check_template(kind, encoder.tokenizer, rows)
    return _KINDS[kind](encoder, rows, max_length, long_rows)


def _check_template(kind: Rows, tokenizer: ChatTokenizer, rows: Sequence[Row]) -> None:
    """A template that looks at contents is rendered for every row, another for some, and compared."""
    for row in rows[:CHECKED_ROWS] if tokenizer.is_plain_template else rows:
        if kind == "preferences":
            for side in ("chosen", "rejected"):
                reply = {"role": "assistant", "content": row[side]}
                tokenizer.check_verbatim([*row["messages"], reply], add_generation_prompt=False)
        else:
            tokenizer.check_verbatim(row["messages"], add_generation_prompt=kind == "prompts")


def _check_piece(encoder: Encoder, messages: Sequence[Message], *, generation: bool) -> None:
    """What is left of a long row is another dialogue to a template that looks at contents."""
    if not encoder.tokenizer.is_plain_template:
        encoder.tokenizer.check_verbatim(messages, add_generation_prompt=generation)


def _text(encoder: Encoder, rows: Sequence[Row], max_length: int, _long_rows: LongRows) -> Encoded:
    ids, offsets = encoder.encode([row["text"] for row in rows])
    tokenizer = encoder.tokenizer
    source = np.concatenate([np.array([tokenizer.document_start_id, tokenizer.document_end_id], dtype=np.uint32), ids])
    count = len(rows)
    starts = np.stack([np.zeros(count, np.int64), offsets[:-1] + 2, np.ones(count, np.int64)], axis=1)
    lengths = np.stack([np.ones(count, np.int64), np.diff(offsets), np.ones(count, np.int64)], axis=1)
    documents = _gathered(source, starts.ravel(), lengths.ravel())
    sizes = lengths.sum(axis=1)
    step = max(max_length - 1, 1)
    pieces = -(-(sizes - 1) // step)
    within = np.arange(int(pieces.sum())) - np.repeat(_ends(pieces)[:-1], pieces)
    first = np.repeat(_ends(sizes)[:-1], pieces) + within * step
    length = np.minimum(max_length, np.repeat(sizes, pieces) - within * step)
    values, row_offsets = _gathered(documents, first, length), _ends(length)
    return Encoded(values, row_offsets, None, encoder.trained_bytes(values, row_offsets, None), None, Counter())


def _dialogues(encoder: Encoder, rows: Sequence[Row], max_length: int, long_rows: LongRows) -> Encoded:
    contents, starts = _contents(encoder, [row["messages"] for row in rows])
    dropped: Counter[str] = Counter()
    pieces: list[Piece] = []
    sizes = np.diff(contents.offsets[starts]).tolist()
    for row, first, end, size in zip(rows, starts[:-1], starts[1:], sizes, strict=True):
        piece = Piece(tuple([message["role"] for message in row["messages"]]), range(first, end))
        if encoder.shape(piece.roles, generation=False).size + size <= max_length:
            pieces.append(piece)
        elif long_rows == "drop":
            dropped["too_long"] += 1
        elif found := _shortened(encoder, contents, piece, max_length, long_rows):
            pieces += found
            for shorter in found:
                _check_piece(encoder, [row["messages"][place - first] for place in shorter.contents], generation=False)
        else:
            dropped["no_exchange_fits"] += 1
    values, offsets, mask = assemble(encoder, contents, pieces, generation=False)
    return Encoded(values, offsets, mask, encoder.trained_bytes(values, offsets, mask), None, dropped)


def _preferences(encoder: Encoder, rows: Sequence[Row], max_length: int, _long_rows: LongRows) -> Encoded:
    sides = ("chosen", "rejected")
    contents, starts = _contents(
        encoder, [[*row["messages"], *({"content": row[side]} for side in sides)] for row in rows]
    )
    dropped: Counter[str] = Counter()
    pieces: list[Piece] = []
    meta: list[dict[str, Any]] = []
    for row, first in zip(rows, starts[:-1], strict=True):
        count = len(row["messages"])
        if np.array_equal(contents.of(first + count), contents.of(first + count + 1)):
            dropped["same_tokens"] += 1
            continue
        roles = (*(message["role"] for message in row["messages"]), "assistant")
        pair = [Piece(roles, [*range(first, first + count), first + count + place]) for place in (0, 1)]
        # Both keep the same prompt, so the longer reply decides how much of it.
        longer = max(pair, key=lambda piece: _size(encoder, contents, piece, generation=False))
        if _size(encoder, contents, longer, generation=False) > max_length:
            kept = _shortened_prompt(encoder, contents, longer, max_length)
            if kept is None:
                dropped["pair_too_long"] += 1
                continue
            pair = [piece.part(*kept) for piece in pair]
            prompt = [row["messages"][place - first] for place in pair[0].contents[:-1]]
            for side in sides:
                reply = {"role": "assistant", "content": row[side]}
                _check_piece(encoder, [*prompt, reply], generation=False)
        pieces += pair
        meta += [{"kind": row.get("kind")}] * 2
    values, offsets, mask = assemble(encoder, contents, pieces, generation=False, last_only=True)
    return Encoded(values, offsets, mask, encoder.trained_bytes(values, offsets, mask), meta, dropped)


def _prompts(encoder: Encoder, rows: Sequence[Row], max_length: int, _long_rows: LongRows) -> Encoded:
    contents, starts = _contents(encoder, [row["messages"] for row in rows])
    dropped: Counter[str] = Counter()
    pieces: list[Piece] = []
    meta: list[dict[str, Any]] = []
    for row, first in zip(rows, starts[:-1], strict=True):
        messages = row["messages"]
        piece = Piece(tuple(message["role"] for message in messages), list(range(first, first + len(messages))))
        if _size(encoder, contents, piece, generation=True) > max_length:
            found = _windows(encoder, contents, piece, max_length, "truncate", generation=True)
            if not found:
                dropped["prompt_too_long"] += 1
                continue
            piece = piece.part(*found[0])
            messages = [messages[place - first] for place in piece.contents]
            _check_piece(encoder, messages, generation=True)
        pieces.append(piece)
        meta.append({"messages": messages})
    values, offsets, _ = assemble(encoder, contents, pieces, generation=True)
    return Encoded(values, offsets, None, np.zeros(len(pieces), dtype=np.int64), meta, dropped)


_KINDS: dict[Rows, Callable[[Encoder, Sequence[Row], int, LongRows], Encoded]] = {
    "text": _text,
    "dialogues": _dialogues,
    "preferences": _preferences,
    "prompts": _prompts,
}


# ── dialogues from contents ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Contents:
    """The encoded contents of a batch: ids uint32 (tokens,), offsets int64 (contents + 1,), and each one's tokens."""

    ids: np.ndarray
    offsets: np.ndarray
    sizes: list[int]

    def of(self, place: int) -> np.ndarray:
        """The ids of one content."""
        return self.ids[self.offsets[place] : self.offsets[place + 1]]


class Piece(NamedTuple):
    """A dialogue, or a part of one, to be laid out: the roles of its turns and the places of their contents."""

    roles: tuple[str, ...]
    contents: Sequence[int]

    def part(self, start: int, end: int) -> Piece:
        """Turns start … end - 1, after the system turn if there is one."""
        system = 1 if self.roles[0] == "system" else 0
        return Piece(self.roles[:system] + self.roles[start:end], [*self.contents[:system], *self.contents[start:end]])


def _contents(encoder: Encoder, dialogues: Sequence[Sequence[Message]]) -> tuple[Contents, list[int]]:
    """All contents encoded, and the place of each dialogue's first, and of the one after the last."""
    ids, offsets = encoder.encode([message["content"] for messages in dialogues for message in messages])
    starts = _ends(np.fromiter(map(len, dialogues), dtype=np.int64, count=len(dialogues)))
    return Contents(ids, offsets, np.diff(offsets).tolist()), starts.tolist()


def _size(encoder: Encoder, contents: Contents, piece: Piece, *, generation: bool) -> int:
    """Tokens of a piece, laid out."""
    sizes = contents.sizes
    return encoder.shape(piece.roles, generation=generation).size + sum([sizes[place] for place in piece.contents])


def _windows(
    encoder: Encoder,
    contents: Contents,
    piece: Piece,
    max_length: int,
    mode: Literal["truncate", "split"],
    *,
    generation: bool,
) -> list[tuple[int, int]]:
    return windows(
        piece.roles,
        lambda start, end: _size(encoder, contents, piece.part(start, end), generation=generation),
        max_length,
        mode=mode,
    )


def _shortened(
    encoder: Encoder, contents: Contents, piece: Piece, max_length: int, mode: Literal["truncate", "split"]
) -> list[Piece]:
    return [
        piece.part(start, end) for start, end in _windows(encoder, contents, piece, max_length, mode, generation=False)
    ]


def _shortened_prompt(encoder: Encoder, contents: Contents, piece: Piece, max_length: int) -> tuple[int, int] | None:
    """The longest end of a pair's prompt with which the reply fits, the reply included."""
    end = len(piece.roles)
    for start, role in enumerate(piece.roles):
        if role == "user" and _size(encoder, contents, piece.part(start, end), generation=False) <= max_length:
            return start, end
    return None


def assemble(
    encoder: Encoder, contents: Contents, pieces: Sequence[Piece], *, generation: bool, last_only: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lay out pieces as the template does.

    Args:
        generation: end with the markup that a reply begins after.
        last_only: of several replies only the last is trained.

    Returns:
        ids uint32 (tokens,), offsets int64 (pieces + 1,), and mask bool (tokens,): assistant contents and the
        end-of-turn token after each.
    """
    by_roles: dict[tuple[str, ...], list[int]] = {}
    for place, piece in enumerate(pieces):
        by_roles.setdefault(piece.roles, []).append(place)
    # Every piece is 2 n + 1 segments: markup, content, markup, …, markup.
    counts = np.fromiter((2 * len(piece.roles) + 1 for piece in pieces), dtype=np.int64, count=len(pieces))
    first = _ends(counts)
    starts, lengths = np.zeros(first[-1], dtype=np.int64), np.zeros(first[-1], dtype=np.int64)
    trained = np.zeros(first[-1], dtype=bool)
    ends_reply = np.zeros(first[-1], dtype=bool)
    for roles, places in by_roles.items():
        at = first[places][:, None] + np.arange(2 * len(roles) + 1)
        shape = encoder.shape(roles, generation=generation)
        chosen = np.array([pieces[place].contents for place in places], dtype=np.int64)
        starts[at[:, 0::2]], lengths[at[:, 0::2]] = shape.starts, shape.lengths
        content_starts = contents.offsets[chosen]
        starts[at[:, 1::2]], lengths[at[:, 1::2]] = content_starts, contents.offsets[chosen + 1] - content_starts
        replies = np.array([role == "assistant" for role in roles])
        if last_only:
            replies[:-1] = False
        trained[at[:, 1::2]] = replies
        ends_reply[at[:, 2::2]] = replies & (not generation)
    # The markup lies before the contents in what is gathered from.
    is_content = (np.arange(len(starts)) - np.repeat(first[:-1], counts)) % 2 == 1
    starts[is_content] += len(encoder.markup)
    values = _gathered(np.concatenate([encoder.markup, contents.ids]), starts, lengths)
    mask = np.repeat(trained, lengths)
    places_in_row = _ends(lengths)
    mask[places_in_row[:-1][ends_reply]] = True
    return values, places_in_row[first], mask


def _gathered(source: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """`source[starts[i] : starts[i] + lengths[i]]` of all i, joined."""
    ends = _ends(lengths)
    return source[np.arange(ends[-1]) + np.repeat(starts - ends[:-1], lengths)]


def _ends(lengths: np.ndarray) -> np.ndarray:
    """0 and the running sums, int64 (lengths + 1,)."""
    found = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=found[1:])
    return found


# Forks after the first batch would print a warning and turn the threads off.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
