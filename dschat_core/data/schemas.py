"""The four data sets' rows: from the forms they come in to the one form the pipeline keeps.

text         {"text"}
dialogues    {"messages": [system?, user, assistant, …]}, ending on an assistant turn
preferences  {"messages": [… ending on a user turn], "chosen", "rejected", "kind"}
prompts      {"messages": [… ending on a user turn]}

Roles of other conventions are mapped (`human` → user, `gpt` → assistant, …). A dialogue whose turns do not alternate, or
that ends on a user turn, or has a system turn elsewhere than first, is rejected with a reason: what was meant can't be
known. Contents are stripped of white space at both ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from dschat_core.config import Dataset

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
}
Row = dict[str, Any]


class RejectedRowError(ValueError):
    """A record that is not a row of its data set; `reason` is a code such as `empty_output`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def normalise(kind: Dataset, record: dict[str, Any]) -> Row:
    """The record as a row of the data set. Raises RejectedRowError with the reason code."""
    return NORMALISERS[kind](record)


def detect_kind(records: Iterable[Any]) -> Dataset | None:
    """The data set that most of the records look like, by their keys; None if none looks like any."""
    kinds = [kind for record in records if isinstance(record, dict) and (kind := _kind_of(record)) is not None]
    return Counter(kinds).most_common(1)[0][0] if kinds else None


def _kind_of(record: dict[str, Any]) -> Dataset | None:
    keys = record.keys()
    if "chosen" in keys or "rejected" in keys:
        return "preferences"
    if "messages" in keys or "conversations" in keys:
        turns = record.get("messages", record.get("conversations"))
        last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
        # One such row may be a broken dialogue; where most are, it is the data set of prompts.
        return "prompts" if ROLES.get(str(last.get("role", last.get("from"))).lower()) == "user" else "dialogues"
    if "output" in keys:
        return "dialogues"
    if "text" in keys:
        return "text"
    return "prompts" if "prompt" in keys or "input" in keys else None


def row_texts(kind: Dataset, row: Row, *, with_rejected: bool = True) -> list[str]:
    """Everything that was said in a row, in order."""
    if kind == "text":
        return [row["text"]]
    texts = [message["content"] for message in row["messages"]]
    if kind == "preferences":
        texts.append(row["chosen"])
        if with_rejected:
            texts.append(row["rejected"])
    return texts


def split_text(kind: Dataset, row: Row) -> str:
    """What decides on which side of the held-out split a row falls: rows with the same one are never parted."""
    return row["messages"][0]["content"] if kind == "preferences" else "\n".join(row_texts(kind, row))


def _text(record: dict[str, Any]) -> Row:
    return {"text": _content(record, "text")}


def _dialogue(record: dict[str, Any]) -> Row:
    if (turns := _message_list(record)) is not None:
        messages = _messages(turns)
    else:
        messages = [*_history(record), _message("user", _content(record, "input"))]
        messages.append(_message("assistant", _content(record, "output")))
    _check_order(messages)
    if messages[-1]["role"] != "assistant":
        raise RejectedRowError("ends_on_user")
    return {"messages": messages}


def _preference(record: dict[str, Any]) -> Row:
    prompt = _prompt_messages(record, required=False)
    replies = {}
    for side in ("chosen", "rejected"):
        value = record.get(side)
        if not isinstance(value, list):
            replies[side] = _content(record, side)
            continue
        turns = _messages(value)
        if turns[-1]["role"] != "assistant":
            raise RejectedRowError(f"{side}_ends_on_user")
        # Some sets repeat the prompt in both lists, instead of or as well as beside them.
        before = turns[:-1]
        if before and prompt is not None and before != prompt:
            raise RejectedRowError("prompts_differ")
        prompt = prompt if prompt is not None else before
        replies[side] = turns[-1]["content"]
    if not prompt:
        raise RejectedRowError("missing_prompt")
    _check_prompt(prompt)
    if replies["chosen"] == replies["rejected"]:
        raise RejectedRowError("chosen_equals_rejected")
    kind = record.get("kind")
    return {"messages": prompt, **replies, "kind": kind if isinstance(kind, str) else None}


def _prompt(record: dict[str, Any]) -> Row:
    if (turns := _message_list(record)) is not None:
        messages = _messages(turns)
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
    else:
        messages = _prompt_messages(record, required=True) or []
    if not messages:
        raise RejectedRowError("no_user_turn")
    _check_prompt(messages)
    return {"messages": messages}


NORMALISERS = {"text": _text, "dialogues": _dialogue, "preferences": _preference, "prompts": _prompt}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _message_list(record: dict[str, Any]) -> list[Any] | None:
    for key in ("messages", "conversations"):
        if key in record:
            if not isinstance(record[key], list):
                raise RejectedRowError(f"{key}_not_list")
            return record[key]
    return None


def _content(record: dict[str, Any], field: str) -> str:
    if record.get(field) is None:
        raise RejectedRowError(f"missing_{field}")
    value = record[field]
    if not isinstance(value, str):
        raise RejectedRowError(f"{field}_not_text")
    if "\0" in value:
        raise RejectedRowError("nul_character")
    value = value.strip()
    if not value:
        raise RejectedRowError(f"empty_{field}")
    return value


def _messages(turns: list[Any]) -> list[dict[str, str]]:
    if not turns:
        raise RejectedRowError("no_messages")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict):
            raise RejectedRowError("message_not_object")
        role = turn.get("role", turn.get("from"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise RejectedRowError("unknown_role")
        field = "value" if "value" in turn and "content" not in turn else "content"
        messages.append(_message(ROLES[role.lower()], _content(turn, field)))
    return messages


def _history(record: dict[str, Any]) -> list[dict[str, str]]:
    """`system` and `history: [[user, reply], …]` before `input`."""
    messages = [_message("system", _content(record, "system"))] if record.get("system") else []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise RejectedRowError("history_not_list")
    for exchange in history:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise RejectedRowError("history_not_pairs")
        said = dict(zip(("user", "assistant"), exchange, strict=True))
        messages += [_message(role, _content({"history": text}, "history")) for role, text in said.items()]
    return messages


def _prompt_messages(record: dict[str, Any], *, required: bool) -> list[dict[str, str]] | None:
    field = "prompt" if "prompt" in record else "input"
    if not required and record.get(field) is None:
        return None
    if isinstance(record.get(field), list):
        return _messages(record[field])
    return [*_history(record), _message("user", _content(record, field))]


def _check_prompt(messages: list[dict[str, str]]) -> None:
    _check_order(messages)
    if messages[-1]["role"] != "user":
        raise RejectedRowError("ends_on_assistant")


def _check_order(messages: list[dict[str, str]]) -> None:
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    if any(turn["role"] == "system" for turn in turns):
        raise RejectedRowError("system_not_first")
    if not turns:
        raise RejectedRowError("no_user_turn")
    if turns[0]["role"] != "user":
        raise RejectedRowError("starts_on_assistant")
    if any(a["role"] == b["role"] for a, b in pairwise(turns)):
        raise RejectedRowError("turns_not_alternating")
