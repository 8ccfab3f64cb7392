"""The gates: duplicates, toxicity, length and the verdict on their rates."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dschat_core.data.gates.duplicates import _signatures, _similar_pairs, comparable, find_duplicates
from dschat_core.data.gates.length import estimated_tokens
from dschat_core.data.gates.toxicity import toxic_span
from dschat_core.data.gates.verdict import judge, wilson_upper

LONG = "the quick brown fox jumps over the lazy dog and then it sleeps in the warm sun all day"
CHINESE = "今天天气很好我们一起去公园散步吧然后去吃好吃的火锅晚上看电影"


def duplicates(*texts: str, near: float = 0.8) -> list[int]:
    return find_duplicates([comparable(text) for text in texts], near_jaccard=near).tolist()


def test_d14_width_case_and_punctuation_do_not_make_a_difference() -> None:
    assert duplicates("Ｈｅｌｌｏ， Ｗｏｒｌｄ！", "hello world", "HELLO  WORLD?!", "hello worlds") == [0, 0, 0, 3]
    assert duplicates("你好，世界！", "你好世界", "你好 世界。") == [0, 0, 0]


def test_texts_of_punctuation_alone_are_told_apart() -> None:
    assert duplicates(":)", ":(", ": )", "???") == [0, 1, 0, 3]


def test_near_duplicates_cluster_on_the_first_and_unrelated_texts_do_not() -> None:
    assert duplicates("something else entirely, said by someone", LONG, LONG + "s", "a " + LONG, LONG[::-1]) == [
        0, 1, 1, 1, 4,
    ]  # fmt: skip
    assert duplicates(CHINESE, CHINESE + "了", "我不喜欢下雨天因为出门不方便而且鞋子会湿所以待在家里") == [0, 0, 2]


def test_near_one_finds_exact_duplicates_only() -> None:
    assert duplicates(LONG, LONG + "s", LONG.upper(), near=1.0) == [0, 1, 0]


def test_short_texts_are_compared_exactly_only() -> None:
    assert duplicates("see you later", "see you laters", "See you, later!") == [0, 1, 0]


def exact_jaccard(a: str, b: str) -> float:
    first, second = ({form[i : i + 5] for i in range(len(form) - 4)} for form in (a, b))
    return len(first & second) / len(first | second)


def test_near_duplicates_agree_with_brute_force() -> None:
    dice = random.Random(0)
    words = [f"w{i:02d}" for i in range(100)]
    texts = [" ".join(dice.choices(words, k=30)) for _ in range(40)]
    for text in list(texts):
        mixed = text.split()
        for _ in range(dice.randint(1, 3)):
            mixed[dice.randrange(30)] = dice.choice(words)
        texts.append(" ".join(mixed))
    forms = [comparable(text) for text in texts]
    pairs = {(a, b) for a in range(80) for b in range(a + 1, 80) if exact_jaccard(forms[a], forms[b]) >= 0.8}
    assert len(pairs) >= 8
    found = {(min(pair), max(pair)) for pair in _similar_pairs(forms, 0.8)}
    assert found <= pairs
    assert len(found) >= 0.95 * len(pairs)


def test_signatures_do_not_depend_on_the_block_a_text_falls_in() -> None:
    forms = [comparable(f"{LONG} {i} {LONG}") for i in range(2000)]
    together = _signatures(forms, [5] * len(forms))
    assert np.array_equal(together[1500:1501], _signatures(forms[1500:1501], [5]))


def test_no_texts_have_no_duplicates() -> None:
    assert duplicates() == []
    assert duplicates("hi") == [0]


@pytest.mark.parametrize(
    "text",
    [
        "you are such a stupid bitch",
        "Fuck you, man",
        "FUCK  YOU".replace("  ", " "),
        "go kill yourself",
        "kys",
        "I'm going to kill you",
        "you’re an idiot",
        "f\u200buck you",
        "ｆｕｃｋ ｙｏｕ",
        "你是傻逼",
        "操你妈",
        "你妈死了",
        "你们这群垃圾",
        "妳去死吧",
    ],
)
def test_abuse_is_toxic(text: str) -> None:
    assert toxic_span(text)


@pytest.mark.parametrize(
    "text",
    [
        "this fucking bus is late again, shit",
        "I feel like an idiot, I hate myself for it",
        "do you hate mondays too?",
        "it would kill you to eat that much sugar",
        "The sad thing about suffering from depression is that people think you want to kill yourself",
        "I'll shoot you an email",
        "are you a dog person? my dog is such a pig",
        "what a class, I could assassinate it on the skunk hour in Scunthorpe",
        "你好傻哦",
        "你家的垃圾桶在哪里",
        "我好想你，累死了",
        "你杀了我的鱼吗",
        "这个垃圾电影浪费我的时间",
    ],
)
def test_swearing_at_no_one_and_harmless_words_are_not(text: str) -> None:
    assert toxic_span(text) is None


def test_wilson_certifies_a_thousandth_only_from_some_thousand_rows() -> None:
    assert wilson_upper(0, 3000) < 0.001 < wilson_upper(0, 2500)
    assert wilson_upper(0, 0) == 1.0
    assert wilson_upper(5, 10) > 0.5


@pytest.mark.parametrize(
    ("count", "total", "action", "verdict"),
    [
        (0, 10_000, "fail", "pass"),
        (0, 100, "fail", "not_certifiable"),
        (100, 1000, "fail", "failed"),
        (100, 1000, "drop", "dropped"),
        (100, 1000, "warn", "warned"),
        (0, 0, "drop", "not_certifiable"),
    ],
)
def test_verdicts(count: int, total: int, action: str, verdict: str) -> None:
    result = judge(count, total, threshold=0.001, action=action)  # type: ignore[arg-type]
    assert result.verdict == verdict
    assert result.as_dict()["count"] == count


def test_length_is_estimated_from_below_and_text_has_none() -> None:
    message = {"role": "user", "content": "a" * 400}
    assert estimated_tokens("prompts", {"messages": [message]}) == 105
    assert estimated_tokens("text", {"text": "a" * 10**6}) == 0
    pair = {"messages": [message], "chosen": "a" * 40, "rejected": "a" * 80}
    assert estimated_tokens("preferences", pair) == 130
