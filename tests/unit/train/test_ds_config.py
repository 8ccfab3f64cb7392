"""DeepSpeed's config: what follows from ours, and what may not be overridden."""

from __future__ import annotations

from typing import Any

import pytest

from dschat_core.config import RuntimeConfig
from dschat_core.errors import ConfigError
from dschat_core.train.ds_config import deepspeed_config, resolve_precision


def build(precision: Any = "fp32", grad_clip: float = 1.0, **runtime: Any) -> dict[str, Any]:
    return deepspeed_config(
        RuntimeConfig(**runtime),
        precision=precision,
        grad_clip=grad_clip,
        world_size=2,
        micro_batch_size=4,
        accumulation=3,
        num_parameters=10_000_000,
    )


def test_knobs_reach_deepspeed() -> None:
    config = build(grad_clip=0.7, zero_stage=3, offload_optimizer=True, offload_param=True)
    assert config["gradient_clipping"] == 0.7
    assert config["train_batch_size"] == 24
    zero = config["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"]) == (3, 10_000_000)
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    assert build("bf16")["bf16"] == {"enabled": True}


def test_extra_adds_and_tunes() -> None:
    extra = {
        "zero_optimization": {"overlap_comm": True, "round_robin_gradients": True},
        "comms_logger": {"enabled": True},
    }
    config = build(deepspeed_extra=extra)
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["zero_optimization"]["round_robin_gradients"] is True
    assert config["zero_optimization"]["stage"] == 1
    assert config["comms_logger"] == {"enabled": True}


@pytest.mark.parametrize(
    ("extra", "path"),
    [
        ({"gradient_clipping": 5.0}, "gradient_clipping"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage"),
        ({"zero_optimization": 3}, "zero_optimization"),
        ({"prescale_gradients": True}, "prescale_gradients"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype"),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"optimizer": {"type": "SGD"}}, "optimizer"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "zero_optimization.offload_param"),
    ],
)
def test_extra_may_not_override_an_owned_key(extra: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path) as caught:
        build(deepspeed_extra=extra)
    assert caught.value.where == f"runtime.deepspeed_extra.{path}"


def test_offload_needs_its_stage() -> None:
    with pytest.raises(ConfigError, match="offload_param needs"):
        build(zero_stage=2, offload_param=True)
    with pytest.raises(ConfigError, match="offload_optimizer needs"):
        build(zero_stage=0, offload_optimizer=True)


def test_precision() -> None:
    assert resolve_precision("auto", 1, on_gpu=False) == "fp32"
    assert resolve_precision("auto", 1, on_gpu=True) == "bf16"
    assert resolve_precision("auto", 0, on_gpu=True) == "fp32"
    with pytest.raises(ConfigError, match="drifts"):
        resolve_precision("bf16", 0, on_gpu=False)
    with pytest.raises(ConfigError, match="GPU"):
        resolve_precision("fp16", 2, on_gpu=False)
