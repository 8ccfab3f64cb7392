"""Talk to a model of the pipeline; what `dschat chat` runs."""

from __future__ import annotations

from pathlib import Path

from dschat_core.chat_template import fit_prompt, load_tokenizer
from dschat_core.config import Stage
from dschat_core.errors import ConfigError
from dschat_core.runs import artifacts_of, find_run

# The model a person means by a run's name: the last one it has.
PREFERENCE: tuple[Stage, ...] = ("publishing", "ppo", "sft", "pretraining")


def model_folder(name: str, runs: str = "runs") -> Path:
    """The model folder of a run or the folder itself.

    Raises:
        ConfigError: it is neither, or the run has no model yet.
    """
    if (Path(name) / "config.json").is_file():
        return Path(name)
    if (Path(name) / "model" / "config.json").is_file():
        return Path(name) / "model"
    folder = find_run(name, runs)
    artifacts = artifacts_of(folder)
    for stage in PREFERENCE:
        if stage in artifacts:
            return artifacts[stage].part("model").folder()
    raise ConfigError(f"run {name!r} has no model yet", fix=f"dschat resume {folder}")


class Chat:
    """A conversation with one model. Keeps as many of the newest turns as its context holds.

    Args:
        temperature: 0 is greedy.
        reply_limit: longest reply, in tokens.
        seed: seed of the sampling; equal seeds and inputs give equal replies.
    """

    def __init__(self, folder: Path, *, temperature: float, reply_limit: int, seed: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._tokenizer = load_tokenizer(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._temperature, self._seed = temperature, seed
        context = int(self._model.config.max_position_embeddings)
        self._reply_limit = min(reply_limit, context // 2)
        self._prompt_limit = context - self._reply_limit
        self._messages: list[dict[str, str]] = []

    def answer(self, text: str) -> str:
        """The model's reply to the next user message. Raises ConfigError if the message alone is too long."""
        from dschat_core.train.generate import sample_replies

        messages = [*self._messages, {"role": "user", "content": text}]
        fitting = fit_prompt(self._tokenizer, messages, self._prompt_limit)
        if fitting is None:
            raise ConfigError(
                f"the message is longer than the {self._prompt_limit} tokens that this model takes", fix="shorten it"
            )
        prompt, kept = fitting
        (reply,) = sample_replies(
            self._model,
            [prompt],
            reply_limit=self._reply_limit,
            temperature=self._temperature,
            eos_id=self._tokenizer.end_of_turn_id,
            pad_id=self._tokenizer.pad_id,
            seeds=[(self._seed, len(messages))],
        )
        decoded = self._tokenizer.decode([int(i) for i in reply]).strip()
        self._messages = [*kept, {"role": "assistant", "content": decoded}]
        return decoded
