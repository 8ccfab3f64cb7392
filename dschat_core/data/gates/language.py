"""The language of a row, told from its script and, for Latin letters, from its commonest words and its own letters.

No model: it can be explained, costs microseconds, and says `und` where a text is too short or too plain to tell ("lol").
On the exchanges of `chatterbot-corpus`, 26 languages (`bench_gates.py`), it is right for 0.98, at 80 k rows per
CPU-second; py3langid 0.4 for 0.97 at 23 k. The words were completed with that corpus in sight, so on texts that
nobody has seen the two are about as good as each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from importlib import resources

from dschat_core.config import LanguageGate
from dschat_core.data.gates.block import Block, Finding, GateShard

SAMPLE_CHARACTERS = 600

# Code points of the scripts that are not Latin: first, last, the language that is written so or a first guess at it.
SCRIPTS = (
    (0x0370, 0x03FF, "el"), (0x0400, 0x052F, "ru"), (0x0530, 0x058F, "hy"), (0x0590, 0x05FF, "he"),
    (0x0600, 0x06FF, "ar"), (0x0750, 0x077F, "ar"), (0x0900, 0x097F, "hi"), (0x0980, 0x09FF, "bn"),
    (0x0A00, 0x0A7F, "pa"), (0x0A80, 0x0AFF, "gu"), (0x0B00, 0x0B7F, "or"), (0x0B80, 0x0BFF, "ta"),
    (0x0C00, 0x0C7F, "te"), (0x0C80, 0x0CFF, "kn"), (0x0D00, 0x0D7F, "ml"), (0x0D80, 0x0DFF, "si"),
    (0x0E00, 0x0E7F, "th"), (0x0E80, 0x0EFF, "lo"), (0x1000, 0x109F, "my"), (0x10A0, 0x10FF, "ka"),
    (0x1100, 0x11FF, "ko"), (0x1200, 0x137F, "am"), (0x1780, 0x17FF, "km"), (0x3040, 0x30FF, "ja"),
    (0x3130, 0x318F, "ko"), (0x3400, 0x4DBF, "zh"), (0x4E00, 0x9FFF, "zh"), (0xAC00, 0xD7AF, "ko"),
    (0xF900, 0xFAFF, "zh"), (0xFB50, 0xFEFC, "ar"), (0xFF66, 0xFF9F, "ja"), (0x20000, 0x3FFFF, "zh"),
)  # fmt: skip
# A few kana among Chinese characters are Japanese, and a Chinese character says as much as several Latin letters: mixed
# text is often "这个 API 怎么用". In the order in which they are asked.
MIN_SCRIPT_SHARE = {"ja": 0.1, "ko": 0.25, "zh": 0.25}
DEFAULT_SCRIPT_SHARE = 0.5
# Languages of one script, by letters that the others have not.
RELATIVES = {
    "ru": (("be", re.compile("[ўЎ]")), ("uk", re.compile("[іїєґІЇЄҐ]"))),
    "ar": (("ur", re.compile("[ٹڈڑںےہ]")), ("fa", re.compile("[پچژگکی]"))),
    "hi": (("mr", re.compile("ळ|आह|नाही|आणि")),),
}
LATIN_LETTERS = {
    "es": "ñ¿¡", "pt": "ãõ", "de": "ß", "tr": "ğışİ", "pl": "ąęłńśźż", "cs": "řěů", "hu": "őű", "ro": "țșţ",
    "vi": "ơưđạảấầẩẫậắằẳẵặẻẽếềểễệỉỏốồổỗộớờởỡợủứừửữựỳỵỷỹ",
}  # fmt: skip
# One name with such a letter does not outweigh the words around it.
MAX_LETTER_VOTES = 2.0
MIN_OTHER_WORDS = 4
MIN_OTHER_SHARE = 0.05

# For plain ASCII this is faster than an expression that finds words.
_SPACED = str.maketrans('.,!?;:"()', " " * 9)
_LETTER = re.compile(r"[^\W\d_]")
_NOT_LATIN = re.compile(r"[^\W\d_\u0000-\u024f\u1e00-\u1eff]")
_WORDS = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")


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
    """An ISO 639-1 code; `other` for a language that is none of those known; `und` where the text does not tell."""
    text = text[:SAMPLE_CHARACTERS]
    if text.isascii():
        return _most(_word_votes(text.lower().translate(_SPACED).split()))
    if found := _NOT_LATIN.findall(text):
        scripts = Counter(map(_script, found))
        letters = len(_LETTER.findall(text))
        for code in (*MIN_SCRIPT_SHARE, *scripts):
            if code in scripts and scripts[code] >= MIN_SCRIPT_SHARE.get(code, DEFAULT_SCRIPT_SHARE) * letters:
                return next((near for near, sign in RELATIVES.get(code, ()) if sign.search(text)), code)
    words = _WORDS.findall(text.lower().replace("’", "'"))
    votes = _word_votes(words)
    of_letter = _letter_languages()
    for code, count in Counter(of_letter[letter] for letter in text if letter in of_letter).items():
        votes[code] = votes.get(code, 0.0) + min(count, MAX_LETTER_VOTES)
    if not votes and len(words) >= MIN_OTHER_WORDS:
        said = "".join(words)
        if sum(letter > "\x7f" for letter in said) >= MIN_OTHER_SHARE * len(said):
            return "other"
    return _most(votes)


def _word_votes(words: Iterable[str]) -> dict[str, float]:
    """A vote for each known word; a word of several languages is shared among them."""
    known = _languages_of_words()
    votes: dict[str, float] = {}
    for word in words:
        codes = known.get(word)
        if codes is None and "'" in word:
            # An article or pronoun written with the word that follows: l'eau, dell'arte.
            codes = known.get(word.partition("'")[0] + "'")
        if codes:
            share = 1 / len(codes)
            for code in codes:
                votes[code] = votes.get(code, 0.0) + share
    return votes


def _most(votes: dict[str, float]) -> str:
    if not votes:
        return "und"
    code, most = max(votes.items(), key=lambda vote: vote[1])
    # Thirds do not add up exactly.
    return "und" if any(other != code and most - count < 1e-6 for other, count in votes.items()) else code


@lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    return next((code for first, last, code in SCRIPTS if first <= ord(letter) <= last), "other")


@lru_cache(maxsize=1)
def _letter_languages() -> dict[str, str]:
    # Of some of them the other case is plain ASCII: ı and I, ß and SS.
    pairs = ((letter, code) for code, letters in LATIN_LETTERS.items() for letter in letters + letters.upper())
    return {letter: code for letter, code in pairs if letter > "\x7f"}


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
