"""The training loop of pretraining, sft and reward: one step is (data, forward, backward)×n, reduce, clip, update.

A step is a function of its number: rows, order and learning rate are derived from it, so a resumed run continues
bitwise, and its metrics too. All ranks take the same number of micro-batches in every step; a rank without rows left
computes an empty one, which weighs nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from dschat_core.cluster.job import Job
from dschat_core.config import TrainingConfig
from dschat_core.data.batches import BatchPlan
from dschat_core.errors import NumericalError, PreemptedError
from dschat_core.train import checkpoint, engine
from dschat_core.train.ds_config import resolve_precision
from dschat_core.train.metrics import MetricsLog, PhaseTimer
from dschat_core.train.objectives import Inputs

MAX_SKIPPED_IN_A_ROW = 10
CPU_MICRO_BATCH_TOKENS = 1024  # measured: larger ones leave the cache and are up to 15 % slower
GPU_MICRO_BATCH_ROWS = 8
MAX_PADDING_SHARE = 0.05


@dataclass(frozen=True)
class Objective:
    """What is trained, as the loop needs it.

    `collate` turns rows (lists of sample ids; none for an empty micro-batch) into inputs; `loss` is the sum over their
    units; `evaluate` measures the held-out part on all ranks together and returns at least `eval_loss`.
    """

    collate: Callable[[Sequence[Sequence[int]]], Inputs]
    loss: Callable[[Any, Inputs], torch.Tensor]
    evaluate: Callable[[Any], dict[str, float]]
    tokens: Callable[[Sequence[int]], int]  # real tokens of a row


@dataclass
class Progress:
    """The part of a run's state that is not in the engine; saved with each checkpoint, the same on all ranks."""

    tokens: int = 0
    slots: int = 0
    window_loss: float = 0.0
    window_units: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    train_loss: float | None = None
    evaluation: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The engine after the last step, and what the run has to say for itself."""

    engine: Any
    facts: dict[str, Any]


def train(
    job: Job,
    section: TrainingConfig,
    model: torch.nn.Module,
    plan: BatchPlan,
    objective: Objective,
) -> Trained:
    """Train `model` to the last step of `plan`, from the newest checkpoint if there is one.

    Raises:
        PreemptedError: asked to stop (SIGTERM); a checkpoint of the step just done was committed.
        NumericalError: loss or gradient were not finite for more than 10 steps in a row.
    """
    runtime = section.runtime
    total_steps = section.max_steps or max(1, round(section.epochs * plan.steps_per_epoch))
    micro_batch_size = resolve_micro_batch_size(section)
    share = -(-section.global_batch_size // engine.world_size())
    timer = PhaseTimer()
    trained = engine.build_engine(
        model,
        section,
        runtime,
        precision=resolve_precision(section.precision, runtime.zero_stage, on_gpu=torch.cuda.is_available()),
        micro_batch_size=micro_batch_size,
        accumulation=-(-share // micro_batch_size),
        timer=timer,
    )
    directory, identity = Path(job.state_dir), {"stage": job.stage, "key": job.key}
    found = checkpoint.load_newest(directory, {"model": trained}, identity=identity)
    first, progress = (found[0], Progress(**found[1])) if found else (0, Progress())
    if found:
        engine.log(f"resumed from step {first}")

    def save(step: int) -> None:
        with timer.phase("checkpoint"):
            checkpoint.save_checkpoint(
                directory, step, {"model": trained}, asdict(progress), token=job.token, identity=identity
            )
            if engine.is_main():
                checkpoint.prune(directory, runtime.keep_checkpoints)

    metrics_path = job.metrics_path if engine.is_main() else None
    with MetricsLog(metrics_path, job.stage, first, total_steps) as metrics:
        logged, tokens_logged = first, progress.tokens
        trained.train()
        timer.take()
        for step in range(first + 1, total_steps + 1):
            rate = engine.learning_rate(section, step, total_steps)
            result, stop = _step(job, section, trained, plan, objective, progress, timer, step, rate)
            is_last = step == total_steps
            evaluates = is_last or step % section.eval_every == 0
            if evaluates:
                with timer.phase("evaluation"):
                    progress.evaluation = objective.evaluate(trained)
            if evaluates or step % runtime.log_every == 0:
                wall_s, phases = timer.take()
                with timer.phase("logging"):
                    metrics.log(
                        step,
                        **_window(progress),
                        lr=rate,
                        grad_norm=result.grad_norm,
                        tokens=progress.tokens,
                        **_speed(wall_s, phases, step - logged, progress.tokens - tokens_logged),
                        skipped=progress.skipped,
                        **(progress.evaluation if evaluates else {}),
                    )
                logged, tokens_logged = step, progress.tokens
            if is_last or stop or step % runtime.checkpoint_every == 0:
                save(step)
            if stop and not is_last:
                raise PreemptedError(
                    f"stopped after step {step} of {total_steps}, which was saved",
                    where=job.stage,
                    why="the job was asked to end (SIGTERM)",
                    fix=f"dschat resume {job.run}",
                )
    padding_share = 1 - progress.tokens / progress.slots if progress.slots else 0.0
    if padding_share > MAX_PADDING_SHARE:
        engine.log(f"warning: {padding_share:.0%} of the computed tokens were padding")
    return Trained(
        trained,
        {
            "resumed_from": first,
            "steps": total_steps,
            "tokens": progress.tokens,
            "num_parameters": num_parameters(model),
            "padding_share": round(padding_share, 4),
            "skipped_steps": progress.skipped,
            "train_loss": progress.train_loss,
            "micro_batch_size": micro_batch_size,
            "world_size": engine.world_size(),
            **progress.evaluation,
        },
    )


def _step(
    job: Job,
    section: TrainingConfig,
    trained: Any,
    plan: BatchPlan,
    objective: Objective,
    progress: Progress,
    timer: PhaseTimer,
    step: int,
    rate: float,
) -> tuple[engine.StepResult, bool]:
    """One optimizer step; also whether any rank was asked to stop."""
    micro_batch_size = resolve_micro_batch_size(section)
    with timer.phase("data"):
        # Dropout, where a model has it, is a function of the step too.
        engine.seed_torch(section.seed, job.stage, "step", step)
        rows = plan.step(step - 1)
        count = max(1, plan.num_targets(step - 1))
        progress.tokens += sum(objective.tokens(row) for row in rows)
        mine = rows[engine.rank() :: engine.world_size()]
        num_micro = -(-len(rows) // (engine.world_size() * micro_batch_size))
    loss_sum, slots = torch.zeros((), dtype=torch.float64, device=engine.device()), 0
    for index in range(num_micro):
        with timer.phase("data"):
            inputs = objective.collate(mine[index * micro_batch_size : (index + 1) * micro_batch_size])
        with timer.phase("forward"):
            loss = objective.loss(trained, inputs)
        with timer.phase("backward"):
            engine.backward(trained, loss, count=count, is_last=index == num_micro - 1)
        loss_sum += loss.detach()
        slots += inputs.num_slots
    with timer.phase("comm"):
        loss_total, stop, slots_total = engine.all_reduce_sum([float(loss_sum), engine.stop_requested(), slots])
    with timer.phase("optimizer"):
        result = engine.optimizer_step(trained, rate)
    progress.slots += int(slots_total)
    if isfinite(loss_total) and not result.skipped:
        progress.window_loss += loss_total
        progress.window_units += count
        progress.skipped_in_a_row = 0
    else:
        _count_skipped(progress, step, rows, loss_total)
    return result, stop > 0


def _count_skipped(progress: Progress, step: int, rows: Sequence[Sequence[int]], loss: float) -> None:
    progress.skipped += 1
    progress.skipped_in_a_row += 1
    samples = [sample for row in rows for sample in row]
    shown = ", ".join(map(str, samples[:20])) + (", …" if len(samples) > 20 else "")
    engine.log(f"step {step} skipped on all ranks: loss sum {loss} or its gradient is not finite; samples {shown}")
    if progress.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
        raise NumericalError(
            f"loss or gradient were not finite for {progress.skipped_in_a_row} steps in a row",
            where=f"step {step}, samples {shown}",
            why="the learning rate is too high, or the model to start from holds non-finite weights",
            fix="lower the stage's learning_rate (a new artifact), or set precision=fp32",
        )


def _window(progress: Progress) -> dict[str, float | None]:
    """The mean loss per unit since the last line; starts a new window."""
    loss = progress.window_loss / progress.window_units if progress.window_units else None
    progress.window_loss, progress.window_units = 0.0, 0
    progress.train_loss = loss if loss is not None else progress.train_loss
    return {"loss": loss}


def _speed(wall_s: float, phases: dict[str, float], num_steps: int, tokens: int) -> dict[str, Any]:
    return {
        "step_s": round(wall_s / num_steps, 6),
        "phases": {name: round(spent / num_steps, 6) for name, spent in sorted(phases.items())},
        "tokens_per_s": round(tokens / wall_s, 1) if wall_s > 0 else 0.0,
    }


def resolve_micro_batch_size(section: TrainingConfig) -> int:
    """Rows per rank and backward; what `auto` means is decided here."""
    share = -(-section.global_batch_size // engine.world_size())
    wanted = section.runtime.micro_batch_size
    if wanted != "auto":
        return min(wanted, share)
    rows = GPU_MICRO_BATCH_ROWS if torch.cuda.is_available() else max(1, CPU_MICRO_BATCH_TOKENS // section.max_length)
    return min(rows, share)


def heldout_sums(
    trained: Any,
    rows: Sequence[Sequence[int]],
    micro_batch_size: int,
    collate: Callable[[Sequence[Sequence[int]]], Inputs],
    measure: Callable[[torch.Tensor, Inputs, Sequence[Sequence[int]]], Sequence[float]],
) -> list[float]:
    """Sums of what `measure(outputs, inputs, rows)` finds in each micro-batch of `rows`, over all ranks.

    The rows are split over the ranks, which all do the same number of forwards (ZeRO 3 gathers in each).
    """
    world = engine.world_size()
    mine = rows[engine.rank() :: world]
    totals: list[float] = []
    trained.eval()
    try:
        with torch.no_grad():
            for index in range(max(1, -(-len(rows) // (world * micro_batch_size)))):
                chunk = mine[index * micro_batch_size : (index + 1) * micro_batch_size]
                inputs = collate(chunk)
                found = measure(trained(inputs), inputs, chunk)
                totals = [a + b for a, b in zip(totals or [0.0] * len(found), found, strict=True)]
    finally:
        trained.train()
    return engine.all_reduce_sum(totals)


def num_parameters(model: torch.nn.Module) -> int:
    """Parameters of the whole model, also where ZeRO 3 has partitioned them; shared ones count once."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def copy_metrics(job: Job, name: str = "metrics.jsonl") -> str:
    """Put the stage's metrics among its products; returns the file's name there."""
    if engine.is_main():
        shutil.copyfile(job.metrics_path, Path(job.output_dir) / name)
    return name


def file_names(out: Path, folder: str) -> list[str]:
    """Files under `out/folder`, relative to `out`, for a product's parts."""
    return sorted(path.relative_to(out).as_posix() for path in (out / folder).rglob("*") if path.is_file())
