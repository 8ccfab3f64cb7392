"""A block of rows as the gates see it, and what a gate says of it.

Every gate is a pure function of a block and its section of the config; blocks stream through all gates, on as many
processes as there are, and what the gates say is added up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dschat_core.config import Dataset
from dschat_core.data.gates.duplicates import comparable
from dschat_core.data.schemas import Row, row_texts

MAX_EXAMPLES = 10


@dataclass(frozen=True, slots=True)
class Finding:
    """A row that a gate flags: its index in the block, a reason code, and what an example in the report shows."""

    row: int
    reason: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass
class GateShard:
    """What a gate says of a block: at most one finding a row, in row order, and counts that add up over blocks."""

    findings: list[Finding] = field(default_factory=list)
    stats: Counter[str] = field(default_factory=Counter)


@dataclass
class GateTally:
    """What a gate found, added up over blocks: rows seen and flagged, reason codes, counts, the first examples."""

    total: int = 0
    count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    stats: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: GateTally) -> None:
        """Take in the tally of the blocks that follow."""
        self.total += other.total
        self.count += other.count
        self.reasons.update(other.reasons)
        self.stats.update(other.stats)
        self.examples += other.examples[: MAX_EXAMPLES - len(self.examples)]


class Block:
    """Rows of one data set, with the views that several gates share, each computed once."""

    def __init__(self, kind: Dataset, rows: Sequence[Row]) -> None:
        self.kind: Dataset = kind
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def texts(self) -> list[list[str]]:
        """Everything said in each row, in order; the chosen and the rejected reply of a pair last."""
        return [row_texts(self.kind, row) for row in self.rows]

    @cached_property
    def joined(self) -> list[str]:
        """The texts of each row, one a line."""
        return ["\n".join(texts) for texts in self.texts]

    @cached_property
    def forms(self) -> list[str]:
        """Each row as duplicates are compared."""
        return [comparable(text) for text in self.joined]
