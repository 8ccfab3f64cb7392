"""What the benchmarks share: medians of CPU-seconds as JSON lines, and chat-like data to measure on."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SYLLABLES = ("ka", "lo", "mi", "ren", "sto", "vel", "tar", "na", "shi", "gor", "pel", "dum", "fi", "bra", "que", "nox")
CHINESE = (
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后"
    "小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已老从动两长"
)


def measure(name: str, unit: str, target: float, amount: float, function: Callable[[], Any], *, runs: int = 3) -> float:
    """Run the function several times; print and return the median of `amount` per CPU-second of this process."""
    figures = []
    for _ in range(runs):
        start = time.process_time()
        function()
        figures.append(amount / (time.process_time() - start))
    return print_figure(name, figures, unit, target=target)


def print_figure(
    name: str, figures: list[float], unit: str, *, target: float | None = None, lower_is_better: bool = False
) -> float:
    """Print one JSON line with the median of the figures, and return it."""
    median = statistics.median(figures)
    record: dict[str, Any] = {"name": name, "value": round(median, 4), "unit": unit}
    if target is not None:
        record |= {"target": target, "reached": median <= target if lower_is_better else median >= target}
    print(json.dumps(record | {"runs": [round(figure, 4) for figure in figures]}), flush=True)
    return median


def dialogues(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Short dialogues of two turns, about 150 characters, a fifth of them Chinese, the words as unequal as in chat."""
    stream = random.Random(seed)
    words = ["".join(stream.choices(SYLLABLES, k=stream.randint(1, 3))) for _ in range(8000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    cumulative = [0.0]
    for weight in weights:
        cumulative.append(cumulative[-1] + weight)
    cumulative = cumulative[1:]
    for _ in range(count):
        turns = []
        for role in ("user", "assistant"):
            if stream.random() < 0.2:
                text = "".join(stream.choices(CHINESE, k=stream.randint(6, 40))) + "。"
            else:
                text = " ".join(stream.choices(words, cum_weights=cumulative, k=stream.randint(3, 24))).capitalize()
                text += stream.choice([".", "?", "!", ""])
            turns.append({"role": role, "content": text})
        yield {"messages": turns}


def write_dialogues(path: Path, count: int, seed: int = 0) -> int:
    """Write so many dialogues as JSON lines; returns the bytes."""
    with path.open("w", encoding="utf-8") as file:
        for row in dialogues(count, seed):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path.stat().st_size


def write_texts(path: Path, megabytes: float, seed: int = 0) -> int:
    """Write documents of several paragraphs as JSON lines until there is so much; returns the bytes of text."""
    total = 0
    with path.open("w", encoding="utf-8") as file:
        said: list[str] = []
        for row in dialogues(2**31, seed):
            said += [turn["content"] for turn in row["messages"]]
            if len(said) >= 20:
                text = "\n".join(said)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                total += len(text.encode())
                said = []
            if total >= megabytes * 1e6:
                return total
    return total
