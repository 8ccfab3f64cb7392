"""The one place that builds DeepSpeed's config, and the checks of what it can run.

Gradient clipping, precision, accumulation and ZeRO follow from the typed config. `runtime.deepspeed_extra` adds
settings but may not override an owned one: those decide what a stage computes, and they are part of its recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from dschat_core.config import RuntimeConfig
from dschat_core.errors import ConfigError

Precision = Literal["fp32", "bf16", "fp16"]

# Beyond the keys that are always set: these would change the result or contradict the typed config.
_FORBIDDEN = {
    "amp",
    "bf16",
    "bfloat16",
    "checkpoint",
    "communication_data_type",
    "fp16",
    "optimizer",
    "scheduler",
    "torch_autocast",
    "train_batch_size",
    "zero_optimization.offload_optimizer",
    "zero_optimization.offload_param",
}


def resolve_precision(wanted: Literal["auto", "fp32", "bf16", "fp16"], zero_stage: int, *, on_gpu: bool) -> Precision:
    """The arithmetic of a job, or a ConfigError for a combination that trains wrongly or not at all."""
    if wanted == "auto":
        # bf16 without ZeRO has no fp32 master weights, so stage 0 falls back to exact arithmetic.
        return "bf16" if on_gpu and zero_stage > 0 else "fp32"
    if wanted == "bf16" and zero_stage == 0:
        raise ConfigError(
            "precision=bf16 with runtime.zero_stage=0 keeps no fp32 weights and drifts",
            why="DeepSpeed accumulates bf16 updates in bf16 at stage 0",
            fix="set runtime.zero_stage to 1, 2 or 3, or precision=fp32",
        )
    if wanted == "fp16" and not on_gpu:
        raise ConfigError("precision=fp16 needs a GPU", why="this machine trains on its CPU", fix="set precision=auto")
    return wanted


def deepspeed_config(
    runtime: RuntimeConfig,
    *,
    precision: Precision,
    grad_clip: float,
    world_size: int,
    micro_batch_size: int,
    accumulation: int,
    num_parameters: int,
) -> dict[str, Any]:
    """DeepSpeed's config for one engine.

    Args:
        runtime: ZeRO stage, offload and the extra settings.
        precision: as resolved by `resolve_precision`.
        grad_clip: largest global gradient norm.
        world_size: ranks of the job.
        micro_batch_size: rows per rank and backward.
        accumulation: backwards per optimizer step.
        num_parameters: parameters of the model; bounds the communication buffers.

    Raises:
        ConfigError: offload does not fit the ZeRO stage, or `deepspeed_extra` overrides an owned key.
    """
    stage = runtime.zero_stage
    if runtime.offload_param and stage != 3:
        raise ConfigError(
            f"runtime.offload_param needs runtime.zero_stage=3, not {stage}",
            why="only ZeRO 3 partitions parameters",
            fix="set runtime.zero_stage=3 or runtime.offload_param=false",
        )
    if runtime.offload_optimizer and stage == 0:
        raise ConfigError(
            "runtime.offload_optimizer needs runtime.zero_stage=1, 2 or 3, not 0",
            why="without ZeRO DeepSpeed leaves the optimizer where the model is",
            fix="set runtime.zero_stage=1 or runtime.offload_optimizer=false",
        )
    # The default buckets of 5e8 elements would take 2 GB of a rank's memory for the smallest model.
    bucket = min(max(num_parameters, 1_000_000), 50_000_000)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": False,
        "contiguous_gradients": True,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket,
    }
    if runtime.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
        if runtime.offload_param:
            zero["offload_param"] = {"device": "cpu"}
    owned: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": micro_batch_size * accumulation * world_size,
        "gradient_clipping": grad_clip,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        # torch's AdamW steps on offloaded state too; DeepSpeed's own would need a compiler on the machine.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000_000,
        "wall_clock_breakdown": False,
    }
    if precision == "bf16":
        owned["bf16"] = {"enabled": True}
    if precision == "fp16":
        owned["fp16"] = {"enabled": True, "initial_scale_power": 16}
    return _merge(owned, runtime.deepspeed_extra)


# Buffers and overlap change the speed and not the result, so `deepspeed_extra` may set them.
_TUNABLE = {
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_optimization.overlap_comm",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.allgather_bucket_size",
}


def _merge(owned: Mapping[str, Any], extra: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    merged = dict(owned)
    for key, value in extra.items():
        path = prefix + key
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping) and path not in _FORBIDDEN:
            merged[key] = _merge(merged[key], value, f"{path}.")
        elif path in _FORBIDDEN or (key in owned and path not in _TUNABLE):
            raise ConfigError(
                f"runtime.deepspeed_extra.{path}={value!r} overrides a setting that dschat owns",
                where=f"runtime.deepspeed_extra.{path}",
                why=f"dschat sets it to {merged[key]!r} from the typed config"
                if key in merged
                else "it changes results",
                fix="remove it; use the typed keys of the section and of its runtime",
            )
        else:
            merged[key] = value
    return merged
