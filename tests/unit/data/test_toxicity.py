"""The toxicity gate, its lexicon, and detectors behind the same protocol."""

from __future__ import annotations

import pytest

from dschat_core.data.gates.toxicity import toxic_span


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
