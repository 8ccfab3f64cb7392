"""The toxicity gate, its lexicon, and detectors behind the same protocol."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dschat_core.config import ToxicityGate
from dschat_core.data.gates import detectors
from dschat_core.data.gates import toxicity as gate
from dschat_core.data.gates.block import Block
from dschat_core.data.gates.detectors import Hit, load_detector
from dschat_core.data.gates.toxicity import lexicon_hits, toxicity
from dschat_core.errors import ConfigError, TransientError

HERE = Path(__file__).parent


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_bytes().splitlines()]


# What the lexicon is held to line by line. The development sets below it was widened on: they show that it stays as good
# as it was, not how good it is; that is measured on `tests/benchmarks/toxicity_labelled.jsonl`, written independently.
CASES = read("toxicity_cases.jsonl")


@pytest.mark.parametrize("text", [case["text"] for case in CASES if case["toxic"]])
def test_abuse_is_toxic(text: str) -> None:
    assert lexicon_hits([text])[0]


@pytest.mark.parametrize("text", [case["text"] for case in CASES if not case["toxic"]])
def test_swearing_at_no_one_reported_speech_and_harmless_words_are_not(text: str) -> None:
    assert lexicon_hits([text])[0] is None


@pytest.mark.parametrize(("language", "recall"), [("en", 0.84), ("zh", 0.87)])
def test_the_development_sets_stay_as_well_covered_as_they_were(language: str, recall: float) -> None:
    rows = read(f"toxicity_dev_{language}.jsonl")
    hits = [hit is not None for hit in lexicon_hits([row["text"] for row in rows])]
    toxic = [hit for hit, row in zip(hits, rows, strict=True) if row["toxic"]]
    harmless = [hit for hit, row in zip(hits, rows, strict=True) if not row["toxic"]]
    assert sum(toxic) >= recall * len(toxic)
    assert sum(harmless) <= 0.06 * len(harmless)


@pytest.mark.parametrize("name", ["lexicon_en.tsv", "lexicon_zh.tsv"])
def test_no_pattern_matches_without_one_of_its_words(name: str) -> None:
    """The words only spare work: every pattern searched in every text finds nothing that the quick way does not."""
    lexicon = gate._lexicon(name)
    for row in CASES + read("toxicity_dev_en.jsonl") + read("toxicity_dev_zh.jsonl"):
        folded = row["text"].lower().replace("’", "'")
        signs = [*gate._WORDS.findall(folded), *folded]
        quick = {(label, match.span()) for label, match in lexicon.hits(folded, signs)}
        slow = {(label, match.span()) for label, pattern in lexicon.patterns for match in pattern.finditer(folded)}
        assert quick == slow, row["text"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text",
    ["you are " * 1000, "a*" * 4000, "f u c k " * 1000, "你" * 4000, "你是" * 2000, "!" * 50_000, "aaa" * 4000,
     "people " * 1500, "you fucking " * 1000, "他们都是" * 1000],
)  # fmt: skip
def test_long_and_hostile_text_ends(text: str) -> None:
    lexicon_hits([text])


# ── the gate ────────────────────────────────────────────────────────────────────────────────────────────


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_every_turn_is_asked_and_of_a_pair_the_rejected_reply_only_where_wanted() -> None:
    rows = [{"messages": turns("hi", "hello")}, {"messages": turns("hi", "hello", "you stupid bitch", "sorry?")}]
    found = toxicity(Block("dialogues", rows), ToxicityGate(), lexicon_hits).findings
    assert [(finding.row, finding.reason, finding.detail["turn"]) for finding in found] == [(1, "insult", 3)]
    assert found[0].detail["span"] in "you stupid bitch"
    pair = {"messages": turns("hi"), "chosen": "hello", "rejected": "go kill yourself", "kind": None}
    assert toxicity(Block("preferences", [pair]), ToxicityGate(), lexicon_hits).findings == []
    strict = toxicity(Block("preferences", [pair]), ToxicityGate(check_rejected=True), lexicon_hits).findings
    assert [finding.reason for finding in strict] == ["self_harm"]


@pytest.mark.parametrize("detector", ["perspective", "hf:", "ftp://x"])
def test_an_unknown_detector_is_refused_at_load(detector: str) -> None:
    with pytest.raises(ValueError, match="unknown detector"):
        ToxicityGate(detector=detector)


def test_the_lexicon_crosses_to_other_processes() -> None:
    assert pickle.loads(pickle.dumps(load_detector(ToxicityGate())))(["you idiot"])[0] is not None


# ── a moderation endpoint ───────────────────────────────────────────────────────────────────────────────


class Endpoint(ThreadingHTTPServer):
    """Answers as told: status codes first, then verdicts on texts with `bad` in them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.requests: list[tuple[str | None, list[str]]] = []
        self.body: bytes | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/moderations"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint

    def do_POST(self) -> None:
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
        self.server.requests.append((self.headers.get("Authorization"), texts))
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        results = [
            {"flagged": "bad" in t, "category_scores": {"hate": 0.9 if "bad" in t else 0.1, "other": 0.2}}
            for t in texts
        ]
        body = self.server.body or json.dumps({"results": results}).encode()
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if status == 200 else b"{}")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr(detectors, "HTTP_BACKOFF_S", 0.001)
    server = Endpoint()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_an_endpoint_is_asked_in_batches_with_the_key_from_the_environment(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSCHAT_MODERATION_KEY", "secret-1")
    hits = load_detector(ToxicityGate(detector=endpoint.url))(["good"] * 99 + ["bad"])
    assert [place for place, hit in enumerate(hits) if hit] == [99]
    assert hits[99] == Hit("bad", "hate", 0.9)
    assert [len(texts) for _, texts in endpoint.requests] == [64, 36]
    assert {key for key, _ in endpoint.requests} == {"Bearer secret-1"}


def test_a_busy_endpoint_is_asked_again_and_a_dead_one_is_named(endpoint: Endpoint) -> None:
    endpoint.statuses = [503, 429]
    detector = load_detector(ToxicityGate(detector=endpoint.url))
    assert detector(["bad"])[0] is not None
    assert len(endpoint.requests) == 3
    endpoint.statuses = [500] * 4
    with pytest.raises(TransientError, match="does not answer") as caught:
        detector(["good"])
    assert "HTTP 500" in caught.value.why


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_asking_again_cannot_mend_is_refused_at_once(endpoint: Endpoint, status: int) -> None:
    endpoint.statuses = [status]
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        load_detector(ToxicityGate(detector=endpoint.url))(["good"])
    assert f"HTTP {status}" in caught.value.why
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("body", [b"not json", b'{"results": []}', b'{"answer": 1}', b'{"results": [1]}'])
def test_an_answer_of_another_form_is_refused(endpoint: Endpoint, body: bytes) -> None:
    endpoint.body = body
    with pytest.raises(ConfigError) as caught:
        load_detector(ToxicityGate(detector=endpoint.url))(["good"])
    assert "its answer is not" in caught.value.why


# ── a transformers classifier ───────────────────────────────────────────────────────────────────────────


def classifier(folder: Path, labels: list[str], *, multi_label: bool = False) -> str:
    """A tiny model that gives its last label to texts with `bad` in them, its first to others."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1, "bad": 2, "good": 3}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16
    ).save_pretrained(folder)
    config = BertConfig(
        vocab_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=16, id2label=dict(enumerate(labels)), label2id={name: i for i, name in enumerate(labels)},
        problem_type="multi_label_classification" if multi_label else "single_label_classification",
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    ids, last = torch.tensor([[2, 3], [3, 3], [1, 2], [1, 3], [2, 2]]), len(labels) - 1
    wanted = torch.tensor([last, 0, last, 0, last])
    for _ in range(60):
        logits = model(ids).logits
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        if multi_label:
            target = torch.nn.functional.one_hot(wanted, len(labels)).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("multi_label", [False, True])
def test_a_classifier_tells_toxic_texts_by_the_names_of_its_labels(tmp_path: Path, multi_label: bool) -> None:
    name = classifier(tmp_path, ["neutral", "insult", "threat"], multi_label=multi_label)
    hits = load_detector(ToxicityGate(detector=f"hf:{name}"))(["good good", "bad good", "good", "bad " * 100])
    assert [hit is not None for hit in hits] == [False, True, False, True]
    assert hits[1] is not None
    assert (hits[1].label, hits[1].span) == ("threat", "bad good")


def test_labels_without_names_have_to_be_told(tmp_path: Path) -> None:
    name = classifier(tmp_path, ["LABEL_0", "LABEL_1"])
    with pytest.raises(ConfigError, match="LABEL_0, LABEL_1"):
        load_detector(ToxicityGate(detector=f"hf:{name}"))
    with pytest.raises(ConfigError) as caught:
        load_detector(ToxicityGate(detector=f"hf:{name}", toxic_labels=("LABEL_9",)))
    assert "LABEL_9 is none of them" in caught.value.why
    detector = load_detector(ToxicityGate(detector=f"hf:{name}", toxic_labels=("LABEL_1",)))
    assert [hit is not None for hit in detector(["bad", "good"])] == [True, False]


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the classifier"):
        load_detector(ToxicityGate(detector=f"hf:{tmp_path / 'none'}"))
