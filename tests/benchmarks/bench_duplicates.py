"""The duplicates gate: speed per CPU-second of one process, recall and precision on planted pairs, memory.

    python tests/benchmarks/bench_duplicates.py [--rows 200000]
    python tests/benchmarks/bench_duplicates.py --write FILE [--rows 500000]    # the same dialogues as JSON lines

The dialogues are made: two turns of words drawn by Zipf's law between stock phrases, 150 characters on average in
English and 70 in Chinese, one in five Chinese. One in twenty repeats an earlier one but for case and punctuation, one in
twenty with words edited, inserted, deleted or swapped until its Jaccard similarity has come down to a value between 0.6
and 1. Similarities are counted by brute force, on sets of strings.
"""

from __future__ import annotations

import argparse
import random
import resource
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
from common import measure, print_figure

from dschat_core.data.gates.duplicates import comparable, find_first, signatures

THRESHOLD = 0.8
ENGLISH_STOCK = (
    "can you tell me", "how do i", "thank you so much", "i would like to", "what is the best way to", "of course",
    "here is what you need to know about", "let me explain", "it depends on", "for example", "i'm not sure, but",
    "please help me with", "sounds good", "you should try to", "in my opinion", "that is a great question",
)  # fmt: skip
CHINESE_STOCK = (
    "请问", "怎么才能", "非常感谢", "我想知道", "最好的办法是", "当然可以", "首先你需要", "比如说", "我不太确定但是",
    "请帮我", "听起来不错", "你可以试试", "在我看来", "这是一个好问题", "一般来说", "没问题",
)  # fmt: skip


@dataclass
class Corpus:
    """Dialogues, [user, assistant] each; `planted`: row of the original, row of the copy, true Jaccard."""

    dialogues: list[tuple[str, str]]
    chinese: list[bool]
    planted: list[tuple[int, int, float]] = field(default_factory=list)

    def texts(self) -> list[str]:
        return ["\n".join(dialogue) for dialogue in self.dialogues]


def make_corpus(rows: int, seed: int = 0) -> Corpus:
    """Dialogues with exact copies and planted near copies among them."""
    dice = random.Random(seed)
    numbers = np.random.default_rng(seed)
    draws = {False: _words(numbers, _english_vocabulary(dice)), True: _words(numbers, _chinese_vocabulary(dice))}
    corpus = Corpus([], [])
    while len(corpus.dialogues) < rows:
        kind = dice.random()
        if kind < 0.1 and len(corpus.dialogues) > 100:
            source = dice.randrange(len(corpus.dialogues))
            chinese = corpus.chinese[source]
            if kind < 0.05:
                user, assistant = corpus.dialogues[source]
                dialogue = (user.upper() + "!", " " + assistant)
            else:
                made = edited(corpus.dialogues[source], draws[chinese], dice, dice.uniform(0.6, 1.0), chinese=chinese)
                if made is None:
                    continue
                dialogue, similarity = made
                corpus.planted.append((source, len(corpus.dialogues), similarity))
        else:
            chinese = dice.random() < 0.2
            dialogue = (_turn(draws[chinese], dice, 9, chinese), _turn(draws[chinese], dice, 19, chinese))
        corpus.dialogues.append(dialogue)
        corpus.chinese.append(chinese)
    return corpus


def edited(
    dialogue: tuple[str, str], draw: Callable[[], str], dice: random.Random, target: float, *, chinese: bool
) -> tuple[tuple[str, str], float] | None:
    """A copy changed step by step, the last one not below the target, and its similarity; None if none is."""
    gap, width = ("", 3) if chinese else (" ", 5)
    units = [list(turn) if chinese else turn.split(" ") for turn in dialogue]
    original = shingles(comparable("\n".join(dialogue)), width)
    best = None
    for _ in range(60):
        turn = dice.choice(units)
        at = dice.randrange(len(turn))
        match dice.randrange(4):
            case 0:
                turn[at] = draw()
            case 1:
                turn.insert(at, draw())
            case 2 if len(turn) > 2:
                del turn[at]
            case _:
                other = dice.randrange(len(turn))
                turn[at], turn[other] = turn[other], turn[at]
        copy = (gap.join(units[0]), gap.join(units[1]))
        changed = shingles(comparable("\n".join(copy)), width)
        similarity = len(original & changed) / max(len(original | changed), 1)
        if similarity < target:
            return best
        if similarity < 1.0:
            best = (copy, similarity)
    return best


def shingles(form: str, width: int) -> set[str]:
    """The set of runs of `width` characters."""
    return {form[i : i + width] for i in range(len(form) - width + 1)}


def _words(numbers: np.random.Generator, vocabulary: list[str]) -> Callable[[], str]:
    """Words drawn by Zipf's law."""
    weights = 1.0 / (np.arange(len(vocabulary)) + 2.7)
    edges = np.cumsum(weights / weights.sum())
    drawn: list[str] = []

    def draw() -> str:
        if not drawn:
            chosen = np.searchsorted(edges, numbers.random(100_000)).clip(max=len(vocabulary) - 1)
            drawn.extend(vocabulary[i] for i in chosen.tolist())
        return drawn.pop()

    return draw


def _english_vocabulary(dice: random.Random) -> list[str]:
    onsets = [
        "b",
        "c",
        "d",
        "f",
        "g",
        "h",
        "l",
        "m",
        "n",
        "p",
        "r",
        "s",
        "t",
        "w",
        "st",
        "tr",
        "ch",
        "sh",
        "pl",
        "th",
        "",
    ]
    vowels, codas = ["a", "e", "i", "o", "u", "ea", "ou", "ai"], ["", "", "n", "r", "s", "t", "l", "nd", "ck", "ng"]
    words = {}
    while len(words) < 20_000:
        size = 1 + min(3, len(words) // 400) * (dice.random() < 0.8) + (dice.random() < 0.3)
        words["".join(dice.choice(onsets) + dice.choice(vowels) + dice.choice(codas) for _ in range(size))] = None
    return list(words)


def _chinese_vocabulary(dice: random.Random) -> list[str]:
    characters = [chr(dice.randrange(0x4E00, 0x9000)) for _ in range(2500)]
    words = {}
    while len(words) < 15_000:
        common = characters[: 40 + len(words) // 4]
        words["".join(dice.choices(common, k=1 if dice.random() < 0.25 else 2))] = None
    return list(words)


def _turn(draw: Callable[[], str], dice: random.Random, mean_words: int, chinese: bool) -> str:
    words = [draw() for _ in range(max(3, round(dice.lognormvariate(0.0, 0.5) * mean_words * 0.8)))]
    if dice.random() < 0.6:
        words.insert(dice.randrange(len(words)), dice.choice(CHINESE_STOCK if chinese else ENGLISH_STOCK))
    for at in range(6, len(words), 7):
        words[at] += "，" if chinese else ","
    end = dice.choice("。？！" if chinese else ".?!")
    return "".join(words) + end if chinese else " ".join(words).capitalize() + end


def boilerplate(rows: int, seed: int = 1) -> list[str]:
    """Forms that share two thirds of their text: every bucket of the common part has thousands of members."""
    dice = random.Random(seed)
    common = "asanaiassistanticannothelpwiththisrequestbutyoumaywanttoaskaprofessionalaboutyourquestionon"
    return [common + "".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=40)) for _ in range(rows)]


def report_quality(corpus: Corpus, forms: list[str], first: np.ndarray) -> None:
    """Recall of the planted pairs from 0.8 on, and the share of joined rows of at least 0.7 with the row that is kept."""
    for language, chinese in (("english", False), ("chinese", True)):
        pairs = [pair for pair in corpus.planted if corpus.chinese[pair[0]] == chinese and len(forms[pair[0]]) >= 20]
        for name, low, high in (("recall", 0.8, 1.0), ("recall_0.80_to_0.82", 0.8, 0.82)):
            asked = [(a, b) for a, b, similarity in pairs if low <= similarity < high and len(forms[b]) >= 20]
            found = sum(int(first[a] == first[b]) for a, b in asked)
            print_figure(f"duplicates_{language}_{name}", [found / len(asked)], "share", target=0.99)
    for language, chinese in (("english", False), ("chinese", True)):
        joined = [row for row, start in enumerate(first.tolist()) if start != row and corpus.chinese[row] == chinese]
        right = sum(_jaccard(forms[row], forms[first[row]], 3 if chinese else 5) >= 0.7 for row in joined)
        print_figure(f"duplicates_{language}_precision", [right / len(joined)], "share", target=0.99)


def _jaccard(first: str, second: str, width: int) -> float:
    if first == second:
        return 1.0
    own, other = shingles(first, width), shingles(second, width)
    return len(own & other) / len(own | other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--write", type=Path, help="write the dialogues to this file instead of measuring")
    arguments = parser.parse_args()
    corpus = make_corpus(arguments.rows)
    if arguments.write:
        with arguments.write.open("wb") as file:
            for user, assistant in corpus.dialogues:
                turns = [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
                file.write(orjson.dumps({"messages": turns}) + b"\n")
        return
    texts = corpus.texts()
    forms = [comparable(text) for text in texts]
    count = len(texts)

    def exact(given: list[str]) -> np.ndarray:
        made = signatures(given, near=False)
        return find_first(made.keys, made.bands, made.widths, given, near_jaccard=1.0)

    def near() -> np.ndarray:
        made_forms = [comparable(text) for text in texts]
        made = signatures(made_forms)
        return find_first(made.keys, made.bands, made.widths, made_forms, near_jaccard=THRESHOLD)

    measure("duplicates_exact_from_forms", "dialogues/CPU-s", 500_000, count, lambda: exact(forms))
    measure("duplicates_exact", "dialogues/CPU-s", 500_000, count, lambda: exact([comparable(text) for text in texts]))
    measure("duplicates_near", "dialogues/CPU-s", 15_000, count, near)
    alike = boilerplate(count // 4)
    made = signatures(alike)
    measure(
        "duplicates_near_boilerplate",
        "dialogues/CPU-s",
        2_000,
        len(alike),
        lambda: find_first(made.keys, made.bands, made.widths, alike, near_jaccard=THRESHOLD),
    )
    report_quality(corpus, forms, near())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print_figure("duplicates_peak_memory", [peak], "MB", target=1000, lower_is_better=True)


if __name__ == "__main__":
    main()
