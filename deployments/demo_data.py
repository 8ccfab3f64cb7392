"""The demo's four data sets, from two packages that hold real conversations.

    python deployments/demo_data.py runs/data

`chitchat-dataset` (MIT): 7,168 conversations between people, in English, with their typos, repeats and swearing, all
kept. `chatterbot-corpus` (BSD), its Chinese part: 467 short exchanges. Both are read as package data.

Every conversation is held out of all four sets or of none (5 % are, by a hash of its id).

text         one row per conversation, a line per utterance
dialogues    successive windows of up to 6 turns; what one person sent in a row is one turn
preferences  the human reply is chosen; rejected is a flawed text, its `kind` in the row:
             `shuffled`  the reply's words in another order
             `looped`    the reply's first words again and again
             `parroted`  the user's last turn handed back, cut or filled up from the reply
             Chosen and rejected have the same number of tokens (by a BPE trained here on the training text as the
             pipeline trains its own), so that length tells nothing. Only replies of 5 to 40 words are used: the order
             of fewer words says little.
prompts      the turns before a reply, the last of them the user's

5,988 conversations carry ratings of wit, mood and interest (3,705 of those in which both sides spoke; half stand where
the form started). They are not used: nothing is chosen or left out by them. Files are rewritten only when this script or a package has changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from dschat_core.data.tokenizing import train_tokenizer

HELDOUT_SHARE = 0.05
WINDOW_TURNS = 6
WINDOW_BYTES = 640
PROMPT_TURNS = 3
PROMPT_BYTES = 360
REPLY_WORDS = range(5, 41)
NUM_PAIRS_PER_KIND = {"train": 3600, "heldout": 250}
NUM_PROMPTS = {"train": 4000, "heldout": 300}
VOCAB_SIZE = 2048
PACKAGES = ("chitchat-dataset", "chatterbot-corpus")

Turns = list[str]
Row = dict[str, Any]


def main(folder: Path) -> None:
    """Write the data sets unless they are there already."""
    made_by = {
        "script": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        **{package: importlib.metadata.version(package) for package in PACKAGES},
    }
    record = folder / "made.json"
    made = json.loads(record.read_text()) if record.exists() else {"by": None, "rows": {}}
    if made["by"] == made_by and all((folder / name).is_file() for name in made["rows"]):
        print(f"{folder} is up to date")
        return
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    rows = {}
    for name, content in data_sets().items():
        with (temporary / name).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        rows[name] = len(content)
    (temporary / "made.json").write_text(json.dumps({"by": made_by, "rows": rows}, indent=2))
    folder.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    for name in [*rows, "made.json"]:
        os.replace(temporary / name, folder / name)
    temporary.rmdir()
    print("\n".join(f"{folder / name}: {count} rows" for name, count in rows.items()))


def data_sets() -> dict[str, list[Row]]:
    """File name → rows, of all four sets."""
    english, chinese = chitchat(), chatterbot()
    documents = {**english, **{key: [[turn] for turn in turns] for key, turns in chinese.items()}}
    turns = {**{key: [" ".join(turn) for turn in conversation] for key, conversation in english.items()}, **chinese}
    halves = {half: [key for key in turns if is_heldout(key) == (half == "heldout")] for half in ("train", "heldout")}

    found: dict[str, list[Row]] = {}
    for half, keys in halves.items():
        found[f"text.{half}.jsonl"] = [
            {"text": "\n".join(utterance for turn in documents[key] for utterance in turn)} for key in keys
        ]
    tokenizer = train_tokenizer((row["text"] for row in found["text.train.jsonl"]), vocab_size=VOCAB_SIZE)
    counts: dict[str, int] = {}

    def word_tokens(word: str) -> int:
        # Byte-level BPE never merges across a space, so a text's tokens are the sum over its words.
        if word not in counts:
            counts[word] = len(tokenizer.encode(word).ids)
        return counts[word]

    for half, keys in halves.items():
        found[f"dialogues.{half}.jsonl"] = [
            {"messages": messages(window)} for key in keys for window in windows(turns[key])
        ]
    for half, keys in halves.items():
        pairs = preferences([turns[key] for key in keys if key in english], half, word_tokens)
        found[f"preferences.{half}.jsonl"] = pairs
    for half, keys in halves.items():
        contexts = [{"messages": messages(context)} for key in keys for context, _ in exchanges(turns[key])]
        random.Random(f"prompts {half}").shuffle(contexts)
        found[f"prompts.{half}.jsonl"] = contexts[: NUM_PROMPTS[half]]
    return found


def is_heldout(key: str) -> bool:
    """By a hash of the conversation's id, so that it holds for all sets and whatever else is in the package."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") < HELDOUT_SHARE * 2**64


def package_folder(module: str) -> Path:
    """Where a package's files are, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        sys.exit(f"the package of {module} is not installed; run: pip install -e '.[demo]'")
    return Path(spec.origin).parent


def chitchat() -> dict[str, list[list[str]]]:
    """Conversation id → turns → utterances; empty ones are left out."""
    source = json.loads((package_folder("chitchat_dataset") / "dataset.json").read_text(encoding="utf-8"))
    found = {}
    for key, conversation in source.items():
        turns = [[text for u in turn if (text := u["text"].strip())] for turn in conversation["messages"]]
        if turns := [turn for turn in turns if turn]:
            found[key] = turns
    return found


def chatterbot() -> dict[str, Turns]:
    """A hash of the exchange → its turns."""
    found = {}
    for path in sorted((package_folder("chatterbot_corpus") / "data" / "chinese").glob("*.yml")):
        for conversation in yaml.safe_load(path.read_text(encoding="utf-8"))["conversations"]:
            turns = [text for turn in conversation if (text := str(turn).strip())]
            found[hashlib.sha256("\n".join(turns).encode()).hexdigest()] = turns
    return found


def messages(turns: Turns) -> list[dict[str, str]]:
    """Turns with roles, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def windows(turns: Turns) -> Iterator[Turns]:
    """Successive pieces that start on a user turn and end on an assistant's, within the limits where possible."""
    window: Turns = []
    for i in range(0, len(turns) - 1, 2):
        exchange = turns[i : i + 2]
        size = sum(len(turn.encode()) for turn in [*window, *exchange])
        if window and (len(window) == WINDOW_TURNS or size > WINDOW_BYTES):
            yield window
            window = []
        window = [*window, *exchange]
    if window:
        yield window


def exchanges(turns: Turns) -> Iterator[tuple[Turns, str]]:
    """(context, reply) at every second reply, so that no reply is another's context as well as its own."""
    for i in range(1, len(turns), 2):
        context = turns[max(0, i - PROMPT_TURNS) : i]
        while len(context) > 1 and sum(len(turn.encode()) for turn in context) > PROMPT_BYTES:
            context = context[2:]
        if len(context) % 2 and len(context[-1].encode()) <= PROMPT_BYTES:
            yield context, turns[i]


def preferences(conversations: list[Turns], half: str, word_tokens: Callable[[str], int]) -> list[Row]:
    """As many pairs of each kind, in random order."""
    rng = random.Random(f"preferences {half}")
    candidates = [(context, reply.split()) for turns in conversations for context, reply in exchanges(turns)]
    rng.shuffle(candidates)
    kinds = {"shuffled": shuffled, "looped": looped, "parroted": parroted}
    rows: list[Row] = []
    missing = dict.fromkeys(kinds, NUM_PAIRS_PER_KIND[half])
    for context, words in candidates:
        if len(words) not in REPLY_WORDS or len({word.lower() for word in words}) < 4:
            continue
        for kind in sorted(missing, key=lambda kind: -missing[kind]):
            if missing[kind] and (flawed := kinds[kind](words, context[-1].split(), rng, word_tokens)):
                row = {"prompt": messages(context), "chosen": " ".join(words), "rejected": " ".join(flawed)}
                rows.append({**row, "kind": kind})
                missing[kind] -= 1
                break
    return rows


def num_tokens(words: Turns, word_tokens: Callable[[str], int]) -> int:
    """Tokens of the words with single spaces between."""
    return word_tokens(words[0]) + sum(word_tokens(" " + word) for word in words[1:]) if words else 0


def shuffled(words: Turns, _: Turns, rng: random.Random, word_tokens: Callable[[str], int]) -> Turns | None:
    """Another order in which at least half of the words have another neighbour."""
    length = num_tokens(words, word_tokens)
    neighbours = set(pairwise(words))
    for _ in range(20):
        order = rng.sample(words, len(words))
        kept = sum(pair in neighbours for pair in pairwise(order))
        if kept <= (len(words) - 1) // 4 and num_tokens(order, word_tokens) == length:
            return order
    return None


def looped(words: Turns, _: Turns, rng: random.Random, word_tokens: Callable[[str], int]) -> Turns | None:
    """The first 1 to 5 words, at least twice, cut where the length is met."""
    length = num_tokens(words, word_tokens)
    for size in rng.sample(range(1, 6), 5):
        if 2 * size > len(words):
            continue
        loop: Turns = []
        while num_tokens(loop, word_tokens) < length:
            loop.append(words[len(loop) % size])
        if num_tokens(loop, word_tokens) == length and len(loop) >= 2 * size and loop != words:
            return loop
    return None


def parroted(words: Turns, said: Turns, rng: random.Random, word_tokens: Callable[[str], int]) -> Turns | None:
    """The user's words: their start or end, or all of them followed by up to 40 % of the reply's last words."""
    length = num_tokens(words, word_tokens)
    echoes = [said[:size] for size in range(4, len(said) + 1)] + [said[-size:] for size in range(4, len(said))]
    echoes += [said + words[-size:] for size in range(1, len(words)) if size <= 0.4 * (len(said) + size)]
    fitting = [echo for echo in echoes if num_tokens(echo, word_tokens) == length and echo != words]
    return rng.choice(fitting) if fitting else None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python deployments/demo_data.py FOLDER")
    main(Path(sys.argv[1]))
