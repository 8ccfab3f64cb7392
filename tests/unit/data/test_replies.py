"""Replies that teach nothing."""

from __future__ import annotations

import pytest

from dschat_core.config import RepliesGate
from dschat_core.data.gates.block import Block
from dschat_core.data.gates.replies import is_boilerplate, replies


@pytest.mark.parametrize(
    "reply",
    [
        "As an AI language model, I don't have feelings.",
        "I'm just an AI, so I can't taste food.",
        "As a large language model trained by OpenAI, I cannot browse.",
        "I’m sorry, but I can’t assist with that.",
        "Sorry, I am unable to help you with this request.",
        "I cannot fulfill your request.",
        "I apologize, but I cannot fulfill this request.",
        "Unfortunately, I can't help with that.",
        "I am not able to provide medical advice.",
        "As a machine learning model, I do not have emotions",
        "As of my last knowledge update in September 2021, it was open.",
        "I don't have access to real-time information.",
        "I am ChatGPT, a large language model.",
        "I was trained by OpenAI.",
        "作为一个人工智能语言模型，我没有感情。",
        "作為一個AI助手，我無法回答。",
        "我是一个由公司开发的语言模型。",
        "很抱歉，我无法提供这类信息。",
        "对不起，我不能帮助您完成这个请求",
        "我只是一个AI，没有感情",
        "作为一种人工智能，我不能感受",
        "截至我的知识截止日期，情况如此",
    ],
)
def test_boilerplate(reply: str) -> None:
    assert is_boilerplate(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "As an AI researcher I read papers all day.",
        "AI is changing my job as a teacher",
        "As an AI engineer, I can tell you it is hard",
        "As an AI model for chess, Stockfish is strong",
        "As a language, I find French beautiful",
        "the whole article says an AI language model is a tool",
        "I'm an AI.. just kidding",
        'in the film it says "I am an AI, obey me"',
        "I'm an AI enthusiast.",
        "As of my last update in the ticket, nothing has changed",
        "I'm so sorry, I can't create a new account on this site, can you?",
        "sorry, i can't help you with that until tuesday",
        "I am unable to engage the clutch in my car.",
        "Here it is: 42. If you have any other questions, please feel free to ask!",
        "I'm sorry, I can't come tonight",
        "sorry but i can't help laughing",
        "I cannot help you move on Sunday, my back hurts",
        "This language model has 7 billion parameters.",
        "我们公司在做语言模型",
        "抱歉，我明天不能来",
        "作为一个老师，我很高兴",
        "作为人工智能专业的学生，我每天写代码",
        "作为AI公司的员工，我不能说",
        "我是做语言模型的",
        "抱歉，我不能帮助你搬家",
        "很抱歉，我们无法提供早餐",
        "抱歉，我无法完成作业了",
        "do you have any other questions about the house?",
    ],
)
def test_what_people_say_is_not(reply: str) -> None:
    assert not is_boilerplate(reply)


@pytest.mark.parametrize(
    ("reply", "is_near_empty"),
    [
        ("ok", False),
        ("k", True),
        ("42", False),
        ("好的", False),
        ("…!?", True),
        ("👍🏽👍🏽", True),
        ("_ _ _", True),
        ("é!", True),
    ],
)
def test_near_empty_counts_letters_and_digits(reply: str, is_near_empty: bool) -> None:
    found = replies(Block("dialogues", [dialogue("hi", reply)]), RepliesGate())
    assert [finding.reason for finding in found.findings] == ["near_empty"] * is_near_empty


def dialogue(*turns: str) -> dict[str, list[dict[str, str]]]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def test_all_assistant_turns_are_asked_and_no_other() -> None:
    rows = [
        dialogue("as an ai language model, what are you?", "just a friend"),
        dialogue("hi", "hello", "bye", "…"),
        dialogue("hi", "ok"),
        dialogue("hi", "k"),
        dialogue("hi", "😀😀😀"),
        dialogue("hi", "好的"),
        dialogue("hi", "As an AI, I can do that"),
    ]
    found = replies(Block("dialogues", rows), RepliesGate())
    assert [(finding.row, finding.reason, finding.detail["reply"]) for finding in found.findings] == [
        (1, "near_empty", 2),
        (3, "near_empty", 1),
        (4, "near_empty", 1),
        (6, "boilerplate", 1),
    ]
    pair = {**dialogue("hi"), "chosen": "fine", "rejected": "."}
    assert replies(Block("preferences", [pair, {**pair, "chosen": "?"}]), RepliesGate()).findings[0].row == 1
    assert replies(Block("text", [{"text": "."}]), RepliesGate()).findings == []
