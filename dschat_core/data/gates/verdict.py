"""From the rows that a gate flagged to its verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from dschat_core.config import GateAction, LengthAction, PiiAction
from dschat_core.data.gates.block import GateTally

Z_ONE_SIDED_95 = 1.6449

Action = GateAction | LengthAction | PiiAction
Verdict = Literal["pass", "not_certifiable", "dropped", "masked", "truncated", "split", "warned", "failed"]

OVER: dict[Action, Verdict] = {
    "drop": "dropped",
    "mask": "masked",
    "truncate": "truncated",
    "split": "split",
    "warn": "warned",
    "fail": "failed",
}


@dataclass(frozen=True)
class GateResult:
    """What a gate found in a data set.

    `rate` is the share of the `total` rows that it flagged, `upper` its 95 % upper bound, by which `pass` is judged: few
    rows without a finding are `not_certifiable`. Over the threshold the verdict is the action's: `dropped`, `failed`, …
    """

    rate: float
    upper: float
    threshold: float
    action: Action
    verdict: Verdict
    count: int
    total: int
    reasons: dict[str, int]
    stats: dict[str, int]
    examples: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """For the verdict file."""
        return asdict(self)


def judge(tally: GateTally, *, threshold: float, action: Action) -> GateResult:
    """The verdict on what a gate counted; a threshold of 1 asks for nothing and always passes."""
    rate = tally.count / tally.total if tally.total else 0.0
    upper = wilson_upper(tally.count, tally.total)
    verdict: Verdict = "pass"
    if rate > threshold:
        verdict = OVER[action]
    elif upper > threshold:
        verdict = "not_certifiable"
    return GateResult(
        rate,
        upper,
        threshold,
        action,
        verdict,
        tally.count,
        tally.total,
        dict(tally.reasons.most_common()),
        dict(tally.stats.most_common()),
        list(tally.examples),
    )


def wilson_upper(count: int, total: int, z: float = Z_ONE_SIDED_95) -> float:
    """Upper end of Wilson's score interval for a share; 1 where nothing was counted."""
    if total == 0:
        return 1.0
    share = count / total
    middle = share + z * z / (2 * total)
    spread = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    return float(min(1.0, (middle + spread) / (1 + z * z / total)))
