"""Training rows that share a long run of words with an evaluation prompt: what is measured there was trained on.

Words are compared in lower case without punctuation; a Chinese, Japanese or Korean character is a word. A prompt of
fewer words than the run has none: "how are you" is no secret.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dschat_core.data.flaws import words
from dschat_core.data.gates.block import Block, Finding, GateShard
from dschat_core.data.unicode import nfkc


@dataclass(frozen=True)
class NgramIndex:
    """The runs of `ngram` words of all evaluation prompts, each joined by spaces, and the words they are made of."""

    ngram: int
    runs: frozenset[str]
    vocabulary: frozenset[str]

    def __len__(self) -> int:
        return len(self.runs)


def prompt_index(prompts: Iterable[str], ngram: int) -> NgramIndex:
    """The index of texts that no training row may share `ngram` words in a row with."""
    runs: set[str] = set()
    vocabulary: set[str] = set()
    for prompt in prompts:
        said = _words(prompt)
        if len(said) >= ngram:
            vocabulary.update(said)
            runs.update(" ".join(said[i : i + ngram]) for i in range(len(said) - ngram + 1))
    return NgramIndex(ngram, frozenset(runs), frozenset(vocabulary))


def contamination(block: Block, index: NgramIndex) -> GateShard:
    """Rows with a run of words that is in the index."""
    if not len(index):
        return GateShard()
    shared = ((row, run) for row, text in enumerate(block.joined) if (run := _shared_run(text, index)))
    return GateShard([Finding(row, "shares_ngram", {"shared": run}) for row, run in shared])


def _shared_run(text: str, index: NgramIndex) -> str | None:
    said = _words(text)
    known = 0
    for end, word in enumerate(said, start=1):
        # Only a run of words that all occur in prompts can be one.
        known = known + 1 if word in index.vocabulary else 0
        if known >= index.ngram and (run := " ".join(said[end - index.ngram : end])) in index.runs:
            return run
    return None


def _words(text: str) -> list[str]:
    return words(text if text.isascii() else nfkc(text))
