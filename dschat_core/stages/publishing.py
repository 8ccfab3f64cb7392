"""Publishing: a model that meets the configured limits becomes a Hugging Face folder that can be served as it is.

The gate reads `evaluation.json`; a figure that a limit asks for and evaluation does not have is a refusal too.
Runs in the orchestrator and copies files, so it needs no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dschat_core.artifacts import Product
from dschat_core.chat_template import ChatTokenizer, encode_prompt, load_tokenizer
from dschat_core.config import LimitsConfig, PublishingConfig
from dschat_core.errors import ConfigError, GateError, IntegrityError
from dschat_core.report.model_card import model_card

MAX_NEW_TOKENS = 256
# All that a Hugging Face folder needs; anything else (pickles first of all) is not passed on.
PUBLISHED_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt", ".model"}
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}


class Limit(NamedTuple):
    """How one key of `publishing.limits` is checked: which headline figure, which side, and what helps."""

    measure: str
    bound: Literal["at most", "at least"]
    remedy: str


LIMITS: dict[str, Limit] = {
    "max_bits_per_byte": Limit("bits_per_byte", "at most", "train longer (pretraining.epochs) or a larger model"),
    "min_sft_gain": Limit("sft_gain", "at least", "raise sft.epochs or sft.learning_rate"),
    "min_reward_accuracy": Limit("reward_accuracy", "at least", "raise reward.epochs or add preferences"),
    "min_reward_gain": Limit("reward_gain", "at least", "raise ppo.num_iterations or ppo.learning_rate"),
    "max_kl": Limit("kl", "at most", "raise ppo.kl_coef"),
    "max_length_change": Limit("length_change", "at most", "raise ppo.kl_coef or lower ppo.learning_rate"),
    "min_distinct_share": Limit("distinct_share", "at least", "raise ppo.kl_coef or lower ppo.learning_rate"),
    "max_flaw_increase": Limit("flaw_increase", "at most", "raise ppo.kl_coef or improve the reward model"),
    "max_toxic_share": Limit("toxic_share", "at most", "tighten validation.toxicity"),
}


def publishing(
    section: PublishingConfig,
    inputs: Mapping[str, Path],
    out: Path,
    *,
    lineage: Sequence[Mapping[str, Any]],
) -> Product:
    """Check the limits and write the folder `out/model`.

    Args:
        section: title, licence and limits.
        inputs: `model`, the folder of the last trained model, and `evaluation`, that of evaluation.json.
        lineage: a row per stage with `stage` and `key`; `facts`, `git_revision`, `versions` where known.

    Returns:
        The part `model`; facts with the limits and their figures.

    Raises:
        GateError: a limit is missed or cannot be checked; all such limits are named.
        IntegrityError: the model folder holds a pickle or lacks its weights.
        ConfigError: the tokenizer or its template cannot be served.
    """
    source = inputs["model"]
    evaluation = _read_json(inputs["evaluation"] / "evaluation.json")
    rows = check_limits(section.limits, evaluation.get("headline", {}))
    tokenizer = load_tokenizer(source)
    _check_one_bos(tokenizer, source)

    folder = out / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for path in _published_files(source):
        shutil.copyfile(path, folder / path.name)
    config = _read_json(source / "config.json") | _special_ids(tokenizer)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(source, config, tokenizer))
    (folder / "chat_template.jinja").write_text(tokenizer.template, encoding="utf-8")
    card = model_card(
        title=section.title,
        license_id=section.license,
        model_config=config,
        evaluation=evaluation,
        limits=rows,
        lineage=lineage,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    files = sorted(f"model/{path.name}" for path in folder.iterdir())
    return Product({"model": files}, {"limits": rows, "license": section.license, "num_files": len(files)})


def check_limits(limits: LimitsConfig, headline: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows {limit, measure, value, bound, threshold} of the limits that are set; `length_change` counts either way.

    Raises:
        GateError: with a line per limit that is missed or whose figure is missing.
    """
    rows, missed, remedies = [], [], []
    for name, threshold in limits.model_dump().items():
        if threshold is None:
            continue
        limit = LIMITS[name]
        value = headline.get(limit.measure)
        rows.append({"limit": name, "measure": limit.measure, "value": value} | _bound(limit, threshold))
        if value is None:
            missed.append(f"{name}: evaluation has no {limit.measure}, the limit is {limit.bound} {threshold:g}")
            remedies.append(f"run the stages that give {limit.measure}, or set publishing.limits.{name}: null")
            continue
        compared = abs(value) if limit.measure == "length_change" else value
        if (compared > threshold) if limit.bound == "at most" else (compared < threshold):
            missed.append(f"{name}: {limit.measure} is {value:.4g}, the limit is {limit.bound} {threshold:g}")
            remedies.append(f"{limit.remedy}, or set publishing.limits.{name}={value:.4g}")
    if missed:
        raise GateError(
            f"not published: {len(missed)} of {len(rows)} limits missed: " + "; ".join(missed),
            where="publishing.limits",
            why="evaluation on held-out data is worse than the config allows",
            fix="; ".join(dict.fromkeys(remedies)),
        )
    return rows


def _bound(limit: Limit, threshold: float) -> dict[str, Any]:
    return {"bound": limit.bound, "threshold": threshold}


def _published_files(source: Path) -> list[Path]:
    paths = sorted(path for path in source.iterdir() if path.is_file())
    pickles = [path.name for path in paths if path.suffix in PICKLES]
    if pickles:
        raise IntegrityError(
            f"{source} holds {', '.join(pickles)}, which would run code when loaded",
            where="publishing",
            fix="save the model's weights as safetensors",
        )
    if not any(path.suffix == ".safetensors" for path in paths):
        raise IntegrityError(f"{source} holds no .safetensors weights", where="publishing", fix="run the stage again")
    return [path for path in paths if path.suffix in PUBLISHED_SUFFIXES]


def _special_ids(tokenizer: ChatTokenizer) -> dict[str, Any]:
    """Ids in config.json: the end of a turn ends a reply; bos only where the tokenizer has one."""
    bos = dict(tokenizer.variables)["bos_token"]
    return {
        "bos_token_id": tokenizer.markup.token_to_id(bos) if bos else None,
        "eos_token_id": tokenizer.end_of_turn_id,
        "pad_token_id": tokenizer.pad_id,
    }


def _generation_config(source: Path, config: Mapping[str, Any], tokenizer: ChatTokenizer) -> dict[str, Any]:
    path = source / "generation_config.json"
    found = _read_json(path) if path.is_file() else {}
    context = config.get("max_position_embeddings") or 2 * MAX_NEW_TOKENS
    # A document's end ends a reply as well: a small model sometimes says it instead.
    ends = list(dict.fromkeys([tokenizer.end_of_turn_id, tokenizer.document_end_id]))
    return (
        found
        | _special_ids(tokenizer)
        | {"eos_token_id": ends, "do_sample": True, "max_new_tokens": min(MAX_NEW_TOKENS, context // 2)}
    )


def _check_one_bos(tokenizer: ChatTokenizer, source: Path) -> None:
    """What a server feeds the model for one turn must hold its bos exactly once, or never if it has none."""
    bos_id = _special_ids(tokenizer)["bos_token_id"]
    if bos_id is None or bos_id in (tokenizer.end_of_turn_id, tokenizer.document_end_id):
        return
    count = int((encode_prompt(tokenizer, [{"role": "user", "content": "hello"}]) == bos_id).sum())
    if count != 1:
        raise ConfigError(
            f"the chat template writes the bos token {count} times, expected 1",
            where=str(source / "chat_template.jinja"),
            why="the model would be served a text it was not trained on",
            fix="mend the template, or remove bos_token from tokenizer_config.json",
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IntegrityError(f"cannot read {path}", why=str(error), fix="dschat verify its artifact") from None
    if not isinstance(found, dict):
        raise IntegrityError(f"{path} holds a {type(found).__name__}, not an object", fix="dschat verify its artifact")
    return found


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
