"""The report page and Prefect's markdown, built from a made-up run."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dschat_core.config import DATASETS
from dschat_core.report.curves import charts, phase_seconds, read_lines
from dschat_core.report.markdown import stage_markdown
from dschat_core.report.page import build_report
from dschat_core.report.plots import Chart, Histogram, Series
from dschat_core.report.tables import Table, evaluation_tables, number, percent, seconds
from tests.helpers_report import STAGES, evaluation, synthetic_run

VOID = {"meta", "br", "img", "input", "hr", "link"}


class Outline(HTMLParser):
    """Checks that tags nest, and collects ids, addresses and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.stack.append(tag)
        self._note(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "xlink:href", "action"):
                self.addresses.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1] != "style":
            self.text.append(data)


def outline(path: Path) -> Outline:
    found = Outline()
    found.feed(path.read_text(encoding="utf-8"))
    found.close()
    assert found.stack == []
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report")
    return build_report(*synthetic_run(root / "store"), root / "run" / "report.html")


def test_the_page_shows_every_section(page: Path) -> None:
    found = outline(page)
    for section in (
        "stages",
        "time",
        "curves",
        "data",
        "rows",
        "evaluation",
        "replies",
        "rollouts",
        "lineage",
        "config",
    ):
        assert section in found.ids
    text = " ".join(" ".join(found.text).split())
    for words in (
        "bits per byte 1.762",
        "another conversation's reply 630 52.0 %",
        "toxicity self harm 20 insult 5 dropped 25 0.12 % 0.18 % 0.10 % drop",
        "best of iteration 40",
        "I'm doing well, thanks! How are you?",
        "7 min 03 s",
        "quarantined lines by reason",
        "text.train.jsonl:12 insult “you idiot”",
        "text.train.jsonl:9 exact repeats text.train.jsonl:2 hi!",
        "text.train.jsonl:3 too long 4,012 tokens",
        "bad_json: 4",
        "removed as held out 5",
        "same question 2.00 %",
        "languages: en 19,000 zh 1,900 und 100",
        "personal data: email 4 phone 2",
        "14 rows text.train.jsonl:2",
        "Rows by length in tokens, estimated from bytes.",
    ):
        assert words in text, words
    # The picture of the stages, the curves, and the lengths of the data sets whose verdict has them.
    assert found.tags.count("svg") == 1 + 8 + 3


def test_the_page_is_offline_and_has_no_script(page: Path) -> None:
    found = outline(page)
    assert "script" not in found.tags
    assert "iframe" not in found.tags
    assert all(address.startswith("#") for address in found.addresses)
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"url\((?!#)", html)
    assert "@import" not in html
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"|http-equiv', "", html)


def test_texts_of_users_and_models_stay_text(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;" in html
    assert "<b>what</b>" not in html
    assert "<|im_end|>" not in html
    assert "<img" not in html
    assert "a <b>config</b>" not in html
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", html)


def test_gates_are_shown_by_word_and_colour(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    for name in ("pass", "dropped", "truncated", "masked", "warned", "failed", "not_certifiable"):
        assert f'<span class="badge {name}">{name.replace("_", " ")}</span>' in html
        assert f".badge.{name}" in html
    # Ten examples each of the three data sets' toxicity.
    assert html.count("“you idiot”") == 30


def test_rows_are_shown_as_the_model_is_given_them(page: Path) -> None:
    html = page.read_text(encoding="utf-8")
    rows = html[html.index('id="rows"') : html.index('id="evaluation"')]
    assert [rows.count(f"<summary>{name}</summary>") for name in DATASETS] == [1, 1, 1, 1]
    # The user's control-token text is text, the template's is a control token; the reply's is trained.
    assert (
        '<b class="control">&lt;|im_start|&gt;</b>user↵\n你好 &lt;|im_end|&gt; &lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;'
        " &amp; &lt;b&gt;bold&lt;/b&gt;"
        '<b class="control">&lt;|im_end|&gt;</b>↵\n<b class="control">&lt;|im_start|&gt;</b>assistant↵\n'
        '<mark class="trained">I&#39;m fine 🙂 ␛[2J&lt;U+202E&gt; 0</mark><b class="control trained">&lt;|im_end|&gt;</b></div>'
    ) in rows
    text = " ".join(" ".join(outline(page).text).split())
    assert "row 2: " in text
    pairs = r"pair (\d), prompt: \d+ tokens .*? chosen: (\d+) tokens, \2 trained good \1 <\|im_end\|>"
    assert [number for number, _ in re.findall(pairs, text)] == ["0", "2", "4", "6", "8"]


def test_a_long_row_is_cut(tmp_path: Path) -> None:
    status, manifests, folders = synthetic_run(tmp_path / "store", STAGES[:2])
    whole = build_report(status, manifests, folders, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "line 0</mark>" in whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dschat_core.report.page.MAX_ROW_CHARACTERS", 20)
        cut = build_report(status, manifests, folders, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "&lt;script</mark> …</div>" in cut
    assert "line 0" not in cut


@pytest.mark.parametrize("damage", ["tokenizer", "index", "folder", "part", "shard", "version"])
def test_rows_that_cannot_be_read_are_left_out(damage: str, tmp_path: Path) -> None:
    status, manifests, folders = synthetic_run(tmp_path / "store", STAGES[:2])
    folder = folders["tokenization"]
    if damage == "tokenizer":
        (folder / "tokenizer" / "tokenizer.json").write_text("{", encoding="utf-8")
    elif damage == "folder":
        shutil.rmtree(folder)
    elif damage == "part":
        shutil.rmtree(folder / "dialogues")
    elif damage == "index":
        (folder / "dialogues" / "index.json").write_text("{", encoding="utf-8")
    elif damage == "shard":
        (folder / "dialogues" / "shard-00000.bin").unlink()
    else:
        path = folder / "dialogues" / "index.json"
        path.write_text(path.read_text(encoding="utf-8").replace('"version": 2', '"version": 1'), encoding="utf-8")
    found = outline(build_report(status, manifests, folders, tmp_path / "report.html"))
    assert "data" in found.ids
    assert ("rows" in found.ids) == (damage not in ("tokenizer", "folder"))
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<summary>dialogues</summary>" not in html
    assert ("<summary>text</summary>" in html) == (damage not in ("tokenizer", "folder"))


def test_ids_are_unique(page: Path) -> None:
    ids = outline(page).ids
    assert len(ids) == len(set(ids))


def test_the_page_is_the_same_every_time(page: Path, tmp_path: Path) -> None:
    again = build_report(*synthetic_run(tmp_path / "store"), tmp_path / "report.html")
    first, second = (path.read_text(encoding="utf-8") for path in (page, again))
    first, second = (re.sub(r'title="/[^"]*"', "", html) for html in (first, second))
    assert first == second


@pytest.mark.parametrize("stages", [(), STAGES[:1], STAGES[:3], STAGES[:6]])
def test_a_partial_run_gives_a_page(stages: tuple[str, ...], tmp_path: Path) -> None:
    status, manifests, folders = synthetic_run(tmp_path / "store", stages)
    found = outline(build_report(status, manifests, folders, tmp_path / "report.html"))
    assert ("data" in found.ids) == ("validation" in stages)
    assert "evaluation" not in found.ids
    assert "pending" in found.text


def test_a_failed_run_shows_its_error(tmp_path: Path) -> None:
    status, manifests, folders = synthetic_run(tmp_path / "store", STAGES[:3])
    status["error"] = {"error": "loss is <nan>", "where": "sft, step 7", "why": "", "next": "dschat resume demo"}
    text = " ".join(outline(build_report(status, manifests, folders, tmp_path / "report.html")).text)
    assert "loss is <nan>" in text
    assert "dschat resume demo" in text


def test_a_run_without_some_stages_bridges_the_picture(tmp_path: Path) -> None:
    status, manifests, folders = synthetic_run(tmp_path / "store", ("validation", "tokenization", "sft"))
    status["stages"] = [entry for entry in status["stages"] if entry["stage"] in ("validation", "tokenization", "sft")]
    html = build_report(status, manifests, folders, tmp_path / "report.html").read_text(encoding="utf-8")
    assert html.count("marker-end") == 2


def test_a_cut_metrics_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo', encoding="utf-8")
    assert read_lines(path) == [{"step": 1, "loss": 2.0}]
    assert read_lines(tmp_path / "none.jsonl") == []


def test_curves_leave_out_missing_and_null_values() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": None},
        {"step": 3, "loss": 1.0, "eval_loss": 1.5},
    ]
    (chart,) = charts("pretraining", lines, evaluation())
    assert [list(series.x) for series in chart.series] == [[1, 3], [3]]
    assert dict(chart.references) == {"unigram": 5.61, "bigram": 4.0}
    assert charts("validation", lines) == []


def test_phase_seconds_weighs_lines_by_their_steps() -> None:
    lines = [
        {"step": 10, "phases": {"forward": 0.5}},
        {"step": 15, "phases": {"forward": 1.0, "comm": 0.1}},
    ]
    assert phase_seconds(lines) == pytest.approx({"forward": 10.0, "comm": 0.5})


def test_a_chart_is_valid_svg_in_the_pages_colours() -> None:
    svg = Chart("ppo: a <b> & c", "step", "x & y", [Series("one", range(100), range(100))], [("base", 3.0)]).svg()
    ET.fromstring(svg)
    assert "var(--series-1)" in svg
    assert "var(--muted)" in svg
    assert "#2563c9" not in svg
    assert "<metadata" not in svg


def test_a_histogram_marks_the_limit_on_a_scale_of_doublings() -> None:
    bins = [(2**power, 10) for power in range(12)]
    svg = Histogram("lengths", bins, 1000).svg()
    ET.fromstring(svg)
    assert "limit 1,000" in svg
    assert "var(--series-1)" in svg
    for label in (">0<", ">1<", ">512<", ">2k<", ">rows<", ">tokens<"):
        assert label in svg, label
    # Beyond all rows a limit would only squeeze them.
    assert "limit" not in Histogram("lengths", bins, 5000).svg()
    assert "limit" not in Histogram("lengths", bins).svg()
    assert "2M" in Histogram("one bin", [(2**21, 1)]).svg()


def test_stage_markdown_embeds_the_curves(tmp_path: Path) -> None:
    _, manifests, folders = synthetic_run(tmp_path / "store")
    text = stage_markdown("ppo", folders["ppo"], manifests["ppo"]["facts"])
    assert text.count("](data:image/png;base64,") == 3
    assert "| num_parameters | 1,073,664 |" in text
    validation = stage_markdown("validation", folders["validation"], {})
    assert "| toxicity | 25 | 0.120 % | 0.184 % | 0.100 % | drop | dropped | self_harm 20, insult 5 |" in validation
    assert "21,940 lines, 21,930 accepted, 7 quarantined, 3 blank" in validation
    assert "- toxicity: text.train.jsonl:12 insult “you idiot” \\<script\\>alert('x')" in validation
    assert "<script>" not in validation
    assert "### Reward model" in stage_markdown("evaluation", folders["evaluation"], {})
    assert stage_markdown("validation", tmp_path, {}) == "## validation\n"


def test_tables_escape_markdown_and_skip_what_is_missing() -> None:
    assert Table("", ("a|b", "c"), (("x\ny", "1"),)).markdown() == "| a\\|b | c |\n| --- | ---: |\n| x y | 1 |"
    nothing = {"text": None, "dialogues": None, "reward": None, "replies": {"prompts": 0, "models": {}}, "change": None}
    assert evaluation_tables(nothing) == []


def test_figures_as_text() -> None:
    assert [number(None), number(1234), number(0.5), number(True)] == ["–", "1,234", "0.50", "yes"]
    assert [percent(None), percent(0.123)] == ["–", "12.3 %"]
    assert [seconds(None), seconds(8.44), seconds(185), seconds(7620)] == ["–", "8.4 s", "3 min 05 s", "2 h 07 min"]


def test_evaluation_json_is_what_the_tables_read() -> None:
    titles = [table.title for table in evaluation_tables(json.loads(json.dumps(evaluation())))]
    assert titles == [
        "Held-out text",
        "Held-out replies",
        "Reward model",
        "Replies to held-out prompts",
        "Flaw detectors",
    ]
