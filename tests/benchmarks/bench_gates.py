"""Each gate that looks at one row at a time, in rows per CPU-second; and how well languages and personal data are told.

    python tests/benchmarks/bench_gates.py

Speed is on short dialogues of two turns, about 150 characters. Languages are told on the exchanges of
`chatterbot-corpus` (26 languages; `hinglish`, a mixture, is left out). py3langid 0.4 on the same exchanges: 0.972 right
at 23 k rows per CPU-second. Personal data is looked for in the training dialogues of the demo, if they have been made
(`deployments/demo_data.py`): every hit is printed masked, to be judged by hand.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from common import dialogues, measure, print_figure

from dschat_core.config import ContaminationGate, LanguageGate, LengthGate, PiiGate, RepliesGate
from dschat_core.data.gates.block import Block
from dschat_core.data.gates.contamination import contamination, prompt_index
from dschat_core.data.gates.language import language, language_of
from dschat_core.data.gates.length import estimated_tokens, length
from dschat_core.data.gates.pii import mask_text, pii
from dschat_core.data.gates.replies import replies

ROWS = 20_000
BLOCK_ROWS = 1000
BUDGET_US = 25.0
DEMO = Path("runs/data/dialogues.train.jsonl")
CODES = {
    "bengali": "bn", "chinese": "zh", "dutch": "nl", "english": "en", "french": "fr", "german": "de", "hebrew": "he",
    "hindi": "hi", "indonesian": "id", "italian": "it", "japanese": "ja", "korean": "ko", "marathi": "mr",
    "oriya": "or", "persian": "fa", "portuguese": "pt", "russian": "ru", "spanish": "es", "swedish": "sv",
    "tamil": "ta", "telugu": "te", "thai": "th", "traditionalchinese": "zh", "turkish": "tr", "ukrainian": "uk",
    "urdu": "ur", "yoruba": "other",
}  # fmt: skip


def blocks() -> list[Block]:
    """The rows in blocks that have shared nothing yet but the texts, which the whole of validation needs anyway."""
    rows = list(dialogues(ROWS))
    found = [Block("dialogues", rows[at : at + BLOCK_ROWS]) for at in range(0, ROWS, BLOCK_ROWS)]
    for block in found:
        assert block.joined
    return found


def exchanges() -> Iterator[tuple[str, str]]:
    """(language, text) of every exchange of the corpus."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or spec.origin is None:
        return
    for name, code in CODES.items():
        for path in sorted((Path(spec.origin).parent / "data" / name).glob("*.yml")):
            for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"] or []:
                turns = [str(turn).strip() for turn in conversation if turn]
                if len(turns) > 1:
                    yield code, "\n".join(turns)


def main() -> None:
    """Print the figures, one JSON line each."""
    data = blocks()
    prompts = [row["messages"][0]["content"] for row in itertools.islice(dialogues(4000, seed=7), 4000)]
    index = prompt_index(prompts, ContaminationGate().ngram)
    gates: dict[str, tuple[float, Callable[[Block], object]]] = {
        "length": (
            200_000,
            lambda block: length(block, LengthGate(), estimated_tokens(block.kind, block.rows)),
        ),
        "language": (50_000, lambda block: language(block, LanguageGate())),
        "pii": (200_000, lambda block: pii(block, PiiGate())),
        "replies": (100_000, lambda block: replies(block, RepliesGate())),
        "contamination": (50_000, lambda block: contamination(block, index)),
    }
    speeds = {
        name: measure(f"gate_{name}", "rows/CPU-s", target, ROWS, lambda gate=gate: [gate(block) for block in data])
        for name, (target, gate) in gates.items()
    }
    total = sum(1e6 / speed for speed in speeds.values())
    print_figure("gates_together", [total], "CPU-us/row", target=BUDGET_US, lower_is_better=True)

    told = [(code, language_of(text)) for code, text in exchanges()]
    if told:
        decided = [(code, found) for code, found in told if found != "und"]
        print_figure(
            "language_right_of_decided", [sum(a == b for a, b in decided) / len(decided)], "share", target=0.97
        )
        print_figure("language_decided", [len(decided) / len(told)], "share", target=0.95)
        mine = [found for code, found in told if code in ("en", "zh")]
        wrong = sum(found not in ("en", "zh", "und") for found in mine) / len(mine)
        print_figure("language_english_or_chinese_refused", [wrong], "share", target=0.005, lower_is_better=True)
        print(
            json.dumps(
                {"wrong": [[*pair, n] for pair, n in Counter(p for p in decided if p[0] != p[1]).most_common(8)]}
            )
        )
    if DEMO.is_file():
        texts = ["\n".join(turn["content"] for turn in json.loads(line)["messages"]) for line in DEMO.open("rb")]
        start = time.process_time()
        found = [(before, after) for before in texts if (after := mask_text(before)) != before]
        print_figure("pii_real_conversations", [len(texts) / (time.process_time() - start)], "rows/CPU-s")
        for _, after in found:
            at = after.index("<")
            print(json.dumps({"masked": after[max(0, at - 40) : at + 40]}, ensure_ascii=False))


if __name__ == "__main__":
    main()
