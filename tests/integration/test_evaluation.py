"""Evaluation on tiny random models: the shape it documents, the same figures on one and two ranks, and publishing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_core.artifacts import Product
from dschat_core.chat_template import load_tokenizer
from dschat_core.cluster.job import Job
from dschat_core.config import EvaluationConfig, LimitsConfig, PublishingConfig
from dschat_core.errors import ConfigError, GateError
from dschat_core.report.tables import evaluation_tables
from dschat_core.stages.publishing import publishing
from dschat_core.train.engine import copy_tokenizer
from tests.helpers_training import make_job, make_parts, run_ranks

SECTION = EvaluationConfig(num_prompts=6, reply_limit=8, max_prompt_tokens=48, fixed_prompts=("sun moon", "你好"))


def save_model(folder: Path, tokenizer: Path, seed: int, *, kind: Any = LlamaForCausalLM) -> Path:
    ids = load_tokenizer(tokenizer)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=ids.vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        num_labels=1,
        initializer_range=0.3,
        eos_token_id=ids.end_of_turn_id,
        pad_token_id=ids.pad_id,
    )
    kind(config).save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("evaluation")
    parts = make_parts(root / "data")
    models = {
        stage: save_model(root / stage, parts["tokenizer"], seed)
        for seed, stage in enumerate(("pretraining", "sft", "ppo"))
    }
    reward = save_model(root / "reward", parts["tokenizer"], 3, kind=LlamaForSequenceClassification)
    (reward / "reward_normalisation.json").write_text('{"mean": 0.5, "std": 2.0}')
    names = ("tokenizer", "text", "text_heldout", "dialogues_heldout", "preferences_heldout", "prompts_heldout")
    return {name: parts[name] for name in names} | models | {"reward": reward}


def evaluate(job: Job) -> Product:
    from dschat_core.stages.evaluation import evaluation

    return evaluation(job)


@pytest.fixture(scope="module")
def jobs(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Job, list[Product]]]:
    """The job and the ranks' products on one and on two ranks."""
    found = {}
    for world_size in (1, 2):
        job = make_job(tmp_path_factory.mktemp(f"ranks{world_size}"), "evaluation", SECTION, inputs)
        found[world_size] = (job, run_ranks(world_size, evaluate, job))
    return found


def read(job: Job) -> dict[str, Any]:
    return json.loads((Path(job.output_dir) / "evaluation.json").read_text(encoding="utf-8"))


def samples(job: Job) -> list[dict[str, Any]]:
    lines = (Path(job.output_dir) / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def close(first: Any, second: Any, where: str = "") -> None:
    """Equal in shape and text, and in figures up to the rounding of other batches."""
    assert type(first) is type(second), where
    if isinstance(first, dict):
        assert list(first) == list(second), where
        for key in first:
            close(first[key], second[key], f"{where}.{key}")
    elif isinstance(first, list):
        assert len(first) == len(second), where
        for index, (left, right) in enumerate(zip(first, second, strict=True)):
            close(left, right, f"{where}[{index}]")
    elif isinstance(first, float):
        assert first == pytest.approx(second, abs=1e-4, rel=1e-4), where
    else:
        assert first == second, where


def test_the_figures_do_not_depend_on_the_ranks(jobs: dict[int, tuple[Job, list[Product]]]) -> None:
    (one, _), (two, products) = jobs[1], jobs[2]
    close(read(one), read(two))
    close(samples(one), samples(two))
    assert products[0].facts == products[1].facts


def test_the_shape_is_the_documented_one(jobs: dict[int, tuple[Job, list[Product]]]) -> None:
    job, products = jobs[2]
    result = read(job)
    assert list(result) == [
        "schema_version",
        "text",
        "dialogues",
        "reward",
        "detectors",
        "replies",
        "change",
        "fixed_prompts",
        "headline",
    ]
    assert set(result["text"]["models"]) == set(result["dialogues"]["models"]) == {"pretraining", "sft", "ppo"}
    assert result["text"]["unigram"]["bits_per_byte"] > result["text"]["bigram"]["bits_per_byte"] > 0
    assert set(result["reward"]["by_kind"]) == {"looped", "shuffled"}
    assert result["reward"]["pairs"] == sum(entry["pairs"] for entry in result["reward"]["by_kind"].values()) == 12
    assert set(result["replies"]["models"]) == {"sft", "ppo"}
    assert [list(row["replies"]) for row in result["fixed_prompts"]] == [["pretraining", "sft", "ppo"]] * 2
    assert result["headline"] == products[0].facts
    assert len(evaluation_tables(result)) == 5
    for file in (name for names in products[0].parts.values() for name in names):
        assert (Path(job.output_dir) / file).is_file()


def test_the_figures_agree_with_the_samples(jobs: dict[int, tuple[Job, list[Product]]]) -> None:
    job, _ = jobs[2]
    result, lines = read(job), samples(job)
    assert len(lines) == 2 * SECTION.num_prompts
    for stage, entry in result["replies"]["models"].items():
        mine = [line for line in lines if line["stage"] == stage]
        assert entry["length_mean"] == pytest.approx(sum(line["tokens"] for line in mine) / len(mine))
        assert entry["reward_mean"] == pytest.approx(sum(line["reward"] for line in mine) / len(mine))
        assert entry["loops"] == sum("loops" in line["flaws"] for line in mine) / len(mine)
    change, models = result["change"], result["replies"]["models"]
    kl = [line["kl"] for line in lines if line["stage"] == "ppo"]
    assert change["kl"] == pytest.approx(sum(kl) / len(kl))
    assert all(line["kl"] == 0 for line in lines if line["stage"] == "sft")
    gain = (models["ppo"]["reward_mean"] - models["sft"]["reward_mean"]) / models["sft"]["reward_std"]
    assert change["reward_gain"] == pytest.approx(gain)


def test_losses_equal_the_models_own(jobs: dict[int, tuple[Job, list[Product]]], inputs: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    from dschat_core.data.shards import ShardReader

    model = AutoModelForCausalLM.from_pretrained(inputs["sft"])
    reader = ShardReader(inputs["dialogues_heldout"])
    total = count = 0.0
    for index in range(len(reader)):
        ids = torch.from_numpy(reader.tokens(index))
        labels = torch.where(torch.from_numpy(reader.mask(index)), ids, -100)
        with torch.no_grad():
            loss = model(input_ids=ids[None], labels=labels[None]).loss
        total += float(loss) * int(reader.num_targets[index])
        count += int(reader.num_targets[index])
    assert read(jobs[1][0])["dialogues"]["models"]["sft"]["loss"] == pytest.approx(total / count, rel=1e-5)


def test_equal_models_have_no_kl_and_no_change(inputs: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(tmp_path, "evaluation", SECTION, inputs | {"ppo": inputs["sft"]})
    run_ranks(1, evaluate, job)
    change = read(job)["change"]
    assert change["kl"] == pytest.approx(0, abs=1e-5)
    assert (change["reward_gain"], change["length_change"], change["distinct_share"]) == (0, 0, 1)
    assert set(change["flaw_increase"].values()) == {0}


def test_a_run_without_reward_and_ppo(inputs: dict[str, Path], tmp_path: Path) -> None:
    kept = {name: path for name, path in inputs.items() if name not in ("reward", "ppo", "preferences_heldout")}
    job = make_job(tmp_path, "evaluation", SECTION, kept)
    (product,) = run_ranks(1, evaluate, job)
    result = read(job)
    assert (result["reward"], result["change"], result["detectors"]) == (None, None, None)
    assert {"bits_per_byte", "sft_gain", "loops_before", "toxic_share"} <= product.facts.keys()
    assert not {"kl", "reward_gain", "loops_after"} & product.facts.keys()


def test_a_fixed_prompt_beyond_the_limit_is_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    section = SECTION.model_copy(update={"fixed_prompts": ("long " * 100,)})
    with pytest.raises(ConfigError, match="fixed prompt"):
        run_ranks(1, evaluate, make_job(tmp_path, "evaluation", section, inputs))


def test_publishing_takes_what_evaluation_gives(
    jobs: dict[int, tuple[Job, list[Product]]], inputs: dict[str, Path], tmp_path: Path
) -> None:
    given = {"model": inputs["ppo"], "evaluation": Path(jobs[2][0].output_dir)}
    limits = LimitsConfig(max_kl=1e9, max_bits_per_byte=1e9, min_reward_gain=-1e9, min_distinct_share=0.0)
    publishing(PublishingConfig(limits=limits), given, tmp_path / "out", lineage=[])
    with pytest.raises(GateError, match="max_bits_per_byte"):
        publishing(PublishingConfig(limits=LimitsConfig(max_bits_per_byte=0.01)), given, tmp_path / "no", lineage=[])
