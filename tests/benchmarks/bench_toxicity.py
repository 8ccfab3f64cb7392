"""The lexicon's precision, recall and speed.

    python tests/benchmarks/bench_toxicity.py

`toxicity_labelled.jsonl` was written by somebody who did not know the lexicon, and the lexicon by somebody who did not
read its lines; nothing may be tuned on it (the lexicon's development sets lie in `tests/unit/data/`). One author and no
second labeller: read its figures with their intervals. Ordinary text is every utterance of `chitchat-dataset`; what the
lexicon finds there is compared with `chitchat_hits.tsv`, the judgement of a person who read every hit, so that a new hit
shows as unjudged.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections import Counter
from pathlib import Path

from common import dialogues, measure, print_figure

from dschat_core.config import ToxicityGate
from dschat_core.data.gates.block import Block
from dschat_core.data.gates.toxicity import lexicon_hits, toxicity
from dschat_core.data.gates.verdict import wilson_upper

HERE = Path(__file__).parent
PRECISION, RECALL = 0.97, 0.80
MAX_FALSE_POSITIVES = 0.001


def labelled() -> None:
    """Precision of all, recall of the explicit and of the implicit lines, in each language."""
    rows = [json.loads(line) for line in (HERE / "toxicity_labelled.jsonl").read_bytes().splitlines()]
    hits = [hit is not None for hit in lexicon_hits([row["text"] for row in rows])]
    for language in ("en", "zh"):
        count = Counter((row["kind"], hit) for row, hit in zip(rows, hits, strict=True) if row["language"] == language)
        found = count["explicit", True] + count["implicit", True]
        wrong = count["hard_negative", True] + count["ordinary", True]
        print_figure(f"toxicity_precision_{language}", [found / max(1, found + wrong)], "share", target=PRECISION)
        for kind, target in (("explicit", RECALL), ("implicit", None)):
            total = count[kind, True] + count[kind, False]
            print_figure(f"toxicity_recall_{language}_{kind}", [count[kind, True] / total], "share", target=target)


def ordinary() -> None:
    """The share of ordinary utterances that are flagged without being toxic."""
    if importlib.util.find_spec("chitchat_dataset") is None:
        print("chitchat-dataset is not installed: pip install -e '.[demo]'", file=sys.stderr)
        return
    sys.path.insert(0, str(HERE.parents[1] / "deployments"))
    from demo_data import chitchat

    texts = [text for turns in chitchat().values() for turn in turns for text in turn]
    judged = dict(
        line.split("\t")[:2] for line in (HERE / "chitchat_hits.tsv").read_text(encoding="utf-8").splitlines()[1:]
    )
    found = Counter[str]()
    for text, hit in zip(texts, lexicon_hits(texts), strict=True):
        if hit is not None:
            verdict = judged.get(hashlib.sha256(text.encode()).hexdigest()[:16], "unjudged")
            found[verdict] += 1
            if verdict == "unjudged" or "--show" in sys.argv:
                print(f"{verdict}: {hit.label}: {hit.span} | {text[:200]}", file=sys.stderr)
    wrong = found["harmless"] + found["unjudged"]
    print_figure(
        "toxicity_false_positives_ordinary",
        [wrong / len(texts)],
        "share",
        target=MAX_FALSE_POSITIVES,
        lower_is_better=True,
    )
    print(
        json.dumps(
            {
                "name": "toxicity_ordinary_hits",
                "texts": len(texts),
                **found,
                "upper_95": round(wilson_upper(wrong, len(texts)), 6),
            }
        )
    )


def main() -> None:
    """Print the figures, one JSON line each."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    block = Block("dialogues", list(dialogues(20_000)))
    measure("toxicity", "dialogues/CPU-s", 20_000, 20_000, lambda: toxicity(block, ToxicityGate(), lexicon_hits))
    labelled()
    ordinary()


if __name__ == "__main__":
    main()
