"""Find or make: the one way in which a stage's artifact comes to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.context import TaskRunContext
from prefect.states import Completed

from dschat_core import storage
from dschat_core.artifacts import Artifact, InputEntry, Product, Workspace, artifact_key
from dschat_core.cluster import attempts
from dschat_core.cluster.job import Job, Supervisor
from dschat_core.cluster.launch import launch, resolve_layout
from dschat_core.config import RuntimeConfig, Section, Stage
from dschat_core.errors import ConfigError, DschatError, ExitCode, OutOfMemoryError, PreemptedError
from dschat_core.report.markdown import stage_markdown
from dschat_core.runs import RunFolder
from tasks.progress import Reporter, reporting

Make = Callable[[Workspace, Reporter], Product]


class Readable(Protocol):
    """Something a stage reads: a part of an artifact or a given folder."""

    def entry(self) -> InputEntry: ...

    def folder(self) -> Path: ...


@dataclass(frozen=True)
class GivenFolder:
    """A model folder that the config names in place of a stage's product."""

    path: str

    def entry(self) -> InputEntry:
        """Its digest, over all its files."""
        root = self.folder()
        files = {str(p.relative_to(root)): storage.sha256_file(p) for p in sorted(root.rglob("*")) if p.is_file()}
        return InputEntry(digest=storage.sha256_json(files), uri=str(root))

    def folder(self) -> Path:
        """The folder. Raises ConfigError naming it if it is not one."""
        path = Path(self.path).absolute()
        if not path.is_dir():
            raise ConfigError(f"{self.path} is not a folder", fix="give the path of a Hugging Face model folder")
        return path


def produce(run: RunFolder, stage: Stage, section: Section, inputs: Mapping[str, InputEntry], make: Make) -> State[Any]:
    """The artifact of this stage, section and inputs: the committed one if there is one, else a new one.

    Returns:
        A completed Prefect state that carries the artifact, named `Reused` where nothing was made.
    """
    key = artifact_key(stage, section, inputs)
    run.start(stage, key=key, uri=run.store.uri(stage, key))
    with reporting(stage) as reporter:
        artifact = run.store.find(stage, key)
        reused = artifact is not None
        if artifact is None:
            with run.store.construct(stage, key, run.state.owner, on_wait=reporter.line) as held:
                if isinstance(held, Artifact):
                    artifact, reused = held, True
                else:
                    reporter.line(f"making {held.uri}")
                    artifact = held.commit(make(held, reporter), section=section, inputs=inputs)
        run.finish(stage, artifact, state="reused" if reused else "done")
        reporter.line(f"{'reused' if reused else 'done'}: {artifact.uri}")
        _publish_markdown(stage, artifact)
    return Completed(name="Reused" if reused else "Completed", data=artifact, message=artifact.uri)


def _publish_markdown(stage: Stage, artifact: Artifact) -> None:
    if TaskRunContext.get() is not None:
        markdown = stage_markdown(stage, artifact.local(), artifact.manifest.facts)
        create_markdown_artifact(markdown, key=f"{stage}-report", description=artifact.uri)


def produce_by_job(
    run: RunFolder, stage: Stage, section: Section, runtime: RuntimeConfig, inputs: Mapping[str, Readable]
) -> State[Any]:
    """`produce` for a stage whose work is a `deepspeed` job."""

    def make(workspace: Workspace, reporter: Reporter) -> Product:
        folders = {name: str(part.folder()) for name, part in inputs.items()}
        product = _attempt(run, workspace, section, runtime, folders, reporter)
        attempts.prune_after_commit(workspace.state, runtime.keep_optimizer)
        return product

    return produce(run, stage, section, {name: part.entry() for name, part in inputs.items()}, make)


def _attempt(
    run: RunFolder,
    workspace: Workspace,
    section: Section,
    runtime: RuntimeConfig,
    inputs: dict[str, str],
    reporter: Reporter,
) -> Product:
    state = workspace.state
    number, first_step = attempts.begin_attempt(state), attempts.last_step(state)
    layout = resolve_layout(runtime)
    attempt_dir = state / f"attempt-{number:04d}"
    shutil.rmtree(attempt_dir, ignore_errors=True)
    owner = workspace.owner
    job = Job(
        run=run.config.name,
        stage=workspace.stage,
        key=workspace.key,
        attempt=number,
        token=workspace.token,
        section=section.model_dump(mode="json"),
        inputs=inputs,
        output_dir=str(workspace.output),
        state_dir=str(state),
        attempt_dir=str(attempt_dir),
        supervisor=Supervisor(host=owner.host, pid=owner.pid, started=owner.started),
    )
    if first_step:
        reporter.line(f"attempt {number}: continuing {workspace.stage} from the checkpoint of step {first_step}")
    outcome: str | None = "interrupted"
    counted = False
    try:
        completion = launch(job, layout, on_line=reporter.line, on_metrics=reporter.metrics)
        outcome = None
        return Product(parts=completion.parts, facts={**completion.facts, "attempts": number})
    except DschatError as error:
        outcome = error.what
        counted = not isinstance(error, PreemptedError | OutOfMemoryError)
        raise
    finally:
        attempts.end_attempt(
            state,
            number=number,
            first_step=first_step,
            error=outcome,
            counted=counted,
            exit_code=int(ExitCode.DONE) if outcome is None else None,
            world_size=layout.world_size,
        )
