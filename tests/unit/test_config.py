"""The config tree: typos, ranges, overrides and cross-checks are errors before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dschat_core.config import RunConfig, differing_keys, dump_config, load_config, parse_config, result_section
from dschat_core.errors import ConfigError, ExitCode

DATA = {name: {"train": [f"{name}.jsonl"]} for name in ("text", "dialogues", "preferences", "prompts")}
TREE = {"name": "t", "data": DATA}


def parse(**changes: object) -> RunConfig:
    return parse_config({**TREE, **changes}, where="test")


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert caught.value.exit_code == ExitCode.CONFIG
    return caught.value.what


def test_a_typo_is_named_by_its_path_with_a_suggestion() -> None:
    message = refusal(sft={"learning_rat": 1e-5})
    assert "sft.learning_rat: extra inputs are not permitted (did you mean learning_rate?)" in message


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sft": {"learning_rate": -1}}, "sft.learning_rate"),
        ({"sft": {"learning_rate": float("nan")}}, "sft.learning_rate"),
        ({"sft": {"runtime": {"zero_stage": 4}}}, "sft.runtime.zero_stage"),
        ({"sft": {"runtime": {"ranks_per_node": "many"}}}, "sft.runtime.ranks_per_node"),
        ({"pretraining": {"model": {"hidden_size": 100, "num_heads": 3}}}, "hidden_size=100"),
        ({"pretraining": {"max_length": 4096}}, "max_length=4096 exceeds model.context_length=2048"),
        ({"sft": {"max_length": 4096}}, "sft.max_length=4096 exceeds pretraining.model.context_length=2048"),
        ({"ppo": {"minibatch_size": 256}}, "minibatch_size=256 exceeds rollout_batch_size=128"),
        ({"ppo": {"reward_function": "no colon"}}, "module:function"),
        ({"data": {"text": {"train": []}}}, "data.text.train"),
        ({"reward": None}, "ppo.reward_model or ppo.reward_function"),
        ({"pretraining": None}, "sft.base_model"),
    ],
)
def test_what_cannot_work_is_refused_at_load(changes: dict[str, object], named: str) -> None:
    assert named in refusal(**changes)


@pytest.mark.parametrize("name", ["a b", 'q"uote', "$(id)", "new\nline", "../up", "a..b", "", "-x", "x" * 65, "名"])
def test_r15_unsafe_run_names_are_refused(name: str) -> None:
    assert "is not a run name" in refusal(name=name)


def test_a_stage_is_left_out_when_its_product_is_given() -> None:
    config = parse(pretraining=None, sft={"base_model": "some/folder"})
    assert "pretraining" not in config.stages()
    assert len(config.stages()) == 7


def test_a_missing_data_set_names_the_stage_that_needs_it() -> None:
    assert "reward needs data.preferences" in refusal(data={k: v for k, v in DATA.items() if k != "preferences"})


def test_overrides_reach_nested_keys_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(parse()), encoding="utf-8")
    config = load_config(path, ["sft.learning_rate=1e-4", "sft.runtime.zero_stage=2", "reward.epochs=2"])
    assert (config.sft and config.sft.learning_rate, config.sft and config.sft.runtime.zero_stage) == (1e-4, 2)
    for bad in ("sft.learning_rate", "=1", "name.x=1", "sft..a=1"):
        with pytest.raises(ConfigError):
            load_config(path, [bad])


def test_the_resolved_config_reads_back_equal(tmp_path: Path) -> None:
    config = parse(sft={"learning_rate": 1e-5}, evaluation={"fixed_prompts": ["你好", "a: b # c"]})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a: [", "not valid YAML"),
        ("- a", "holds a list"),
        ("name: a\nname: b", "given twice"),
        ("name: !!python/x 1", "YAML"),
    ],
)
def test_a_broken_file_says_so(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert named in str(caught.value)


def test_a_missing_or_binary_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.yaml", "binary.yaml"):
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name)
        assert name in str(caught.value)


def test_exponents_without_a_dot_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(parse()).replace("learning_rate: 1.0e-05", "learning_rate: 1e-5"), encoding="utf-8")
    assert load_config(path) == parse()


def test_the_result_section_leaves_runtime_out() -> None:
    section = parse().sft
    assert section is not None
    assert "runtime" not in result_section(section)
    assert result_section(section)["learning_rate"] == 1e-5


def test_differing_keys_give_path_and_both_values() -> None:
    assert differing_keys({"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": 4}) == ["a.b: 1 -> 3", "d: None -> 4"]


def test_a_discount_that_forgets_the_score_is_warned_of() -> None:
    assert "ppo.gamma" in parse().warnings()[0]
    assert parse(ppo={"gamma": 1.0}).warnings() == []
