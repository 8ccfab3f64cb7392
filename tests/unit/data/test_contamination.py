"""Runs of words that training rows share with evaluation prompts."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from dschat_core.data.gates.block import Block
from dschat_core.data.gates.contamination import contamination, prompt_index

PROMPT = "What is the capital of the small island country that lies south of India, and who rules it?"


def flagged(texts: list[str], prompts: list[str], ngram: int = 8) -> list[int]:
    return [
        f.row for f in contamination(Block("text", [{"text": t} for t in texts]), prompt_index(prompts, ngram)).findings
    ]


def test_a_shared_run_of_words_is_found_whatever_its_case_and_punctuation() -> None:
    texts = [
        "He asked: WHAT IS the capital -- of the small island; country that lies there",
        "the capital of the small island country",
        "unrelated words about the capital of another country that lies in the north of Europe",
        "ｗｈａｔ is the capital of the small island country",
    ]
    assert flagged(texts, [PROMPT]) == [0, 3]


def test_a_chinese_character_is_a_word_and_short_prompts_have_no_run() -> None:
    assert flagged(["请问：你能告诉我怎样才能学好中文吗"], ["你能告诉我怎样才能学好中文"]) == [0]
    assert flagged(["how are you today my friend and neighbour of many years"], ["how are you today"]) == []
    assert len(prompt_index(["too short"], 8)) == 0


def test_the_shared_words_are_shown_and_the_index_crosses_to_other_processes() -> None:
    index = pickle.loads(pickle.dumps(prompt_index([PROMPT], 8)))
    finding = contamination(Block("text", [{"text": PROMPT}]), index).findings[0]
    assert (finding.reason, finding.detail["shared"]) == ("shares_ngram", "what is the capital of the small island")


@given(
    st.lists(st.sampled_from(["a", "b", "c"]), max_size=30),
    st.lists(st.sampled_from(["a", "b", "c"]), max_size=30),
)
def test_it_finds_what_a_plain_search_finds(said: list[str], asked: list[str]) -> None:
    runs = {tuple(asked[i : i + 5]) for i in range(len(asked) - 4)}
    expected = any(tuple(said[i : i + 5]) in runs for i in range(len(said) - 4))
    assert flagged([" ".join(said)], [" ".join(asked)], ngram=5) == ([0] if expected else [])


def test_runs_do_not_reach_across_words_that_no_prompt_has_nor_join_two_prompts() -> None:
    first, second = "a b c d e f g h", "e f g h i j k l"
    assert flagged(["a b c d zebra e f g h"], [first], ngram=5) == []
    assert flagged(["c d e f g h i j"], [first, second], ngram=8) == []
    assert flagged(["x a b c d e y"], [first, second], ngram=5) == [0]
