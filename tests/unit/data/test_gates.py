"""From counts to verdicts."""

from __future__ import annotations

from collections import Counter

import pytest

from dschat_core.data.gates.block import MAX_EXAMPLES, GateTally
from dschat_core.data.gates.verdict import judge, wilson_upper


def test_wilson_certifies_a_thousandth_only_from_some_thousand_rows() -> None:
    assert wilson_upper(0, 3000) < 0.001 < wilson_upper(0, 2500)
    assert wilson_upper(0, 0) == 1.0
    assert wilson_upper(5, 10) > 0.5


@pytest.mark.parametrize(
    ("count", "total", "action", "verdict"),
    [
        (0, 10_000, "fail", "pass"),
        (0, 100, "fail", "not_certifiable"),
        (100, 1000, "fail", "failed"),
        (100, 1000, "drop", "dropped"),
        (100, 1000, "warn", "warned"),
        (100, 1000, "mask", "masked"),
        (100, 1000, "truncate", "truncated"),
        (100, 1000, "split", "split"),
        (0, 0, "drop", "not_certifiable"),
    ],
)
def test_verdicts(count: int, total: int, action: str, verdict: str) -> None:
    result = judge(GateTally(total=total, count=count), threshold=0.001, action=action)  # type: ignore[arg-type]
    assert result.verdict == verdict
    assert result.as_dict()["count"] == count


@pytest.mark.parametrize(("count", "total"), [(0, 0), (0, 5), (5, 5)])
def test_a_gate_that_asks_for_nothing_passes(count: int, total: int) -> None:
    assert judge(GateTally(total=total, count=count), threshold=1.0, action="warn").verdict == "pass"


def test_tallies_add_up_and_keep_the_first_examples() -> None:
    total = GateTally()
    for block in range(5):
        total.add(GateTally(10, 4, Counter(a=3, b=1), Counter(x=2), [{"line": 10 * block + i} for i in range(4)]))
    assert (total.total, total.count) == (50, 20)
    assert (total.reasons, total.stats) == ({"a": 15, "b": 5}, {"x": 10})
    assert [example["line"] for example in total.examples] == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21]
    assert len(total.examples) == MAX_EXAMPLES
