"""The model card (README.md) of a published folder: what it is, how well it does, from what it was made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dschat_core.report.tables import Table, evaluation_tables, limits_table, markdown_text, number, percent

USAGE = """\
```python
from transformers import pipeline

chat = pipeline("text-generation", model="PATH_OR_NAME")
print(chat([{"role": "user", "content": "Hello, how are you?"}])[0]["generated_text"][-1]["content"])
```"""


def model_card(
    *,
    title: str,
    license_id: str,
    model_config: Mapping[str, Any],
    evaluation: Mapping[str, Any],
    limits: Sequence[Mapping[str, Any]],
    lineage: Sequence[Mapping[str, Any]],
) -> str:
    """The card as markdown with a YAML header.

    Args:
        title: heading, from the config.
        license_id: licence identifier of the header, from the config.
        model_config: the model's `config.json`.
        evaluation: the run's `evaluation.json`.
        limits: rows {measure, value, bound, threshold} of the publishing gate.
        lineage: one row per stage with `stage`, `key` and, where known, `facts`, `git_revision`, `versions`.
    """
    parts = [
        _header(license_id, lineage),
        f"# {markdown_text(title)}",
        _summary(model_config, lineage),
        f"## How to use\n\nThe chat template is in the folder; a reply ends on its end-of-turn token.\n\n{USAGE}",
        "## Evaluation\n\nAll figures are on held-out data, measured by the pipeline that made the model.\n\n"
        + "\n\n".join(_section(table) for table in (*evaluation_tables(evaluation), *_present(limits_table(limits)))),
        _samples(evaluation),
        _data(lineage),
        _lineage(lineage),
        _limitations(evaluation),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _present(table: Table | None) -> list[Table]:
    return [table] if table else []


def _section(table: Table) -> str:
    return f"### {table.title}\n\n{table.markdown()}" + (f"\n\n{table.note}" if table.note else "")


def _header(license_id: str, lineage: Sequence[Mapping[str, Any]]) -> str:
    tags = ["dschat", "conversational", *(row["stage"] for row in lineage if row["stage"] in ("sft", "ppo"))]
    # JSON is YAML: whatever the config holds stays a string here.
    return "\n".join(
        [
            "---",
            f"license: {json.dumps(license_id)}",
            "library_name: transformers",
            "pipeline_tag: text-generation",
            f"tags: {json.dumps(tags)}",
            "---",
        ]
    )


def _summary(config: Mapping[str, Any], lineage: Sequence[Mapping[str, Any]]) -> str:
    facts = {row["stage"]: row.get("facts") or {} for row in lineage}
    parameters = next((f["num_parameters"] for f in facts.values() if "num_parameters" in f), None)
    architecture = (config.get("architectures") or ["causal language model"])[0]
    shape = [
        f"{number(config[key])} {words}"
        for key, words in (
            ("num_hidden_layers", "layers"),
            ("hidden_size", "wide"),
            ("num_attention_heads", "attention heads"),
            ("vocab_size", "tokens of vocabulary"),
            ("max_position_embeddings", "tokens of context"),
        )
        if config.get(key) is not None
    ]
    stages = [stage for stage in ("pretraining", "sft", "reward", "ppo") if stage in facts]
    size = f" with {number(parameters)} parameters" if parameters else ""
    return f"A chat model ({architecture}{size}: {', '.join(shape)}), made by the stages {', '.join(stages)} of a dschat run."


def _samples(evaluation: Mapping[str, Any]) -> str:
    rows = evaluation.get("fixed_prompts") or []
    blocks = []
    for row in rows:
        stage, reply = list(row["replies"].items())[-1] if row["replies"] else ("", "")
        if reply:
            blocks.append(f"> **user** {markdown_text(row['prompt'])}\n>\n> **{stage}** {markdown_text(reply)}")
    return "## Samples\n\nFirst draws, not chosen.\n\n" + "\n\n".join(blocks) if blocks else ""


def _data(lineage: Sequence[Mapping[str, Any]]) -> str:
    """The rows of each data set, and what its gates found; facts without them give no sentence on gates."""
    validation = next((row for row in lineage if row["stage"] == "validation"), None)
    datasets = ((validation or {}).get("facts") or {}).get("datasets")
    if not isinstance(datasets, Mapping):
        return ""
    known = {
        str(name): facts
        for name, facts in datasets.items()
        if isinstance(facts, Mapping) and isinstance(facts.get("rows"), Mapping)
    }
    if not known:
        return ""
    gates = {name: facts["gates"] for name, facts in known.items() if isinstance(facts.get("gates"), Mapping)}
    rows = tuple(
        (
            name,
            number(facts["rows"].get("train")),
            number(facts["rows"].get("heldout")),
            *(
                [", ".join(map(_gate, gates[name], gates[name].values())) or "none"]
                if name in gates
                else ["–"] * bool(gates)
            ),
        )
        for name, facts in known.items()
    )
    header = ("data set", "training rows", "held-out rows", *(["gates: rows flagged, verdict"] if gates else []))
    text = "## Data\n\nRows left after the data gates"
    if gates:
        text += ": " + ", ".join(dict.fromkeys(gate for found in gates.values() for gate in found))
        text += ". *Not certifiable*: too few rows to be sure, at 95 %, that the rate is below the threshold"
    return f"{text}.\n\n{Table('', header, rows).markdown()}"


def _gate(name: str, facts: Mapping[str, Any]) -> str:
    return f"{name} {number(facts.get('count'))} ({percent(facts.get('rate'), 2)}) {facts.get('verdict', '')}".replace(
        "_", " "
    )


def _lineage(lineage: Sequence[Mapping[str, Any]]) -> str:
    if not lineage:
        return ""
    rows = tuple((row["stage"], f"`{str(row.get('key', ''))[:24]}`") for row in lineage)
    text = "## Lineage\n\nEach stage's artifact by its key, the hash of its recipe and inputs.\n\n"
    text += Table("", ("stage", "artifact"), rows).markdown()
    last = lineage[-1]
    versions = last.get("versions") or {}
    made = [f"{name} {version}" for name, version in versions.items()]
    if last.get("git_revision"):
        made.append(f"revision {last['git_revision'][:12]}")
    return text + (f"\n\nMade with {', '.join(made)}." if made else "")


def _limitations(evaluation: Mapping[str, Any]) -> str:
    points = [
        "It says what is likely in chat, not what is true; do not rely on it for facts or advice.",
        "It was evaluated on held-out data of the same origin as its training data; elsewhere it will do worse.",
        "Toxic training rows were filtered by a detector that misses some; the model may be rude.",
    ]
    models = (evaluation.get("replies") or {}).get("models") or {}
    last = models.get("ppo") or models.get("sft")
    if last:
        points.append(
            f"Of its sampled replies {percent(last['loops'])} loop, {percent(last['parroting'])} parrot the user and "
            f"{percent(last['shuffled'])} have a word order no better than chance."
        )
    return "## Limitations\n\n" + "\n".join(f"- {point}" for point in points)
