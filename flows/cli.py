"""`dschat`: parse, call, print. Prefect, torch and pandas are imported only in the commands that need them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dschat_core.config import STAGES, RunConfig, Stage, load_config
from dschat_core.errors import ConfigError, DschatError, ExitCode, IntegrityError

if TYPE_CHECKING:
    from dschat_core.data.inspecting import Piece

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="From raw dialogues to an aligned, evaluated, published chat model.",
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; progress goes to stderr.")]
Config = Annotated[Path, typer.Argument(help="The run's YAML file.", metavar="CONFIG")]
RunName = Annotated[str, typer.Argument(help="A run's folder or name.", metavar="RUN")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="One-off change `a.b=value`; may be repeated.")]
Runs = Annotated[str, typer.Option("--runs", help="Folder that holds the runs' folders.")]

STATE_STYLE = {"done": "green", "reused": "cyan", "running": "yellow", "failed": "bold red", "pending": "dim"}


def main() -> None:
    """The console script: typer's own usage errors exit with 20 like ours."""
    try:
        code = app(standalone_mode=False)
    except (typer.Exit, SystemExit) as error:
        code = getattr(error, "exit_code", getattr(error, "code", 0))
    except typer.Abort:
        code = ExitCode.INTERRUPTED
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        Console(stderr=True).print(f"error: {error.format_message()}\n  next: dschat --help", markup=False)
        code = ExitCode.CONFIG
    sys.exit(int(code or 0))


@app.command()
def run(config: Config, set_: Sets = None, until: str | None = None, as_json: Json = False) -> None:
    """Run the pipeline; stages whose artifact exists are reused, an interrupted one continues."""
    with _errors(as_json):
        resolved = load_config(config, set_ or [])
        _run(resolved, str(config), set_ or [], _stage(until), as_json)


@app.command()
def resume(name: RunName, runs: Runs = "runs", as_json: Json = False) -> None:
    """Continue a run with exactly the config and input it began with."""
    with _errors(as_json):
        from dschat_core.runs import CONFIG_FILE, find_run, read_state, saved_config

        folder = find_run(name, runs)
        resolved = saved_config(folder)
        from flows.session import check_before_start
        from tasks.inputs import refuse_changed_files

        check_before_start(resolved)
        refuse_changed_files(resolved, read_state(folder).inputs)
        _run(resolved, str(folder / CONFIG_FILE), [], None, as_json)


@app.command()
def status(
    name: Annotated[str | None, typer.Argument(help="A run's folder or name; none: all runs.", metavar="[RUN]")] = None,
    runs: Runs = "runs",
    as_json: Json = False,
) -> None:
    """Where a run's stages stand."""
    with _errors(as_json):
        from dschat_core.runs import STATE_FILE, find_run
        from dschat_core.runs import status as read_status

        if name is None:
            shown = [read_status(path.parent) for path in sorted(Path(runs).glob(f"*/{STATE_FILE}"))]
            if as_json:
                _print_json({"runs": shown})
            for one in shown if not as_json else []:
                _print_status(one)
            if not shown and not as_json:
                Console().print(f"no runs below {runs}/; dschat run CONFIG starts one", markup=False)
            return
        one = read_status(find_run(name, runs))
        _print_json(one) if as_json else _print_status(one)


@app.command()
def validate(
    files: Annotated[
        list[str],
        typer.Argument(help="Data files, globs, s3:// addresses, save_to_disk folders or hf:NAME.", metavar="FILE…"),
    ],
    kind: Annotated[str | None, typer.Option(help="text, dialogues, preferences or prompts; none: detected.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="`output=answer`: our column and theirs; may be repeated.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Take the gates of this run's YAML file.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One-off change of a gate, as `pii.action=fail`; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Read data files, quarantine bad lines and apply the gates; exit 30 when a gate says no."""
    with _errors(as_json):
        from dschat_core.config import DATASETS, load_validation
        from dschat_core.stages.validation import validate_files

        if kind is not None and kind not in DATASETS:
            raise ConfigError(f"--kind {kind!r} is unknown", fix=f"one of {', '.join(DATASETS)}")
        columns = dict(pair.partition("=")[::2] for pair in column or [])
        if not all(columns.values()):
            raise ConfigError(
                f"--column {column} is not of the form ours=theirs", fix="for example --column output=answer"
            )
        console = Console(stderr=True)
        verdict = validate_files(
            files,
            load_validation(config, set_ or []),
            kind,
            columns=columns,
            progress=lambda line: console.print(line, markup=False),
        )
        _print_json(verdict) if as_json else _print_verdict(verdict)
        if verdict["verdict"] == "fail":
            raise typer.Exit(ExitCode.GATE)


@app.command()
def verify(
    artifact: Annotated[str, typer.Argument(help="An artifact's folder or s3:// address.")],
    repair: Annotated[
        bool,
        typer.Option(help="Take a damaged artifact back: the next run makes it again, of shards only the damaged."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Hash every file of an artifact; exit 22 naming those that changed."""
    with _errors(as_json):
        from dschat_core.artifacts import load_artifact, take_back
        from dschat_core.artifacts import verify as find_problems

        problems = find_problems(artifact)
        manifest = load_artifact(artifact).manifest
        if problems and repair:
            kept = take_back(artifact)
            found = {"uri": artifact, "problems": problems, "files": len(manifest.files), "kept": kept}
            text = f"{artifact} was taken back, {kept} of {len(manifest.files)} files are kept\n  next: dschat run its config"
            _print_json(found) if as_json else Console().print(text, markup=False, soft_wrap=True)
            return
        if as_json:
            _print_json({"uri": artifact, "key": manifest.key, "files": len(manifest.files), "problems": problems})
        elif not problems:
            Console().print(
                f"{artifact}: {len(manifest.files)} files are what the manifest says", markup=False, soft_wrap=True
            )
        if problems and not as_json:
            raise IntegrityError(
                "; ".join(problems), where=artifact, why="changed or damaged after it was committed", fix=_REBUILD
            )
        if problems:
            raise typer.Exit(ExitCode.INTEGRITY)


_REBUILD = "dschat verify it with --repair, then dschat run its config again"


@app.command()
def report(name: RunName, runs: Runs = "runs", as_json: Json = False) -> None:
    """Draw the run's report anew and print where it is."""
    with _errors(as_json):
        from dschat_core.runs import REPORT_FILE, find_run
        from flows.session import write_report

        folder = find_run(name, runs)
        write_report(folder)
        path = str(folder / REPORT_FILE)
        _print_json({"run": folder.name, "report": path}) if as_json else print(path)


INSPECTED = {"sft": "dialogues", "reward": "preferences", "ppo": "prompts", "pretraining": "text"}


@app.command()
def inspect(
    what: Annotated[str, typer.Argument(help="sft, preferences, ppo or text.", metavar="STAGE")],
    name: RunName,
    row: Annotated[int, typer.Option(min=0, help="Which row, from 0; of preferences: which pair.")] = 0,
    heldout: Annotated[bool, typer.Option("--heldout", help="A row of the held-out part.")] = False,
    packed: Annotated[
        bool,
        typer.Option(
            "--packed", help="--row counts the rows that training reads, in its order, several samples in each."
        ),
    ] = False,
    runs: Runs = "runs",
    as_json: Json = False,
) -> None:
    """Show a row as the model is given it: control tokens, and which tokens are trained.

    On a terminal trained text is green and control tokens are reversed. Elsewhere trained text stands between ⟦ and ⟧,
    and a trained control token has a ✓ behind it. ↵ is a newline of the row.
    """
    with _errors(as_json):
        from dschat_core.chat_template import load_tokenizer
        from dschat_core.data.shards import ShardReader
        from dschat_core.runs import artifacts_of, find_run, saved_config

        kind = INSPECTED.get(what, what)
        if kind not in INSPECTED.values():
            raise ConfigError(f"{what!r} is nothing to inspect", fix="one of sft, preferences, ppo, text")
        folder = find_run(name, runs)
        config = saved_config(folder)
        if (artifact := artifacts_of(folder).get("tokenization")) is None:
            raise ConfigError(
                f"{folder} has no finished tokenization",
                fix=f"dschat run {folder / 'config.yaml'} --until tokenization",
            )
        part = f"{kind}_heldout" if heldout else kind
        reader = ShardReader(artifact.part(part).folder())
        tokenizer = load_tokenizer(artifact.part("tokenizer").folder())
        if packed:
            title, samples = _packed_row(reader, config, part, row)
        else:
            title, samples = "", _row_samples(len(reader), part, row)
        limit = config.ppo.max_prompt_tokens if kind == "prompts" and config.ppo else None
        records, shown = zip(*(_inspected(reader, tokenizer, kind, sample, limit) for sample in samples), strict=True)
        if as_json:
            _print_json({"kind": kind, "part": part, "row": row, "packed": title or None, "rows": records})
        elif kind == "preferences":
            _print_pair(part, row, *shown)
        else:
            _print_rows(part, title, records, shown)


def _row_samples(size: int, part: str, row: int) -> list[int]:
    """The rows of a part that hold row `row`: two of a pair. Raises ConfigError if there is none."""
    per_row = 2 if part.startswith("preferences") else 1
    if row >= size // per_row:
        last = size // per_row - 1
        raise ConfigError(
            f"{part} has no row {row}",
            why=f"its rows are 0 … {last}" if size else "it is empty",
            fix=f"--row {last}"
            if size
            else f"inspect another part, or add rows to data.{part.removesuffix('_heldout')}",
        )
    return list(range(per_row * row, per_row * row + per_row))


def _packed_row(reader: Any, config: RunConfig, part: str, row: int) -> tuple[str, list[int]]:
    """What the n-th row that training reads is, and its samples. Raises ConfigError if there is no such row."""
    from dschat_core.data.batches import packed_plan

    section = {"text": config.pretraining, "dialogues": config.sft}.get(part)
    if section is None:
        raise ConfigError(
            f"{part} is not packed in this run",
            why="pretraining packs text, sft packs dialogues, a stage set to null packs nothing",
            fix="leave out --packed",
        )
    plan = packed_plan(reader, section, "pretraining" if part == "text" else "sft")
    if row >= plan.num_rows:
        last = plan.num_rows - 1
        raise ConfigError(f"there is no packed row {row}", why=f"they are 0 … {last}", fix=f"--row {last}")
    step, place = divmod(row, plan.global_batch_size)
    samples = plan.step(step)[place]
    size = int(reader.lengths[samples].sum())
    count = f"{len(samples)} sample{'' if len(samples) == 1 else 's'}"
    return f"row {place} of step {step}: {count}, {size:,} of {section.max_length:,} tokens filled", samples


def _inspected(reader: Any, tokenizer: Any, kind: str, sample: int, limit: int | None) -> tuple[dict[str, Any], Any]:
    """A row as its record and its pieces; a prompt longer than `limit` is what the actor is given of it."""
    from dschat_core.chat_template import fit_prompt
    from dschat_core.data.inspecting import as_record, inspect_row, pieces

    meta = reader.meta[sample] if reader.meta else None
    found, note = inspect_row(reader, tokenizer, sample), None
    if limit is not None and reader.lengths[sample] > limit:
        messages = meta["messages"] if meta else []
        fitted = fit_prompt(tokenizer, messages, limit)
        note = f"{reader.lengths[sample]} tokens exceed ppo.max_prompt_tokens={limit}: "
        if fitted is None:
            note += "ppo leaves it out"
        else:
            ids, kept = fitted
            found = pieces(tokenizer, ids.tolist(), [False] * len(ids))
            note += f"the actor is given {len(kept)} of its {len(messages)} messages, the oldest are left out"
    return {**as_record(kind, sample, found, meta), "note": note}, found


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _print_rows(part: str, title: str, records: Sequence[dict[str, Any]], shown: Sequence[Sequence[Piece]]) -> None:
    console = _console()
    if title:
        console.print(title, markup=False)
    for record, found in zip(records, shown, strict=True):
        _rule(console, f"{part} {record['row']}: {record['num_tokens']} tokens, {record['num_trained']} trained")
        if record["note"]:
            console.print(record["note"], markup=False, style="yellow")
        _print_pieces(console, found)


def _print_pair(part: str, row: int, chosen: Sequence[Piece], rejected: Sequence[Piece]) -> None:
    from dschat_core.data.inspecting import num_tokens, num_trained, split_pair

    console = _console()
    prompt, *replies = split_pair(chosen, rejected)
    _rule(console, f"{part} {row}, prompt: {num_tokens(prompt)} tokens")
    _print_pieces(console, prompt)
    for side, found in zip(("chosen", "rejected"), replies, strict=True):
        _rule(console, f"{side}: {num_tokens(found)} tokens, {num_trained(found)} trained")
        _print_pieces(console, found)


def _rule(console: Console, title: str) -> None:
    from rich.text import Text

    console.rule(Text(title, style="bold"), align="left", style="dim")


def _print_pieces(console: Console, found: Sequence[Piece]) -> None:
    from rich.text import Text

    from dschat_core.data.inspecting import runs_of, visible

    colour = console.is_terminal and not console.no_color
    text = Text()
    for piece in runs_of(found):
        shown = visible(piece.text)
        if piece.control:
            text.append(shown, style="bold reverse green" if piece.trained else "reverse cyan")
            text.append("✓" if piece.trained and not colour else "")
        elif piece.trained:
            text.append(shown if colour else f"⟦{shown}⟧", style="green")
        else:
            text.append(shown, style="dim")
    console.print(text, soft_wrap=True, end="" if text.plain.endswith("\n") else "\n")


@app.command()
def chat(
    name: Annotated[str, typer.Argument(help="A run (its last model) or a model folder.", metavar="RUN|DIR")],
    prompt: Annotated[str | None, typer.Option(help="Answer this and end; none: read from the terminal.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.7,
    reply_limit: Annotated[int, typer.Option(min=1, help="Longest reply, in tokens.")] = 128,
    seed: int = 0,
    runs: Runs = "runs",
    as_json: Json = False,
) -> None:
    """Talk to a model of the pipeline."""
    with _errors(as_json):
        from dschat_core.chat import Chat, model_folder

        session = Chat(model_folder(name, runs), temperature=temperature, reply_limit=reply_limit, seed=seed)
        if prompt is not None:
            reply = session.answer(prompt)
            _print_json({"prompt": prompt, "reply": reply}) if as_json else print(reply)
            return
        console = Console()
        console.print("Type a message; an empty line or Ctrl-D ends the chat.", style="dim")
        while text := _read_line(console):
            console.print(session.answer(text), markup=False, style="cyan")


def _read_line(console: Console) -> str:
    try:
        return console.input("[bold]you> [/bold]").strip()
    except EOFError:
        return ""


def _run(config: RunConfig, path: str, overrides: list[str], until: Stage | None, as_json: bool) -> None:
    """Call the flow in this process, on Prefect's embedded server unless PREFECT_API_URL names one."""
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    # Our own console lines tell the story; Prefect's go to its server.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    from dschat_core.runs import status as read_status
    from flows.session import check_before_start

    check_before_start(config)
    from flows.chat import chat_pipeline
    from tasks.progress import use_console

    use_console(Console(stderr=as_json))
    signal.signal(signal.SIGTERM, _terminate)
    import httpx

    try:
        chat_pipeline(path, overrides, until)
    except (httpx.TransportError, RuntimeError) as error:
        api = os.environ.get("PREFECT_API_URL")
        unreachable = isinstance(error, httpx.TransportError) or "Failed to reach API" in str(error)
        if not (api and unreachable):
            raise
        raise ConfigError(
            f"Prefect's server at {api} does not answer",
            why=str(error),
            fix="start it (`prefect server start`), or unset PREFECT_API_URL to use the embedded one",
        ) from error
    shown = read_status(config.folder)
    _print_json(shown) if as_json else _print_status(shown)


def _terminate(_signal: int, _frame: object) -> None:
    # As an exception, so that the launcher's clean-up runs and the ranks write a checkpoint.
    raise SystemExit(ExitCode.TERMINATED)


def _stage(name: str | None) -> Stage | None:
    for stage in STAGES:
        if stage == name:
            return stage
    if name is not None:
        raise ConfigError(f"--until {name!r} is not a stage", fix=f"one of {', '.join(STAGES)}")
    return None


@contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    """Print our errors as a person or a program wants them, and exit with their code."""
    try:
        yield
    except DschatError as error:
        if as_json:
            _print_json(error.as_dict())
        console = Console(stderr=True)
        console.print(f"[bold red]error:[/] {_escape(error.what)}", highlight=False, soft_wrap=True)
        for label, text in error.details():
            if text:
                console.print(f"  [bold]{label}:[/] {_escape(text)}", highlight=False, soft_wrap=True)
        raise typer.Exit(int(error.exit_code)) from None
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted; run the same command again: finished work is reused", markup=False)
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=1))


def _print_status(shown: dict[str, Any]) -> None:
    table = Table(title=f"run {_escape(shown['run'])}", title_justify="left", box=None, pad_edge=False)
    for column in ("stage", "state", "time", "artifact"):
        table.add_column(column, justify="right" if column == "time" else "left", no_wrap=column != "artifact")
    for row in shown["stages"]:
        style = STATE_STYLE[row["state"]]
        table.add_row(row["stage"], f"[{style}]{row['state']}[/]", f"{row['wall_s']:.1f} s", _escape(row["uri"] or ""))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    if error := shown.get("error"):
        console.print(f"error: {error.get('error')}\n  next: {error.get('next')}", markup=False, highlight=False)


def _print_verdict(verdict: dict[str, Any]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(
        f"{verdict['kind']}: {verdict['lines']:,} lines: {verdict['accepted']:,} accepted, "
        f"{verdict['quarantined']:,} quarantined, {verdict['blank']:,} blank; {verdict['usable']:,} rows to use",
        markup=False,
    )
    for reason, count in sorted(verdict["reasons"].items()):
        first = next((entry for entry in verdict["quarantine"] if entry["reason"] == reason), None)
        place = f", first at {first['file']}:{first['line']}" if first else ""
        console.print(f"  quarantined {count:,}: {reason}{place}", markup=False)
    for empty in verdict["empty_files"]:
        console.print(f"  {empty} is empty", markup=False)
    table = Table(box=None, pad_edge=False)
    for column in ("gate", "count", "rate", "upper bound", "threshold", "action", "verdict", "why"):
        table.add_column(column, justify="right" if column in ("count", "rate", "upper bound", "threshold") else "left")
    for name, gate in verdict["gates"].items():
        shares = (f"{gate[key]:.3%}" for key in ("rate", "upper", "threshold"))
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in gate["reasons"].items())
        style = VERDICT_STYLE.get(gate["verdict"], "yellow")
        shown = f"[{style}]{gate['verdict'].replace('_', ' ')}[/]"
        table.add_row(name, f"{gate['count']:,}", *shares, gate["action"], shown, _escape(reasons))
    console.print(table)
    for name, gate in verdict["gates"].items():
        if gate["examples"]:
            example = gate["examples"][0]
            console.print(f"{name}: {example['file']}:{example['line']}: {example['excerpt']}", markup=False)
    for why in verdict["why"]:
        console.print(f"refused: {why}", markup=False)
    console.print(f"verdict: {verdict['verdict']}", markup=False)


VERDICT_STYLE = {"pass": "green", "failed": "bold red", "not_certifiable": "dim"}


if __name__ == "__main__":
    main()
