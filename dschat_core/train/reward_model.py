"""A trained reward model as its consumers (ppo, evaluation) see it: ids in, normalised scores out.

Scores are read at the last real token and shifted and scaled so that held-out replies of people have mean 0 and
standard deviation 1; a folder without `reward_normalisation.json` gives raw scores.

Legend: B rows, T tokens (padded on either side).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from dschat_core.errors import ConfigError
from dschat_core.model_folder import check_reward_folder

NORMALISATION = "reward_normalisation.json"


class RewardModel(nn.Module):
    """A sequence-classification model with one label and the normalisation of its scores."""

    def __init__(self, model: Any, *, mean: float = 0.0, std: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.mean, self.std = mean, std

    @classmethod
    def load(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Self:
        """Read a reward folder, for scoring (no dropout, no gradients).

        Raises:
            ConfigError: the folder has no scalar head, more than one label, or a broken normalisation.
        """
        folder = Path(folder)
        check_reward_folder(folder)
        model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, use_safetensors=True)
        if model.config.num_labels != 1:
            raise ConfigError(
                f"the reward model has {model.config.num_labels} labels instead of one",
                where=str(folder),
                fix="name a model with num_labels=1",
            )
        mean, std = _normalisation(folder / NORMALISATION)
        reward = cls(model, mean=mean, std=std).eval()
        return reward.requires_grad_(False)

    @torch.no_grad()
    def score(self, ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor) -> torch.Tensor:
        """Normalised scores (B,), fp32, at the last token that the attention mask marks as real.

        Padding is found by the mask alone: an eos inside the prompt, or one that doubles as padding, changes nothing.
        """
        mask_BT = attention_mask_BT.to(torch.long)
        positions_BT = (mask_BT.cumsum(-1) - 1).clamp_min(0)
        hidden_BTH = self.model.base_model(
            input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False
        ).last_hidden_state
        columns_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        last_B = (columns_T * mask_BT).argmax(-1)
        hidden_BH = hidden_BTH[torch.arange(len(ids_BT), device=ids_BT.device), last_B]
        return (self.model.score(hidden_BH).squeeze(-1).float() - self.mean) / self.std

    def forward(self, ids_BT: torch.Tensor, attention_mask_BT: torch.Tensor) -> torch.Tensor:
        """As `score`."""
        return self.score(ids_BT, attention_mask_BT)


def save_normalisation(folder: Path, mean: float, std: float) -> None:
    """Put the mean and standard deviation of the raw scores beside the model."""
    (folder / NORMALISATION).write_text(json.dumps({"mean": mean, "std": std}) + "\n", encoding="utf-8")


def _normalisation(path: Path) -> tuple[float, float]:
    if not path.exists():
        return 0.0, 1.0
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        mean, std = float(found["mean"]), float(found["std"])
        if not std > 0:
            raise ValueError(f"std={std} is not positive")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            "the reward model's normalisation cannot be used", where=str(path), why=str(error), fix="run reward again"
        ) from None
    return mean, std
