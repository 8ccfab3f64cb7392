"""The language of a row, told from its script and, for Latin letters, from its commonest words.

No model: it can be explained, costs microseconds, and says `und` where a text is too short or too plain to tell ("lol").
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from importlib import resources

from dschat_core.config import LanguageGate
from dschat_core.data.gates.block import Block, Finding, GateShard

SAMPLE_CHARACTERS = 600

# In this order: a text with a few kana among its Chinese characters is Japanese.
SCRIPTS = {
    "ja": re.compile(r"[\u3040-\u30ff\uff66-\uff9f]"),
    "ko": re.compile(r"[\uac00-\ud7af\u1100-\u11ff]"),
    "zh": re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"),
    "ru": re.compile(r"[\u0400-\u04ff]"),
    "ar": re.compile(r"[\u0600-\u06ff\u0750-\u077f]"),
    "hi": re.compile(r"[\u0900-\u097f]"),
    "bn": re.compile(r"[\u0980-\u09ff]"),
    "te": re.compile(r"[\u0c00-\u0c7f]"),
    "th": re.compile(r"[\u0e00-\u0e7f]"),
    "el": re.compile(r"[\u0370-\u03ff]"),
    "he": re.compile(r"[\u0590-\u05ff]"),
}
_LETTER = re.compile(r"[^\W\d_]")
_WORDS = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
# A Chinese character says as much as several Latin letters; mixed text is often "这个 API 怎么用".
MIN_SCRIPT_SHARE = {"ja": 0.1, "zh": 0.25, "ko": 0.25}
DEFAULT_SCRIPT_SHARE = 0.5


def language(block: Block, section: LanguageGate) -> GateShard:
    """Rows of a language that is not allowed; `stats` counts the languages of all rows."""
    found = [language_of(text) for text in block.joined]
    allowed = {*section.allowed, "und"}
    return GateShard(
        [
            Finding(row, "language_not_allowed", {"language": code})
            for row, code in enumerate(found)
            if section.allowed and code not in allowed
        ],
        Counter(found),
    )


def language_of(text: str) -> str:
    """An ISO 639-1 code, or `und`."""
    text = text[:SAMPLE_CHARACTERS]
    if not text.isascii() and (letters := len(_LETTER.findall(text))):
        for code, script in SCRIPTS.items():
            if len(script.findall(text)) >= MIN_SCRIPT_SHARE.get(code, DEFAULT_SCRIPT_SHARE) * letters:
                return code
    words = text.lower().split() if text.isascii() else _WORDS.findall(text.lower().replace("’", "'"))
    known = _languages_of_words()
    votes: Counter[str] = Counter()
    for word in words:
        for code in known.get(word.strip('.,!?;:"()'), ()):
            votes[code] += 1
    if not votes:
        return "und"
    (code, most), *others = votes.most_common(2)
    return "und" if others and others[0][1] == most else code


@lru_cache(maxsize=1)
def _languages_of_words() -> dict[str, tuple[str, ...]]:
    text = resources.files(__package__).joinpath("language_words.tsv").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            code, words = line.split("\t")
            for word in words.split():
                found.setdefault(word, []).append(code)
    return {word: tuple(codes) for word, codes in found.items()}
