"""Who takes part in PPO: actor and critic (trained), reference and reward (frozen), and the prompts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dschat_core.chat_template import ChatTokenizer, fit_prompt, load_tokenizer
from dschat_core.cluster.job import Job
from dschat_core.config import PpoConfig
from dschat_core.data.shards import ShardReader
from dschat_core.errors import ConfigError
from dschat_core.train import engine as ranks
from dschat_core.train.ds_config import resolve_precision
from dschat_core.train.metrics import PhaseTimer
from dschat_core.train.reward_model import RewardModel
from dschat_core.train.rollouts import Prompt, Rollout
from dschat_core.train.value_model import ValueModel

GPU_MICRO_BATCH_SIZE = 8
REWARD_ROWS = 64

Scorer = Callable[[Sequence[Rollout], Sequence[Prompt]], list[float]]
"""Scores of whole replies; a row's `prompt_id` is the index of its prompt."""


@dataclass(frozen=True)
class Players:
    """Everything an iteration needs. `policy` is the Hugging Face model inside the actor's engine."""

    actor: Any
    critic: Any
    policy: Any
    reference: Any
    score: Scorer
    tokenizer: ChatTokenizer
    prompts: list[Prompt]
    heldout_prompts: list[Prompt]
    micro_batch_size: int
    num_parameters: int

    @property
    def eos_id(self) -> int:
        """The token that ends a reply."""
        return self.tokenizer.end_of_turn_id

    @property
    def pad_id(self) -> int:
        """Fills up short rows; hidden by the masks."""
        return self.tokenizer.pad_id

    def decode(self, reply: np.ndarray) -> str:
        """The reply as text."""
        return self.tokenizer.decode(reply.tolist())


def load_players(job: Job, section: PpoConfig, timer: PhaseTimer) -> Players:
    """Load all models and prompts, and build the two engines.

    Raises:
        ConfigError: no usable prompt, or a reward function that cannot be imported.
    """
    tokenizer = load_tokenizer(job.input("tokenizer"))
    on_gpu = ranks.device().type == "cuda"
    precision = resolve_precision(section.precision, section.runtime.zero_stage, on_gpu=on_gpu)
    dtype = ranks.DTYPES[precision]
    policy: Any = AutoModelForCausalLM.from_pretrained(job.input("model"), dtype=torch.float32)
    reference: Any = AutoModelForCausalLM.from_pretrained(job.input("model"), dtype=dtype)
    reference.to(ranks.device())
    reward = RewardModel.load(job.input("reward_model")) if "reward_model" in job.inputs else None
    value_model = _value_model(job.input("model"), reward)
    score = _model_scorer(reward, tokenizer.pad_id) if reward else _function_scorer(section, tokenizer)

    share = math.ceil(section.minibatch_size / ranks.world_size())
    wanted = section.runtime.micro_batch_size
    micro_batch_size = min(share, (GPU_MICRO_BATCH_SIZE if on_gpu else share) if wanted == "auto" else wanted)
    engines = [
        ranks.build_engine(
            model,
            section,
            section.runtime,
            precision=precision,
            micro_batch_size=micro_batch_size,
            accumulation=math.ceil(share / micro_batch_size),
        )
        for model in (policy, value_model)
    ]
    ranks.time_collectives(timer)
    reference.requires_grad_(False)
    # Dropout stays off, in the update too: the ratio of new to old probabilities must come from the weights alone.
    for model in (policy, value_model, reference):
        model.eval()
    return Players(
        actor=engines[0],
        critic=engines[1],
        policy=policy,
        reference=reference,
        score=score,
        tokenizer=tokenizer,
        prompts=_prompts(job.input("prompts"), tokenizer, section, required=True),
        heldout_prompts=_prompts(job.input("prompts_heldout"), tokenizer, section, required=False),
        micro_batch_size=micro_batch_size,
        num_parameters=sum(parameter.numel() for parameter in reference.parameters()),
    )


def _value_model(sft: Path, reward: RewardModel | None) -> ValueModel:
    """The critic, started from the reward model (its head scaled to normalised scores), else from sft at zero."""
    if reward is None:
        return ValueModel(AutoModelForCausalLM.from_pretrained(sft, dtype=torch.float32).base_model)
    import copy

    model = copy.deepcopy(reward.model).float()
    weight = model.score.weight.detach() / reward.std
    return ValueModel(model.base_model, weight=weight, bias=-reward.mean / reward.std)


def _prompts(folder: Path, tokenizer: ChatTokenizer, section: PpoConfig, *, required: bool) -> list[Prompt]:
    reader = ShardReader(folder)
    prompts = []
    for row in range(len(reader)):
        messages = reader.meta[row]["messages"] if reader.meta else []
        ids = reader.tokens(row)
        if len(ids) > section.max_prompt_tokens:
            fitted = fit_prompt(tokenizer, messages, section.max_prompt_tokens)
            if fitted is None:
                continue
            ids, messages = fitted
        prompts.append(Prompt(ids, messages))
    if len(prompts) < len(reader):
        ranks.log(
            f"{len(reader) - len(prompts)} prompts of {folder.name} exceed ppo.max_prompt_tokens and are left out"
        )
    if required and not prompts:
        raise ConfigError(
            f"none of {len(reader)} prompts fits ppo.max_prompt_tokens={section.max_prompt_tokens}",
            where=str(folder),
            fix="raise ppo.max_prompt_tokens or add shorter prompts to data.prompts",
        )
    return prompts


# ── rewards ─────────────────────────────────────────────────────────────────────────────────────────────


def _model_scorer(reward: RewardModel, pad_id: int) -> Scorer:
    """Normalised scores of the reward model, read at each row's last real token."""

    def score(rows: Sequence[Rollout], _prompts: Sequence[Prompt]) -> list[float]:
        scores = [0.0] * len(rows)
        by_length = sorted(range(len(rows)), key=lambda i: rows[i].num_tokens)
        for start in range(0, len(rows), REWARD_ROWS):
            part = by_length[start : start + REWARD_ROWS]
            lengths_B = torch.tensor([rows[i].num_tokens for i in part])
            ids_BT = torch.full((len(part), int(lengths_B.max())), pad_id)
            for place, i in enumerate(part):
                ids_BT[place, : rows[i].num_tokens] = torch.from_numpy(np.concatenate([rows[i].prompt, rows[i].reply]))
            mask_BT = torch.arange(ids_BT.shape[1]) < lengths_B.unsqueeze(-1)
            found_B = reward.score(ids_BT.to(ranks.device()), mask_BT.to(ranks.device()))
            for i, value in zip(part, found_B.tolist(), strict=True):
                scores[i] = value
        return scores

    return score


def _function_scorer(section: PpoConfig, tokenizer: ChatTokenizer) -> Scorer:
    """The user's `function(prompts, replies)`: lists of messages and of reply texts, one score back per reply."""
    path = section.reward_function or ""
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"ppo.reward_function={path!r} cannot be imported",
            where="ppo.reward_function",
            why=str(error),
            fix="name an importable module:function; its folder must be on PYTHONPATH",
        ) from error

    def score(rows: Sequence[Rollout], prompts: Sequence[Prompt]) -> list[float]:
        replies = [tokenizer.decode(row.reply.tolist()) for row in rows]
        try:
            scores = [float(value) for value in function([prompts[row.prompt_id].messages for row in rows], replies)]
        except Exception as error:
            raise ConfigError(
                f"the reward function {path} failed: {type(error).__name__}: {error}",
                where="ppo.reward_function",
                fix=f"mend {module}; the run continues from its last checkpoint",
            ) from error
        if len(scores) != len(rows):
            raise ConfigError(
                f"the reward function {path} returned {len(scores)} scores for {len(rows)} replies",
                where="ppo.reward_function",
                fix="return one number per reply, in order",
            )
        return scores

    return score
