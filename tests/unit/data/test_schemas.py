"""From the forms rows come in to the one the pipeline keeps."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dschat_core.config import DATASETS, Dataset, RowFormat
from dschat_core.data.schemas import RejectedRowError, detect_kind, expected_columns, normalise, row_texts

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
        (
            "dialogues",
            {"system": "s", "conversations": [{"from": "Human", "value": "u"}, {"from": "GPT", "value": "a"}]},
            {"messages": [S, U, A]},
        ),
        (
            "dialogues",
            {
                "system": " ",
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "user", "value": "u"},
                    {"from": "bot", "value": "a"},
                ],
            },
            {"messages": [S, U, A]},
        ),
        ("dialogues", {"instruction": "u", "input": "", "output": "a"}, {"messages": [U, A]}),
        ("dialogues", {"instruction": "u", "input": " \n", "output": "a"}, {"messages": [U, A]}),
        (
            "dialogues",
            {"instruction": "u ", "input": " i", "output": "a", "system": "s", "history": [["u", "a"]]},
            {"messages": [S, U, A, {"role": "user", "content": "u\n\ni"}, A]},
        ),
        (
            "dialogues",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
                    {"role": "assistant", "content": "a", "weight": 0, "tool_calls": None},
                ]
            },
            {"messages": [{"role": "user", "content": "xy"}, A]},
        ),
        ("dialogues", {"messages": [{"role": "developer", "content": "s"}, U, A]}, {"messages": [S, U, A]}),
        # A table's rows have all columns of all forms.
        (
            "dialogues",
            {"messages": None, "conversations": None, "instruction": None, "input": "u", "output": "a", "system": None},
            {"messages": [U, A]},
        ),
        (
            "dialogues",
            {
                "messages": [
                    {"role": None, "content": None, "from": "human", "value": "u"},
                    {**A, "from": None, "value": None},
                ]
            },
            {"messages": [U, A]},
        ),
        ("text", {"text": "a\x1b[0m\tb"}, {"text": "a\x1b[0m\tb"}),
        (
            "preferences",
            {"instruction": "u", "input": "i", "chosen": "a", "rejected": "b"},
            {"messages": [{"role": "user", "content": "u\n\ni"}], "chosen": "a", "rejected": "b", "kind": None},
        ),
        (
            "preferences",
            {"system": "s", "prompt": "u", "chosen": [U, A], "rejected": [U, {"role": "assistant", "content": "b"}]},
            {"messages": [S, U], "chosen": "a", "rejected": "b", "kind": None},
        ),
        (
            "preferences",
            {
                "conversations": [{"from": "human", "value": "u"}],
                "chosen": {"from": "gpt", "value": "a"},
                "rejected": "b",
            },
            {"messages": [U], "chosen": "a", "rejected": "b", "kind": None},
        ),
        (
            "preferences",
            {
                "prompt": "u",
                "messages": [U, A],
                "chosen": [U, A],
                "rejected": [U, {"role": "assistant", "content": "b"}],
            },
            {"messages": [U], "chosen": "a", "rejected": "b", "kind": None},
        ),
        ("prompts", {"instruction": "u", "output": "a"}, {"messages": [U]}),
        ("prompts", {"prompt": [U], "system": "s"}, {"messages": [S, U]}),
        (
            "prompts",
            {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]},
            {"messages": [U]},
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
        ("dialogues", {"input": "u", "output": "\u200b\u00a0\u200d\ufeff"}, "empty_output"),
        ("dialogues", {"input": "u", "output": "\ufe0f \x07"}, "empty_output"),
        ("dialogues", {"messages": "u"}, "messages_not_list"),
        ("dialogues", {"messages": None, "id": 7}, "messages_not_list"),
        ("dialogues", {"conversations": {"from": []}}, "conversations_not_list"),
        ("dialogues", {"question": "u", "answer": "a"}, "unknown_columns"),
        ("dialogues", {"text": "u"}, "unknown_columns"),
        ("dialogues", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]}, "content_not_text"),
        ("dialogues", {"messages": [{"role": "user", "content": []}, A]}, "content_not_text"),
        ("dialogues", {"messages": [{"role": "user", "content": {"text": "u"}}, A]}, "content_not_text"),
        ("dialogues", {"messages": [{"role": "user", "content": [{"type": "text", "text": " "}]}, A]}, "empty_content"),
        ("dialogues", {"messages": [U, {**A, "tool_calls": [{"id": 1}]}]}, "tool_turn"),
        (
            "dialogues",
            {"messages": [U, {"role": "assistant", "content": None, "function_call": {"name": "f"}}]},
            "tool_turn",
        ),
        ("dialogues", {"conversations": [{"from": "function_call", "value": "{}"}]}, "tool_turn"),
        ("dialogues", {"conversations": [{"from": "observation", "value": "{}"}]}, "tool_turn"),
        ("dialogues", {"messages": [{"role": ["user"], "content": "u"}, A]}, "unknown_role"),
        ("dialogues", {"messages": [{"content": "u"}, A]}, "unknown_role"),
        ("dialogues", {"instruction": "u", "input": 7, "output": "a"}, "input_not_text"),
        ("dialogues", {"input": "u", "output": "a", "history": "u"}, "history_not_list"),
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


BOTH = {"messages": [U, A], "instruction": "i", "output": "o"}


@pytest.mark.parametrize(
    ("form", "record", "said"),
    [
        ("auto", BOTH, ["u", "a"]),
        ("messages", BOTH, ["u", "a"]),
        ("alpaca", BOTH, ["i", "o"]),
        ("sharegpt", BOTH, "not_sharegpt"),
        ("input_output", BOTH, "not_input_output"),
        ("input_output", {"instruction": "i", "input": "u", "output": "o"}, ["u", "o"]),
        ("alpaca", {"instruction": None, "input": "u", "output": "o"}, "not_alpaca"),
        ("messages", {"input": "u", "output": "o"}, "not_messages"),
        ("alpaca", {"question": "u"}, "unknown_columns"),
    ],
)
def test_a_row_is_read_in_the_form_that_is_named_or_not_at_all(form: RowFormat, record: Any, said: Any) -> None:
    if isinstance(said, list):
        assert row_texts("dialogues", normalise("dialogues", record, form)) == said
        return
    with pytest.raises(RejectedRowError) as caught:
        normalise("dialogues", record, form)
    assert caught.value.reason == said


def test_the_form_of_messages_covers_prompts_and_preferences_of_turns() -> None:
    assert normalise("prompts", {"prompt": [U]}, "messages") == {"messages": [U]}
    assert normalise("preferences", {"prompt": [U], "chosen": [A], "rejected": "b"}, "messages")["chosen"] == "a"
    with pytest.raises(RejectedRowError, match="not_messages"):
        normalise("prompts", {"prompt": "u"}, "messages")
    assert normalise("text", {"text": "a"}, "messages") == {"text": "a"}


@pytest.mark.parametrize(
    ("kind", "record", "columns", "said"),
    [
        ("dialogues", {"question": "u", "answer": "a"}, {"input": "question", "output": "answer"}, ["u", "a"]),
        ("dialogues", {"input": "u", "answer": "a"}, {"instruction": "input", "output": "answer"}, ["u", "a"]),
        ("dialogues", {"input": "a", "output": "u"}, {"input": "output", "output": "input"}, ["u", "a"]),
        ("dialogues", {"input": "u", "output": "a"}, {"output": "answer"}, ["u", "a"]),
        ("dialogues", {"turns": [U, A]}, {"messages": "turns"}, ["u", "a"]),
        ("text", {"content": "a"}, {"text": "content"}, ["a"]),
        (
            "preferences",
            {"question": "u", "better": "a", "worse": "b"},
            {"prompt": "question", "chosen": "better", "rejected": "worse"},
            ["u", "a", "b"],
        ),
    ],
)
def test_columns_of_other_names_are_mapped(
    kind: Dataset, record: Any, columns: dict[str, str], said: list[str]
) -> None:
    before = copy.deepcopy(record)
    assert row_texts(kind, normalise(kind, record, "auto", columns)) == said
    assert record == before


@pytest.mark.parametrize("kind", DATASETS)
def test_a_row_of_no_expected_column_is_unknown_and_one_of_any_is_judged_by_it(kind: Dataset) -> None:
    with pytest.raises(RejectedRowError, match="unknown_columns"):
        normalise(kind, {"foo": "u"})
    for column in expected_columns(kind):
        with pytest.raises(RejectedRowError) as caught:
            normalise(kind, {column: 7})
        assert caught.value.reason != "unknown_columns"


@given(
    st.sampled_from(DATASETS),
    st.dictionaries(
        st.sampled_from(["messages", "conversations", "instruction", "input", "output", "history", "system", "prompt"])
        | st.sampled_from(["chosen", "rejected", "text"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.fixed_dictionaries(
                    {},
                    optional={
                        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | inner,
                        "content": inner,
                        "from": st.sampled_from(["human", "gpt"]) | inner,
                        "value": inner,
                    },
                )
            ),
            max_leaves=8,
        ),
    ),
    st.sampled_from(get_args(RowFormat)),
)
def test_any_record_becomes_a_row_in_order_or_is_rejected(
    kind: Dataset, record: dict[str, Any], form: RowFormat
) -> None:
    detect_kind([record])
    try:
        row = normalise(kind, record, form)
    except RejectedRowError:
        return
    assert all(text and text == text.strip() for text in row_texts(kind, row))
    if kind != "text":
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) + ["user"] * (len(turns) % 2)
        assert turns[-1] == ("assistant" if kind == "dialogues" else "user")


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
        ([{"conversations": [{"from": "gpt", "value": "a"}]}], "dialogues"),
        ([{"instruction": "u", "input": "", "output": "a"}], "dialogues"),
        ([{"instruction": "u", "chosen": "a", "rejected": "b"}], "preferences"),
        ([{"instruction": "u"}], "prompts"),
        ([{"messages": None, "chosen": None, "text": "a"}], "text"),
        (["x", {"other": 1}], None),
    ],
)
def test_the_kind_is_detected_from_the_keys(records: list[Any], kind: Dataset | None) -> None:
    assert detect_kind(records) == kind


def test_rejected_replies_can_be_left_out_of_what_was_said() -> None:
    row = {"messages": [U], "chosen": "a", "rejected": "b"}
    assert row_texts("preferences", row) == ["u", "a", "b"]
    assert row_texts("preferences", row, with_rejected=False) == ["u", "a"]
