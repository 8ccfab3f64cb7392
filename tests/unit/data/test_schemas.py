"""From the forms rows come in to the one the pipeline keeps."""

from __future__ import annotations

from typing import Any

import pytest

from dschat_core.config import Dataset
from dschat_core.data.schemas import RejectedRowError, detect_kind, normalise, row_texts

U, A, S = ({"role": role, "content": role[0]} for role in ("user", "assistant", "system"))


@pytest.mark.parametrize(
    ("kind", "record", "row"),
    [
        ("text", {"text": " a \n"}, {"text": "a"}),
        ("dialogues", {"input": "u", "output": "a"}, {"messages": [U, A]}),
        ("dialogues", {"messages": [S, U, A], "id": 7}, {"messages": [S, U, A]}),
        (
            "dialogues",
            {"system": "s", "history": [["u", "a"]], "input": "u", "output": "a"},
            {"messages": [S, U, A, U, A]},
        ),
        (
            "dialogues",
            {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
            {"messages": [U, A]},
        ),
        (
            "preferences",
            {"prompt": "u", "chosen": "a", "rejected": "b", "kind": "looped"},
            {"messages": [U], "chosen": "a", "rejected": "b", "kind": "looped"},
        ),
        (
            "preferences",
            {"input": [U, A, U], "chosen": [A], "rejected": "b"},
            {"messages": [U, A, U], "chosen": "a", "rejected": "b", "kind": None},
        ),
        (
            "preferences",
            {"chosen": [U, A], "rejected": [U, {"role": "assistant", "content": "b"}]},
            {"messages": [U], "chosen": "a", "rejected": "b", "kind": None},
        ),
        ("prompts", {"prompt": "u"}, {"messages": [U]}),
        ("prompts", {"input": [S, U]}, {"messages": [S, U]}),
        ("prompts", {"messages": [U, A, U, A]}, {"messages": [U, A, U]}),
    ],
)
def test_every_form_becomes_the_one(kind: Dataset, record: dict[str, Any], row: dict[str, Any]) -> None:
    assert normalise(kind, record) == row


@pytest.mark.parametrize(
    ("kind", "record", "reason"),
    [
        ("dialogues", {"input": 7, "output": "a"}, "input_not_text"),
        ("dialogues", {"input": "u", "output": ""}, "empty_output"),
        ("dialogues", {"input": "u", "output": " \n"}, "empty_output"),
        ("dialogues", {"input": "u"}, "missing_output"),
        ("dialogues", {"input": "u\0", "output": "a"}, "nul_character"),
        ("dialogues", {"input": "u", "output": "a", "history": [["u"]]}, "history_not_pairs"),
        ("dialogues", {"messages": "u"}, "messages_not_list"),
        ("dialogues", {"messages": []}, "no_messages"),
        ("dialogues", {"messages": ["u"]}, "message_not_object"),
        ("text", {"text": None}, "missing_text"),
        ("prompts", {"messages": [A]}, "no_user_turn"),
        ("prompts", {"prompt": [U, A]}, "ends_on_assistant"),
        ("preferences", {"chosen": "a", "rejected": "b"}, "missing_prompt"),
        ("preferences", {"prompt": [S], "chosen": "a", "rejected": "b"}, "no_user_turn"),
        ("preferences", {"chosen": [U, A], "rejected": [S, U, A]}, "prompts_differ"),
        ("preferences", {"prompt": "u", "chosen": [A, U], "rejected": "b"}, "chosen_ends_on_user"),
    ],
)
def test_d1_what_is_no_row_is_rejected_with_a_reason(kind: Dataset, record: dict[str, Any], reason: str) -> None:
    with pytest.raises(RejectedRowError) as caught:
        normalise(kind, record)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([U, U, A], "turns_not_alternating"),
        ([U, A, U], "ends_on_user"),
        ([U, S, A], "system_not_first"),
        ([A, U, A], "starts_on_assistant"),
        ([S], "no_user_turn"),
        ([{"role": "tool", "content": "x"}, A], "tool_turn"),
        ([{"role": "narrator", "content": "x"}, A], "unknown_role"),
    ],
)
def test_d5_turns_that_do_not_alternate_are_never_trained_on(messages: list[dict[str, str]], reason: str) -> None:
    with pytest.raises(RejectedRowError) as caught:
        normalise("dialogues", {"messages": messages})
    assert caught.value.reason == reason


def test_d15_identical_replies_are_rejected_and_a_long_shared_prefix_is_not() -> None:
    for chosen, rejected in (("same", "same"), ("same", "same ")):
        with pytest.raises(RejectedRowError, match="chosen_equals_rejected"):
            normalise("preferences", {"prompt": "u", "chosen": chosen, "rejected": rejected})
    row = normalise("preferences", {"prompt": "u", "chosen": "p" * 500 + "a", "rejected": "p" * 500 + "b"})
    assert row["chosen"] != row["rejected"]


@pytest.mark.parametrize(
    ("records", "kind"),
    [
        ([{"chosen": 1}], "preferences"),
        ([{"messages": []}, {"text": "a"}, {"input": "u", "output": "a"}], "dialogues"),
        ([{"text": "a"}], "text"),
        ([{"prompt": "u"}], "prompts"),
        ([{"messages": [U]}, {"messages": [U, A, U]}, {"messages": [U, A]}], "prompts"),
        ([{"messages": [U, A]}, {"messages": [U, A]}, {"messages": [U, A, U]}], "dialogues"),
        ([{"conversations": [{"from": "human", "value": "u"}]}], "prompts"),
        (["x", {"other": 1}], None),
    ],
)
def test_the_kind_is_detected_from_the_keys(records: list[Any], kind: Dataset | None) -> None:
    assert detect_kind(records) == kind


def test_rejected_replies_can_be_left_out_of_what_was_said() -> None:
    row = {"messages": [U], "chosen": "a", "rejected": "b"}
    assert row_texts("preferences", row) == ["u", "a", "b"]
    assert row_texts("preferences", row, with_rejected=False) == ["u", "a"]
