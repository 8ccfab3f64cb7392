"""PPO's critic: a transformer of its own with a scalar head, one value per reply token.

Legend: B rows, L prompt and reply, T reply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dschat_core.train.rollouts import Batch


class ValueModel(nn.Module):
    """The value of the state before each reply token."""

    def __init__(self, backbone: Any, *, weight: torch.Tensor | None = None, bias: float = 0.0) -> None:
        """Take a Llama-like backbone (no LM head); without `weight` (1, hidden) the head starts at zero."""
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, 1)
        with torch.no_grad():
            self.head.bias.fill_(bias)
            if weight is None:
                self.head.weight.zero_()
            else:
                self.head.weight.copy_(weight)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Values (B, T), fp32."""
        hidden_BLD = self.backbone(
            input_ids=batch.ids_BL, attention_mask=batch.mask_BL, position_ids=batch.position_BL, use_cache=False
        ).last_hidden_state
        before_BTD = hidden_BLD[:, -batch.reply_BT.shape[1] - 1 : -1]
        values_BT: torch.Tensor = self.head(before_BTD).squeeze(-1).float()
        return values_BT
