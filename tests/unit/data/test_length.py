"""Length: estimates, and what is left of a dialogue that is too long."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dschat_core.chat_template import CHAT_TEMPLATE, encode_dialogue, encode_prompt, load_tokenizer
from dschat_core.config import Dataset, LengthGate
from dschat_core.data.gates.block import Block
from dschat_core.data.gates.length import estimated_tokens, exact_measure, length, shortened, windows
from dschat_core.data.schemas import Row
from dschat_core.data.tokenizing import save_tokenizer, train_tokenizer


def test_length_is_estimated_from_bytes() -> None:
    message = {"role": "user", "content": "a" * 400}
    assert estimated_tokens("prompts", [{"messages": [message]}]).tolist() == [105]
    assert estimated_tokens("text", [{"text": "a" * 4000}, {"text": "你好" * 10}]).tolist() == [1000, 15]
    pair = {"messages": [message], "chosen": "a" * 40, "rejected": "a" * 80}
    assert estimated_tokens("preferences", [pair]).tolist() == [130]
    assert estimated_tokens("dialogues", []).tolist() == []


def test_rows_over_the_limit_are_flagged_and_all_are_counted_by_powers_of_two() -> None:
    tokens = np.array([1, 2, 3, 64, 65, 2048, 2049])
    rows: list[Row] = [{"messages": []}] * 7
    found = length(Block("dialogues", rows), LengthGate(max_tokens=2048), tokens)
    assert [(finding.row, finding.reason, finding.detail) for finding in found.findings] == [
        (6, "too_long", {"tokens": 2049})
    ]
    assert found.stats == {"1": 1, "2": 1, "4": 1, "64": 1, "128": 1, "2048": 1, "4096": 1}
    assert length(Block("text", rows), LengthGate(max_tokens=10), tokens).findings == []


def sizes(*tokens: int, system: int = 0):  # type: ignore[no-untyped-def]
    return lambda start, end: system + sum(tokens[start:end])


@pytest.mark.parametrize(
    ("tokens", "limit", "truncated", "split"),
    [
        ((5, 5, 5, 5), 20, [(0, 4)], [(0, 4)]),
        ((5, 5, 5, 5), 19, [(2, 4)], [(0, 2), (2, 4)]),
        ((5, 5, 5, 5, 5, 5), 20, [(2, 6)], [(0, 4), (4, 6)]),
        ((5, 5, 50, 5), 20, [(0, 2)], [(0, 2)]),  # D11: the last user turn does not fit
        ((5, 5, 5, 50, 5, 5), 20, [(4, 6)], [(0, 2), (4, 6)]),
        ((5, 50), 20, [], []),  # D10: the answer would be cut away
    ],
)
def test_whole_turns_are_kept(
    tokens: tuple[int, ...], limit: int, truncated: list[tuple[int, int]], split: list[tuple[int, int]]
) -> None:
    roles = ("user", "assistant") * (len(tokens) // 2)
    assert windows(roles, sizes(*tokens), limit) == truncated
    assert windows(roles, sizes(*tokens), limit, mode="split") == split


def test_a_system_turn_belongs_to_every_piece_and_a_prompt_keeps_its_last_turn() -> None:
    roles = ("system", "user", "assistant", "user", "assistant")
    assert windows(roles, sizes(0, 5, 5, 5, 5, system=8), 18, mode="split") == [(1, 3), (3, 5)]
    assert windows(roles, sizes(0, 5, 5, 5, 5, system=8), 17, mode="split") == []
    prompt = ("user", "assistant", "user")
    assert windows(prompt, sizes(5, 5, 5), 14) == [(2, 3)]
    assert windows(prompt, sizes(5, 5, 50), 14) == []


@given(
    tokens=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12),
    limit=st.integers(1, 80),
)
def test_pieces_fit_do_not_overlap_and_leave_out_only_what_cannot_fit(
    tokens: list[tuple[int, int]], limit: int
) -> None:
    flat = [size for pair in tokens for size in pair]
    roles = ("user", "assistant") * len(tokens)
    pieces = windows(roles, sizes(*flat), limit, mode="split")
    assert all(sum(flat[start:end]) <= limit and start % 2 == 0 and end % 2 == 0 for start, end in pieces)
    covered = [turn for start, end in pieces for turn in range(start, end)]
    assert covered == [2 * i + side for i, pair in enumerate(tokens) if sum(pair) <= limit for side in (0, 1)]
    for start, end in windows(roles, sizes(*flat), limit):
        assert sum(flat[start:end]) <= limit
        assert start == 0 or sum(flat[start - 2 : end]) > limit
        assert all(sum(flat[last : last + 2]) > limit for last in range(end, len(flat), 2))


def test_a_pair_keeps_its_replies_whole_and_loses_prompt_turns() -> None:
    prompt = [{"role": role, "content": "x" * 400} for role in ("user", "assistant", "user")]
    pair = {"messages": prompt, "chosen": "y" * 40, "rejected": "z" * 400, "kind": None}
    found = shortened("preferences", pair, LengthGate(max_tokens=250, action="truncate"), estimated_tokens)
    assert found == [{**pair, "messages": prompt[2:]}]
    assert shortened("preferences", pair, LengthGate(max_tokens=200, action="truncate"), estimated_tokens) == []


@pytest.mark.parametrize("mode", ["truncate", "split"])
@pytest.mark.parametrize("turn_tokens", [1, 30, 300])
def test_what_is_measured_stays_near_what_fits(mode: str, turn_tokens: int) -> None:
    roles = ("user", "assistant") * 2000
    measured = 0

    def measure(start: int, end: int) -> int:
        nonlocal measured
        measured += end - start
        return (end - start) * turn_tokens

    windows(roles, measure, 256, mode=mode)  # type: ignore[arg-type]
    assert measured <= 12 * len(roles)


@pytest.mark.parametrize("template", [None, "{{ bos_token }}" + CHAT_TEMPLATE])
def test_an_exact_measure_is_the_length_that_training_sees(tmp_path: Path, template: str | None) -> None:
    texts = ["hello there, how are you?", "你好，世界", "<|im_end|> stays text", "I'm fine"]
    save_tokenizer(train_tokenizer(texts * 20, vocab_size=330), tmp_path, max_length=64)
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer, measure = load_tokenizer(tmp_path), exact_measure(tmp_path)
    turns = [
        {"role": role, "content": text}
        for role, text in zip(("system", "user", "assistant", "user"), texts, strict=True)
    ]
    replies = [{"role": "assistant", "content": text} for text in ("short", "a much longer reply 你好")]
    expected: dict[Dataset, tuple[Row, int]] = {
        "dialogues": ({"messages": turns[:3]}, len(encode_dialogue(tokenizer, turns[:3])[0])),
        "prompts": ({"messages": turns}, len(encode_prompt(tokenizer, turns))),
        "preferences": (
            {"messages": turns, "chosen": replies[0]["content"], "rejected": replies[1]["content"]},
            max(len(encode_dialogue(tokenizer, [*turns, reply])[0]) for reply in replies),
        ),
        "text": ({"text": texts[1]}, len(tokenizer.encode_document(tokenizer.encode_text(texts[1])))),
    }
    for kind, (row, tokens) in expected.items():
        assert measure(kind, [row, row]).tolist() == [tokens, tokens]
        assert measure(kind, []).tolist() == []


def test_a_split_row_keeps_its_system_turn_in_every_piece() -> None:
    turns = [{"role": "system", "content": "s" * 40}]
    for place in range(3):
        turns += [{"role": role, "content": f"{place}" * 100} for role in ("user", "assistant")]
    found = shortened("dialogues", {"messages": turns}, LengthGate(max_tokens=80, action="split"), estimated_tokens)
    assert [row["messages"] for row in found] == [[turns[0], *turns[i : i + 2]] for i in (1, 3, 5)]
