"""Normalised rows → a tokenizer and shards of token ids with their masks.

The tokenizer is trained on `text` (on `dialogues` where there is no text), or taken from a base model with its
template. Limits are exact here: text is split, dialogues and prompts lose their oldest turns whole, and a row of which
nothing can be trained is dropped and counted by reason.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from dschat_core.artifacts import Product
from dschat_core.chat_template import (
    ChatTokenizer,
    Message,
    assemble_dialogue,
    assemble_prompt,
    load_tokenizer,
    shorter,
    token_bytes,
)
from dschat_core.config import TokenizationConfig
from dschat_core.data.shards import Masks, ShardWriter, trained_bytes
from dschat_core.data.tokenizing import save_tokenizer, train_tokenizer
from dschat_core.errors import ConfigError, GateError

ROWS = "rows.jsonl"
CHUNK_ROWS = 1000
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
MASKS: dict[str, Masks] = {"text": "all", "dialogues": "rows", "preferences": "rows", "prompts": "none"}
WITH_META = ("preferences", "prompts")

# A row to be written: ids, mask (None where the part has none per row), meta.
Encoded = tuple[np.ndarray, np.ndarray | None, dict[str, Any] | None]


def tokenization(
    section: TokenizationConfig,
    inputs: dict[str, Path],
    out: Path,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Product:
    """Write `tokenizer` and the shards of every part given.

    Args:
        inputs: validation's part (`text`, `text_heldout`, …) → its folder; `base_model` → the folder that stands for
            `section.base_model`, if it is elsewhere than that says.

    Raises:
        ConfigError: no data to train a tokenizer on, or a base model whose tokenizer or template can't be used.
        GateError: no row of a training part fits into `max_length`.
    """
    parts = {
        "tokenizer": [f"tokenizer/{name}" for name in _make_tokenizer(section, inputs, out / "tokenizer", progress)]
    }
    tokenizer = load_tokenizer(out / "tokenizer")
    sizes = token_bytes(tokenizer)
    data: dict[str, Any] = {}
    for name, folder in inputs.items():
        if name == "base_model":
            continue
        dataset = name.removesuffix("_heldout")
        writer = ShardWriter(
            out / name,
            vocab_size=tokenizer.vocab_size,
            masks=MASKS[dataset],
            shard_bytes=section.shard_bytes,
            has_meta=dataset in WITH_META,
        )
        dropped: Counter[str] = Counter()
        for chunk in _chunks(read_rows(folder), CHUNK_ROWS):
            for ids, mask, meta in ENCODERS[dataset](tokenizer, chunk, section.max_length, dropped):
                trained = np.ones(len(ids), dtype=bool) if mask is None else mask
                num_bytes = 0 if MASKS[dataset] == "none" else trained_bytes(ids, trained, sizes)
                writer.add(ids, mask, num_bytes=num_bytes, meta=meta)
        index = writer.close()
        if name == dataset and not index["rows"]:
            raise GateError(
                f"no row of {name} is left after tokenization",
                where=f"tokenization.max_length={section.max_length}",
                why=", ".join(f"{reason}: {count}" for reason, count in dropped.items()) or f"{name} is empty",
                fix="raise tokenization.max_length or shorten the rows",
            )
        parts[name] = [f"{name}/{file}" for file in writer.files]
        data[name] = {key: index[key] for key in ("rows", "tokens", "targets", "bytes")} | {"dropped": dict(dropped)}
        lost = f", dropped {dict(dropped)}" if dropped else ""
        progress(f"{name}: {index['rows']:,} rows, {index['tokens']:,} tokens, {index['targets']:,} trained{lost}")
    facts = {"vocab_size": tokenizer.vocab_size, "own_template": tokenizer.is_own_template, "data": data}
    return Product(parts=parts, facts=facts)


def read_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """The normalised rows of a validation part, in order."""
    with (folder / ROWS).open("rb") as file:
        for line in file:
            yield orjson.loads(line)


def _make_tokenizer(
    section: TokenizationConfig, inputs: dict[str, Path], folder: Path, progress: Callable[[str], None]
) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    if section.base_model is not None:
        source = inputs.get("base_model", Path(section.base_model))
        load_tokenizer(source)
        names = [name for name in TOKENIZER_FILES if (source / name).exists()]
        for name in names:
            shutil.copyfile(source / name, folder / name)
        progress(f"tokenizer of {source}")
        return names
    if "text" in inputs:
        texts: Iterator[str] = (row["text"] for row in read_rows(inputs["text"]))
    elif "dialogues" in inputs:
        texts = (message["content"] for row in read_rows(inputs["dialogues"]) for message in row["messages"])
    else:
        raise ConfigError(
            "there is no text to train a tokenizer on",
            fix="set data.text or data.dialogues, or tokenization.base_model to a Hugging Face folder",
        )
    tokenizer = train_tokenizer(texts, vocab_size=section.vocab_size)
    progress(f"tokenizer trained: {tokenizer.get_vocab_size():,} entries")
    return save_tokenizer(tokenizer, folder, max_length=section.max_length)


def _chunks(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    iterator = iter(rows)
    while chunk := list(islice(iterator, size)):
        yield chunk


def encode_text_rows(
    tokenizer: ChatTokenizer, rows: list[dict[str, Any]], max_length: int, dropped: Counter[str]
) -> Iterator[Encoded]:
    """Documents in pieces of `max_length` tokens; pieces overlap by one token, so that each token is predicted once."""
    for ids in tokenizer.encode_texts([row["text"] for row in rows]):
        document = np.array(tokenizer.encode_document(ids), dtype=np.int64)
        for start in range(0, len(document) - 1, max(max_length - 1, 1)):
            yield document[start : start + max_length], None, None


def encode_dialogue_rows(
    tokenizer: ChatTokenizer, rows: list[dict[str, Any]], max_length: int, dropped: Counter[str]
) -> Iterator[Encoded]:
    """The longest end of each dialogue that fits; where the last exchange alone doesn't, of the dialogue before it."""
    for messages, contents in _encoded_contents(tokenizer, [row["messages"] for row in rows]):
        if (found := _fit_dialogue(tokenizer, messages, contents, max_length)) is None:
            dropped["no_exchange_fits"] += 1
        else:
            yield (*found, None)


def _fit_dialogue(
    tokenizer: ChatTokenizer, messages: list[Message], contents: list[list[int]], max_length: int
) -> tuple[np.ndarray, np.ndarray] | None:
    end = len(messages)
    while end > 0:
        for kept in shorter(messages[:end]):
            chosen = _contents_of(kept, messages, contents, end)
            ids, mask = assemble_dialogue(tokenizer, kept, chosen)
            if len(ids) <= max_length and mask.any():
                return ids, mask
        end = max((i for i in range(end - 1) if messages[i]["role"] == "assistant"), default=-1) + 1
    return None


def _contents_of(kept: list[Message], messages: list[Message], contents: list[list[int]], end: int) -> list[list[int]]:
    """The encoded contents of an end of `messages[:end]` as `shorter` makes it."""
    system = 1 if kept[0]["role"] == "system" else 0
    return contents[:system] + contents[end - (len(kept) - system) : end]


def encode_preference_rows(
    tokenizer: ChatTokenizer, rows: list[dict[str, Any]], max_length: int, dropped: Counter[str]
) -> Iterator[Encoded]:
    """Two rows per pair, chosen first, after the same prompt; only the reply is marked."""
    dialogues = [
        [*row["messages"], {"role": "assistant", "content": row[side]}]
        for row in rows
        for side in ("chosen", "rejected")
    ]
    encoded = _encoded_contents(tokenizer, dialogues)
    for row, (chosen, chosen_ids), (rejected, rejected_ids) in zip(rows, encoded[::2], encoded[1::2], strict=True):
        if chosen_ids[-1] == rejected_ids[-1]:
            dropped["same_tokens"] += 1
            continue
        for kept in shorter(row["messages"]):
            pair = []
            for messages, contents in ((chosen, chosen_ids), (rejected, rejected_ids)):
                dialogue = [*kept, messages[-1]]
                ids, mask = assemble_dialogue(
                    tokenizer, dialogue, _contents_of(dialogue, messages, contents, len(messages))
                )
                # Only the last reply is judged; earlier assistant turns are part of the prompt.
                start = len(ids) - 1 - len(contents[-1])
                pair.append((ids, mask & (np.arange(len(ids)) >= start)))
            if max(len(ids) for ids, _ in pair) <= max_length:
                for ids, mask in pair:
                    yield ids, mask, {"kind": row.get("kind")}
                break
        else:
            dropped["pair_too_long"] += 1


def encode_prompt_rows(
    tokenizer: ChatTokenizer, rows: list[dict[str, Any]], max_length: int, dropped: Counter[str]
) -> Iterator[Encoded]:
    """Prompts up to where the reply begins, without their oldest turns where they are too long."""
    for messages, contents in _encoded_contents(tokenizer, [row["messages"] for row in rows]):
        for kept in shorter(messages):
            ids = assemble_prompt(tokenizer, kept, _contents_of(kept, messages, contents, len(messages)))
            if len(ids) <= max_length:
                yield ids, None, {"messages": kept}
                break
        else:
            dropped["prompt_too_long"] += 1


def _encoded_contents(
    tokenizer: ChatTokenizer, dialogues: list[list[Message]]
) -> list[tuple[list[Message], list[list[int]]]]:
    """Each dialogue with the ids of its contents, encoded in one batch."""
    encoded = iter(tokenizer.encode_texts([message["content"] for messages in dialogues for message in messages]))
    return [(messages, list(islice(encoded, len(messages)))) for messages in dialogues]


ENCODERS: dict[str, Callable[[ChatTokenizer, list[dict[str, Any]], int, Counter[str]], Iterator[Encoded]]] = {
    "text": encode_text_rows,
    "dialogues": encode_dialogue_rows,
    "preferences": encode_preference_rows,
    "prompts": encode_prompt_rows,
}
