"""Pretraining: next-token prediction on plain text, from a fresh Llama or a base model."""

from __future__ import annotations

from dschat_core.artifacts import Product
from dschat_core.chat_template import load_tokenizer
from dschat_core.cluster.job import Job
from dschat_core.config import PretrainingConfig
from dschat_core.train.models import load_causal, new_llama
from dschat_core.train.next_token import train_next_token


def pretraining(job: Job) -> Product:
    """Train on part `text`; returns parts `model` and `metrics`. Run by every rank."""
    section: PretrainingConfig = job.config()
    tokenizer = load_tokenizer(job.input("tokenizer"))
    if "base_model" in job.inputs:
        model = load_causal(job.input("base_model"), tokenizer, max_length=section.max_length, seed=section.seed)
    else:
        model = new_llama(section.model, tokenizer, seed=section.seed)
    return train_next_token(job, section, model, train_part="text", heldout_part="text_heldout")
