"""The shipped PPO arithmetic against published values and against plain restatements of the formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dschat_core.train import ppo_math

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "ppo.json").read_text())


def row(values: list[float]) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def close(actual: torch.Tensor | float, expected: list[float] | float) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64).squeeze(),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=0,
        atol=1e-6,
    )


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    given = GOLDEN["inputs"]
    return {name: row(given[name]) for name in ("logp_old", "logp_ref", "values")} | {
        "mask": torch.ones(1, 4, dtype=torch.bool)
    }


def golden_rewards(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    given = GOLDEN["inputs"]
    score_B = ppo_math.final_scores(
        torch.tensor([given["score"]], dtype=torch.float64),
        torch.tensor([True]),
        clip=given["score_clip"],
        penalty=1.0,
    )
    return ppo_math.token_rewards(
        inputs["logp_old"], inputs["logp_ref"], inputs["mask"], score_B, kl_coef=given["kl_coef"]
    )


def test_m6_rewards(inputs: dict[str, torch.Tensor]) -> None:
    close(golden_rewards(inputs), GOLDEN["rewards"])


@pytest.mark.parametrize(("name", "gamma"), [("gae_gamma1_lam095", 1.0), ("gae_gamma099_lam095", 0.99)])
def test_m6_advantages(inputs: dict[str, torch.Tensor], name: str, gamma: float) -> None:
    advantages, returns = ppo_math.generalized_advantages(
        golden_rewards(inputs), inputs["values"], inputs["mask"], gamma=gamma, lam=0.95
    )
    close(advantages, GOLDEN[name]["advantages"])
    if "returns" in GOLDEN[name]:
        close(returns, GOLDEN[name]["returns"])


def test_m6_whitening(inputs: dict[str, torch.Tensor]) -> None:
    whitened, constant = ppo_math.whiten(row(GOLDEN["gae_gamma1_lam095"]["advantages"]), inputs["mask"])
    close(whitened, GOLDEN["whitened_advantages_biased_variance_gamma1"])
    assert not constant


def test_m6_kl_estimators(inputs: dict[str, torch.Tensor]) -> None:
    kl = ppo_math.kl_estimators(inputs["logp_old"], inputs["logp_ref"])
    for name, expected in GOLDEN["kl_estimators_mean"].items():
        close(getattr(kl, f"{name}_BT").mean(), expected)


def test_m6_policy_loss(inputs: dict[str, torch.Tensor]) -> None:
    given = GOLDEN["policy_loss"]
    loss = ppo_math.policy_loss(
        row(given["logp_new"]), inputs["logp_old"], row(given["advantages"]), clip=given["clip"]
    )
    close(loss.ratio_BT, given["ratio"])
    close(loss.loss_BT, given["per_token"])
    close(ppo_math.masked_mean(loss.loss_BT, inputs["mask"]), given["mean"])
    close(ppo_math.masked_mean(loss.loss_BT, torch.tensor([[True, True, True, False]])), given["mean_mask_1110"])
    assert loss.clipped_BT.tolist() == [[True, False, False, False]]


def test_m6_value_loss(inputs: dict[str, torch.Tensor]) -> None:
    given = GOLDEN["value_loss"]
    loss = ppo_math.value_loss(row(given["values_new"]), inputs["values"], row(given["returns"]), clip=given["clip"])
    close(loss, given["per_token"])
    close(ppo_math.masked_mean(loss, inputs["mask"]), given["mean"])
    close(ppo_math.masked_mean(loss, torch.tensor([[True, True, True, False]])), given["mean_mask_1110"])


def test_m6_adaptive_kl() -> None:
    given = GOLDEN["adaptive_kl"]
    for kl, expected in given["kl_to_coef"].items():
        close(
            ppo_math.adapted_kl_coef(
                given["coef"],
                float(kl),
                target=given["target"],
                horizon=given["horizon"],
                num_samples=given["num_samples"],
            ),
            expected,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -3.3333333, 1e6])
def test_m8_constant_advantages_whiten_to_zero(dtype: torch.dtype, value: float) -> None:
    mask = torch.tensor([[True, True, True], [True, False, False]])
    whitened, constant = ppo_math.whiten(torch.full((2, 3), value, dtype=dtype), mask)
    assert constant
    assert torch.equal(whitened, torch.zeros(2, 3, dtype=dtype))


def test_whitening_ignores_padding() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 7, dtype=torch.float64)
    mask = torch.rand(5, 7) < 0.6
    whitened, _ = ppo_math.whiten(torch.where(mask, x, 1e9), mask)
    real = whitened[mask]
    close(real.mean(), 0.0)
    close(real.var(correction=0), 1.0)
    assert torch.equal(whitened[~mask], torch.zeros(int((~mask).sum()), dtype=torch.float64))


def test_ragged_rows_equal_the_same_rows_alone() -> None:
    """Padding, whatever stands in it, changes neither rewards nor advantages."""
    torch.manual_seed(1)
    lengths = [1, 4, 6]
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    logp, logp_ref, values = (torch.randn(3, 6, dtype=torch.float64) for _ in range(3))
    score = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    padded = [torch.where(mask, x, 77.0) for x in (logp, logp_ref, values)]
    rewards = ppo_math.token_rewards(padded[0], padded[1], mask, score, kl_coef=0.3)
    advantages, returns = ppo_math.generalized_advantages(rewards, padded[2], mask, gamma=0.9, lam=0.8)
    for i, length in enumerate(lengths):
        alone = torch.ones(1, length, dtype=torch.bool)
        one = [x[i : i + 1, :length] for x in (logp, logp_ref, values)]
        rewards_alone = ppo_math.token_rewards(one[0], one[1], alone, score[i : i + 1], kl_coef=0.3)
        expected, expected_returns = ppo_math.generalized_advantages(rewards_alone, one[2], alone, gamma=0.9, lam=0.8)
        torch.testing.assert_close(rewards[i : i + 1, :length], rewards_alone)
        torch.testing.assert_close(advantages[i : i + 1, :length], expected)
        torch.testing.assert_close(returns[i : i + 1, :length], expected_returns)
    assert not rewards[~mask].any()
    assert not advantages[~mask].any()


def test_gae_with_lambda_one_is_return_minus_value() -> None:
    torch.manual_seed(2)
    rewards, values = torch.randn(2, 5, dtype=torch.float64), torch.randn(2, 5, dtype=torch.float64)
    advantages, returns = ppo_math.generalized_advantages(
        rewards, values, torch.ones(2, 5, dtype=torch.bool), gamma=1.0, lam=1.0
    )
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(advantages, to_go - values)


def test_unfinished_replies_pay_the_penalty_even_at_the_clip() -> None:
    scores = ppo_math.final_scores(
        torch.tensor([9.0, -9.0, 1.0]), torch.tensor([False, False, True]), clip=5.0, penalty=2.0
    )
    assert scores.tolist() == [3.0, -7.0, 1.0]


def test_log_ratio_is_clamped_to_stay_finite() -> None:
    loss = ppo_math.policy_loss(torch.tensor([[0.0]]), torch.tensor([[-1e4]]), torch.tensor([[-1.0]]), clip=0.2)
    assert torch.isfinite(loss.loss_BT).all()


def test_policy_gradient_is_zero_where_clipped() -> None:
    logp_new = torch.tensor([[0.5, 0.0, -0.5, -0.5]], requires_grad=True)
    loss = ppo_math.policy_loss(logp_new, torch.zeros(1, 4), torch.tensor([[1.0, 1.0, -1.0, 1.0]]), clip=0.2)
    loss.loss_BT.sum().backward()
    assert logp_new.grad is not None
    assert (logp_new.grad != 0).tolist() == [[False, True, False, True]]
    assert loss.clipped_BT.tolist() == [[True, False, True, False]]


def test_k3_is_never_negative() -> None:
    torch.manual_seed(3)
    kl = ppo_math.kl_estimators(torch.randn(100), torch.randn(100))
    assert (kl.k3_BT >= 0).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_log_probs_and_entropy(temperature: float) -> None:
    torch.manual_seed(4)
    logits = torch.randn(2, 3, 11, requires_grad=True)
    targets = torch.randint(0, 11, (2, 3))
    logp, entropy = ppo_math.log_probs_and_entropy(logits, targets, temperature)
    expected = torch.distributions.Categorical(logits=logits / temperature)
    torch.testing.assert_close(logp, expected.log_prob(targets))
    torch.testing.assert_close(entropy, expected.entropy())
    assert not entropy.requires_grad
