"""Batched sampling with a KV cache: used by ppo, evaluation and chat.

A row's random numbers come from its own seed alone, one per position, so that a reply depends neither on its
neighbours in the batch nor on the number of ranks. Prompts are padded on the left and positions count real tokens
only; a row that has ended leaves the batch at once, so that finished replies cost nothing.

Legend: B rows, P prompt tokens (padded), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

BATCH_SIZE = 64


def sample_replies(
    model: Any,
    prompts: Sequence[np.ndarray],
    *,
    reply_limit: int,
    temperature: float,
    eos_id: int,
    pad_id: int,
    seeds: Sequence[tuple[int, ...]],
    batch_size: int = BATCH_SIZE,
) -> list[np.ndarray]:
    """Sample one reply to each prompt.

    Args:
        model: a Hugging Face causal LM; its dropout is off while it samples.
        prompts: token ids, one array of at least one id per row.
        reply_limit: tokens after which a reply is cut off.
        temperature: of the sampling; 0 takes the likeliest token.
        eos_id: the token that ends a reply; it is the last token of a reply that ended by itself.
        pad_id: fills up short prompts; the attention mask hides it, whatever its id.
        seeds: one tuple of non-negative integers per row.
        batch_size: rows sampled at a time.

    Returns:
        Reply token ids (int64) without the prompt, in the order of `prompts`; 1 to `reply_limit` tokens each.
    """
    assert len(prompts) == len(seeds), (len(prompts), len(seeds))
    assert reply_limit >= 1
    assert all(len(prompt) for prompt in prompts)
    replies: list[np.ndarray] = [np.empty(0, np.int64)] * len(prompts)
    # Rows of similar length share a batch: less padding, and the same batches for the same prompts.
    by_length = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for start in range(0, len(by_length), batch_size):
                rows = by_length[start : start + batch_size]
                sampled = _sample_batch(
                    model,
                    [prompts[row] for row in rows],
                    np.stack([uniforms(seeds[row], reply_limit) for row in rows]),
                    temperature=temperature,
                    eos_id=eos_id,
                    pad_id=pad_id,
                )
                for row, reply in zip(rows, sampled, strict=True):
                    replies[row] = reply
    finally:
        model.train(was_training)
    return replies


def uniforms(seed: tuple[int, ...], count: int) -> np.ndarray:
    """The first `count` numbers in [0, 1) of a row's stream; position t gets the same one for any `count`."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).random(count)


def left_pad(prompts: Sequence[np.ndarray], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids_BP int64, mask_BP bool) with every prompt's last token in the last column."""
    width = max(len(prompt) for prompt in prompts)
    ids_BP = np.full((len(prompts), width), pad_id, np.int64)
    mask_BP = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        ids_BP[row, width - len(prompt) :] = prompt
        mask_BP[row, width - len(prompt) :] = True
    return torch.from_numpy(ids_BP), torch.from_numpy(mask_BP)


def positions(mask_BT: torch.Tensor) -> torch.Tensor:
    """Position ids (B, T) that count real tokens from 0; pads get 0, which the mask hides."""
    return (mask_BT.long().cumsum(-1) - 1).clamp_min(0)


def pick(logits_BV: torch.Tensor, uniform_B: torch.Tensor, temperature: float) -> torch.Tensor:
    """Token ids (B,) by the inverse CDF of softmax(logits / temperature) at `uniform_B`; temperature 0: the argmax.

    The CDF is summed in float64: in float32 the tail of a large vocabulary would be lost.
    """
    if temperature == 0:
        return logits_BV.argmax(-1)
    cdf_BV = torch.softmax(logits_BV.float() / temperature, -1).double().cumsum(-1)
    threshold_B1 = (uniform_B * cdf_BV[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cdf_BV, threshold_B1, right=True).squeeze(-1).clamp_max(logits_BV.shape[-1] - 1)


def _sample_batch(
    model: Any,
    prompts: Sequence[np.ndarray],
    uniforms_BT: np.ndarray,
    *,
    temperature: float,
    eos_id: int,
    pad_id: int,
) -> list[np.ndarray]:
    device = next(model.parameters()).device
    ids_BP, mask_BP = (tensor.to(device) for tensor in left_pad(prompts, pad_id))
    uniform_BT = torch.from_numpy(uniforms_BT).to(device)
    replies_BT = torch.full(uniform_BT.shape, pad_id, dtype=torch.int64, device=device)
    num_tokens = np.zeros(len(prompts), np.int64)
    alive = torch.arange(len(prompts), device=device)
    cache = DynamicCache(config=model.config)

    inputs, mask, position = ids_BP, mask_BP, positions(mask_BP)
    for step in range(uniform_BT.shape[1]):
        output = model(
            input_ids=inputs,
            attention_mask=mask,
            position_ids=position,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        token = pick(output.logits[:, -1], uniform_BT[alive, step], temperature)
        replies_BT[alive, step] = token
        num_tokens[alive.cpu().numpy()] = step + 1
        going = token != eos_id
        position = position[:, -1:] + 1
        if not bool(going.all()):
            alive, token, mask, position = alive[going], token[going], mask[going], position[going]
            if not len(alive):
                break
            cache.batch_select_indices(going.nonzero().squeeze(-1))
        inputs = token.unsqueeze(-1)
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], -1)
    tokens = replies_BT.cpu().numpy()
    return [tokens[row, :length] for row, length in enumerate(num_tokens)]
