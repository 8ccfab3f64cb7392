"""Training a byte-level BPE and saving it as a Hugging Face tokenizer folder with our chat template."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from dschat_core.chat_template import CHAT_TEMPLATE, DOCUMENT_END, PAD, SPECIAL_TOKENS, TURN_END

# Set explicitly, or every fork after the first batch prints a warning and turns the threads off.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A byte-level BPE: any text round-trips, and the same texts give the same tokenizer.

    Args:
        vocab_size: entries at most, the 256 bytes and the special tokens included.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_length: int) -> list[str]:
    """Write the folder that both `load_tokenizer` and Hugging Face's `AutoTokenizer` read; returns the file names."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": TURN_END,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in (TURN_END, PAD)],
        "clean_up_tokenization_spaces": False,
        "document_end_token": DOCUMENT_END,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
