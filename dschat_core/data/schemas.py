"""The four data sets' rows: from the forms they come in to the one form the pipeline keeps.

text         {"text"}
dialogues    {"messages": [system?, user, assistant, …]}, ending on an assistant turn
preferences  {"messages": [… ending on a user turn], "chosen", "rejected", "kind"}
prompts      {"messages": [… ending on a user turn]}

They come as OpenAI's `messages`, ShareGPT's `conversations`, Alpaca's `instruction`/`input`/`output`, or
`history`/`input`/`output`; columns of other names are mapped by the config. Roles of other conventions are mapped
(`human` → user, `gpt` → assistant, …), a tool's turn is not. A dialogue whose turns do not alternate, or that ends on a
user turn, or has a system turn elsewhere than first, is rejected with a reason: what was meant can't be known. Contents
are stripped of white space at both ends; one of nothing but white space and invisible characters is empty, one with NUL
is rejected, other control characters stay. A column that is null is one that isn't there, as tables can say it no other
way. Keys beside those above (`weight`, `id`, …) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from dschat_core.config import Dataset, RowFormat

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
}
TOOL_ROLES = {"tool", "tool_call", "tool_response", "function", "function_call", "observation", "ipython"}
# White space and control characters, soft hyphen, direction marks, Hangul fillers, zero-width characters and joiners,
# Braille's blank, variation selectors.
INVISIBLE = "".join(
    chr(code)
    for first, last in (
        *((0, 0x20), (0x7F, 0xA0), (0xAD, 0xAD), (0x61C, 0x61C), (0x115F, 0x1160), (0x1680, 0x1680), (0x180E, 0x180E)),
        *((0x2000, 0x200F), (0x2028, 0x202F), (0x205F, 0x206F), (0x2800, 0x2800), (0x3000, 0x3000), (0x3164, 0x3164)),
        *((0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0)),
    )
    for code in range(first, last + 1)
)
Row = dict[str, Any]


class RejectedRowError(ValueError):
    """A record that is not a row of its data set; `reason` is a code such as `empty_output`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


COLUMNS: dict[Dataset, tuple[str, ...]] = {
    "text": ("text",),
    "dialogues": ("messages", "conversations", "instruction", "input", "output", "history"),
    "preferences": ("chosen", "rejected", "prompt", "instruction", "input"),
    "prompts": ("prompt", "messages", "conversations", "instruction", "input"),
}
ASKING_COLUMNS = ("messages", "conversations", "instruction", "input", "prompt")
# A form that the config names → the columns that only others have; a row of both is read as the one that is named.
OTHER_FORMS: dict[RowFormat, tuple[str, ...]] = {
    "messages": ("conversations", "instruction", "output", "history"),
    "sharegpt": ("messages", "instruction", "output", "history"),
    "alpaca": ("messages", "conversations"),
    "input_output": ("messages", "conversations", "instruction"),
}


def normalise(
    kind: Dataset, record: dict[str, Any], form: RowFormat = "auto", columns: Mapping[str, str] | None = None
) -> Row:
    """The record as a row of the data set. Raises RejectedRowError with the reason code.

    Args:
        form, columns: see `config.DataSource`.
    """
    if columns:
        renamed = {ours: record[theirs] for ours, theirs in columns.items() if theirs in record}
        # Under its own name too, an `input` that was mapped to `instruction` would be asked twice.
        record = {key: value for key, value in record.items() if key not in columns.values()} | renamed
    if record.keys().isdisjoint(COLUMNS[kind]):
        raise RejectedRowError("unknown_columns")
    if form != "auto" and kind != "text":
        if not _has_form(record, form):
            raise RejectedRowError(f"not_{form}")
        record = {key: value for key, value in record.items() if key not in OTHER_FORMS[form]}
    return NORMALISERS[kind](record)


def _has_form(record: dict[str, Any], form: RowFormat) -> bool:
    if form == "sharegpt":
        return record.get("conversations") is not None
    if form == "alpaca":
        return record.get("instruction") is not None
    if form == "messages":
        lists = (record.get(column) for column in ("chosen", "prompt", "input"))
        return record.get("messages") is not None or any(isinstance(value, list) for value in lists)
    return any(record.get(column) is not None for column in ("input", "prompt", "history"))


def expected_columns(kind: Dataset) -> tuple[str, ...]:
    """The columns of which a row of the data set has some."""
    return COLUMNS[kind]


def detect_kind(records: Iterable[Any]) -> Dataset | None:
    """The data set that most of the records look like, by their keys; None if none looks like any."""
    kinds = [kind for record in records if isinstance(record, dict) and (kind := _kind_of(record)) is not None]
    return Counter(kinds).most_common(1)[0][0] if kinds else None


def _kind_of(record: dict[str, Any]) -> Dataset | None:
    keys = {key for key, value in record.items() if value is not None}
    if "chosen" in keys or "rejected" in keys:
        return "preferences"
    if "messages" in keys or "conversations" in keys:
        turns = record["messages" if "messages" in keys else "conversations"]
        last = turns[-1] if isinstance(turns, list) and turns and isinstance(turns[-1], dict) else {}
        # One such row may be a broken dialogue; where most are, it is the data set of prompts.
        return "prompts" if ROLES.get(str(last.get("role", last.get("from"))).lower()) == "user" else "dialogues"
    if "output" in keys:
        return "dialogues"
    if "instruction" in keys:
        return "prompts"
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
        messages = _with_system(record, _messages(turns))
    else:
        messages = [*_history(record), _message("user", _question(record, "input"))]
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
        if not isinstance(value, list | dict):
            replies[side] = _content(record, side)
            continue
        turns = _messages(value if isinstance(value, list) else [value])
        if turns[-1]["role"] != "assistant":
            raise RejectedRowError(f"{side}_ends_on_user")
        # Some sets repeat the prompt in both lists, instead of or as well as beside them.
        before = _with_system(record, turns[:-1]) if len(turns) > 1 else []
        if before and prompt is not None and before != prompt:
            raise RejectedRowError("prompts_differ")
        prompt = prompt if prompt is not None else before
        replies[side] = turns[-1]["content"]
    if not prompt and (before_reply := _message_list(record)) is not None:
        prompt = _with_system(record, _messages(before_reply))
    if not prompt:
        raise RejectedRowError("missing_prompt")
    _check_prompt(prompt)
    if replies["chosen"] == replies["rejected"]:
        raise RejectedRowError("chosen_equals_rejected")
    kind = record.get("kind")
    return {"messages": prompt, **replies, "kind": kind if isinstance(kind, str) else None}


def _prompt(record: dict[str, Any]) -> Row:
    if (turns := _message_list(record)) is not None:
        messages = _with_system(record, _messages(turns))
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
        turns = record.get(key)
        if type(turns) is list:
            return turns
        if turns is not None or (key in record and all(record.get(column) is None for column in ASKING_COLUMNS)):
            raise RejectedRowError(f"{key}_not_list")
    return None


def _content(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if type(value) is not str:
        if value is None:
            raise RejectedRowError(f"missing_{field}")
        value = _joined_parts(value, field)
    if "\0" in value:
        raise RejectedRowError("nul_character")
    value = value.strip()
    if not value or not value.strip(INVISIBLE):
        raise RejectedRowError(f"empty_{field}")
    return value


def _joined_parts(value: Any, field: str) -> str:
    """OpenAI's `[{"type": "text", "text": …}, …]`; parts that are no text have no place in a text model's row."""
    if not isinstance(value, list) or not value:
        raise RejectedRowError(f"{field}_not_text")
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RejectedRowError(f"{field}_not_text")
        texts.append(text)
    return "".join(texts)


def _messages(turns: list[Any]) -> list[dict[str, str]]:
    if not turns:
        raise RejectedRowError("no_messages")
    messages = []
    for turn in turns:
        if type(turn) is not dict:
            raise RejectedRowError("message_not_object")
        written = turn.get("role")
        if written is None:
            written = turn.get("from")
        role = ROLES.get(written) if type(written) is str else None
        if role is None:
            role = _other_role(written)
        if turn.get("tool_calls") or turn.get("function_call"):
            raise RejectedRowError("tool_turn")
        field = "value" if turn.get("content") is None and "value" in turn else "content"
        messages.append({"role": role, "content": _content(turn, field)})
    return messages


def _other_role(written: Any) -> str:
    """A role in another case; a tool's turn is not one that a chat model is trained to write."""
    role = written.lower() if isinstance(written, str) else ""
    if role in TOOL_ROLES:
        raise RejectedRowError("tool_turn")
    if role not in ROLES:
        raise RejectedRowError("unknown_role")
    return ROLES[role]


def _with_system(record: dict[str, Any], messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """The turns, `system` before them where it lies beside them."""
    if _given(record, "system") and messages[0]["role"] != "system":
        return [_message("system", _content(record, "system")), *messages]
    return messages


def _given(record: dict[str, Any], field: str) -> bool:
    """Whether an optional field says anything."""
    value = record.get(field)
    return value is not None and not (type(value) is str and not value.strip(INVISIBLE))


def _question(record: dict[str, Any], field: str) -> str:
    """What is asked: `field`, or Alpaca's `instruction` with its `input` below it."""
    if record.get("instruction") is None:
        return _content(record, field)
    question = _content(record, "instruction")
    return f"{question}\n\n{_content(record, 'input')}" if _given(record, "input") else question


def _history(record: dict[str, Any]) -> list[dict[str, str]]:
    """`system` and `history: [[user, reply], …]` before `input`."""
    messages = [_message("system", _content(record, "system"))] if _given(record, "system") else []
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
    field = "input" if record.get("prompt") is None and "input" in record else "prompt"
    instructed = record.get("instruction") is not None
    if not required and record.get(field) is None and not instructed:
        return None
    if isinstance(record.get(field), list) and not instructed:
        return _with_system(record, _messages(record[field]))
    return [*_history(record), _message("user", _question(record, field))]


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
