"""The arithmetic of PPO as pure functions, from Schulman et al. 2015 (GAE), 2017 (PPO) and Ziegler et al. 2019.

Nothing here knows of models, ranks or configs. Departures from the papers: the policy's log-ratio is clamped before
`exp`, and advantages that are all the same whiten to exactly 0 instead of to amplified rounding.

Legend: B replies, T reply tokens (padded on the right); `mask_BT` is True at real reply tokens, the end-of-turn token
included. Values and log-probabilities at masked positions may hold anything finite: they change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LOG_RATIO_LIMIT = 20.0
"""exp(20) = 5e8: far beyond every clip range, and still finite in fp16's wider neighbours (bf16, fp32)."""

ROUNDING = 16 * torch.finfo(torch.float32).eps
"""Relative spread below which numbers that came from fp32 networks are the same number."""


def masked_mean(x_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over the real tokens, a scalar; 0 where there is none."""
    return torch.where(mask_BT, x_BT, 0).sum() / mask_BT.sum().clamp_min(1)


def final_scores(score_B: torch.Tensor, ended_B: torch.Tensor, *, clip: float, penalty: float) -> torch.Tensor:
    """Scores (B,) clipped to ±`clip`, then less `penalty` for replies that did not end by themselves."""
    return score_B.clamp(-clip, clip) - penalty * (~ended_B).to(score_B.dtype)


def token_rewards(
    logp_BT: torch.Tensor, logp_ref_BT: torch.Tensor, mask_BT: torch.Tensor, score_B: torch.Tensor, *, kl_coef: float
) -> torch.Tensor:
    """Rewards (B, T): −kl_coef · (log π − log π_ref) at each token (k1), plus the score at the last real one."""
    rewards_BT = torch.where(mask_BT, -kl_coef * (logp_BT - logp_ref_BT), 0)
    last_B1 = (mask_BT.sum(-1, keepdim=True) - 1).clamp_min(0)
    return rewards_BT.scatter_add(-1, last_B1, score_B.to(rewards_BT.dtype).unsqueeze(-1))


def generalized_advantages(
    rewards_BT: torch.Tensor, values_BT: torch.Tensor, mask_BT: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(advantages_BT, returns_BT) by GAE; the value after the last real token is 0, as are both at padding.

    `values_BT[:, t]` is the value of the state *before* token t.
    """
    values_BT = torch.where(mask_BT, values_BT, 0)
    advantages_BT = torch.zeros_like(values_BT)
    next_value_B = torch.zeros_like(values_BT[:, 0])
    running_B = torch.zeros_like(next_value_B)
    for t in reversed(range(values_BT.shape[1])):
        delta_B = rewards_BT[:, t] + gamma * next_value_B - values_BT[:, t]
        running_B = torch.where(mask_BT[:, t], delta_B + gamma * lam * running_B, 0)
        advantages_BT[:, t] = running_B
        next_value_B = values_BT[:, t]
    return advantages_BT, advantages_BT + values_BT


def whiten(x_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """(x with mean 0 and biased variance 1 over the real tokens and 0 at padding, whether x was constant).

    A constant x (up to rounding) gives exactly 0 everywhere.
    """
    mean = masked_mean(x_BT, mask_BT)
    centred_BT = torch.where(mask_BT, x_BT - mean, 0)
    deviation = masked_mean(centred_BT.square(), mask_BT).sqrt()
    rounding = ROUNDING * torch.where(mask_BT, x_BT, 0).abs().max()
    if deviation <= rounding:
        return torch.zeros_like(x_BT), True
    return centred_BT / deviation, False


@dataclass(frozen=True)
class KL:
    """Estimators of KL(π ‖ π_ref) from samples of π, per token; k3 is unbiased and never negative."""

    k1_BT: torch.Tensor
    k2_BT: torch.Tensor
    k3_BT: torch.Tensor


def kl_estimators(logp_BT: torch.Tensor, logp_ref_BT: torch.Tensor) -> KL:
    """Schulman's k1 = d, k2 = d²/2 and k3 = e^(−d) − 1 + d, with d = log π − log π_ref."""
    d_BT = logp_BT - logp_ref_BT
    return KL(d_BT, d_BT.square() / 2, torch.expm1(-d_BT) + d_BT)


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token loss, probability ratio new/old, and where the clipped branch was taken."""

    loss_BT: torch.Tensor
    ratio_BT: torch.Tensor
    clipped_BT: torch.Tensor


def policy_loss(
    logp_new_BT: torch.Tensor, logp_old_BT: torch.Tensor, advantages_BT: torch.Tensor, *, clip: float
) -> PolicyLoss:
    """max(−A·ratio, −A·clamp(ratio, 1 − clip, 1 + clip)) per token; the caller masks and normalises."""
    log_ratio_BT = (logp_new_BT - logp_old_BT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_BT = log_ratio_BT.exp()
    free_BT = -advantages_BT * ratio_BT
    clipped_BT = -advantages_BT * ratio_BT.clamp(1 - clip, 1 + clip)
    return PolicyLoss(torch.maximum(free_BT, clipped_BT), ratio_BT, clipped_BT > free_BT)


def value_loss(
    values_new_BT: torch.Tensor, values_old_BT: torch.Tensor, returns_BT: torch.Tensor, *, clip: float
) -> torch.Tensor:
    """½·max((v − R)², (v_clipped − R)²) per token (B, T), with v kept within ±`clip` of its old value."""
    near_BT = values_old_BT + (values_new_BT - values_old_BT).clamp(-clip, clip)
    return torch.maximum((values_new_BT - returns_BT).square(), (near_BT - returns_BT).square()) / 2


def adapted_kl_coef(coef: float, kl: float, *, target: float, horizon: int, num_samples: int) -> float:
    """The next KL coefficient (Ziegler et al. 2019): moved by at most 20 % of num_samples / horizon."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)


def log_probs_and_entropy(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probability of the targets, entropy), each (B, T) in fp32, of softmax(logits / temperature).

    The entropy carries no gradient: it is logged, not optimised.
    """
    logp_BTV = torch.log_softmax(logits_BTV.float() / temperature, -1)
    target_BT = logp_BTV.gather(-1, targets_BT.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        entropy_BT = -(logp_BTV.exp() * logp_BTV).sum(-1)
    return target_BT, entropy_BT
