"""From the rows that a gate flagged to its verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dschat_core.config import GateAction

Z_ONE_SIDED_95 = 1.6449

Verdict = Literal["pass", "not_certifiable", "dropped", "warned", "failed"]


@dataclass(frozen=True)
class GateResult:
    """What a gate found in a data set.

    `rate` is the share of rows flagged, `upper` its 95 % upper bound, by which `pass` is judged: few rows without a
    finding are `not_certifiable`. Over the threshold the verdict is the action's: `dropped`, `warned` or `failed`.
    """

    rate: float
    upper: float
    threshold: float
    action: GateAction
    verdict: Verdict
    count: int
    examples: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """For the verdict file."""
        return asdict(self)


def judge(
    count: int, total: int, *, threshold: float, action: GateAction, examples: Sequence[dict[str, Any]] = ()
) -> GateResult:
    """The verdict on `count` flagged rows of `total`."""
    rate = count / total if total else 0.0
    upper = wilson_upper(count, total)
    verdict: Verdict
    if rate > threshold:
        over: dict[GateAction, Verdict] = {"drop": "dropped", "warn": "warned", "fail": "failed"}
        verdict = over[action]
    else:
        verdict = "pass" if upper <= threshold else "not_certifiable"
    return GateResult(rate, upper, threshold, action, verdict, count, list(examples))


def wilson_upper(count: int, total: int, z: float = Z_ONE_SIDED_95) -> float:
    """Upper end of Wilson's score interval for a share; 1 where nothing was counted."""
    if total == 0:
        return 1.0
    share = count / total
    middle = share + z * z / (2 * total)
    spread = z * (share * (1 - share) / total + z * z / (4 * total * total)) ** 0.5
    return float(min(1.0, (middle + spread) / (1 + z * z / total)))
