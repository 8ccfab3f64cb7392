"""Normalisation of hostile text."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dschat_core.data.gates.block import Block
from dschat_core.data.gates.contamination import contamination, prompt_index
from dschat_core.data.gates.duplicates import comparable
from dschat_core.data.gates.toxicity import lexicon_hits
from dschat_core.data.unicode import nfkc


@given(st.text(max_size=60))
def test_ordinary_text_is_nfkc(text: str) -> None:
    assert nfkc(text) == unicodedata.normalize("NFKC", text)


# Quadratic, it would take an hour.
@pytest.mark.timeout(120)
def test_endless_combining_marks_take_linear_time() -> None:
    text = "x" + "\u0301\u0327" * 1_000_000
    assert len(nfkc(text)) <= 31
    comparable(text)
    lexicon_hits([text])
    contamination(Block("text", [{"text": text}]), prompt_index(["a b c d e f g h"], 5))
