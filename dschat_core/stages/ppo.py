"""PPO: sample replies, score them, and move the policy towards better ones without straying from sft.

One iteration, in the order of the code below:

    1 sample     a reply to each prompt, from the policy as it stands
    2 score      log-probabilities under policy and reference, values, and the reward of each whole reply
    3 penalise   replies that did not end by themselves
    4 reward     −kl_coef · (log π − log π_ref) at each token, plus the score at the last one
    5 advantages GAE, whitened over all replies of the iteration
    6 update     `ppo_epochs` passes of minibatches over them: clipped policy and value losses; in the first
                 `critic_warmup` iterations the value loss alone
    7 log        and, every so often, held-out reward, sample replies and a checkpoint

Departures from the papers (Schulman et al. 2017, Ziegler et al. 2019): the value network is a transformer of its own,
with its own optimizer, started from the reward model. That one knows nothing of replies that are still going on, and
its first advantages would favour ending early: hence `critic_warmup` (Yuan et al. 2025 found the same collapse).
Losses are means over all reply tokens of a minibatch, not means of rows; advantages are whitened once per iteration,
not per minibatch; dropout is off everywhere.

Replies are dealt to the ranks for sampling and scoring, then gathered: every rank computes the same rewards and
advantages and takes its share of each minibatch, so the result means the same on any number of ranks. All randomness
is derived from (seed, iteration, slot, prompt) and checkpoints lie between iterations: a resumed run repeats the
interrupted iteration exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dschat_core.artifacts import Product
from dschat_core.cluster.job import Job
from dschat_core.config import PpoConfig
from dschat_core.data.batches import permutation
from dschat_core.errors import NumericalError, PreemptedError
from dschat_core.train import engine as ranks
from dschat_core.train import ppo_math
from dschat_core.train.checkpoint import load_newest, prune, save_checkpoint
from dschat_core.train.generate import sample_replies
from dschat_core.train.metrics import MetricsLog, PhaseTimer
from dschat_core.train.ppo_setup import Players, load_players
from dschat_core.train.rollouts import Batch, Rollout, RolloutLog, collate, pad_right, reply_log_probs

# Which random stream a seed belongs to, besides the numbers of iteration, slot and prompt.
SAMPLING, MINIBATCHES, HELD_OUT = range(3)

SCORING_ROWS = 64
MAX_SKIPPED_IN_A_ROW = 10


@dataclass
class Progress:
    """What one iteration hands to the next, besides the two engines; saved in every checkpoint."""

    kl_coef: float
    num_tokens: int = 0
    num_constant: int = 0
    num_skipped: int = 0
    skipped_in_a_row: int = 0
    first_heldout_reward: float | None = None
    last_heldout_reward: float | None = None


def ppo(job: Job) -> Product:
    """Train the policy; returns parts `model`, `metrics` and `rollouts`."""
    section: PpoConfig = job.config()
    timer = PhaseTimer()
    players = load_players(job, section, timer)
    engines = {"actor": players.actor, "critic": players.critic}
    checkpoints, identity = Path(job.state_dir), {"stage": job.stage, "key": job.key}
    progress = Progress(kl_coef=section.kl_coef)
    resumed = load_newest(checkpoints, engines, identity=identity)
    done = 0
    if resumed is not None:
        done, state = resumed
        progress = Progress(**state["progress"])
        ranks.log(f"resumed from step {done}")

    main = ranks.is_main()
    metrics_path, rollouts_path = job.metrics_path, Path(job.state_dir) / "rollouts.jsonl"
    fields: dict[str, Any] = {}
    with (
        MetricsLog(metrics_path if main else None, "ppo", done, section.num_iterations) as metrics,
        RolloutLog(rollouts_path if main else None, done, players.decode) as rollout_log,
    ):
        if done == 0:
            before = held_out(players, section, timer)
            progress.first_heldout_reward = before.get("heldout_reward")
            metrics.log(0, **before)
        timer.take()
        for iteration in range(done + 1, section.num_iterations + 1):
            mine = sample(players, section, iteration, timer)  # 1
            score(players, section, mine, timer)  # 2
            with timer.phase("comm"):
                rollouts = sorted(
                    (row for share in ranks.gather_objects(mine) for row in share), key=lambda row: row.slot
                )
            with timer.phase("advantages"):
                fields = advantages(section, rollouts, progress)  # 3, 4, 5
            fields |= update(players, section, rollouts, iteration, progress, timer)  # 6

            # 7
            last = iteration == section.num_iterations
            if last or iteration % section.eval_every == 0:
                fields |= held_out(players, section, timer)
                progress.last_heldout_reward = fields.get("heldout_reward")
            if last or iteration % section.rollouts_every == 0:
                rollout_log.write(iteration, rollouts, players.prompts)
            if section.kl_controller == "adaptive":
                progress.kl_coef = ppo_math.adapted_kl_coef(
                    progress.kl_coef,
                    fields["kl"],
                    target=section.kl_target,
                    horizon=section.kl_horizon,
                    num_samples=len(rollouts),
                )
            stop = ranks.all_reduce_sum([ranks.stop_requested()])[0] > 0
            if last or stop or iteration % section.runtime.checkpoint_every == 0:
                with timer.phase("checkpoint"):
                    state = {"progress": vars(progress)}
                    save_checkpoint(checkpoints, iteration, engines, state, token=job.token, identity=identity)
                    if ranks.is_main():
                        prune(checkpoints, section.runtime.keep_checkpoints)
            wall_s, phases = timer.take()
            metrics.log(iteration, **fields, **_speed(rollouts, wall_s, phases))
            if stop and not last:
                raise PreemptedError(
                    f"asked to stop; iteration {iteration} is saved", where="ppo", fix="run the same command again"
                )

    return _export(job, players, progress, done, fields)


# ── 1 and 2: sampling and scoring ───────────────────────────────────────────────────────────────────────


def sample(players: Players, section: PpoConfig, iteration: int, timer: PhaseTimer) -> list[Rollout]:
    """This rank's share of the iteration's prompts, each with a reply by the current policy."""
    with timer.phase("generation"):
        first, num_prompts = (iteration - 1) * section.rollout_batch_size, len(players.prompts)
        chosen = []
        for slot in range(ranks.rank(), section.rollout_batch_size, ranks.world_size()):
            epoch, place = divmod(first + slot, num_prompts)
            chosen.append((slot, permutation(section.seed, epoch, num_prompts)(place)))
        replies = _reply(
            players,
            section,
            [players.prompts[prompt].ids for _, prompt in chosen],
            [(section.seed, SAMPLING, iteration, slot, prompt) for slot, prompt in chosen],
        )
    return [
        Rollout(slot, prompt, players.prompts[prompt].ids, reply, ended=bool(reply[-1] == players.eos_id))
        for (slot, prompt), reply in zip(chosen, replies, strict=True)
    ]


def _reply(
    players: Players, section: PpoConfig, prompts: list[np.ndarray], seeds: list[tuple[int, ...]]
) -> list[np.ndarray]:
    with _whole_model(players.actor) as model:
        return sample_replies(
            model,
            prompts,
            reply_limit=section.reply_limit,
            temperature=section.temperature,
            eos_id=players.eos_id,
            pad_id=players.pad_id,
            seeds=seeds,
        )


@contextmanager
def _whole_model(engine: Any) -> Iterator[Any]:
    """The engine's model with all its weights on this rank, for generation."""
    if engine.zero_optimization_stage() < 3:
        yield engine.module
        return
    from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

    with unwrap_model_for_generation(engine) as unwrapped:
        yield unwrapped.module


def score(players: Players, section: PpoConfig, rows: list[Rollout], timer: PhaseTimer) -> None:
    """Fill in log-probabilities, values and the score of each reply.

    The old log-probabilities come from the same forward that the update uses, not from the sampler: the first
    minibatch then sees a ratio of 1 up to rounding.
    """
    with timer.phase("scoring"), torch.no_grad():
        share = math.ceil(section.rollout_batch_size / ranks.world_size())
        for start in range(0, share, SCORING_ROWS):
            # Under ZeRO 3 every forward is a collective: ranks with fewer rows take part with an empty one.
            part = rows[start : start + SCORING_ROWS]
            batch = collate(part, pad_id=players.pad_id, device=ranks.device())
            logp_BT, _ = reply_log_probs(players.actor, batch, section.temperature)
            logp_ref_BT, _ = reply_log_probs(players.reference, batch, section.temperature)
            values_BT = players.critic(batch)
            for i, row in enumerate(part):
                length = len(row.reply)
                row.logp = logp_BT[i, :length].cpu().numpy()
                row.logp_ref = logp_ref_BT[i, :length].cpu().numpy()
                row.values = values_BT[i, :length].cpu().numpy()
        for row, value in zip(rows, players.score(rows, players.prompts), strict=True):
            row.score = value


def held_out(players: Players, section: PpoConfig, timer: PhaseTimer) -> dict[str, float]:
    """Mean score and length of replies to held-out prompts, with the same random numbers each time."""
    prompts = players.heldout_prompts[: section.eval_prompts]
    if not prompts:
        return {}
    with timer.phase("evaluation"):
        mine = range(ranks.rank(), len(prompts), ranks.world_size())
        seeds: list[tuple[int, ...]] = [(section.seed, HELD_OUT, index) for index in mine]
        replies = _reply(players, section, [prompts[index].ids for index in mine], seeds)
        rows = [
            Rollout(index, index, prompts[index].ids, reply, ended=bool(reply[-1] == players.eos_id))
            for index, reply in zip(mine, replies, strict=True)
        ]
        scores = players.score(rows, prompts)
        reward, tokens = ranks.all_reduce_sum([sum(scores), sum(len(reply) for reply in replies)])
    return {"heldout_reward": reward / len(prompts), "heldout_reply_length": tokens / len(prompts)}


# ── 3, 4 and 5: rewards and advantages ──────────────────────────────────────────────────────────────────


def advantages(section: PpoConfig, rollouts: Sequence[Rollout], progress: Progress) -> dict[str, float]:
    """Give every row its advantages and returns; returns what to log. Raises NumericalError for a score of NaN."""
    width = max(len(row.reply) for row in rollouts)
    lengths_B = torch.tensor([len(row.reply) for row in rollouts])
    mask_BT = torch.arange(width) < lengths_B.unsqueeze(-1)
    # On the CPU and in float64, once for all rows: cheap, and the same on every rank and device.
    logp_BT, logp_ref_BT, values_BT = (
        pad_right([getattr(row, name) for row in rollouts], width).double() for name in ("logp", "logp_ref", "values")
    )
    score_B = torch.tensor([row.score for row in rollouts], dtype=torch.float64)
    ended_B = torch.tensor([row.ended for row in rollouts])
    if not torch.isfinite(score_B).all():
        row = next(row for row in rollouts if not math.isfinite(row.score))
        raise NumericalError(
            f"the score of a reply is {row.score}",
            where=f"ppo, prompt {row.prompt_id}",
            why="the reward model or reward function gave a value that is not finite",
            fix="mend the reward; the run continues from its last checkpoint",
        )

    final_B = ppo_math.final_scores(score_B, ended_B, clip=section.score_clip, penalty=section.missing_eos_penalty)  # 3
    rewards_BT = ppo_math.token_rewards(logp_BT, logp_ref_BT, mask_BT, final_B, kl_coef=progress.kl_coef)  # 4
    advantages_BT, returns_BT = ppo_math.generalized_advantages(
        rewards_BT, values_BT, mask_BT, gamma=section.gamma, lam=section.lam
    )  # 5
    advantages_BT, constant = ppo_math.whiten(advantages_BT, mask_BT)
    for i, row in enumerate(rollouts):
        row.advantages = advantages_BT[i, : len(row.reply)].float().numpy()
        row.returns = returns_BT[i, : len(row.reply)].float().numpy()

    progress.num_tokens += int(lengths_B.sum())
    progress.num_constant += constant
    kl = ppo_math.kl_estimators(logp_BT, logp_ref_BT)
    residual = ppo_math.masked_mean((returns_BT - values_BT).square(), mask_BT)
    spread = ppo_math.masked_mean((returns_BT - ppo_math.masked_mean(returns_BT, mask_BT)).square(), mask_BT)
    return {
        "reward_mean": float(score_B.mean()),
        "reward_std": float(score_B.std(correction=0)),
        "reward_final": float(final_B.mean()),
        "kl": float(torch.where(mask_BT, kl.k1_BT, 0).sum(-1).mean()),
        "kl_k3": float(torch.where(mask_BT, kl.k3_BT, 0).sum(-1).mean()),
        "kl_coef": progress.kl_coef,
        "reply_length": float(lengths_B.double().mean()),
        "missing_eos_share": float((~ended_B).double().mean()),
        "explained_variance": float(1 - residual / spread) if spread > 0 else 0.0,
        "constant_advantages": progress.num_constant,
        "tokens": progress.num_tokens,
    }


# ── 6: the update ───────────────────────────────────────────────────────────────────────────────────────


def update(
    players: Players,
    section: PpoConfig,
    rollouts: Sequence[Rollout],
    iteration: int,
    progress: Progress,
    timer: PhaseTimer,
) -> dict[str, float]:
    """Passes of minibatches over the rollouts; returns the means of what to log.

    Raises:
        NumericalError: many optimizer steps in a row had a gradient that is not finite.
    """
    sums = _Sums()
    steps_per_epoch = math.ceil(len(rollouts) / section.minibatch_size)
    total_steps = section.num_iterations * section.ppo_epochs * steps_per_epoch
    step = (iteration - 1) * section.ppo_epochs * steps_per_epoch
    first_log_ratio_max = lr = 0.0
    policy_learns = iteration > section.critic_warmup
    with timer.phase("update"):
        for epoch in range(section.ppo_epochs):
            shuffled = np.random.default_rng((section.seed, MINIBATCHES, iteration, epoch)).permutation(len(rollouts))
            for start in range(0, len(rollouts), section.minibatch_size):
                step += 1
                rows = [rollouts[i] for i in shuffled[start : start + section.minibatch_size]]
                num_tokens = sum(len(row.reply) for row in rows)
                # Long and short rows are dealt evenly, and each micro-batch has rows of one length.
                mine = sorted(rows, key=lambda row: (row.num_tokens, row.slot))[ranks.rank() :: ranks.world_size()]
                share = math.ceil(len(rows) / ranks.world_size())
                starts = range(0, share, players.micro_batch_size)
                for first in starts:
                    part = mine[first : first + players.micro_batch_size]
                    batch = collate(part, pad_id=players.pad_id, device=ranks.device())
                    is_last = first == starts[-1]
                    _value_step(players, section, part, batch, num_tokens, is_last=is_last, sums=sums)
                    if policy_learns:
                        log_ratio_max = _policy_step(
                            players, section, part, batch, num_tokens, is_last=is_last, sums=sums
                        )
                        if epoch == 0 and start == 0:
                            first_log_ratio_max = max(first_log_ratio_max, log_ratio_max)
                lr = ranks.learning_rate(section, step, total_steps)
                critic_lr = ranks.learning_rate(section, step, total_steps, peak=section.critic_learning_rate)
                with timer.phase("optimizer"):
                    critic = ranks.optimizer_step(players.critic, critic_lr)
                    sums.add(critic_grad_norm=critic.grad_norm)
                    skipped = critic.skipped
                    if policy_learns:
                        actor = ranks.optimizer_step(players.actor, lr)
                        sums.add(grad_norm=actor.grad_norm)
                        skipped = skipped or actor.skipped
                progress.num_skipped += skipped
                progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if skipped else 0
                if progress.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
                    raise NumericalError(
                        f"{progress.skipped_in_a_row} optimizer steps in a row had a gradient that is not finite",
                        where=f"ppo, iteration {iteration}",
                        why="the policy or the value network has diverged",
                        fix="lower ppo.learning_rate or ppo.critic_learning_rate, or raise ppo.kl_coef",
                    )
    with timer.phase("comm"):
        totals = sums.reduce()
        first_log_ratio_max = max(ranks.gather_objects(first_log_ratio_max))
    steps, tokens = steps_per_epoch * section.ppo_epochs, totals["num_tokens"]
    fields = {
        "value_loss": totals["value_loss"] / tokens,
        "critic_grad_norm": totals["critic_grad_norm"] / ranks.world_size() / steps,
        "skipped_steps": progress.num_skipped,
    }
    if policy_learns:
        fields |= {
            "loss": totals["policy_loss"] / tokens,
            "policy_loss": totals["policy_loss"] / tokens,
            "entropy": totals["entropy"] / tokens,
            "clip_share": totals["clipped"] / tokens,
            "update_kl": totals["update_kl"] / tokens,
            "first_log_ratio_max": first_log_ratio_max,
            "grad_norm": totals["grad_norm"] / ranks.world_size() / steps,
            "lr": lr,
        }
    return fields


def _policy_step(
    players: Players,
    section: PpoConfig,
    rows: Sequence[Rollout],
    batch: Batch,
    num_tokens: int,
    *,
    is_last: bool,
    sums: _Sums,
) -> float:
    """Forward and backward of the policy on one micro-batch; returns the largest |log-ratio|.

    `num_tokens` counts the reply tokens of the whole minibatch, over all ranks: the loss is a mean over them.
    """
    mask_BT = batch.reply_mask_BT
    logp_old_BT, advantages_BT = batch.column(rows, "logp"), batch.column(rows, "advantages")
    logp_BT, entropy_BT = reply_log_probs(players.actor, batch, section.temperature)
    policy = ppo_math.policy_loss(logp_BT, logp_old_BT, advantages_BT, clip=section.clip)
    loss_sum = torch.where(mask_BT, policy.loss_BT, 0).sum()
    ranks.backward(players.actor, loss_sum, count=num_tokens, is_last=is_last)
    with torch.no_grad():
        log_ratio_BT = torch.where(mask_BT, logp_BT - logp_old_BT, 0)
        sums.add(
            policy_loss=float(loss_sum),
            entropy=float(torch.where(mask_BT, entropy_BT, 0).sum()),
            clipped=float((policy.clipped_BT & mask_BT).sum()),
            update_kl=float((torch.expm1(log_ratio_BT) - log_ratio_BT).sum()),
        )
        return float(log_ratio_BT.abs().max())


def _value_step(
    players: Players,
    section: PpoConfig,
    rows: Sequence[Rollout],
    batch: Batch,
    num_tokens: int,
    *,
    is_last: bool,
    sums: _Sums,
) -> None:
    """Forward and backward of the critic on one micro-batch; its loss is a mean over `num_tokens` too."""
    mask_BT = batch.reply_mask_BT
    value_BT = ppo_math.value_loss(
        players.critic(batch), batch.column(rows, "values"), batch.column(rows, "returns"), clip=section.value_clip
    )
    loss_sum = torch.where(mask_BT, value_BT, 0).sum()
    ranks.backward(players.critic, loss_sum, count=num_tokens, is_last=is_last)
    sums.add(value_loss=float(loss_sum.detach()), num_tokens=float(mask_BT.sum()))


class _Sums:
    """Named sums over micro-batches, then over ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def reduce(self) -> dict[str, float]:
        names = sorted(self._sums)
        return dict(zip(names, ranks.all_reduce_sum([self._sums[name] for name in names]), strict=True))


# ── 7: the log and the product ──────────────────────────────────────────────────────────────────────────


def _speed(rollouts: Sequence[Rollout], wall_s: float, phases: dict[str, float]) -> dict[str, Any]:
    return {
        "step_s": wall_s,
        "tokens_per_s": sum(len(row.reply) for row in rollouts) / wall_s,
        "samples_per_s": len(rollouts) / wall_s,
        "phases": phases,
    }


def _export(job: Job, players: Players, progress: Progress, resumed_from: int, fields: dict[str, Any]) -> Product:
    out = Path(job.output_dir)
    ranks.export_model(players.actor, players.policy, job.input("tokenizer"), out / "model")
    if ranks.is_main():
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            (out / name).write_bytes((Path(job.state_dir) / name).read_bytes())
    facts: dict[str, Any] = {
        "resumed_from": resumed_from,
        "steps": job.config().num_iterations,
        "tokens": progress.num_tokens,
        "num_parameters": players.num_parameters,
        "num_prompts": len(players.prompts),
        "constant_advantages": progress.num_constant,
        "skipped_steps": progress.num_skipped,
        "heldout_reward_before": progress.first_heldout_reward,
        "heldout_reward": progress.last_heldout_reward,
        **{name: fields[name] for name in ("reward_mean", "kl", "kl_coef", "reply_length") if name in fields},
    }
    model_files = sorted(f"model/{path.name}" for path in (out / "model").iterdir()) if ranks.is_main() else []
    return Product(
        parts={"model": model_files, "metrics": ["metrics.jsonl"], "rollouts": ["rollouts.jsonl"]}, facts=facts
    )
