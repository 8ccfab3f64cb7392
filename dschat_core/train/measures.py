"""The measures of `evaluation`: each takes a model and held-out rows, and returns figures that don't depend on ranks.

`shared` splits the rows over the ranks and puts the results together again in order, on every rank; sums are then
taken in row order, so two ranks report what one would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dschat_core.chat_template import ChatTokenizer, Message
from dschat_core.data import flaws
from dschat_core.data.shards import ShardReader
from dschat_core.train.engine import device, gather_objects, rank, world_size
from dschat_core.train.generate import sample_replies
from dschat_core.train.likelihood import length_batches, token_nats
from dschat_core.train.reward_model import RewardModel

Item = TypeVar("Item")
Result = TypeVar("Result")

REWARD_BATCH_TOKENS = 8192


def shared(items: Sequence[Item], measure: Callable[[list[Item]], Sequence[Result]]) -> list[Result]:
    """`measure` of every item, each rank taking every `world_size`-th; all results in item order on every rank."""
    size = world_size()
    results: list[Any] = [None] * len(items)
    for owner, part in enumerate(gather_objects(list(measure(list(items[rank() :: size]))))):
        results[owner::size] = part
    return results


def spread(available: int, wanted: int) -> list[int]:
    """At most `wanted` row numbers, evenly spaced, so that a cut does not take one corner of the data."""
    return [index * available // min(wanted, available) for index in range(min(wanted, available))]


# ── tokens and rows ─────────────────────────────────────────────────────────────────────────────────────


def reply_text(tokenizer: ChatTokenizer, ids: np.ndarray) -> str:
    """The text of some tokens, without control tokens."""
    return tokenizer.decode(ids.tolist()).strip()


def last_user_turn(tokenizer: ChatTokenizer, prompt: np.ndarray) -> str:
    """What the user said last in a rendered prompt: between the last two ends of a turn, below the role's line."""
    ends = np.flatnonzero(prompt == tokenizer.end_of_turn_id)
    if not len(ends):
        return ""
    start = ends[-2] + 1 if len(ends) > 1 else 0
    turn = tokenizer.decode(prompt[start : ends[-1]].tolist())
    return turn.strip("\n").partition("\n")[2]


@dataclass(frozen=True)
class HeldOut:
    """Held-out rows of one data set with their target masks."""

    rows: list[np.ndarray]
    targets: list[np.ndarray]
    num_targets: int
    num_bytes: int

    @classmethod
    def read(cls, folder: Path, max_rows: int) -> HeldOut | None:
        """At most `max_rows` rows of a shard folder; None if it has no target token."""
        reader = ShardReader(folder)
        chosen = spread(len(reader), max_rows)
        rows = [np.asarray(reader.tokens(index)) for index in chosen]
        targets = [np.asarray(reader.mask(index)) for index in chosen]
        num_targets = int(sum(int(mask[1:].sum()) for mask in targets))
        if not num_targets:
            return None
        return cls(rows, targets, num_targets, int(np.asarray(reader.num_bytes)[chosen].sum()))

    def sizes(self) -> dict[str, Any]:
        """Rows and target tokens, for the report."""
        return {"rows": len(self.rows), "tokens": self.num_targets, "models": {}}

    def per_byte(self, nats: float) -> dict[str, float]:
        """A sum of nats over all targets as loss (nats per token) and bits per byte of text."""
        return {"loss": nats / self.num_targets, "bits_per_byte": nats / np.log(2) / max(self.num_bytes, 1)}


def total_nats(model: Any, held_out: HeldOut) -> float:
    """Sum of the negative log-likelihoods of all target tokens, in nats."""

    def measure(mine: list[int]) -> list[float]:
        rows, targets = [held_out.rows[i] for i in mine], [held_out.targets[i] for i in mine]
        return [float(nats.sum()) for nats in token_nats(model, rows, targets)]

    return sum(shared(range(len(held_out.rows)), measure))


# ── replies ─────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Reply:
    """One sampled reply to a held-out prompt, and all that is measured on it. Log-probabilities are in nats."""

    index: int
    stage: str
    messages: list[Message]
    prompt: np.ndarray
    ids: np.ndarray
    text: str
    finished: bool
    own_nats: float = 0.0
    sft_nats: float | None = None
    reward: float | None = None
    flaws: list[str] = field(default_factory=list)
    toxic: bool = False

    @property
    def kl(self) -> float | None:
        """log p(reply | its model) − log p(reply | sft); over many replies its mean estimates the divergence."""
        return None if self.sft_nats is None else self.sft_nats - self.own_nats

    @property
    def row(self) -> np.ndarray:
        """Prompt and reply, as the reward model reads them."""
        return np.concatenate([self.prompt, self.ids])

    def as_dict(self) -> dict[str, Any]:
        """A line of samples.jsonl."""
        return {
            "index": self.index,
            "stage": self.stage,
            "prompt": self.messages,
            "reply": self.text,
            "tokens": len(self.ids),
            "finished": self.finished,
            "reward": self.reward,
            "kl": self.kl,
            "flaws": self.flaws,
            "toxic": self.toxic,
        }


def sample(
    model: Any,
    prompts: Sequence[tuple[np.ndarray, list[Message]]],
    *,
    stage: str,
    tokenizer: ChatTokenizer,
    reply_limit: int,
    temperature: float,
    seed: tuple[int, ...],
) -> list[Reply]:
    """One reply to each prompt, from the seed and the prompt's place alone: the same dice for every stage."""

    def measure(mine: list[int]) -> list[np.ndarray]:
        return sample_replies(
            model,
            [prompts[index][0] for index in mine],
            reply_limit=reply_limit,
            temperature=temperature,
            eos_id=tokenizer.end_of_turn_id,
            pad_id=tokenizer.pad_id,
            seeds=[(*seed, index) for index in mine],
        )

    return [
        Reply(
            index, stage, messages, prompt, ids, reply_text(tokenizer, ids), bool(ids[-1] == tokenizer.end_of_turn_id)
        )
        for index, ((prompt, messages), ids) in enumerate(
            zip(prompts, shared(range(len(prompts)), measure), strict=True)
        )
    ]


def reply_nats(model: Any, replies: Sequence[Reply], temperature: float) -> list[float]:
    """Negative log-probability of each whole reply, in nats, at the temperature it was sampled with."""

    def measure(mine: list[Reply]) -> list[float]:
        targets = [np.arange(len(reply.row)) >= len(reply.prompt) for reply in mine]
        nats = token_nats(model, [reply.row for reply in mine], targets, temperature=temperature)
        return [float(values.sum()) for values in nats]

    return shared(replies, measure)


# ── reward ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Pair:
    """One held-out preference."""

    kind: str | None
    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray

    @classmethod
    def read(cls, folder: Path, max_pairs: int) -> list[Pair]:
        """At most `max_pairs` pairs of a shard folder, in which row 2i is chosen and 2i + 1 rejected."""
        reader = ShardReader(folder)
        pairs = []
        for index in spread(len(reader) // 2, max_pairs):
            (prompt, chosen), (_, rejected) = _split(reader, 2 * index), _split(reader, 2 * index + 1)
            meta = reader.meta[2 * index] if reader.meta else {}
            pairs.append(cls(meta.get("kind"), prompt, chosen, rejected))
        return pairs


def _split(reader: ShardReader, row: int) -> tuple[np.ndarray, np.ndarray]:
    """The prompt's and the reply's tokens of a preference row."""
    tokens, start = np.asarray(reader.tokens(row)), int(np.asarray(reader.mask(row)).argmax())
    return tokens[:start], tokens[start:]


def reward_scores(model: RewardModel, rows: Sequence[np.ndarray], pad_id: int) -> list[float]:
    """Normalised scores of whole dialogues."""

    def measure(mine: list[np.ndarray]) -> list[float]:
        scores = [0.0] * len(mine)
        for batch in length_batches([len(row) for row in mine], REWARD_BATCH_TOKENS):
            width = max(len(mine[index]) for index in batch)
            ids_BT = torch.full((len(batch), width), pad_id, dtype=torch.int64)
            mask_BT = torch.zeros((len(batch), width), dtype=torch.int64)
            for place, index in enumerate(batch):
                ids_BT[place, : len(mine[index])] = torch.from_numpy(mine[index].astype(np.int64))
                mask_BT[place, : len(mine[index])] = 1
            with torch.inference_mode():
                found = model.score(ids_BT.to(device()), mask_BT.to(device())).float().cpu().tolist()
            for index, score in zip(batch, found, strict=True):
                scores[index] = score
        return scores

    return shared(rows, measure)


def reward_accuracy(model: RewardModel, pairs: Sequence[Pair], pad_id: int) -> dict[str, Any]:
    """Accuracy overall, by kind, of a guess by length, and against another conversation's reply."""
    # Half-way round the set, so that neighbours cut from one conversation do not meet.
    others = [pairs[(index + len(pairs) // 2) % len(pairs)].chosen for index in range(len(pairs))]
    limit = max(len(pair.prompt) + max(len(pair.chosen), len(pair.rejected)) for pair in pairs)
    replies = [
        [pair.chosen for pair in pairs],
        [pair.rejected for pair in pairs],
        others,
    ]
    rows = [
        np.concatenate([pair.prompt[max(0, len(pair.prompt) + len(reply) - limit) :], reply])
        for group in replies
        for pair, reply in zip(pairs, group, strict=True)
    ]
    scores = np.asarray(reward_scores(model, rows, pad_id)).reshape(3, len(pairs))
    lengths = np.asarray([[len(reply) for reply in group] for group in replies])
    right, longer = wins(scores[0], scores[1]), wins(lengths[0], lengths[1])
    kinds = np.asarray([pair.kind or "" for pair in pairs])
    return {
        **_accuracy(right, longer),
        "by_kind": {kind: _accuracy(right[kinds == kind], longer[kinds == kind]) for kind in sorted({*kinds} - {""})},
        "other_reply": _accuracy(wins(scores[0], scores[2]), wins(lengths[0], lengths[2])),
    }


def wins(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """1 where the first is larger, 0.5 where they are equal, else 0."""
    return np.where(first == second, 0.5, (first > second).astype(float))


def _accuracy(right: np.ndarray, longer: np.ndarray) -> dict[str, Any]:
    return {"pairs": len(right), "accuracy": float(right.mean()), "length_only": float(longer.mean())}


# ── flaws ───────────────────────────────────────────────────────────────────────────────────────────────


def word_order(text: Path, tokenizer: ChatTokenizer, max_tokens: int) -> flaws.WordOrder:
    """A word-order model counted on at most `max_tokens` tokens of a text part."""
    return flaws.WordOrder(reply_text(tokenizer, row) for row in training_rows(text, max_tokens))


def training_rows(text: Path, max_tokens: int) -> Iterable[np.ndarray]:
    """Rows of a text part, evenly spaced, of at most about `max_tokens` tokens."""
    reader = ShardReader(text)
    total = int(np.asarray(reader.lengths).sum())
    for index in spread(len(reader), max(1, int(len(reader) * min(1.0, max_tokens / max(total, 1))))):
        yield np.asarray(reader.tokens(index))


def detector_quality(pairs: Sequence[Pair], order: flaws.WordOrder, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Each detector's recall on rejected replies of its kind and false-positive rate on the chosen, human ones."""

    def measure(mine: list[Pair]) -> list[tuple[list[flaws.Flaw], list[flaws.Flaw]]]:
        found = []
        for pair in mine:
            turn = last_user_turn(tokenizer, pair.prompt)
            chosen, rejected = reply_text(tokenizer, pair.chosen), reply_text(tokenizer, pair.rejected)
            found.append((flaws.find_flaws(chosen, turn, order), flaws.find_flaws(rejected, turn, order)))
        return found

    found = shared(pairs, measure)
    quality: dict[str, Any] = {}
    for flaw in flaws.FLAWS:
        known = [flaw in bad for pair, (_, bad) in zip(pairs, found, strict=True) if pair.kind in flaws.KINDS[flaw]]
        quality[flaw] = {
            "recall": sum(known) / len(known) if known else None,
            "num_known": len(known),
            "false_positive_rate": sum(flaw in good for good, _ in found) / len(found),
            "num_human": len(found),
        }
    return quality
