"""Toxic turns; the embedded lexicon is precise, so that a hit means something, and far from complete.

It looks for abuse that is aimed at the person spoken to, threats, calls to self-harm and slurs, in English and Chinese.
Swearing at no one ("this fucking bus") is not toxic here. The patterns are regular expressions, one a line, in
`lexicon_en.txt` and `lexicon_zh.txt`, written for this project.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

from dschat_core.config import ToxicityGate
from dschat_core.data.gates.block import Block, Finding, GateShard
from dschat_core.data.gates.detectors import Detector, Hit
from dschat_core.data.schemas import row_texts

_INVISIBLE = re.compile(r"[\u00ad\u200b-\u200f\u2060\ufeff]")


def toxicity(block: Block, section: ToxicityGate, detector: Detector) -> GateShard:
    """Rows with a toxic turn; of a pair the chosen reply is asked, the rejected one only with `check_rejected`."""
    if block.kind == "preferences" and not section.check_rejected:
        texts = [row_texts(block.kind, row, with_rejected=False) for row in block.rows]
    else:
        texts = block.texts
    hits = iter(detector([text for turns in texts for text in turns]))
    findings = []
    for row, turns in enumerate(texts):
        found = [(turn, hit) for turn, hit in enumerate(next(hits) for _ in turns) if hit is not None]
        if found:
            turn, hit = found[0]
            findings.append(Finding(row, hit.label, {"turn": turn + 1, "span": hit.span, "score": round(hit.score, 3)}))
    return GateShard(findings)


def lexicon_hits(texts: Sequence[str]) -> list[Hit | None]:
    """The lexicon's `Detector`."""
    return [Hit(span, "toxic", 1.0) if (span := toxic_span(text)) else None for text in texts]


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
