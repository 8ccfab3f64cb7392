"""The pipeline: raw dialogues in, an aligned, evaluated, published chat model out.

`dschat run deployments/runs/demo.yaml` calls it on the spot; `deployments/prefect.yaml` declares it for a worker.
"""

from __future__ import annotations

from typing import Any

from prefect import flow

from dschat_core.config import Stage
from flows.session import run_session
from tasks.stages import evaluation, ppo, pretraining, publishing, reward, sft, tokenization, validation


@flow(name="chat", flow_run_name="chat {config}", persist_result=False)
def chat_pipeline(config: str, overrides: list[str] | None = None, until: Stage | None = None) -> None:
    """Run every stage that the config asks for; a stage whose artifact exists is reused.

    Args:
        config: path of the run's YAML file.
        overrides: one-off changes, `["ppo.kl_coef=0.1"]`.
        until: the last stage to run; none: all.
    """
    base: Any = None
    assistant: Any = None
    judge: Any = None
    aligned: Any = None
    with run_session(config, overrides or [], until) as run:
        data = validation(run)
        if run.wants("tokenization"):
            shards = tokenization(run, data)
        if run.wants("pretraining"):
            base = pretraining(run, shards)
        if run.wants("sft"):
            assistant = sft(run, shards, base)
        if run.wants("reward"):
            judge = reward(run, shards, assistant)
        if run.wants("ppo"):
            aligned = ppo(run, shards, assistant, judge)
        if run.wants("evaluation"):
            scores = evaluation(run, shards, base, assistant, judge, aligned)
        if run.wants("publishing"):
            publishing(run, aligned or assistant or base, scores)
