"""The embedded lexicon of abuse, English and Chinese: precise, so that a hit means something, and far from complete.

It knows abuse of the person spoken to, threats, calls to self-harm, sexual harassment, slurs and hate against groups, in
plain spelling and in the usual disguises (`f*ck`, `1d10t`, `f u c k`, `stuuupid`, full width, `傻X`, traditional
characters). Swearing at no one ("this fucking bus") is not toxic here, nor is telling of what others said.

Everything it knows lies in data files beside this one, written for this project (Apache-2.0), `lexicon_<language>_…`:

words     list name, entry
patterns  reason code, pattern; the codes `-before`, `-after` and `-near` are contexts that excuse a hit
spelling  what is written, what it is read as (`lexicon_characters.tsv`: the same for single characters)

Patterns and entries share one notation: `(a|b)` one of them, `[a|b]` perhaps one of them, `[a|b]*` any number of them, `[a|b]+` at least one,
`{name}` one of a list, `~3` up to three words (of Chinese: characters) of any kind but those of the list `between`, `<` and `>` the start and the end of a
clause, `"` a quotation mark.

A pattern matches only where one of its triggers stands, the rarest words that every match of it must have. They are
derived from the pattern, so the search for triggers, which is all that an ordinary text pays for, can hide no match.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Literal, NamedTuple

from dschat_core.data.gates.detectors import Hit

Language = Literal["en", "zh"]

_NOTATION = re.compile(r"\][*+]|[()\[\]|<>]|\{\w+\}|~\d+|[^\s()\[\]|<>{}~*+]+")
_RARE = 1e-5
# Bounded, so that no text can make a search long.
_REPEATS = {")": "", "]": "?", "]*": "{0,6}", "]+": "{1,6}"}
# What a gap is made of; none reaches across a word of the list `between`: another person, a negation.
_ANY = {"en": ("(?:(?!(?:{}) )[a-z0-9']+ )", ""), "zh": (r"(?:(?!{})[^。,?\"])", "?")}
_BORDER = r'[。.?,"]'
_MARKS = frozenset('。.?,"')
# How far around a hit the contexts that excuse it are looked for, in characters.
_BEFORE = {"en": 70, "zh": 24}
_NEAR = {"en": 160, "zh": 60}


class Pattern(NamedTuple):
    """What a pattern means: a regular expression, and what every match of it has.

    Each of the needs is a set of words (of Chinese: strings) of which one must be there, the rarest set first.
    """

    expression: str
    needs: tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Lexicon:
    """One language: labelled patterns, and the contexts in which a match is no abuse.

    `by_trigger` leads from a word or string of a pattern's first need to the pattern; `second_needs` are looked at next,
    before the pattern itself. Chinese has no words to look up: its strings are found by one of their characters.
    """

    language: Language
    patterns: tuple[tuple[str, re.Pattern[str]], ...]
    by_trigger: Mapping[str, Sequence[int]]
    second_needs: Sequence[frozenset[str] | None]
    by_character: Mapping[str, Sequence[str]]
    trigger_characters: frozenset[str]
    before: re.Pattern[str]
    after: re.Pattern[str]
    near: re.Pattern[str]

    def hit(self, text: str) -> Hit | None:
        """The first hit in a text in its plain form."""
        for index in self.candidates(text):
            label, pattern = self.patterns[index]
            for match in pattern.finditer(text):
                if not self._is_excused(text, match):
                    return Hit(match.group().strip(), label, 1.0)
        return None

    def candidates(self, text: str) -> list[int]:
        """The patterns of which a text in its plain form has what they need, in their order."""
        found = set(text.split() if self.language == "en" else _LATIN.findall(text))
        for character in self.by_character.keys() & set(text):
            found.update(string for string in self.by_character[character] if string in text)
        indices = {index for word in self.by_trigger.keys() & found for index in self.by_trigger[word]}
        return sorted(index for index in indices if not (need := self.second_needs[index]) or not need.isdisjoint(found))

    def _is_excused(self, text: str, match: re.Match[str]) -> bool:
        start, end = match.span()
        near = _NEAR[self.language]
        return bool(
            self.before.search(text, max(0, start - _BEFORE[self.language]), start)
            or self.after.match(text, end)
            or self.near.search(text, max(0, start - near), end + near)
            or _is_quoted(text, start, end)
        )


def lexicon_hits(texts: Sequence[str]) -> list[Hit | None]:
    """The lexicon's `Detector`: the first hit of each text; its span as compared, disguises undone."""
    return [first_hit(text) if may_hit(text) else None for text in texts]


def may_hit(text: str) -> bool:
    """Whether a text has a trigger; False for nearly all ordinary ones, and then `first_hit` is None."""
    folded = fold(text)
    if folded.isascii():
        return any(map(_has_trigger, folded.split()))
    if any(map(_has_trigger, _ASCII.findall(folded))):
        return True
    chinese = load_lexicon("zh")
    return not chinese.trigger_characters.isdisjoint(folded) and bool(chinese.candidates(plain_chinese(folded)))


def first_hit(text: str) -> Hit | None:
    """Search a text in both languages."""
    folded = fold(text)
    english, chinese = load_lexicon("en"), load_lexicon("zh")
    plain = plain_english(folded)
    if hit := english.hit(plain):
        return hit
    plain = plain_chinese(folded)
    return chinese.hit(plain)


# ── plain forms ─────────────────────────────────────────────────────────────────────────────────────────

_ASCII = re.compile(r"[!-~]+")
_LATIN = re.compile(r"[a-z0-9]+")
_CACHED_TOKEN = 32
_PIECE = re.compile(r"[a-z0-9@$*#'_!|]+|[^a-z0-9@$*#'_!|]")
_SPELLED = re.compile(r"(?<![a-z0-9'])[a-z](?:[ .*_-]{1,2}[a-z](?![a-z0-9'])){2,}")
# Letters that stand alone in ordinary text; every word that may be spelled out has another one.
_LONE_LETTERS = frozenset("aiurxdstmn")
_LEET = str.maketrans("@430!15$7|", "aaeoiissti")
_SUFFIXES = (
    ("n't", " not"),
    ("'re", " are"),
    ("'m", " am"),
    ("'ll", " will"),
    ("'ve", " have"),
    ("'s", " is"),
    ("'d", " would"),
)
_PUNCTUATION = {
    **dict.fromkeys(".!;:", "."),
    "?": "?",
    ",": ",",
    "(": ",",
    ")": ",",
    "-": " ",
    '"': '"',
    "/": ",",
    "~": ".",
}
_HAN_GAP = re.compile(
    r"(?<=[\u3400-\u9fff])[^\S\n]+|[^\S\n]+(?=[\u3400-\u9fff])|(?<=[\u3400-\u9fff])[·.*_|/\\~-]+(?=[\u3400-\u9fff])"
)
_HAN_PUNCTUATION = str.maketrans({**dict.fromkeys("!;:\n.~…、（）()", "。"), "、": ",", ";": ",", ":": ","})


def fold(text: str) -> str:
    """Lower case; half width, simplified characters, no accents, nothing invisible."""
    if text.isascii():
        return text.lower()
    return unicodedata.normalize("NFKC", text).lower().translate(_characters())


def plain_english(folded: str) -> str:
    """The words of a folded text, read as they are meant, and its punctuation as one of ` . ? , " `, space between all."""
    if "\n" in folded:
        folded = folded.replace("\n", " . ")
    spelled = _SPELLED.sub(lambda match: _spelled(match.group()), folded)
    words = [_plain(token) for token in _ASCII.findall(spelled)]
    return f" . {' '.join(words)} . "


def plain_chinese(folded: str) -> str:
    """A folded text without gaps between Chinese characters, its punctuation as one of `。?,"`."""
    return f"。{_HAN_GAP.sub('', folded).translate(_HAN_PUNCTUATION)}。"


def _has_trigger(token: str) -> bool:
    return _cached_has_trigger(token) if len(token) <= _CACHED_TOKEN else _uncached_has_trigger(token)


def _uncached_has_trigger(token: str) -> bool:
    if len(token) == 1:
        return token.isalpha() and token not in _LONE_LETTERS
    return (
        not load_lexicon("en").by_trigger.keys().isdisjoint(_plain(token).split())
        or not load_lexicon("zh").by_trigger.keys().isdisjoint(_LATIN.findall(token))
        or _SPELLED.search(token) is not None
    )


_cached_has_trigger = lru_cache(maxsize=1 << 16)(_uncached_has_trigger)


def _spelled(run: str) -> str:
    letters = "".join(character for character in run if character.isalpha())
    words = _vocabulary().pattern.findall(letters)
    return " ".join(words) if "".join(words) == letters else run


def _plain(token: str) -> str:
    """A token of printable ASCII as words and punctuation."""
    return _cached_plain(token) if len(token) <= _CACHED_TOKEN else _uncached_plain(token)


def _uncached_plain(token: str) -> str:
    if token.isalpha():
        return _word(token)
    token = _SPELLED.sub(lambda match: _spelled(match.group()), token)
    whole = token.strip(".,?!\"'()*_")
    if whole in _spelling():
        return _spelling()[whole]
    return " ".join(_plain_piece(piece) for piece in _PIECE.findall(token))


_cached_plain = lru_cache(maxsize=1 << 16)(_uncached_plain)


def _plain_piece(piece: str) -> str:
    if piece.isalpha():
        return _word(piece)
    if len(piece) == 1:
        return _PUNCTUATION.get(piece, "")
    core = piece.strip("'_") if not piece.startswith("*") else piece.strip("'*_")
    for candidate in (core, core.rstrip("!|*#@$"), core.strip("!|*#@$")):
        if any(map(str.isalpha, candidate)) and (found := _undisguised(candidate)):
            return f"{found} ." if piece.endswith("!") else found
    for suffix, meaning in _SUFFIXES:
        if core.endswith(suffix):
            return _word(core[: -len(suffix)]) + meaning
    words = " ".join(_word(word) for word in _LATIN.findall(piece.replace("'", "")))
    quotes = ['"'] if piece.startswith("'") else []
    closing = ['"'] if piece.endswith("'") and len(piece) > 1 else ["."] if piece.endswith("!") else []
    return " ".join([*quotes, words, *closing])


def _undisguised(word: str) -> str | None:
    """`sh1t` → shit, `f*ck` → fuck, `a$$hole` → asshole; None if it stands for no word that the lexicon knows."""
    words = _vocabulary().words
    decoded = word.translate(_LEET)
    if word.isalpha():
        return None
    if decoded.isalpha() and len(decoded) > 2:
        known = _word(decoded)
        return known if known in words or known != decoded else None
    hidden = sum(not character.isalpha() for character in decoded)
    if set(decoded) - set("abcdefghijklmnopqrstuvwxyz*#_") or hidden < 1 or len(decoded) < 3:
        return None
    masked = re.compile(re.sub(r"[*#_]", "[a-z]", decoded))
    return next(
        (known for known in _vocabulary().masked if len(known) == len(decoded) and masked.fullmatch(known)), None
    )


def _word(word: str) -> str:
    """A word as it is meant: misspellings and stretched letters undone."""
    spelling = _spelling()
    if word in spelling:
        return spelling[word]
    words = _vocabulary().words
    if word in words:
        return word
    for stretched, kept in _STRETCHES:
        shorter = stretched.sub(kept, word)
        if shorter != word and (shorter in words or shorter in spelling):
            return spelling.get(shorter, shorter)
    return word


_STRETCHES = (
    (re.compile(r"([a-z])\1{2,}"), r"\1\1"),
    (re.compile(r"([a-z])\1{2,}"), r"\1"),
    (re.compile(r"([a-z])\1+"), r"\1"),
)


def _is_quoted(text: str, start: int, end: int) -> bool:
    """Whether a match lies between quotation marks in a text that has words of its own outside them."""
    before = text[:start].count('"')
    closing = text.find('"', end)
    if before % 2 == 0 or closing < 0:
        return False
    opening = text.rfind('"', 0, start)
    return any(map(str.isalnum, text[:opening] + text[closing:]))


# ── data files ──────────────────────────────────────────────────────────────────────────────────────────


class Vocabulary(NamedTuple):
    """The words of the English lists, those that may hide behind stars, most likely first, and one pattern for all."""

    words: frozenset[str]
    masked: tuple[str, ...]
    pattern: re.Pattern[str]


def read_table(name: str) -> list[tuple[str, str]]:
    """The rows of a data file."""
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if line and not line.startswith("# "))
    return [(first, second) for first, second in rows]


@lru_cache(maxsize=1)
def _characters() -> dict[int, str | None]:
    accented = {code: unicodedata.normalize("NFD", chr(code))[0] for code in range(0xC0, 0x180)}
    invisible: dict[int, str | None] = dict.fromkeys(
        [0xAD, 0x34F, *range(0x200B, 0x2010), *range(0x2060, 0x2065), 0xFEFF]
    )
    invisible |= dict.fromkeys([*range(0x300, 0x370), *range(0xFE00, 0xFE10)])
    return {**accented, **invisible, **{ord(written): read for written, read in read_table("lexicon_characters.tsv")}}


@lru_cache(maxsize=1)
def _spelling() -> dict[str, str]:
    return dict(read_table("lexicon_en_spelling.tsv"))


@lru_cache(maxsize=1)
def _vocabulary() -> Vocabulary:
    rows = read_table("lexicon_en_words.tsv")
    words = {word for name, entry in rows if name != "common" for word in re.findall(r"[a-z']+", entry)}
    masked = tuple(entry for name, entry in rows if name == "masked")
    spelled = sorted({*words, *_spelling()}, key=lambda word: (-len(word), word))
    return Vocabulary(frozenset(words), masked, re.compile("|".join(map(re.escape, spelled))))


@lru_cache(maxsize=2)
def load_lexicon(language: Language) -> Lexicon:
    """Read and compile a language's data files."""
    lists: dict[str, list[str]] = {}
    for name, entry in read_table(f"lexicon_{language}_words.tsv"):
        lists.setdefault(name, []).append(entry)
    reader = PatternReader(language, lists)
    patterns, second_needs, by_trigger = [], [], dict[str, list[int]]()
    excuses: dict[str, list[str]] = {"-before": [], "-after": [], "-near": []}
    for label, source in read_table(f"lexicon_{language}_patterns.tsv"):
        pattern = reader.read(source)
        if label in excuses:
            excuses[label].append(pattern.expression)
            continue
        assert pattern.needs, f"{source}: it could match a text of which it names no word"
        first, *second = pattern.needs
        for trigger in first:
            by_trigger.setdefault(trigger, []).append(len(patterns))
        second_needs.append(second[0] if second else None)
        patterns.append((label, re.compile(pattern.expression)))
    by_character: dict[str, list[str]] = {}
    if language == "zh":
        for string in {*by_trigger}.union(*filter(None, second_needs)):
            if not is_latin(string):
                by_character.setdefault(reader.rarest(string), []).append(string)
    # Excused: what comes within the clause before, right after, or anywhere around.
    before, after, near = ("|".join(excuses[label]) for label in ("-before", "-after", "-near"))
    return Lexicon(
        language,
        tuple(patterns),
        by_trigger,
        second_needs,
        by_character,
        frozenset(character for character, strings in by_character.items() if not by_trigger.keys().isdisjoint(strings)),
        re.compile(rf"(?:{before})[^.。?]*$"),
        re.compile(after),
        re.compile(near),
    )


def is_latin(word: str) -> bool:
    """Whether a string of the Chinese lists is written in Latin letters or digits: `cnm`, `2b`."""
    return word.isascii() and word.isalnum()


class PatternReader:
    """Reads the notation into regular expressions and triggers (see the top of this module)."""

    def __init__(self, language: Language, lists: Mapping[str, Sequence[str]]) -> None:
        self._language = language
        self._lists = lists
        self._common = {word: rank for rank, word in enumerate(lists["common"])}
        self._read: dict[str, Pattern] = {}

    def read(self, source: str) -> Pattern:
        """One pattern.

        Raises:
            ValueError: the notation is wrong.
        """
        tokens = _NOTATION.findall(source)
        if "".join(tokens) != source.replace(" ", ""):
            raise ValueError(f"{source}: not the notation")
        pattern, rest = self._alternatives(tokens)
        if rest:
            raise ValueError(f"{source}: {rest[0]} closes nothing")
        expression = rf"(?<= )(?:{pattern.expression})" if self._language == "en" else pattern.expression
        return Pattern(expression, pattern.needs)

    def rarest(self, string: str) -> str:
        """The character of a Chinese string by which it is looked for."""
        return max(set(string) - _MARKS, key=self._rank)

    def _rank(self, word: str) -> int:
        return self._common.get(word, len(self._common))

    def _alternatives(self, tokens: Sequence[str]) -> tuple[Pattern, Sequence[str]]:
        choices = []
        while True:
            choice, tokens = self._sequence(tokens)
            choices.append(choice)
            if not tokens or tokens[0] != "|":
                return self._one_of(choices), tokens
            tokens = tokens[1:]

    def _one_of(self, choices: Sequence[Pattern]) -> Pattern:
        if len(choices) == 1:
            return choices[0]
        # Longer ones first: the first that fits is taken, and a hit is shown whole.
        expressions = sorted({choice.expression for choice in choices}, key=lambda text: (-len(text), text))
        rarest = [choice.needs[0] for choice in choices if choice.needs]
        needs = (frozenset().union(*rarest),) if len(rarest) == len(choices) else ()
        return Pattern(f"(?:{'|'.join(expressions)})", needs)

    def _sequence(self, tokens: Sequence[str]) -> tuple[Pattern, Sequence[str]]:
        expressions, needs = [], list[frozenset[str]]()
        while tokens and tokens[0] not in ("|", *_REPEATS):
            token, *tokens = tokens
            if token in ("(", "["):
                inner, tokens = self._alternatives(tokens)
                closing, *tokens = tokens or [""]
                if closing not in _REPEATS or (token == "(") != (closing == ")"):
                    raise ValueError(f"{token} is not closed")
                expressions.append(f"(?:{inner.expression}){_REPEATS[closing]}")
                needs += inner.needs if closing in (")", "]+") else ()
            else:
                part = self._part(token)
                expressions.append(part.expression)
                needs += part.needs
        return Pattern("".join(expressions), tuple(sorted(needs, key=self._cost)[:2])), tokens

    def _part(self, token: str) -> Pattern:
        if token == "<":
            return Pattern(rf"(?<={_BORDER})" if self._language == "zh" else rf"(?<={_BORDER} )", ())
        if token == ">":
            return Pattern(rf"(?={_BORDER})", ())
        if token.startswith("~"):
            any_other, greed = _ANY[self._language]
            return Pattern(f"{any_other.format('|'.join(self._lists['between']))}{{0,{token[1:]}}}{greed}", ())
        if token.startswith("{"):
            if token not in self._read:
                choices = [self._alternatives(_NOTATION.findall(entry))[0] for entry in self._lists[token[1:-1]]]
                self._read[token] = self._one_of(choices)
            return self._read[token]
        return self._literal(token)

    def _literal(self, text: str) -> Pattern:
        if self._language == "en":
            return Pattern(f"{re.escape(text)} ", (frozenset([text]),) if text[0].isalnum() else ())
        bounded = rf"(?<![a-z0-9]){text}(?![a-z0-9])" if is_latin(text) else re.escape(text)
        return Pattern(bounded, () if set(text) <= _MARKS else (frozenset([text]),))

    def _cost(self, need: frozenset[str]) -> float:
        return sum(map(self._frequency, need))

    def _frequency(self, trigger: str) -> float:
        # By Zipf's law; that of a Chinese string is of its rarest character, and falls with every further one.
        if self._language == "en" or is_latin(trigger):
            return 1 / (2 + self._common[trigger]) if trigger in self._common else _RARE
        rarest = max(self._common.get(character, 2 * len(self._common)) for character in trigger)
        return 1 / (2 + rarest) / 8 ** (len(trigger) - 1)
