"""Small real inputs for training tests, and ranks that fork from one warm process.

`make_parts` runs the project's own tokenization on made-up dialogues; `make_job` describes a stage on them;
`run_ranks(2, function, …)` runs `function` on real ranks over gloo; `run_launcher` is the real `deepspeed` launcher.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from dschat_core.cluster.job import Job, Supervisor
from dschat_core.config import Section, TokenizationConfig
from dschat_core.stages.tokenization import tokenization

WORDS = [
    "sun",
    "moon",
    "tree",
    "river",
    "stone",
    "bread",
    "music",
    "letter",
    "garden",
    "window",
    "paper",
    "story",
    "road",
    "cloud",
    "lamp",
    "bird",
    "horse",
    "chair",
]
PRELOADED = ["torch", "deepspeed", "transformers.models.llama.modeling_llama", "dschat_core.train.next_token"]

TINY_MODEL = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4, "context_length": 64}


def make_parts(folder: Path, *, num_rows: int = 60, max_length: int = 64, seed: int = 0) -> dict[str, Path]:
    """Tokenizer and shards of made-up conversations; part name → folder."""
    draw = random.Random(seed)

    def sentence(low: int, high: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    inputs = {}
    for half, count in (("", num_rows), ("_heldout", max(8, num_rows // 5))):
        rows: dict[str, list[dict[str, Any]]] = {"text": [], "dialogues": [], "preferences": [], "prompts": []}
        for index in range(count):
            turns = [
                {"role": role, "content": sentence(1, 6)}
                for _ in range(draw.randint(1, 2))
                for role in ("user", "assistant")
            ]
            chosen = sentence(3, 6)
            words = chosen.split()
            rows["text"].append({"text": sentence(5, 40)})
            rows["dialogues"].append({"messages": turns})
            rows["prompts"].append({"messages": turns[:1]})
            rows["preferences"].append(
                {
                    "messages": turns[:1],
                    "chosen": chosen,
                    "rejected": " ".join([words[0]] * len(words)) + " no",
                    "kind": "looped" if index % 2 else "shuffled",
                }
            )
        for name, found in rows.items():
            source = folder / "validated" / (name + half)
            source.mkdir(parents=True)
            (source / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
            inputs[name + half] = source
    section = TokenizationConfig(vocab_size=320, max_length=max_length)
    product = tokenization(section, inputs, folder / "tokenized")
    return {name: folder / "tokenized" / name for name in product.parts}


def make_job(
    folder: Path, stage: str, section: Section, inputs: dict[str, Path], *, key: str = "k1", attempt: int = 1
) -> Job:
    """A job in `folder`, supervised by this process."""
    out, state, attempts = folder / "out", folder / "state", folder / f"attempt-{attempt}"
    for path in (out, state, attempts):
        path.mkdir(parents=True, exist_ok=True)
    me = psutil.Process()
    return Job(
        run="test",
        stage=stage,  # type: ignore[arg-type]
        key=key,
        attempt=attempt,
        token=f"token-{attempt}",
        section=section.model_dump(mode="json"),
        inputs={name: str(path) for name, path in inputs.items()},
        output_dir=str(out),
        state_dir=str(state),
        attempt_dir=str(attempts),
        supervisor=Supervisor(host=socket.gethostname(), pid=me.pid, started=me.create_time()),
    )


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """What `function(*args)` returned on each rank, in rank order; an exception on a rank is raised here with its stack.

    `function` must be importable by name. The processes fork from one that has imported torch already.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank_main, args=(rank, world_size, port, sender, function, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    results, failures = [], []
    try:
        for rank, receiver in enumerate(pipes):
            try:
                ok, value = receiver.recv() if receiver.poll(timeout_s) else (False, f"nothing in {timeout_s} s")
            except EOFError:
                ok, value = False, "the process died"
            results.append(value)
            if not ok:
                failures.append((rank, value))
                break
    finally:
        for process in processes:
            if failures:
                process.kill()
            process.join(30)
    if failures:
        rank, value = failures[0]
        if isinstance(value, tuple):
            error, stack = value
            error.add_note(f"on rank {rank}:\n{stack}")
            raise error
        raise AssertionError(f"rank {rank}: {value}")
    return results


def _rank_main(
    rank: int, world_size: int, port: int, sender: Any, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    try:
        from dschat_core.train import engine

        engine.init_distributed(timeout_s=60.0)
        sender.send((True, function(*args)))
    except BaseException as error:
        sender.send((False, (error, traceback.format_exc())))
    finally:
        sender.close()


def launcher_command(job_path: Path, *, ranks: int = 2) -> list[str]:
    """The real launcher on this machine's CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", str(ranks), "--master_port", str(port), "--no_local_rank"]
    return [sys.executable, str(launcher), *options, "--module", "dschat_core.worker", str(job_path)]


def start_launcher(job: Job, *, ranks: int = 2) -> subprocess.Popen[str]:
    """Start the job under the launcher; its output goes to `launcher.log` in the attempt's folder."""
    path = Path(job.attempt_dir) / "job.json"
    job.save(path)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    log = (Path(job.attempt_dir) / "launcher.log").open("w")
    with log:
        return subprocess.Popen(
            launcher_command(path, ranks=ranks), env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        )
