"""Toxic turns by a lexicon: precise, so that a hit means something, and far from complete.

It looks for abuse that is aimed at the person spoken to, threats, calls to self-harm and slurs, in English and Chinese.
Swearing at no one ("this fucking bus") is not toxic here. The patterns are regular expressions, one a line, in
`lexicon_en.txt` and `lexicon_zh.txt`, written for this project.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from importlib import resources

_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff]")


@lru_cache(maxsize=1)
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    def union(name: str) -> str:
        text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
        lines = (line.strip() for line in text.splitlines())
        return "|".join(line for line in lines if line and not line.startswith("#"))

    return re.compile(rf"\b(?:{union('lexicon_en.txt')})\b"), re.compile(union("lexicon_zh.txt"))


def toxic_span(text: str) -> str | None:
    """The first toxic words of a text, as compared (NFKC, lower case), or None."""
    folded = text.casefold() if text.isascii() else _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).casefold()
    folded = folded.replace("’", "'")
    english, chinese = _patterns()
    found = english.search(folded)
    if found is None and not text.isascii():
        found = chinese.search(folded)
    return found.group() if found else None
