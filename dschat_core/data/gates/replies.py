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
SIGNS = (
    " an ai", " a.i.", "artificial", "language model", "learning model", " assistant", "chatgpt", " by ", "knowledge",
    "training", "last update", "real-time", "personal", "i can", "i'm unable", "i'm not able", "i am unable",
    "i am not able", "i won't", "i will not", "作为", "作為", "身为", "身為", "我是", "我只是", "我仅", "我僅", "我只不过",
    "抱歉", "对不起", "對不起", "我无法", "我無法", "我不能", "我的",
)  # fmt: skip


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
    return any(sign in text for sign in SIGNS) and _patterns().search(text) is not None


@lru_cache(maxsize=1)
def _patterns() -> re.Pattern[str]:
    lines = resources.files(__package__).joinpath("boilerplate.txt").read_text(encoding="utf-8").splitlines()
    return re.compile("|".join(f"(?:{line})" for line in lines if line and not line.startswith("#")))
