"""The publishing gate and the folder it lets through."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, pipeline

from dschat_core.chat_template import SPECIAL_TOKENS, encode_prompt, load_tokenizer
from dschat_core.config import LimitsConfig, PublishingConfig
from dschat_core.data.tokenizing import save_tokenizer, train_tokenizer
from dschat_core.errors import ConfigError, ExitCode, GateError, IntegrityError
from dschat_core.stages.publishing import LIMITS, check_limits, publishing
from tests.helpers_report import evaluation

LINEAGE = [
    {"stage": "validation", "key": "a" * 64, "facts": {"datasets": {"text": {"rows": {"train": 100, "heldout": 7}}}}},
    {"stage": "ppo", "key": "b" * 64, "facts": {"num_parameters": 12_345}, "versions": {"torch": "2.13.0"}},
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model folder with a tokenizer trained on the spot."""
    folder = tmp_path_factory.mktemp("model")
    texts = ["hello there, how are you?", "i am fine"] * 5
    save_tokenizer(train_tokenizer(texts, vocab_size=300), folder, max_length=128)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def inputs(source: Path, tmp_path: Path) -> dict[str, Path]:
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps(evaluation()), encoding="utf-8")
    model = tmp_path / "source"
    shutil.copytree(source, model)
    return {"model": model, "evaluation": folder}


def test_the_folder_is_complete_and_loads(inputs: dict[str, Path], tmp_path: Path) -> None:
    section = PublishingConfig(title="A *model*", license="mit", limits=LimitsConfig(max_kl=10.0))
    product = publishing(section, inputs, tmp_path / "out", lineage=LINEAGE)
    folder = tmp_path / "out" / "model"
    assert sorted(f"model/{path.name}" for path in folder.iterdir()) == product.parts["model"]
    assert product.facts["limits"] == [
        {"limit": "max_kl", "measure": "kl", "value": 4.6, "bound": "at most", "threshold": 10.0}
    ]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    assert tokenizer.eos_token_id == model.config.eos_token_id == ours.end_of_turn_id
    assert model.config.pad_token_id == tokenizer.pad_token_id == ours.pad_id
    assert model.generation_config.eos_token_id == [ours.end_of_turn_id, ours.document_end_id]
    assert model.generation_config.pad_token_id == ours.pad_id
    assert model.generation_config.max_new_tokens == 64


def test_d8_serving_feeds_the_model_what_training_did(inputs: dict[str, Path], tmp_path: Path) -> None:
    publishing(PublishingConfig(), inputs, tmp_path / "out", lineage=[])
    folder = tmp_path / "out" / "model"
    messages = [{"role": "user", "content": "hello, how are you?"}]
    tokenizer, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    served = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(served) == encode_prompt(ours, messages).tolist()
    assert tokenizer.bos_token is None
    assert json.loads((folder / "config.json").read_text())["bos_token_id"] is None
    assert list(served).count(ours.document_start_id) == 0


def test_d8_a_template_that_doubles_its_bos_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    model = inputs["model"]
    config = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    new_id = 1 + max(entry["id"] for entry in tokenizer["added_tokens"])
    new_id = max(new_id, 1 + max(tokenizer["model"]["vocab"].values()))
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": new_id, "content": "<s>"})
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>"}))
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").write_text("{{ bos_token }}" + template)
    publishing(PublishingConfig(), inputs, tmp_path / "once", lineage=[])
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}" + template)
    with pytest.raises(ConfigError, match="bos token 2 times"):
        publishing(PublishingConfig(), inputs, tmp_path / "twice", lineage=[])


def test_a_chat_pipeline_answers(inputs: dict[str, Path], tmp_path: Path) -> None:
    publishing(PublishingConfig(), inputs, tmp_path / "out", lineage=[])
    chat: Any = pipeline("text-generation", model=str(tmp_path / "out" / "model"), device="cpu")
    answer = chat([{"role": "user", "content": "hello"}], max_new_tokens=4)[0]["generated_text"]
    assert [message["role"] for message in answer] == ["user", "assistant"]
    assert not any(token in answer[-1]["content"] for token in SPECIAL_TOKENS)


def test_the_card_tells_what_it_is(inputs: dict[str, Path], tmp_path: Path) -> None:
    section = PublishingConfig(title="A *model*", license='mit"\nx: y', limits=LimitsConfig(max_kl=10.0))
    publishing(section, inputs, tmp_path / "out", lineage=LINEAGE)
    card = (tmp_path / "out" / "model" / "README.md").read_text(encoding="utf-8")
    assert card.startswith('---\nlicense: "mit\\"\\nx: y"\n')
    for words in (
        "# A \\*model\\*",
        "12,345 parameters",
        "| pretraining | 1.762 | 3.910 |",
        "| kl | 4.6 | at most 10 |",
        "| text | 100 | 7 |",
        "| ppo | `bbbbbbbbbbbbbbbbbbbbbbbb` |",
        "torch 2.13.0",
        "## Limitations",
        "I'm doing well, thanks! How are you?",
    ):
        assert words in card, words
    assert str(tmp_path) not in card


HEADLINE = {
    "bits_per_byte": 1.9,
    "sft_gain": 0.02,
    "reward_accuracy": 0.7,
    "reward_gain": 0.3,
    "kl": 12.0,
    "length_change": -0.5,
    "distinct_share": 0.4,
    "flaw_increase": 0.02,
    "toxic_share": 0.01,
}


@pytest.mark.parametrize(
    ("limit", "met", "missed"),
    [
        ("max_bits_per_byte", 2.0, 1.8),
        ("min_sft_gain", 0.01, 0.03),
        ("min_reward_accuracy", 0.7, 0.75),
        ("min_reward_gain", 0.2, 0.5),
        ("max_kl", 12.0, 10.0),
        ("max_length_change", 0.5, 0.33),
        ("min_distinct_share", 0.3, 0.5),
        ("max_flaw_increase", 0.03, 0.0),
        ("max_toxic_share", 0.02, 0.001),
    ],
)
def test_each_limit_is_checked_on_its_side(limit: str, met: float, missed: float) -> None:
    (row,) = check_limits(LimitsConfig(**{limit: met}), HEADLINE)
    assert row["value"] == HEADLINE[row["measure"]]
    with pytest.raises(GateError) as caught:
        check_limits(LimitsConfig(**{limit: missed}), HEADLINE)
    assert caught.value.exit_code == ExitCode.GATE
    assert limit in caught.value.what
    assert f"{missed:g}" in caught.value.what
    assert f"{HEADLINE[row['measure']]:.4g}" in caught.value.what


def test_every_limit_of_the_config_is_known() -> None:
    assert set(LIMITS) == set(LimitsConfig.model_fields)


def test_all_missed_limits_are_named_with_what_helps(inputs: dict[str, Path], tmp_path: Path) -> None:
    limits = LimitsConfig(max_kl=1.0, min_reward_gain=0.9, max_bits_per_byte=2.0)
    with pytest.raises(GateError, match=r"2 of 3 limits missed") as caught:
        publishing(PublishingConfig(limits=limits), inputs, tmp_path / "out", lineage=[])
    assert "max_kl: kl is 4.6, the limit is at most 1" in str(caught.value)
    assert "min_reward_gain: reward_gain is 0.72, the limit is at least 0.9" in str(caught.value)
    assert "ppo.kl_coef" in caught.value.fix
    assert not (tmp_path / "out").exists()


def test_a_limit_without_its_figure_is_a_refusal() -> None:
    with pytest.raises(GateError, match="evaluation has no kl"):
        check_limits(LimitsConfig(max_kl=10.0), {})


def test_no_limits_no_gate() -> None:
    assert check_limits(LimitsConfig(), {}) == []


def test_r14_a_pickle_in_the_folder_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    (inputs["model"] / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(IntegrityError, match=r"pytorch_model\.bin"):
        publishing(PublishingConfig(), inputs, tmp_path / "out", lineage=[])


def test_missing_weights_and_a_broken_evaluation_are_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    (inputs["model"] / "model.safetensors").unlink()
    with pytest.raises(IntegrityError, match="safetensors"):
        publishing(PublishingConfig(), inputs, tmp_path / "a", lineage=[])
    (inputs["evaluation"] / "evaluation.json").write_text("{", encoding="utf-8")
    with pytest.raises(IntegrityError, match=r"evaluation\.json"):
        publishing(PublishingConfig(), inputs, tmp_path / "b", lineage=[])
