"""The eight stages as Prefect tasks: name the inputs, run the stage, hand on its artifact.

A task is called directly in the flow, so that its real error reaches the caller. Prefect's result cache is off: the
artifact's manifest is the only memo.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.tasks import exponential_backoff

from dschat_core.artifacts import Artifact, Product, Workspace
from dschat_core.config import RuntimeConfig
from dschat_core.errors import RETRYABLE, DschatError
from dschat_core.runs import RunFolder
from dschat_core.stages.publishing import publishing as publish
from dschat_core.stages.tokenization import tokenization as tokenize
from dschat_core.stages.validation import validation as validate
from tasks.inputs import checking_entries, input_entries
from tasks.produce import GivenFolder, Readable, produce, produce_by_job
from tasks.progress import Reporter

P = ParamSpec("P")


def _retryable(_task: Task[..., Any], _run: TaskRun, state: State[Any]) -> bool:
    """Whether another attempt can help: the exit code of the error decides."""
    return isinstance(state.data, DschatError) and state.data.exit_code in RETRYABLE


def stage_task(function: Callable[P, State[Any]]) -> Callable[P, Any]:
    """A Prefect task named like its stage, retried as often as the stage's `runtime.max_attempts` says."""
    stage = task(
        name=function.__name__,
        task_run_name=function.__name__,
        cache_policy=NO_CACHE,
        persist_result=False,
        retry_condition_fn=_retryable,
        retry_delay_seconds=exponential_backoff(backoff_factor=5),
    )(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        run = args[0]
        assert isinstance(run, RunFolder)
        runtime = getattr(getattr(run.config, function.__name__), "runtime", None)
        retries = runtime.max_attempts - 1 if isinstance(runtime, RuntimeConfig) else 0
        return stage.with_options(retries=retries)(*args, **kwargs)

    return call


def model_source(given: str | None, made: Artifact | None) -> Readable | None:
    """The model a stage starts from: the folder that the config names, else the previous stage's product."""
    if given:
        return GivenFolder(given)
    return made.part("model") if made else None


@stage_task
def validation(run: RunFolder) -> State[Any]:
    """Read the raw files, quarantine bad lines, apply the gates."""
    section, sources = run.config.validation, run.config.data
    inputs = input_entries(sources, run.state.inputs) | checking_entries(section, run.state.inputs)

    def make(workspace: Workspace, reporter: Reporter) -> Product:
        return validate(section, sources, workspace.output, progress=reporter.line)

    return produce(run, "validation", section, inputs, make)


@stage_task
def tokenization(run: RunFolder, data: Artifact) -> State[Any]:
    """Train or take the tokenizer, write the shards."""
    section = run.config.tokenization
    parts: dict[str, Readable] = {name: data.part(name) for name in data.manifest.parts if name != "report"}
    if section.base_model:
        parts["base_model"] = GivenFolder(section.base_model)

    def make(workspace: Workspace, reporter: Reporter) -> Product:
        folders = {name: part.folder() for name, part in parts.items()}
        return tokenize(section, folders, workspace.output, state=workspace.state, progress=reporter.line)

    return produce(run, "tokenization", section, {name: part.entry() for name, part in parts.items()}, make)


def _shards(shards: Artifact, *names: str) -> dict[str, Readable]:
    return {name: shards.part(name) for name in names}


@stage_task
def pretraining(run: RunFolder, shards: Artifact) -> State[Any]:
    """Next-token prediction on `text`."""
    section = run.config.pretraining
    assert section is not None
    inputs = _shards(shards, "tokenizer", "text", "text_heldout")
    if section.base_model:
        inputs["base_model"] = GivenFolder(section.base_model)
    return produce_by_job(run, "pretraining", section, section.runtime, inputs)


@stage_task
def sft(run: RunFolder, shards: Artifact, base: Artifact | None) -> State[Any]:
    """Supervised fine-tuning on `dialogues`."""
    section = run.config.sft
    assert section is not None
    inputs = _shards(shards, "tokenizer", "dialogues", "dialogues_heldout")
    inputs |= _given(model=model_source(section.base_model, base))
    return produce_by_job(run, "sft", section, section.runtime, inputs)


@stage_task
def reward(run: RunFolder, shards: Artifact, assistant: Artifact | None) -> State[Any]:
    """A scalar head trained on `preferences`."""
    section = run.config.reward
    assert section is not None
    inputs = _shards(shards, "tokenizer", "preferences", "preferences_heldout")
    inputs |= _given(model=model_source(section.base_model, assistant))
    return produce_by_job(run, "reward", section, section.runtime, inputs)


@stage_task
def ppo(run: RunFolder, shards: Artifact, assistant: Artifact | None, judge: Artifact | None) -> State[Any]:
    """The sft model, optimised against the reward model on `prompts`."""
    section = run.config.ppo
    assert section is not None
    inputs = _shards(shards, "tokenizer", "prompts", "prompts_heldout")
    inputs |= _given(model=model_source(section.base_model, assistant))
    if not section.reward_function:
        inputs |= _given(reward_model=model_source(section.reward_model, judge))
    return produce_by_job(run, "ppo", section, section.runtime, inputs)


@stage_task
def evaluation(
    run: RunFolder,
    shards: Artifact,
    base: Artifact | None,
    assistant: Artifact | None,
    judge: Artifact | None,
    aligned: Artifact | None,
) -> State[Any]:
    """Held-out measures of every stage."""
    section = run.config.evaluation
    assert section is not None
    wanted = ("tokenizer", "text", "text_heldout", "dialogues_heldout", "preferences_heldout", "prompts_heldout")
    inputs = _shards(shards, *(name for name in wanted if name in shards.manifest.parts))
    ppo_section, sft_section = run.config.ppo, run.config.sft
    inputs |= _given(
        pretraining=model_source(sft_section.base_model if sft_section else None, base),
        sft=model_source(ppo_section.base_model if ppo_section else None, assistant),
        reward=model_source(ppo_section.reward_model if ppo_section else None, judge),
        ppo=model_source(None, aligned),
    )
    return produce_by_job(run, "evaluation", section, section.runtime, inputs)


@stage_task
def publishing(run: RunFolder, model: Artifact, scores: Artifact) -> State[Any]:
    """The Hugging Face folder that is served, behind the gate of `publishing.limits`."""
    section = run.config.publishing
    assert section is not None
    parts: dict[str, Readable] = {"model": model.part("model"), "evaluation": scores.part("evaluation")}

    def make(workspace: Workspace, reporter: Reporter) -> Product:
        folders = {name: part.folder() for name, part in parts.items()}
        return publish(section, folders, workspace.output, lineage=run.lineage())

    return produce(run, "publishing", section, {name: part.entry() for name, part in parts.items()}, make)


def _given(**sources: Readable | None) -> dict[str, Readable]:
    return {name: source for name, source in sources.items() if source is not None}
