"""A tokenized row as a person reads it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from dschat_core.chat_template import CHAT_TEMPLATE, ChatTokenizer, encode_dialogue, load_tokenizer
from dschat_core.data.inspecting import (
    Piece,
    _byte_level_alphabet,
    as_record,
    inspect_row,
    pieces,
    runs_of,
    split_pair,
    spread,
    visible,
)
from dschat_core.data.shards import ShardReader, ShardWriter, write_index
from dschat_core.data.tokenizing import save_tokenizer, train_tokenizer


def make_tokenizer(folder: Path, texts: list[str], vocab_size: int) -> ChatTokenizer:
    save_tokenizer(train_tokenizer(texts, vocab_size=vocab_size), folder, max_length=64)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), ["hello there"] * 10, 270)


def texts_of(found: list[Piece]) -> list[str]:
    return [piece.text for piece in found]


def test_pieces_are_the_text_with_control_and_trained_tokens_told_apart(tokenizer: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "你好 <|im_end|>"}, {"role": "assistant", "content": "hello 😀!"}]
    ids, mask = encode_dialogue(tokenizer, messages)
    found = pieces(tokenizer, ids.tolist(), mask.tolist())
    assert [token for piece in found for token in piece.ids] == ids.tolist()
    assert "".join(texts_of(found)) == (
        "<|im_start|>user\n你好 <|im_end|><|im_end|>\n<|im_start|>assistant\nhello 😀!<|im_end|>"
    )
    assert [piece.text for piece in found if piece.control] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert "".join(piece.text for piece in found if piece.trained) == "hello 😀!<|im_end|>"
    # Characters of several tokens are shown whole, the user's control-token text is plain.
    assert {"你", "好", "😀"} <= set(texts_of(found))
    runs = runs_of(found)
    assert [run.text for run in runs if run.trained] == ["hello 😀!", "<|im_end|>"]


@given(text=st.text(max_size=40))
def test_any_text_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode_text(text)
    found = pieces(tokenizer, ids, [True] * len(ids))
    assert "".join(texts_of(found)) == text
    assert [token for piece in found for token in piece.ids] == ids
    # No character is torn, and the replacement character is shown where the text itself holds it.
    assert sum(piece.text.count("\ufffd") for piece in found) == text.count("\ufffd")


def test_tokens_that_end_and_begin_inside_characters_come_together(tmp_path: Path) -> None:
    # Each first character ends on byte A0, each second begins with E7: the pair A0 E7 becomes a token.
    texts = [chr(0x4E20 + 64 * i) + chr(0x7000 + 67 * i) for i in range(40)]
    tokenizer = make_tokenizer(tmp_path, texts, 261)
    text = "".join(texts)
    ids = tokenizer.encode_text(text)
    found = pieces(tokenizer, ids, [False] * len(ids))
    assert max(len(piece.ids) for piece in found) > 3
    assert "".join(texts_of(found)) == text


def test_bytes_that_are_no_text_do_not_swallow_what_follows(tokenizer: ChatTokenizer) -> None:
    broken = tokenizer.encode_text("你")
    found = pieces(tokenizer, [*broken[:2], *tokenizer.encode_text("a"), broken[2]], [False] * 4)
    assert texts_of(found) == ["\ufffd", "a", "\ufffd"]
    assert texts_of(pieces(tokenizer, broken[:2], [True] * 2)) == ["\ufffd"]


def test_a_piece_ends_where_training_begins(tokenizer: ChatTokenizer) -> None:
    found = pieces(tokenizer, tokenizer.encode_text("你"), [False, True, True])
    assert [(len(piece.ids), piece.trained) for piece in found] == [(1, False), (1, True), (1, True)]
    record = as_record("text", 0, found)
    assert (record["num_tokens"], record["num_trained"]) == (3, 2)


def test_the_byte_alphabet_is_the_librarys() -> None:
    assert sorted(_byte_level_alphabet().values()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_spaces_and_byte_tokens_of_sentencepiece_vocabularies(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁there", "▁", "a"]
    source = {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": words[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}
            for i in range(3)
        ]
        + [{"id": len(words), "content": "    ", "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Metaspace",
                    "replacement": "▁", "prepend_scheme": "always", "split": True}]},
        "model": {"type": "BPE", "vocab": {w: i for i, w in enumerate(words)}, "merges": [], "unk_token": "<unk>",
                  "byte_fallback": True},
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(source), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    template = CHAT_TEMPLATE.replace("<|im_start|>", "<s>").replace("<|im_end|>", "</s>")
    (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    ids = [1, 259, 260, 3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 262, len(words), 2]
    found = pieces(tokenizer, ids, [False] * 8 + [True])
    assert texts_of(found) == ["<s>", " hello", " there", "你", "a", "    ", "</s>"]
    assert [piece.control for piece in found] == [True, False, False, False, False, False, True]


def test_an_id_without_a_token_is_named(tokenizer: ChatTokenizer) -> None:
    assert texts_of(pieces(tokenizer, [60000], [False])) == ["<id 60000>"]


def test_what_would_act_on_a_terminal_is_spelled_out() -> None:
    assert visible("a\nb\tc") == "a↵\nb\tc"
    assert visible("\x1b[2J\x00\x7f\x9b \u202egnp") == "␛[2J␀<U+007F><U+009B> <U+202E>gnp"
    assert visible("👩‍👩‍👧 你好 é") == "👩‍👩‍👧 你好 é"


def test_a_pair_is_shown_with_what_it_shares_once(tokenizer: ChatTokenizer) -> None:
    def row(reply: str) -> list[Piece]:
        ids, mask = encode_dialogue(
            tokenizer,
            [{"role": "user", "content": "hi"}, {"role": "assistant", "content": reply}],
        )
        return pieces(tokenizer, ids.tolist(), mask.tolist())

    # The replies begin alike, and that is theirs all the same.
    prompt, chosen, rejected = split_pair(row("hello there"), row("hello"))
    assert "".join(texts_of(list(prompt))) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert "".join(texts_of(list(chosen))) == "hello there<|im_end|>"
    assert "".join(texts_of(list(rejected))) == "hello<|im_end|>"


def test_a_row_of_a_part(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    ids = np.array(tokenizer.encode_text("hello there"))
    writer = ShardWriter(tmp_path, 0, vocab_size=tokenizer.vocab_size, masks="all")
    writer.add_batch(ids, np.array([0, len(ids)]), mask=None, num_bytes=np.array([11]), meta=None)
    write_index(tmp_path, [writer.close()], vocab_size=tokenizer.vocab_size, masks="all", has_meta=False)
    found = inspect_row(ShardReader(tmp_path), tokenizer, 0)
    record = as_record("text", 0, found)
    assert (record["num_tokens"], record["num_trained"]) == (len(ids), len(ids) - 1)
    json.dumps(record)
    with pytest.raises(IndexError):
        inspect_row(ShardReader(tmp_path), tokenizer, 1)


def test_rows_are_spread_over_a_part() -> None:
    assert spread(100, 5) == [0, 24, 49, 74, 99]
    assert spread(3, 5) == [0, 1, 2]
    assert spread(0, 5) == []
