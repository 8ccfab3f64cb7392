"""The data paragraph of the model card, from validation's facts."""

from __future__ import annotations

from typing import Any

from dschat_core.report.model_card import model_card


def card(facts: dict[str, Any]) -> str:
    lineage = [{"stage": "validation", "key": "ab", "facts": facts}]
    return model_card(title="t", license_id="mit", model_config={}, evaluation={}, limits=[], lineage=lineage)


def test_the_gates_are_those_of_the_verdict() -> None:
    gates = {
        "duplicates": {"count": 1165, "rate": 0.1526, "verdict": "dropped"},
        "toxicity": {"count": 7, "rate": 0.0006, "verdict": "not_certifiable"},
    }
    text = card(
        {
            "datasets": {
                "text": {"rows": {"train": 6073, "heldout": 339}, "gates": gates},
                "prompts": {"rows": {"train": 9, "heldout": 1}, "gates": {}},
            }
        }
    )
    assert "Rows left after the data gates: duplicates, toxicity." in text
    assert "| text | 6,073 | 339 | duplicates 1,165 (15.26 %) dropped, toxicity 7 (0.06 %) not certifiable |" in text
    assert "| prompts | 9 | 1 | none |" in text


def test_facts_without_gates_claim_none() -> None:
    text = card({"datasets": {"text": {"rows": {"train": 6073, "heldout": 339}}, "broken": 3}})
    assert "Rows left after the data gates.\n\n| data set | training rows | held-out rows |" in text
    assert "| text | 6,073 | 339 |" in text
    assert "## Data" not in card({"datasets": {"text": {"rows": None}}})
    assert "## Data" not in card({})
