"""Replies that teach nothing: near-empty ones, and boilerplate such as "as an AI language model".

All assistant turns of dialogues are asked, and the chosen reply of preferences. The patterns are in `boilerplate.txt`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import resources
from itertools import islice

from dschat_core.config import Dataset, RepliesGate
from dschat_core.data.gates.block import Block, Finding, GateShard
from dschat_core.data.schemas import Row

_ALPHANUMERIC = re.compile(r"[^\W_]")
# Every pattern of the list needs one of these; most replies have none, and finding that out is cheap.
_TRIGGERS = re.compile(
    r"\bai\b|a\.i\.|artificial|language model|assistant,|knowledge c|training data|^(?:i|so|very|really)\b[^.!?]{0,60}?\b"
    r"(?:assist|fulfil|comply|help|provide|engage|generate|create|answer)|^sorry|any (?:other|further|more) questions"
    r"|人工智|模型|助手|抱歉"
)


def replies(block: Block, section: RepliesGate) -> GateShard:
    """Rows with a reply of fewer than `min_characters` letters and digits, or with boilerplate."""
    findings = []
    for index, row in enumerate(block.rows):
        for turn, reply in enumerate(_replies(block.kind, row)):
            if reason := _reason(reply, section.min_characters):
                findings.append(Finding(index, reason, {"reply": turn + 1}))
                break
    return GateShard(findings)


def _replies(kind: Dataset, row: Row) -> list[str]:
    if kind == "dialogues":
        return [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    return [row["chosen"]] if kind == "preferences" else []


def _reason(reply: str, min_characters: int) -> str | None:
    if next(islice(_ALPHANUMERIC.finditer(reply), min_characters - 1, None), None) is None:
        return "near_empty"
    return "boilerplate" if is_boilerplate(reply) else None


def is_boilerplate(reply: str) -> bool:
    """Whether a reply speaks of its being a model, or refuses in the stock words."""
    text = reply.lower().replace("’", "'")
    return _TRIGGERS.search(text) is not None and _patterns().search(text) is not None


@lru_cache(maxsize=1)
def _patterns() -> re.Pattern[str]:
    lines = resources.files(__package__).joinpath("boilerplate.txt").read_text(encoding="utf-8").splitlines()
    return re.compile("|".join(f"(?:{line})" for line in lines if line and not line.startswith("#")))
