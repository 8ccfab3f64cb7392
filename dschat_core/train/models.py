"""The models that training starts from: a fresh Llama, a causal model from a folder, or one with a scalar head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from dschat_core.chat_template import ChatTokenizer
from dschat_core.config import ModelConfig
from dschat_core.errors import ConfigError
from dschat_core.model_folder import model_config, tensor_names
from dschat_core.train.engine import seed_torch


def new_llama(config: ModelConfig, tokenizer: ChatTokenizer, *, seed: int) -> Any:
    """A randomly initialised Llama with the tokenizer's vocabulary; the same weights for the same seed."""
    seed_torch(seed, "pretraining", "initialisation")
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads or config.num_heads,
            max_position_embeddings=config.context_length,
            tie_word_embeddings=config.tie_embeddings,
            initializer_range=config.init_std,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            bos_token_id=tokenizer.document_start_id,
            eos_token_id=tokenizer.end_of_turn_id,
            pad_token_id=tokenizer.pad_id,
        )
    )


def load_causal(folder: Path, tokenizer: ChatTokenizer, *, max_length: int, seed: int) -> Any:
    """A causal model from safetensors, its vocabulary extended to the tokenizer's where it is smaller.

    Raises:
        ConfigError: no safetensors weights, or `max_length` exceeds the model's context.
    """
    _check(folder, max_length)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
    return _fitted(model, tokenizer, seed)


def load_with_scalar_head(folder: Path, tokenizer: ChatTokenizer, *, max_length: int, seed: int) -> Any:
    """The transformer of a causal model under a new head that gives one score per position.

    The head is drawn from N(0, 1/(hidden size + 1)) as in Stiennon et al. 2020, so that first scores have a spread of
    about one whatever the width; the head of a folder that has one is kept.
    """
    _check(folder, max_length)
    seed_torch(seed, "reward", "initialisation")
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, use_safetensors=True
    )
    if "score.weight" not in tensor_names(folder):
        with torch.no_grad():
            model.score.weight.normal_(std=(model.config.hidden_size + 1) ** -0.5)
    return _fitted(model, tokenizer, seed)


def _fitted(model: Any, tokenizer: ChatTokenizer, seed: int) -> Any:
    if model.config.vocab_size < tokenizer.vocab_size:
        seed_torch(seed, "vocabulary")
        model.resize_token_embeddings(tokenizer.vocab_size)
    model.config.pad_token_id = tokenizer.pad_id
    # An embedding whose padding doubles as the end of a document would never be trained (its gradient is dropped).
    model.get_input_embeddings().padding_idx = None
    return model


def _check(folder: Path, max_length: int) -> None:
    context = model_config(folder).get("max_position_embeddings")
    if isinstance(context, int) and max_length > context:
        raise ConfigError(
            f"max_length={max_length} exceeds the model's context of {context}",
            where=str(folder / "config.json"),
            fix=f"set max_length <= {context} or choose another base model",
        )
    tensor_names(folder)
