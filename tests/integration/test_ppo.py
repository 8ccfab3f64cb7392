"""The shipped ppo stage on real ranks: what it learns, what it logs, and that an interruption leaves no trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from dschat_core.chat_template import load_tokenizer
from dschat_core.cluster.job import Job
from dschat_core.config import PpoConfig
from dschat_core.errors import ConfigError, NumericalError
from dschat_core.stages import ppo as stage
from tests.helpers_training import make_job, make_parts, run_ranks

NOT_COMPARED = {"stage", "step_s", "phases", "tokens_per_s", "samples_per_s"}


def count_vowels(_prompts: list[list[dict[str, str]]], replies: list[str]) -> list[float]:
    """A true reward that is easy to see: the vowels of the reply, in quarters."""
    return [sum(letter in "aeiou" for letter in reply) / 4 for reply in replies]


def constant(_prompts: list[list[dict[str, str]]], replies: list[str]) -> list[float]:
    return [1.0] * len(replies)


def not_a_number(_prompts: list[list[dict[str, str]]], replies: list[str]) -> list[float]:
    return [math.nan] * len(replies)


def raising(_prompts: list[list[dict[str, str]]], _replies: list[str]) -> list[float]:
    raise KeyError("no such word")


def too_few(_prompts: list[list[dict[str, str]]], replies: list[str]) -> list[float]:
    return [0.0] * (len(replies) - 1)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizer, prompts, a random policy with dropout in its config, and a random reward model."""
    folder = tmp_path_factory.mktemp("ppo")
    parts = make_parts(folder)
    tokenizer = load_tokenizer(parts["tokenizer"])
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        attention_dropout=0.1,
        initializer_range=0.1,
        pad_token_id=tokenizer.pad_id,
        eos_token_id=tokenizer.end_of_turn_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(folder / "reward")
    return parts | {"model": folder / "policy", "reward_model": folder / "reward"}


def ppo_job(folder: Path, parts: dict[str, Path], *, attempt: int = 1, **changes: Any) -> Job:
    options = {
        "num_iterations": 4,
        "rollout_batch_size": 16,
        "minibatch_size": 8,
        "ppo_epochs": 2,
        "max_prompt_tokens": 40,
        "reply_limit": 10,
        "learning_rate": 1e-3,
        "critic_learning_rate": 1e-3,
        "gamma": 1.0,
        "eval_every": 2,
        "eval_prompts": 8,
        "rollouts_every": 2,
        "runtime": {"checkpoint_every": 1},
    }
    names = ["tokenizer", "prompts", "prompts_heldout", "model"]
    if "reward_function" not in changes:
        names.append("reward_model")
    section = PpoConfig.model_validate(options | changes)
    return make_job(folder, "ppo", section, {name: parts[name] for name in names}, attempt=attempt)


def train(job: Job) -> dict[str, Any]:
    """What a rank does."""
    return stage.ppo(job).facts


def train_until(job: Job, step: str, iteration: int) -> dict[str, Any]:
    """Train, and die at the start of one step of one iteration."""
    original: Callable[..., Any] = getattr(stage, step)
    calls = 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == iteration:
            raise RuntimeError("the lights went out")
        return original(*args, **kwargs)

    setattr(stage, step, dying)
    return train(job)


def metrics(job: Job) -> list[dict[str, Any]]:
    """The metrics without what depends on the clock, as numbers."""
    lines = [json.loads(line) for line in job.metrics_path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in NOT_COMPARED} for line in lines]


def weights(job: Job) -> dict[str, torch.Tensor]:
    return load_file(Path(job.output_dir) / "model" / "model.safetensors")


def test_it_learns_a_true_reward_and_says_so(tmp_path: Path, parts: dict[str, Path]) -> None:
    job = ppo_job(
        tmp_path,
        parts,
        reward_function="tests.integration.test_ppo:count_vowels",
        num_iterations=16,
        rollout_batch_size=32,
        ppo_epochs=4,
        learning_rate=3e-3,
        kl_coef=0.01,
        missing_eos_penalty=0,
    )
    facts = run_ranks(2, train, job)[0]
    lines = metrics(job)
    assert [line["step"] for line in lines] == list(range(17))
    assert facts["heldout_reward_before"] == lines[0]["heldout_reward"]
    assert facts["heldout_reward"] > facts["heldout_reward_before"] + 0.5
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-4), "policy and reference start as one"
    assert lines[-1]["kl"] > 0.1
    assert all(line["first_log_ratio_max"] <= 1e-5 for line in lines[1:])
    rows = [json.loads(line) for line in (Path(job.output_dir) / "rollouts.jsonl").read_text().splitlines()]
    assert {row["pick"] for row in rows} == {"best", "worst", "random"}
    assert max(row["score"] for row in rows) == max(row["score"] for row in rows if row["pick"] == "best")
    model = AutoModelForCausalLM.from_pretrained(Path(job.output_dir) / "model")
    assert model.config.attention_dropout == 0.1, "the recipe is handed on; only training ran without it"


def test_m5_first_log_ratio_with_dropout_and_temperature(tmp_path: Path, parts: dict[str, Path]) -> None:
    job = ppo_job(tmp_path, parts, temperature=0.6, num_iterations=3)
    run_ranks(2, train, job)
    assert all(line["first_log_ratio_max"] <= 1e-5 for line in metrics(job)[1:])


ADAPTIVE = {"kl_controller": "adaptive", "kl_target": 0.01, "kl_horizon": 50}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, parts: dict[str, Path]) -> Job:
    job = ppo_job(tmp_path_factory.mktemp("undisturbed"), parts, **ADAPTIVE)
    run_ranks(2, train, job)
    return job


@pytest.mark.parametrize("step", ["sample", "score", "update"])
def test_r1_an_interrupted_iteration_is_repeated_to_the_bit(
    tmp_path: Path, parts: dict[str, Path], undisturbed: Job, step: str
) -> None:
    with pytest.raises(RuntimeError, match="lights"):
        run_ranks(2, train_until, ppo_job(tmp_path, parts, **ADAPTIVE), step, 3)
    second = ppo_job(tmp_path, parts, attempt=2, **ADAPTIVE)
    facts = run_ranks(2, train, second)[0]
    assert facts["resumed_from"] == 2
    assert metrics(second) == metrics(undisturbed)
    assert metrics(second)[-1]["kl_coef"] != 0.05, "the adaptive coefficient should have moved"
    expected = weights(undisturbed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(second).items())
    rollouts = [Path(job.output_dir) / "rollouts.jsonl" for job in (second, undisturbed)]
    assert rollouts[0].read_text() == rollouts[1].read_text()


def test_the_number_of_ranks_and_micro_batches_changes_nothing_but_rounding(
    tmp_path: Path, parts: dict[str, Path]
) -> None:
    """M2, and sampling too: 7 rows in minibatches of 3 divide by nothing."""
    odd = {"rollout_batch_size": 7, "minibatch_size": 3, "num_iterations": 2}
    one = ppo_job(tmp_path / "one", parts, **odd)
    two = ppo_job(tmp_path / "two", parts, **odd)
    small = ppo_job(tmp_path / "small", parts, **odd, runtime={"micro_batch_size": 1})
    run_ranks(1, train, one)
    run_ranks(2, train, two)
    run_ranks(2, train, small)
    for other in (two, small):
        for expected, found in zip(metrics(one), metrics(other), strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
        for name, tensor in weights(one).items():
            torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_zero_stages_agree(tmp_path: Path, parts: dict[str, Path], zero_stage: int) -> None:
    jobs = [
        ppo_job(tmp_path / str(stage), parts, num_iterations=2, runtime={"zero_stage": stage})
        for stage in (1, zero_stage)
    ]
    for job in jobs:
        run_ranks(2, train, job)
    for expected, found in zip(*map(metrics, jobs), strict=True):
        assert found == pytest.approx(expected, rel=1e-2, abs=1e-4)


def test_edges_a_reply_limit_of_one_and_prompts_at_the_limit(tmp_path: Path, parts: dict[str, Path]) -> None:
    job = ppo_job(tmp_path, parts, reply_limit=1, max_prompt_tokens=63, num_iterations=2)
    facts = run_ranks(2, train, job)[0]
    assert facts["reply_length"] == 1
    assert all(math.isfinite(value) for line in metrics(job) for value in line.values() if isinstance(value, float))


def test_m8_a_constant_reward_stays_finite(tmp_path: Path, parts: dict[str, Path]) -> None:
    """Replies of one token with one score: all advantages are equal, whiten to 0, and the policy does not move."""
    job = ppo_job(
        tmp_path,
        parts,
        reward_function="tests.integration.test_ppo:constant",
        reply_limit=1,
        missing_eos_penalty=0,
        critic_learning_rate=1e-12,
    )
    facts = run_ranks(2, train, job)[0]
    assert facts["constant_advantages"] == 4
    before = load_file(parts["model"] / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(job).items())


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("not_a_number", NumericalError, "score of a reply is nan"),
        ("raising", ConfigError, "failed: KeyError: 'no such word'"),
        ("too_few", ConfigError, "returned 15 scores for 16 replies"),
        ("missing", ConfigError, "cannot be imported"),
    ],
)
def test_a_broken_reward_function_is_named(
    tmp_path: Path, parts: dict[str, Path], function: str, error: type[Exception], message: str
) -> None:
    job = ppo_job(tmp_path, parts, reward_function=f"tests.integration.test_ppo:{function}", eval_prompts=0)
    with pytest.raises(error) as caught:
        run_ranks(1, train, job)
    assert message in str(caught.value)


def test_no_prompt_fits(tmp_path: Path, parts: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="max_prompt_tokens=3"):
        run_ranks(1, train, ppo_job(tmp_path, parts, max_prompt_tokens=3))


def test_the_policy_waits_while_the_critic_warms_up(tmp_path: Path, parts: dict[str, Path]) -> None:
    waiting = ppo_job(tmp_path, parts, critic_warmup=2, num_iterations=3)
    run_ranks(2, train, waiting)
    lines = metrics(waiting)
    assert [line["kl"] == pytest.approx(0, abs=1e-4) for line in lines[1:]] == [True, True, True]
    assert ["policy_loss" in line for line in lines[1:]] == [False, False, True]
    before = load_file(parts["model"] / "model.safetensors")
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(waiting).items())


def test_a_warm_up_that_never_ends_is_refused() -> None:
    with pytest.raises(ValueError, match="critic_warmup=4 leaves the policy none of num_iterations=4"):
        PpoConfig(num_iterations=4, critic_warmup=4)
