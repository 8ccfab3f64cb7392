"""What a Hugging Face model folder says of itself, read without torch: for checks before anything is launched."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from dschat_core.errors import ConfigError, IntegrityError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
REWARD_HEAD = "score.weight"


def model_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises ConfigError if there is none."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder} is not a Hugging Face model folder",
            where=str(path),
            why=str(error),
            fix="name a folder with config.json",
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object", fix="restore the model folder")
    return found


def context_length(folder: Path) -> int | None:
    """Longest sequence the model was made for, in tokens; None where its config does not say."""
    value = model_config(folder).get("max_position_embeddings")
    return value if isinstance(value, int) else None


def vocab_size(folder: Path) -> int | None:
    """Rows of the model's embedding; None where its config does not say."""
    value = model_config(folder).get("vocab_size")
    return value if isinstance(value, int) else None


def tensor_names(folder: Path) -> set[str]:
    """Names of the weights, from the safetensors header or index.

    Raises:
        ConfigError: there are no safetensors weights (pickled ones are not read).
        IntegrityError: the file is not a safetensors file.
    """
    index, weights = folder / _INDEX, folder / _WEIGHTS
    if index.exists():
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not weights.exists():
        raise ConfigError(
            f"{folder} has no {_WEIGHTS}",
            why="pickled weights can run code when they are read, so only safetensors are",
            fix="save the model with save_pretrained of a current transformers",
        )
    try:
        with weights.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            if size > weights.stat().st_size:
                raise ValueError(f"a header of {size} bytes in a file of {weights.stat().st_size}")
            header = json.loads(file.read(size))
    except (struct.error, ValueError) as error:
        raise IntegrityError(
            f"{weights} is not a safetensors file", why=str(error), fix="restore the model folder"
        ) from None
    return set(header) - {"__metadata__"}


def check_reward_folder(folder: Path) -> None:
    """Refuse a reward model that could only score at random.

    Raises:
        ConfigError: the folder has no scalar head (a causal model, or a checkpoint saved without it).
    """
    architectures = model_config(folder).get("architectures") or []
    if REWARD_HEAD not in tensor_names(folder):
        raise ConfigError(
            f"the reward model has no scalar head: {REWARD_HEAD} is not among its weights",
            where=str(folder),
            why=f"its architecture is {architectures}; a new head would score at random",
            fix="name a sequence-classification model with num_labels=1, for example the reward stage's output",
        )
