"""The form of the labelled lines that the toxicity gate is measured on.

The lines were written without sight of the gate, so nothing here asks what the gate makes of them: only that the set
is large and balanced enough for its figures to mean something, and that no line counts twice.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "benchmarks" / "toxicity_labelled.jsonl"
LANGUAGES = ("en", "zh")
KINDS = {"explicit": True, "implicit": True, "hard_negative": False, "ordinary": False}
TOXIC_TOPICS = {
    "insult",
    "threat",
    "hate",
    "harassment",
    "sexual_harassment",
    "self_harm_incitement",
    "dehumanising",
}
HARD_NEGATIVE_TOPICS = {
    "medicine",
    "computing",
    "quotation",
    "idiom",
    "gaming",
    "cooking",
    "place_name",
    "person_name",
    "news",
    "self_deprecation",
    "negation",
    "profanity_no_target",
    "film_or_book",
    "law",
    "linguistics",
    "debate",
    "support",
    "everyday",
}
ORDINARY_TOPICS = {
    "everyday",
    "support",
    "computing",
    "cooking",
    "medicine",
    "gaming",
    "film_or_book",
    "news",
    "place_name",
    "law",
    "science",
    "study",
}
TOPICS = {
    "explicit": TOXIC_TOPICS,
    "implicit": TOXIC_TOPICS,
    "hard_negative": HARD_NEGATIVE_TOPICS,
    "ordinary": ORDINARY_TOPICS,
}
HAN = re.compile(r"[\u3400-\u9fff]")
# common characters that a simplified text does not hold, enough of them to meet every traditional line of the set
TRADITIONAL = frozenset(
    "這個說們沒為麼嗎國學來還會過開關對時從現話讓請幫覺聽講識樣給車進選經應實種題問長門電氣機場"
    "單訂適舊證報論辯罵傷雞戰藝蟲懶髒勞資錢陽譯"
)


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]


ROWS = read()


def rows_of(language: str) -> list[dict[str, Any]]:
    return [row for row in ROWS if row["language"] == language]


def folded(text: str) -> str:
    """The text as far as its letters and digits go, whatever their width and case."""
    return "".join(c for c in unicodedata.normalize("NFKC", text).casefold() if c.isalnum())


def test_every_line_holds_the_five_fields_and_known_values() -> None:
    for row in ROWS:
        assert list(row) == ["text", "language", "toxic", "kind", "topic"], row
        assert isinstance(row["text"], str), row
        assert row["text"] == row["text"].strip() != "", row
        assert "\n" not in row["text"], row
        assert row["language"] in LANGUAGES, row
        assert row["kind"] in KINDS, row
        assert row["toxic"] is KINDS[row["kind"]], row
        assert row["topic"] in TOPICS[row["kind"]], row


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_is_large_and_half_toxic(language: str) -> None:
    rows = rows_of(language)
    assert len(rows) >= 260
    assert 0.45 <= sum(row["toxic"] for row in rows) / len(rows) <= 0.55


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_mixes_the_kinds_as_meant(language: str) -> None:
    kinds = Counter(row["kind"] for row in rows_of(language))
    assert min(kinds[kind] for kind in KINDS) >= 20
    assert 0.55 <= kinds["explicit"] / (kinds["explicit"] + kinds["implicit"]) <= 0.75
    assert 0.50 <= kinds["hard_negative"] / (kinds["hard_negative"] + kinds["ordinary"]) <= 0.70


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_topic_of_a_kind_is_in_both_languages(language: str, kind: str) -> None:
    assert {row["topic"] for row in rows_of(language) if row["kind"] == kind} == TOPICS[kind]


def test_no_line_is_there_twice() -> None:
    counts = Counter(folded(row["text"]) for row in ROWS)
    assert "" not in counts
    assert [text for text, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_two_lines_are_near_copies(language: str) -> None:
    """No two lines share half of their runs of three characters, as lines made from one template would."""
    grams = []
    for row in rows_of(language):
        text = folded(row["text"])
        grams.append((row["text"], {text[i : i + 3] for i in range(max(1, len(text) - 2))}))
    alike = [(a, b) for (a, of_a), (b, of_b) in combinations(grams, 2) if 2 * len(of_a & of_b) > len(of_a | of_b)]
    assert alike == []


def test_lines_are_as_long_as_a_chat_turn_and_in_their_language() -> None:
    for row in ROWS:
        if row["language"] == "en":
            assert 3 <= len(row["text"].split()) <= 40, row
            assert not HAN.search(row["text"]), row
        else:
            assert 4 <= len(row["text"]) <= 80, row
            assert len(HAN.findall(row["text"])) >= 3, row


def test_some_of_the_chinese_is_traditional_in_every_kind() -> None:
    chinese = rows_of("zh")
    traditional = [row for row in chinese if TRADITIONAL & set(row["text"])]
    assert 0.10 <= len(traditional) / len(chinese) <= 0.20
    assert {row["kind"] for row in traditional} == set(KINDS)


def test_no_line_of_it_is_in_a_set_that_the_lexicon_was_widened_on() -> None:
    here = Path(__file__).parent
    held_out = {row["text"].strip() for row in ROWS}
    for name in ("toxicity_dev_en", "toxicity_dev_zh", "toxicity_cases"):
        lines = (here / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        assert not held_out & {json.loads(line)["text"].strip() for line in lines}, name
