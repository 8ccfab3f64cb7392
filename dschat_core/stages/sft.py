"""Supervised fine-tuning: next-token prediction on the assistant's tokens of dialogues, end of turn included."""

from __future__ import annotations

from dschat_core.artifacts import Product
from dschat_core.chat_template import load_tokenizer
from dschat_core.cluster.job import Job
from dschat_core.config import SftConfig
from dschat_core.train.models import load_causal
from dschat_core.train.next_token import train_next_token


def sft(job: Job) -> Product:
    """Train input `model` on part `dialogues`; returns parts `model` and `metrics`. Run by every rank."""
    section: SftConfig = job.config()
    tokenizer = load_tokenizer(job.input("tokenizer"))
    model = load_causal(job.input("model"), tokenizer, max_length=section.max_length, seed=section.seed)
    return train_next_token(job, section, model, train_part="dialogues", heldout_part="dialogues_heldout")
