"""What `dschat inspect` prints of rows, on a terminal and elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from dschat_core.chat_template import ChatTokenizer, load_tokenizer
from dschat_core.config import RunConfig
from dschat_core.data.inspecting import inspect_row
from dschat_core.data.shards import ShardReader
from dschat_core.errors import ConfigError
from flows.cli import _inspected, _packed_row, _print_pair, _print_pieces, _print_rows, _row_samples
from tests.helpers_report import tokenization_artifact


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "tokenization"
    tokenization_artifact(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(artifact: Path) -> ChatTokenizer:
    return load_tokenizer(artifact / "tokenizer")


def test_without_colours_trained_text_stands_in_brackets(
    artifact: Path, tokenizer: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    record, found = _inspected(ShardReader(artifact / "dialogues"), tokenizer, "dialogues", 3, None)
    _print_rows("dialogues", "row 3 of step 0", [record], [found])
    shown = capsys.readouterr().out
    title, rule, *rest = shown.splitlines()
    assert title == "row 3 of step 0"
    assert rule.startswith(f"dialogues 3: {record['num_tokens']} tokens, {record['num_trained']} trained ──")
    assert "\n".join(rest) == (
        "<|im_start|>user↵\n你好 <|im_end|> <script>alert('x')</script> & <b>bold</b><|im_end|>↵\n<|im_start|>assistant↵\n"
        "⟦I'm fine 🙂 ␛[2J<U+202E> 3⟧<|im_end|>✓"
    )
    assert "\x1b" not in shown


def test_on_a_terminal_colours_tell_trained_from_control_tokens(artifact: Path, tokenizer: ChatTokenizer) -> None:
    console = Console(force_terminal=True, color_system="standard", width=200, highlight=False, no_color=False)
    with console.capture() as capture:
        _print_pieces(console, inspect_row(ShardReader(artifact / "dialogues"), tokenizer, 0))
    shown = capture.get()
    assert "\x1b[32mI'm fine 🙂 ␛[2J<U+202E> 0\x1b[0m" in shown
    assert "\x1b[1;7;32m<|im_end|>\x1b[0m" in shown
    assert "\x1b[7;36m<|im_start|>\x1b[0m" in shown
    assert "⟦" not in shown
    # The row's own escape sequence does not reach the terminal.
    assert "\x1b[2J" not in shown


def test_a_pair_shows_its_prompt_once(
    artifact: Path, tokenizer: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    reader = ShardReader(artifact / "preferences")
    samples = _row_samples(len(reader), "preferences", 4)
    assert samples == [8, 9]
    _print_pair("preferences", 4, *(inspect_row(reader, tokenizer, sample) for sample in samples))
    shown = capsys.readouterr().out
    assert shown.count("你好") == 1
    assert shown.index("⟦good 4⟧<|im_end|>✓") < shown.index("rejected: ") < shown.index("⟦bad 4⟧<|im_end|>✓")


def test_a_prompt_is_shown_as_the_actor_is_given_it(artifact: Path, tokenizer: ChatTokenizer) -> None:
    reader = ShardReader(artifact / "prompts")
    whole, _ = _inspected(reader, tokenizer, "prompts", 1, int(reader.lengths[1]))
    assert whole["note"] is None
    cut, found = _inspected(reader, tokenizer, "prompts", 1, int(reader.lengths[1]) - 1)
    assert cut["num_tokens"] == reader.lengths[0] < reader.lengths[1]
    assert "".join(piece.text for piece in found).endswith("<|im_start|>assistant\n")
    assert cut["note"].endswith("the actor is given 1 of its 3 messages, the oldest are left out")
    out, found = _inspected(reader, tokenizer, "prompts", 1, 5)
    assert out["note"].endswith("ppo leaves it out")
    assert out["num_tokens"] == reader.lengths[1]


@pytest.mark.parametrize(
    ("size", "part", "row", "named"),
    [
        (9, "dialogues", 9, "its rows are 0 … 8; --row 8"),
        (18, "preferences", 9, "its rows are 0 … 8; --row 8"),
        (0, "text_heldout", 0, "it is empty; inspect another part, or add rows to data.text"),
    ],
)
def test_rows_out_of_range_name_the_range(size: int, part: str, row: int, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _row_samples(size, part, row)
    assert f"{caught.value.why}; {caught.value.fix}" == named


def test_a_packed_row_names_its_step_and_its_samples(artifact: Path) -> None:
    reader = ShardReader(artifact / "dialogues")
    stages = dict.fromkeys(("pretraining", "reward", "ppo", "evaluation", "publishing"))
    config = RunConfig.model_validate(
        {
            "name": "demo",
            "data": {"dialogues": {"train": ["x"]}},
            "sft": {"max_length": 256, "global_batch_size": 2, "base_model": "x"},
            **stages,
        }
    )
    title, samples = _packed_row(reader, config, "dialogues", 2)
    filled = int(reader.lengths[samples].sum())
    assert title == f"row 0 of step 1: {len(samples)} samples, {filled} of 256 tokens filled"
    with pytest.raises(ConfigError, match="there is no packed row 999"):
        _packed_row(reader, config, "dialogues", 999)
    for part in ("text", "preferences", "dialogues_heldout"):
        with pytest.raises(ConfigError, match="is not packed"):
            _packed_row(reader, config, part, 0)
