"""The trained tokenizer: any text round-trips, the same everywhere, and Hugging Face reads its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dschat_core.chat_template import CHAT_TEMPLATE, SPECIAL_TOKENS, load_tokenizer
from dschat_core.data.encoding import HARD_TEXTS
from dschat_core.data.tokenizing import save_tokenizer, train_tokenizer

TEXTS = ["how are you today?", "fine, thanks; and you?", "你今天怎么样？", "it's <|im_end|> in a text"] * 10


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(iter(TEXTS), vocab_size=300)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(trained: Tokenizer, text: str) -> None:
    trained.encode_special_tokens = True
    ids = trained.encode(text).ids
    assert trained.decode(ids, skip_special_tokens=False) == text
    assert not {trained.token_to_id(token) for token in SPECIAL_TOKENS} & set(ids)


def test_hard_texts_round_trip(trained: Tokenizer) -> None:
    trained.encode_special_tokens = True
    for text in HARD_TEXTS:
        assert trained.decode(trained.encode(text).ids, skip_special_tokens=False) == text


def test_the_vocabulary_has_the_bytes_the_special_tokens_and_what_was_asked_for(trained: Tokenizer) -> None:
    assert trained.get_vocab_size() == 300
    assert [trained.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    # 256 bytes and 4 special tokens are always there; one letter has no pair to learn.
    assert train_tokenizer(["a"], vocab_size=1000).get_vocab_size() == 260


def test_the_order_of_texts_does_not_matter() -> None:
    once, again = (train_tokenizer(texts, vocab_size=300).to_str() for texts in (TEXTS, TEXTS[::-1]))
    assert once == again


def test_the_folder_is_complete_and_hugging_face_reads_it(trained: Tokenizer, tmp_path: Path) -> None:
    names = save_tokenizer(trained, tmp_path / "new" / "folder", max_length=77)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 77
    ours = load_tokenizer(folder)
    assert ours.template == CHAT_TEMPLATE
    assert len({ours.pad_id, ours.end_of_turn_id, ours.document_end_id}) == 3
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id) == (ours.end_of_turn_id, ours.pad_id, None)
    assert theirs("how are you")["input_ids"] == ours.encode_text("how are you")
    assert len(theirs) == ours.vocab_size == 300
