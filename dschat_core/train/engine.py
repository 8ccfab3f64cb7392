"""The ranks' side of DeepSpeed: processes, engines, one optimizer step, and the export to Hugging Face's layout.

`init_distributed()` once per rank, then `build_engine(...)` per trained model, `backward` and `optimizer_step` in
the loop, `export_model` at the end. What DeepSpeed leaves dangerous by default (facts that took a drill each to
find) is mended here and nowhere else.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import cos, isfinite, pi
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from dschat_core.chat_template import load_tokenizer
from dschat_core.config import OptimizerConfig, RuntimeConfig
from dschat_core.seeds import derive_seed
from dschat_core.train.ds_config import Precision, deepspeed_config
from dschat_core.train.metrics import PhaseTimer

COLLECTIVE_TIMEOUT_S = 1800.0

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# ── processes ───────────────────────────────────────────────────────────────────────────────────────────

_stop_signal: int | None = None


def init_distributed(timeout_s: float | None = None) -> None:
    """Join the job's process group, as the launcher's environment says (alone without one), once per process.

    Args:
        timeout_s: seconds after which a collective with a dead or hung peer raises; default
            `DSCHAT_COLLECTIVE_TIMEOUT_S` or half an hour.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = _free_port()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed loads its own checkpoints as plain pickles; this turns every torch.load into a weights-only one.
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    threads = os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(int(threads) if threads else max(1, (os.cpu_count() or 1) // _local_world_size()))
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

    from deepspeed import comm
    from deepspeed.ops import __compatible_ops__
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    torch.serialization.add_safe_globals([LossScaler, DynamicLossScaler, ZeroStageEnum, fragment_address])
    # Else DeepSpeed compiles a shared-memory collective with the machine's compiler, even for gloo.
    __compatible_ops__["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", category=FutureWarning, module="(torch|deepspeed)")
    limit = timedelta(seconds=timeout_s or float(os.environ.get("DSCHAT_COLLECTIVE_TIMEOUT_S", COLLECTIVE_TIMEOUT_S)))
    _limit_new_groups(limit)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    comm.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo", timeout=limit, verbose=False)
    signal.signal(signal.SIGTERM, _remember_signal)


def _free_port() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))


def _limit_new_groups(limit: timedelta) -> None:
    """Give DeepSpeed's own groups a timeout: they take none, and a hung peer would never be noticed."""
    original = dist.new_group

    def new_group(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("timeout") is None:
            kwargs["timeout"] = limit
        return original(*args, **kwargs)

    dist.new_group = new_group
    dist.distributed_c10d.new_group = new_group


def _remember_signal(signum: int, _frame: FrameType | None) -> None:
    global _stop_signal
    _stop_signal = signum


def stop_requested() -> bool:
    """Whether this rank was asked to end (SIGTERM); ranks must agree on it before any of them acts on it."""
    return _stop_signal is not None


def rank() -> int:
    """This process among all ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Ranks of the job."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Rank 0 writes metrics and products."""
    return rank() == 0


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def shutdown() -> None:
    """Leave the process group; the last thing a rank does."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(values: Sequence[float]) -> list[float]:
    """Sums over all ranks, in float64; the same numbers on every rank."""
    if world_size() == 1:
        return [float(value) for value in values]
    total = torch.tensor(values, dtype=torch.float64, device=device())
    dist.all_reduce(total)
    return [float(value) for value in total.tolist()]


def broadcast_object(value: Any) -> Any:
    """Rank 0's value on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank."""
    if world_size() == 1:
        return [value]
    boxes: list[Any] = [None] * world_size()
    dist.all_gather_object(boxes, value)
    return boxes


def seed_torch(*names: int | str) -> None:
    """Start torch's generators of this process at the stream that `names` identify."""
    torch.manual_seed(derive_seed(*names))


# ── engines ─────────────────────────────────────────────────────────────────────────────────────────────


def build_engine(
    model: torch.nn.Module,
    optimizer: OptimizerConfig,
    runtime: RuntimeConfig,
    *,
    precision: Precision,
    micro_batch_size: int,
    accumulation: int = 1,
    timer: PhaseTimer | None = None,
) -> Any:
    """A DeepSpeed engine over `model` (already initialised, the same on all ranks) with AdamW.

    The learning rate is set by each `optimizer_step`, so that a resumed run needs no scheduler state. Call the
    engine itself for a forward (ZeRO 3 gathers in its hooks); see `objectives.AtPositions` for the usual module.

    Args:
        micro_batch_size: rows per rank and backward, for DeepSpeed's own accounting.
        accumulation: most backwards per optimizer step, for the same.
        timer: charged with the `comm` phase whenever a collective blocks this rank.
    """
    import deepspeed

    model.to(device=device(), dtype=DTYPES[precision])
    config = deepspeed_config(
        runtime,
        precision=precision,
        grad_clip=optimizer.grad_clip,
        world_size=world_size(),
        micro_batch_size=micro_batch_size,
        accumulation=accumulation,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )
    adamw = torch.optim.AdamW(
        parameter_groups(model, optimizer.weight_decay),
        lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=1e-8,
        fused=True,
    )
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw, config=config, dist_init_required=False)
    if timer is not None:
        time_collectives(timer)
    return engine


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """AdamW's groups: matrices decay; norms, biases and embeddings do not."""
    if weight_decay == 0:
        return [{"params": [p for p in model.parameters() if p.requires_grad], "weight_decay": 0.0}]
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            decays = parameter.ndim >= 2 and id(parameter) not in embeddings
            (matrices if decays else others).append(parameter)
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def learning_rate(config: OptimizerConfig, step: int, total_steps: int, *, peak: float | None = None) -> float:
    """The rate of optimizer step `step` (counted from 1): linear warm-up to the peak, then the decay.

    Args:
        config: schedule, warm-up and final share.
        step: 1 to `total_steps`; later steps keep the final rate.
        total_steps: optimizer steps of the whole stage.
        peak: instead of `config.learning_rate` (ppo's critic).
    """
    peak = config.learning_rate if peak is None else peak
    warmup = int(config.warmup_share * total_steps)
    if step <= warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    share = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + cos(pi * done))
    return peak * (config.min_lr_share + (1.0 - config.min_lr_share) * share)


def backward(engine: Any, loss_sum: torch.Tensor, *, count: float, is_last: bool) -> None:
    """Backpropagate one micro-batch of an optimizer step.

    Args:
        loss_sum: scalar, summed over the units (target tokens or pairs) of this rank's micro-batch.
        count: units of the whole optimizer step, over all ranks and micro-batches.
        is_last: whether it is the step's last micro-batch, after which gradients are reduced.

    DeepSpeed averages gradients over the ranks, so the sum is scaled by world/count: clipping and the optimizer see
    the gradient of the mean over the whole step, however it is cut into ranks and micro-batches.
    """
    engine.set_gradient_accumulation_boundary(is_last)
    engine.backward(loss_sum * (world_size() / count), scale_wrt_gas=False)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did; the same on all ranks."""

    grad_norm: float  # before clipping; inf or nan where the step was skipped
    skipped: bool  # the gradient was not finite and no weight was changed


def optimizer_step(engine: Any, lr: float) -> StepResult:
    """Clip and update with the learning rate `lr`; a gradient that is not finite changes nothing, on all ranks."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    if engine.zero_optimization_stage() == 0:
        # Without ZeRO DeepSpeed neither reports the norm nor skips; its gradients are already equal on all ranks.
        grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = float(sum(float(grad.double().square().sum()) for grad in grads)) ** 0.5
        if not isfinite(norm):
            engine.zero_grad()
            return StepResult(norm, True)
        engine.step()
        return StepResult(norm, False)
    engine.step()
    norm = float(engine.get_global_grad_norm())
    return StepResult(norm, bool(engine.optimizer.overflow))


_TIMED = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_gather",
    "barrier",
)


def time_collectives(timer: PhaseTimer) -> None:
    """Charge the time this rank is blocked in DeepSpeed's collectives to `timer`'s phase `comm`."""
    from deepspeed.comm import comm

    backend = comm.cdb
    for name in _TIMED:
        original = getattr(type(backend), name, None)
        if original is not None:
            setattr(backend, name, _timed(timer, original.__get__(backend)))


def _timed(timer: PhaseTimer, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with timer.phase("comm"):
            return call(*args, **kwargs)

    return timed


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────


def copy_tokenizer(tokenizer_dir: Path, out: Path) -> None:
    """Put the tokenizer's files beside a model's, so that the folder is complete in itself."""
    for path in sorted(tokenizer_dir.iterdir()):
        if path.is_file():
            shutil.copyfile(path, out / path.name)


def export_model(engine: Any, model: Any, tokenizer_dir: Path, out: Path) -> None:
    """Write `model` (the Hugging Face model inside the engine) and the tokenizer to `out`; called by all ranks.

    `out` then loads with the matching `AutoModel….from_pretrained`. The end-of-turn and padding ids of the tokenizer
    become the model's, so that generation ends where training did.
    """
    weights: dict[str, torch.Tensor] | None = None
    if engine.zero_optimization_stage() == 3:
        prefix = next((name for name, part in engine.module.named_modules() if part is model), "")
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        if is_main():
            start = len(prefix) + 1 if prefix else 0
            weights = {name[start:]: tensor for name, tensor in consolidated.items()}
    if is_main():
        out.mkdir(parents=True, exist_ok=True)
        tokenizer = load_tokenizer(tokenizer_dir)
        for config in (model.config, getattr(model, "generation_config", None)):
            if config is not None:
                config.eos_token_id, config.pad_token_id = tokenizer.end_of_turn_id, tokenizer.pad_id
        model.save_pretrained(out, state_dict=weights)
        copy_tokenizer(tokenizer_dir, out)
    barrier()


def log(message: str) -> None:
    """One line on rank 0's standard output, for the person who watches."""
    if is_main():
        print(message, flush=True)
