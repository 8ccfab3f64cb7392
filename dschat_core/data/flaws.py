"""Rule-based detectors of three flaws of replies, independent of any reward model.

`loops`: a phrase said again and again. `parroting`: the user's own words handed back. `shuffled`: words whose order
a word-bigram model of the training text likes no better than chance. All read plain text, so they see what a person
sees, not what a tokenizer or a reward model sees. Their limits were set on human chat and on flawed replies made
from it; `evaluation` measures their recall and false-positive rate again on each data set's own held-out replies.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

Flaw = Literal["loops", "parroting", "shuffled"]
FLAWS: tuple[Flaw, ...] = get_args(Flaw)

# The names preference data gives to the same flaws (`kind` of a row).
KINDS: dict[Flaw, tuple[str, ...]] = {
    "loops": ("looped", "loop", "loops"),
    "parroting": ("parroted", "parrot", "parroting"),
    "shuffled": ("shuffled", "shuffle"),
}

_CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+(?:['’][^\W_{_CJK}]+)*")
_UNIT = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+(?:['’][^\W_{_CJK}]+)*|[.,!?;:。，！？；：]")
_ITEM = re.compile(rf"[{_CJK}][^\s{_CJK}\w]*|[^\s{_CJK}]+")

MIN_LOOP_WORDS = 5
MIN_LOOP_SHARE = 0.5
MIN_PARROT_WORDS = 4
MIN_PARROT_SHARE = 0.6
MIN_SHUFFLE_ITEMS = 5
MAX_SHUFFLE_RANK = 0.1
NUM_PERMUTATIONS = 64


def words(text: str) -> list[str]:
    """Lower-case words without punctuation; a Chinese, Japanese or Korean character is a word."""
    return _WORD.findall(text.lower())


def loop_share(text: str) -> float:
    """Share of the words that lie in the longest stretch made of one phrase said at least twice in a row.

    A phrase may end cut short, as a reply that ran into its limit does. A single word counts from its third time on
    ("no no" is not a loop).
    """
    sequence = words(text)
    longest = 0
    for period in range(1, len(sequence) // 2 + 1):
        run = 0
        for index in range(period, len(sequence)):
            run = run + 1 if sequence[index] == sequence[index - period] else 0
            if run >= max(period, 2):
                longest = max(longest, run + period)
    return longest / len(sequence) if sequence else 0.0


def is_looped(text: str) -> bool:
    """Whether half of a reply of five words or more is one phrase repeated."""
    return len(words(text)) >= MIN_LOOP_WORDS and loop_share(text) >= MIN_LOOP_SHARE


def copied_share(reply: str, source: str) -> float:
    """Share of the reply's words that lie in stretches of three or more also found in the source, in order."""
    mine, theirs = words(reply), words(source)
    size = min(3, len(mine))
    if not size:
        return 0.0
    known = {tuple(theirs[i : i + size]) for i in range(len(theirs) - size + 1)}
    covered = [False] * len(mine)
    for start in range(len(mine) - size + 1):
        if tuple(mine[start : start + size]) in known:
            covered[start : start + size] = [True] * size
    return sum(covered) / len(mine)


def is_parroted(reply: str, last_user_turn: str) -> bool:
    """Whether most of a reply of four words or more is copied from the turn it answers."""
    return len(words(reply)) >= MIN_PARROT_WORDS and copied_share(reply, last_user_turn) >= MIN_PARROT_SHARE


def distinct_2(replies: Iterable[str]) -> float:
    """Different word pairs as a share of all word pairs over the replies; 0 when there is none.

    Falls with the amount of text: compare sets of replies to the same prompts only.
    """
    pairs = Counter(pair for reply in replies for pair in _pairs(words(reply)))
    return len(pairs) / pairs.total() if pairs else 0.0


def _pairs(sequence: Sequence[str]) -> Iterable[tuple[str, str]]:
    return itertools.pairwise(sequence)


class WordOrder:
    """A word-bigram model of training text that tells ordered from shuffled replies.

    `WordOrder(texts)` counts; `rank(reply)` is the share of random permutations of the reply's words that the model
    likes at least as much as the reply itself: near 0 for text in its own order, uniform for shuffled text.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._unigrams: Counter[str] = Counter()
        self._bigrams: Counter[tuple[str, str]] = Counter()
        for text in texts:
            for line in text.splitlines():
                units = _bounded(line)
                self._unigrams.update(units[1:])
                self._bigrams.update(_pairs(units))
        self._total = self._unigrams.total() + len(self._unigrams) + 1
        self._contexts: Counter[str] = Counter()
        for (first, _), count in self._bigrams.items():
            self._contexts[first] += count

    def log_probability(self, text: str) -> float:
        """Natural log of the text's probability, bigram and add-one unigram interpolated (Witten-Bell weights)."""
        total = 0.0
        for first, second in _pairs(_bounded(text)):
            unigram = (self._unigrams[second] + 1) / self._total
            seen = self._contexts[first]
            # Five stands for the typical number of different followers; it only has to be of the right size.
            weight = seen / (seen + 5.0)
            bigram = self._bigrams[first, second] / seen if seen else 0.0
            total += math.log(weight * bigram + (1 - weight) * unigram)
        return total

    def rank(self, text: str) -> float | None:
        """Share of permutations at least as likely as the text; None below five words, where order says little."""
        items = _ITEM.findall(text)
        if len(items) < MIN_SHUFFLE_ITEMS or len(set(items)) < MIN_SHUFFLE_ITEMS - 1:
            return None
        own = self.log_probability(" ".join(items))
        # Seeded by the text, so that one reply is judged the same in every run.
        stream = random.Random(zlib.crc32(text.encode("utf-8", "surrogatepass")))
        likelier = 0
        for _ in range(NUM_PERMUTATIONS):
            order = items[:]
            stream.shuffle(order)
            likelier += order != items and self.log_probability(" ".join(order)) >= own
        return likelier / NUM_PERMUTATIONS

    def is_shuffled(self, text: str) -> bool:
        """Whether the text's word order is no better than that of its permutations."""
        rank = self.rank(text)
        return rank is not None and rank > MAX_SHUFFLE_RANK


def _bounded(text: str) -> list[str]:
    """The words and punctuation of one line, between marks of its beginning and end."""
    return ["<s>", *_UNIT.findall(text.lower()), "</s>"]


def find_flaws(reply: str, last_user_turn: str, order: WordOrder) -> list[Flaw]:
    """The flaws of one reply. A looped reply is not asked about its word order, which repeats decide."""
    found: list[Flaw] = []
    if is_looped(reply):
        found.append("loops")
    if is_parroted(reply, last_user_turn):
        found.append("parroting")
    if not found and order.is_shuffled(reply):
        found.append("shuffled")
    return found
