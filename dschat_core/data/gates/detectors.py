"""What tells a toxic text: the embedded lexicon, a transformers classifier, or a moderation endpoint."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dschat_core.config import ToxicityGate
from dschat_core.errors import ConfigError, TransientError

HF_BATCH = 32
HTTP_BATCH = 64
HTTP_TIMEOUT_S = 30.0
HTTP_ATTEMPTS = 4
HTTP_BACKOFF_S = 1.0
KEY_VARIABLE = "DSCHAT_MODERATION_KEY"
# Names under which classifiers say that a text is not toxic.
BENIGN_LABELS = {"neutral", "normal", "ok", "safe", "clean", "none", "benign", "acceptable", "nothate", "nohate"}


class Hit(NamedTuple):
    """A toxic text: the words that make it so (the whole text where a model judged it), of what kind, how surely."""

    span: str
    label: str
    score: float


class Detector(Protocol):
    """Judges texts; one hit or None for each, in order."""

    def __call__(self, texts: Sequence[str]) -> list[Hit | None]: ...


def load_detector(section: ToxicityGate) -> Detector:
    """The detector that the config names.

    Raises:
        ConfigError: a model that can't be loaded, or of whose labels none is known to be toxic.
    """
    if section.detector == "lexicon":
        from dschat_core.data.gates.toxicity import lexicon_hits

        return lexicon_hits
    if section.detector.startswith("hf:"):
        return ClassifierDetector(section)
    return EndpointDetector(section)


class ClassifierDetector:
    """A text-classification model: a softmax over labels, or independent ones, of which the highest toxic one counts."""

    def __init__(self, section: ToxicityGate) -> None:
        # The one place in data/ that needs torch, and only where this detector is asked for.
        from transformers import pipeline

        name = section.detector.removeprefix("hf:")
        try:
            self._classify: Any = pipeline("text-classification", model=name, tokenizer=name, top_k=None)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ConfigError(
                f"cannot load the classifier {name}",
                where="validation.toxicity.detector",
                why=str(error).splitlines()[0][:300],
                fix="name a Hugging Face text-classification model, by hub id or as a local folder",
            ) from error
        config: Any = self._classify.model.config
        labels: list[str] = list(config.id2label.values())
        self._toxic = frozenset(section.toxic_labels or [label for label in labels if not _is_benign(label)])
        if unknown := self._toxic - set(labels):
            self._refuse(labels, f"{', '.join(sorted(unknown))} is none of them")
        nameless = (self._toxic == set(labels) and len(labels) == 2) or all(
            name.startswith("LABEL_") for name in labels
        )
        if nameless and not section.toxic_labels:
            self._refuse(labels, "their names do not tell which mean toxic")
        self._min_score = section.min_score
        self._multi_label = config.problem_type == "multi_label_classification"

    def _refuse(self, labels: Sequence[str], why: str) -> None:
        raise ConfigError(
            f"the classifier's labels are {', '.join(labels)}",
            where="validation.toxicity.toxic_labels",
            why=why,
            fix="set validation.toxicity.toxic_labels to those that mean toxic",
        )

    def __call__(self, texts: Sequence[str]) -> list[Hit | None]:
        # Of several exclusive labels the probabilities add up; independent ones are compared.
        scored = self._classify(
            list(texts),
            batch_size=HF_BATCH,
            truncation=True,
            function_to_apply="sigmoid" if self._multi_label else "softmax",
        )
        return [self._hit(text, scores) for text, scores in zip(texts, scored, strict=True)]

    def _hit(self, text: str, scores: list[dict[str, Any]]) -> Hit | None:
        toxic = [entry for entry in scores if entry["label"] in self._toxic]
        worst = max(toxic, key=lambda entry: entry["score"])
        score = worst["score"] if self._multi_label else sum(entry["score"] for entry in toxic)
        return Hit(text, str(worst["label"]), float(score)) if score >= self._min_score else None


def _is_benign(label: str) -> bool:
    plain = "".join(character for character in label.lower() if character.isalnum())
    return plain in BENIGN_LABELS or (
        plain.startswith(("non", "not", "no")) and plain not in ("notsafe", "notsafeforwork")
    )


class EndpointDetector:
    """A moderation endpoint that takes `{"input": [texts]}` and answers `{"results": [{"flagged", "category_scores"}]}`.

    That is OpenAI's form, which others have taken over. A key, if one is needed, is read from `DSCHAT_MODERATION_KEY`.
    """

    def __init__(self, section: ToxicityGate) -> None:
        self._url = section.detector
        self._min_score = section.min_score

    def __call__(self, texts: Sequence[str]) -> list[Hit | None]:
        found: list[Hit | None] = []
        for start in range(0, len(texts), HTTP_BATCH):
            batch = texts[start : start + HTTP_BATCH]
            results = self._ask(batch)
            found += [self._hit(text, result) for text, result in zip(batch, results, strict=True)]
        return found

    def _hit(self, text: str, result: dict[str, Any]) -> Hit | None:
        scores = result.get("category_scores") or {}
        label = max(scores, key=scores.__getitem__, default="flagged")
        score = float(scores.get(label, 1.0 if result.get("flagged") else 0.0))
        return Hit(text, label, score) if result.get("flagged") or score >= self._min_score else None

    def _ask(self, batch: Sequence[str]) -> list[dict[str, Any]]:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._url, json.dumps({"input": list(batch)}).encode(), headers)
        for attempt in range(1, HTTP_ATTEMPTS + 1):
            try:
                with urllib.request.urlopen(request, timeout=HTTP_TIMEOUT_S) as response:
                    return self._results(response.read(), len(batch))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code} {error.reason}"
                if error.code < 500 and error.code != 429:
                    raise self._refused(reason) from None
            except (urllib.error.URLError, OSError) as error:
                reason = str(getattr(error, "reason", error))
            if attempt < HTTP_ATTEMPTS:
                time.sleep(HTTP_BACKOFF_S * 2 ** (attempt - 1))
        raise TransientError(
            f"the moderation endpoint {self._url} does not answer",
            where="validation.toxicity.detector",
            why=f"{reason}, {HTTP_ATTEMPTS} times",
            fix="see that it runs, then run the same command again",
        )

    def _results(self, body: bytes, count: int) -> list[dict[str, Any]]:
        try:
            results = json.loads(body)["results"]
        except (ValueError, KeyError, TypeError):
            results = None
        if not isinstance(results, list) or len(results) != count or not all(isinstance(r, dict) for r in results):
            raise self._refused(f"its answer is not {{'results': [… {count} …]}}: {body[:80]!r}")
        return results

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"the moderation endpoint {self._url} cannot be used",
            where="validation.toxicity.detector",
            why=why,
            fix=f"correct the address, or the key in the environment variable {KEY_VARIABLE}",
        )


def local_folder(section: ToxicityGate) -> Path | None:
    """The folder of an `hf:` detector that is not a hub id."""
    path = Path(section.detector.removeprefix("hf:"))
    return path if section.detector.startswith("hf:") and path.is_dir() else None
