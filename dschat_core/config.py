"""The configuration of a run: one frozen tree, unknown keys forbidden, checked at load.

`load_config("deployments/runs/demo.yaml", ["sft.learning_rate=1e-5"])` → `RunConfig`.

Only the flow sees the whole tree; a stage gets its own section. In a section, `runtime` says where and
how the stage runs; everything else defines its result and is hashed into the artifact's key.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dschat_core.errors import ConfigError

Stage = Literal["validation", "tokenization", "pretraining", "sft", "reward", "ppo", "evaluation", "publishing"]
STAGES: tuple[Stage, ...] = get_args(Stage)

Dataset = Literal["text", "dialogues", "preferences", "prompts"]
DATASETS: tuple[Dataset, ...] = get_args(Dataset)

GateAction = Literal["fail", "drop", "warn"]
LengthAction = Literal["fail", "drop", "truncate", "split", "warn"]
PiiAction = Literal["fail", "drop", "mask", "warn"]

PositiveInt = Annotated[int, Field(ge=1)]

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Section(BaseModel):
    """A part of the config: immutable, and a typo is an error rather than a default."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def described(default: Any, description: str, **bounds: Any) -> Any:
    """A field with its default and its one-line description (unit included)."""
    return Field(default, description=description, **bounds)


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────


RowFormat = Literal["auto", "messages", "sharegpt", "alpaca", "input_output"]


class DataSource(Section):
    """Where one data set comes from, and how its rows are written."""

    train: tuple[str, ...] = Field(
        min_length=1,
        description="files or globs, local or s3://; a `save_to_disk` folder; `hf:name[/config][:split]` from a hub",
    )
    heldout: tuple[str, ...] = described((), "the same, never trained on; empty: split off `validation.heldout_share`")
    format: RowFormat = described(
        "auto",
        "auto: recognised row by row; messages: OpenAI's, sharegpt: `conversations` of `from`/`value`, alpaca: "
        "`instruction`/`input`/`output`, input_output: `history`/`input`/`output`",
    )
    columns: dict[str, str] = described(
        {}, "the standard column → the one that these files have in its place, e.g. {output: answer}"
    )


class DataConfig(Section):
    """The four data sets. A stage that is left out does not need its own."""

    text: DataSource | None = described(None, "plain text for pretraining")
    dialogues: DataSource | None = described(None, "dialogues for sft")
    preferences: DataSource | None = described(None, "chosen and rejected replies for reward")
    prompts: DataSource | None = described(None, "prompts for ppo")

    def sources(self) -> dict[Dataset, DataSource]:
        """The data sets that are configured, in their fixed order."""
        return {name: source for name in DATASETS if (source := getattr(self, name)) is not None}


class DataRuntimeConfig(Section):
    """How validation and tokenization use this machine. Nothing here changes what they make."""

    workers: PositiveInt | Literal["auto"] = described(
        "auto", "processes; auto: one per core where the data is large enough"
    )
    memory_bytes: int = described(
        2**30, "what the duplicates gate may hold in memory; above it its tables lie on disk", ge=2**20
    )


class Gate(Section):
    """A share of rows that a data set may have, and what happens to those rows."""

    threshold: float = described(1.0, "share of rows above which the action `fail` fails", ge=0, le=1)
    action: GateAction = described("warn", "fail: refuse the data set over the threshold; drop: leave out the rows")


class LengthGate(Section):
    """Rows longer than the limit."""

    max_tokens: int = described(2048, "tokens of the rendered template", gt=0)
    threshold: float = described(1.0, "share of rows above which the action `fail` fails", ge=0, le=1)
    action: LengthAction = described(
        "drop", "what happens to rows over the limit; truncate: oldest turns go; split: into rows that fit, whole turns"
    )
    tokenizer: str | None = described(
        None, "count with this Hugging Face folder's tokenizer and template; none: an estimate from the bytes"
    )


class DuplicatesGate(Gate):
    """Exact and near duplicates, keep-first; also what removes held-out rows from the training side."""

    threshold: float = described(0.05, "share of duplicate rows above which the action `fail` fails", ge=0, le=1)
    action: GateAction = described("drop", "what happens to all but the first of a cluster")
    near_jaccard: float = described(
        0.8,
        "Jaccard similarity of character shingles from which two rows are one; below 0.7 more and more pairs are missed",
        gt=0,
        le=1,
    )


class ToxicityGate(Gate):
    """Toxic turns."""

    threshold: float = described(0.001, "share of toxic rows above which the action `fail` fails", ge=0, le=1)
    action: GateAction = described("drop", "what happens to toxic rows")
    detector: str = described(
        "lexicon",
        "`lexicon`: the embedded one (English and Chinese); `hf:MODEL`: a transformers text classifier, by folder or "
        "hub id; `http://…`, `https://…`: a moderation endpoint",
    )
    min_score: float = described(0.5, "score from which `hf:` and `http:` call a text toxic", gt=0, le=1)
    toxic_labels: tuple[str, ...] = described(
        (), "labels of an `hf:` model that mean toxic; empty: all but those that say not toxic"
    )
    check_rejected: bool = described(False, "check the rejected replies of preferences too")

    @field_validator("detector")
    @classmethod
    def _known_detector(cls, value: str) -> str:
        if value != "lexicon" and not re.fullmatch(r"hf:.+|https?://.+", value):
            raise ValueError(f"unknown detector {value!r}; use lexicon, hf:MODEL or http://ADDRESS")
        return value


class LanguageGate(Gate):
    """The languages of the rows, told from their scripts and commonest words."""

    allowed: tuple[str, ...] = described((), "language codes such as en, zh; other rows are flagged; empty: only count")


class PiiGate(Section):
    """E-mail addresses, phone, identity and card numbers, keys."""

    threshold: float = described(1.0, "share of rows above which the action `fail` fails", ge=0, le=1)
    action: PiiAction = described("warn", "mask: put <EMAIL>, <PHONE>, … in their place and keep the row")


class RepliesGate(Gate):
    """Replies that teach nothing: near-empty ones and boilerplate such as "as an AI language model"."""

    min_characters: int = described(2, "letters and digits below which a reply is near-empty", ge=1)


class ContaminationGate(Gate):
    """Training rows that share a long run of words with an evaluation prompt."""

    threshold: float = described(0.01, "share of training rows above which the action `fail` fails", ge=0, le=1)
    action: GateAction = described("drop", "what happens to contaminated training rows")
    ngram: int = described(
        13, "words in a row (a Chinese, Japanese or Korean character counts as one) that must agree", ge=5
    )
    against: tuple[str, ...] = described(
        (), "files of evaluation prompts beside the held-out part of `data.prompts`, which is always checked"
    )


class ValidationConfig(Section):
    """Reads the raw files, quarantines bad lines and applies the gates."""

    version: ClassVar[int] = 2
    length: LengthGate = LengthGate()
    duplicates: DuplicatesGate = DuplicatesGate()
    toxicity: ToxicityGate = ToxicityGate()
    language: LanguageGate = LanguageGate()
    pii: PiiGate = PiiGate()
    replies: RepliesGate = RepliesGate()
    contamination: ContaminationGate = ContaminationGate()
    heldout_share: float = described(
        0.02, "share of rows held out where a data set names no held-out files", gt=0, lt=1
    )
    max_line_bytes: int = described(8 * 2**20, "longest line read, in bytes", gt=0)
    max_file_bytes: int = described(2**40, "largest file read, in bytes after decompression", gt=0)
    min_usable_rows: int = described(1, "usable training rows below which a data set is refused", ge=1)
    runtime: DataRuntimeConfig = DataRuntimeConfig()


class TokenizationConfig(Section):
    """Trains or takes the tokenizer, renders the chat template and writes the shards."""

    version: ClassVar[int] = 2
    base_model: str | None = described(
        None, "take tokenizer and template from this Hugging Face folder instead of training"
    )
    vocab_size: int = described(32_000, "entries of a trained tokenizer, special tokens included", ge=300)
    max_length: int = described(2048, "tokens per row; plain text is split there", ge=2)
    long_rows: Literal["truncate", "split", "drop"] = described(
        "truncate", "dialogues over max_length: lose their oldest turns, become several rows of whole turns, or go"
    )
    shard_bytes: int = described(64 * 2**20, "target size of one shard's tokens, in bytes", gt=0)
    seed: int = 0
    runtime: DataRuntimeConfig = DataRuntimeConfig()


# ── training ────────────────────────────────────────────────────────────────────────────────────────────


class RuntimeConfig(Section):
    """Where and how a stage runs. Nothing here changes what the stage computes."""

    num_nodes: int = described(1, "nodes of the job", ge=1)
    ranks_per_node: PositiveInt | Literal["auto"] = described(
        "auto", "ranks on each node; auto: one per GPU, 2 on a CPU"
    )
    hostfile: str | None = described(None, "DeepSpeed hostfile (`name slots=N` per line) for more than one node")
    threads_per_rank: PositiveInt | Literal["auto"] = described(
        "auto", "OpenMP threads of a rank; auto: cores divided by ranks"
    )
    micro_batch_size: PositiveInt | Literal["auto"] = described(
        "auto", "rows per rank and backward; auto: about 1,024 tokens on a CPU, 8 rows on a GPU"
    )
    zero_stage: Literal[0, 1, 2, 3] = described(1, "DeepSpeed ZeRO stage")
    offload_optimizer: bool = described(False, "keep optimizer states in host memory (ZeRO 1-3)")
    offload_param: bool = described(False, "keep parameters in host memory (ZeRO 3)")
    checkpoint_every: int = described(1000, "optimizer steps (ppo: iterations) between checkpoints", ge=1)
    keep_checkpoints: int = described(2, "newest checkpoints kept while the stage runs", ge=1)
    keep_optimizer: Literal["last", "none"] = described("last", "checkpoints kept after the artifact is committed")
    log_every: int = described(10, "optimizer steps between metric lines", ge=1)
    max_attempts: int = described(
        1, "launches of one run before the stage fails; each continues from the last checkpoint", ge=1
    )
    deepspeed_extra: dict[str, Any] = described({}, "more DeepSpeed settings; may not override the ones dschat owns")


class ModelConfig(Section):
    """A Llama-architecture model trained from scratch."""

    hidden_size: int = described(512, "width", gt=0)
    intermediate_size: int = described(1376, "width of the MLP", gt=0)
    num_layers: int = described(8, "transformer layers", gt=0)
    num_heads: int = described(8, "attention heads", gt=0)
    num_kv_heads: int | None = described(None, "key-value heads; none: as many as heads", gt=0)
    context_length: int = described(2048, "longest sequence, in tokens", gt=0)
    tie_embeddings: bool = described(True, "share input and output embeddings")
    rope_theta: float = described(10_000.0, "base of the rotary embedding", gt=0)
    init_std: float = described(
        0.02, "deviation of the initial weights; about sqrt(2 / (5 hidden_size)) suits small widths", gt=0
    )

    @model_validator(mode="after")
    def _divisible(self) -> ModelConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        return self


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: float = described(1e-5, "peak learning rate", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = described("cosine", "decay after the warm-up")
    warmup_share: float = described(0.03, "share of the steps that warm up linearly", ge=0, lt=1)
    min_lr_share: float = described(0.1, "learning rate at the end, as a share of the peak", ge=0, le=1)
    weight_decay: float = described(0.0, "decoupled decay of matrices; norms, biases and embeddings have none", ge=0)
    beta1: float = described(0.9, "Adam's first-moment decay", ge=0, lt=1)
    beta2: float = described(0.95, "Adam's second-moment decay", ge=0, lt=1)
    grad_clip: float = described(1.0, "largest global gradient norm", gt=0)


class TrainingConfig(OptimizerConfig):
    """What pretraining, sft and reward have in common."""

    seed: int = described(0, "seed of initialisation, order and every other random stream")
    base_model: str | None = described(
        None, "start from this Hugging Face folder instead of the previous stage's output"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = described("auto", "auto: bf16 on a GPU, fp32 on a CPU")
    global_batch_size: int = described(32, "rows per optimizer step over all ranks", gt=0)
    max_length: int = described(2048, "tokens of a (packed) row", gt=1)
    epochs: float = described(1.0, "passes over the data", gt=0)
    max_steps: int | None = described(None, "optimizer steps; overrides `epochs`", gt=0)
    eval_every: int = described(100, "optimizer steps between held-out losses", gt=0)
    eval_rows: int = described(256, "held-out rows of one such evaluation", gt=0)
    runtime: RuntimeConfig = RuntimeConfig()


class PretrainingConfig(TrainingConfig):
    """Next-token prediction on `text`, from scratch or from a base model."""

    version: ClassVar[int] = 1
    model: ModelConfig = ModelConfig()
    global_batch_size: int = described(1024, "packed rows per optimizer step over all ranks", gt=0)
    learning_rate: float = described(3e-4, "peak learning rate", gt=0)
    weight_decay: float = described(0.1, "decoupled decay of matrices; norms, biases and embeddings have none", ge=0)

    @model_validator(mode="after")
    def _fits_context(self) -> PretrainingConfig:
        if self.base_model is None and self.max_length > self.model.context_length:
            raise ValueError(
                f"max_length={self.max_length} exceeds model.context_length={self.model.context_length}; "
                f"set max_length <= {self.model.context_length} or raise model.context_length"
            )
        return self


class SftConfig(TrainingConfig):
    """Supervised fine-tuning on the assistant tokens of `dialogues`."""

    version: ClassVar[int] = 1


class RewardConfig(TrainingConfig):
    """A scalar head trained on `preferences` with the Bradley-Terry loss."""

    version: ClassVar[int] = 1
    global_batch_size: int = described(32, "pairs per optimizer step over all ranks", gt=0)


class PpoConfig(OptimizerConfig):
    """Proximal policy optimisation of the sft model against the reward model; the optimizer's keys are the actor's."""

    version: ClassVar[int] = 1
    seed: int = described(0, "seed of sampling, order and every other random stream")
    base_model: str | None = described(None, "start from this Hugging Face folder instead of sft's output")
    reward_model: str | None = described(
        None, "score with this sequence-classification folder instead of reward's output"
    )
    reward_function: str | None = described(
        None, "score with this Python function, `module:name(prompts, replies) -> list[float]`"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = described("auto", "auto: bf16 on a GPU, fp32 on a CPU")
    num_iterations: int = described(1000, "rounds of sampling and update", gt=0)
    rollout_batch_size: int = described(128, "prompts sampled per iteration over all ranks", gt=0)
    minibatch_size: int = described(32, "replies per optimizer step over all ranks", gt=0)
    ppo_epochs: int = described(4, "passes over the replies of one iteration", gt=0)
    critic_warmup: int = described(0, "first iterations in which only the critic learns", ge=0)
    max_prompt_tokens: int = described(512, "longer prompts lose their oldest turns", gt=0)
    reply_limit: int = described(256, "longest reply, in tokens", gt=0)
    temperature: float = described(1.0, "sampling temperature, in every log-probability too", gt=0)
    learning_rate: float = described(1e-6, "peak learning rate of the actor", gt=0)
    critic_learning_rate: float = described(5e-6, "peak learning rate of the critic", gt=0)
    schedule: Literal["cosine", "linear", "constant"] = described("constant", "decay after the warm-up, of both")
    kl_coef: float = described(0.05, "weight of the per-token KL penalty in the reward", ge=0)
    kl_controller: Literal["fixed", "adaptive"] = described(
        "fixed", "adaptive: Ziegler et al. 2019, towards `kl_target`"
    )
    kl_target: float = described(6.0, "nats per reply the adaptive controller aims at", gt=0)
    kl_horizon: int = described(10_000, "replies over which the adaptive controller acts", gt=0)
    gamma: float = described(0.99, "discount per token", gt=0, le=1)
    lam: float = described(0.95, "GAE lambda", ge=0, le=1)
    clip: float = described(0.2, "clip range of the policy ratio", gt=0)
    value_clip: float = described(0.2, "clip range of the value update", gt=0)
    score_clip: float = described(5.0, "largest absolute score", gt=0)
    missing_eos_penalty: float = described(1.0, "subtracted from the score of a reply that did not end", ge=0)
    eval_every: int = described(10, "iterations between held-out rewards", gt=0)
    eval_prompts: int = described(128, "held-out prompts of one such evaluation", ge=0)
    rollouts_every: int = described(10, "iterations between kept best, worst and random replies", gt=0)
    runtime: RuntimeConfig = RuntimeConfig()

    @field_validator("reward_function")
    @classmethod
    def _import_path(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
            raise ValueError(f"{value!r} is not of the form module:function")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> PpoConfig:
        if self.minibatch_size > self.rollout_batch_size:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} exceeds rollout_batch_size={self.rollout_batch_size}"
            )
        if self.critic_warmup >= self.num_iterations:
            raise ValueError(
                f"critic_warmup={self.critic_warmup} leaves the policy none of num_iterations={self.num_iterations}"
            )
        if self.reward_model and self.reward_function:
            raise ValueError("reward_model and reward_function are both set; keep one")
        return self


# ── evaluation and publishing ───────────────────────────────────────────────────────────────────────────


class EvaluationConfig(Section):
    """Held-out measures of every stage, baselines beside them."""

    version: ClassVar[int] = 1
    seed: int = 0
    max_rows: int = described(2000, "held-out rows per data set", gt=0)
    num_prompts: int = described(256, "held-out prompts answered by sft and ppo", gt=0)
    reply_limit: int = described(256, "longest reply, in tokens", gt=0)
    max_prompt_tokens: int = described(512, "longer prompts lose their oldest turns", gt=0)
    temperature: float = described(1.0, "sampling temperature", gt=0)
    fixed_prompts: tuple[str, ...] = described(
        ("Hello, how are you?", "What do you like to do on weekends?", "你好"),
        "the same prompts answered by each stage in the report",
    )
    runtime: RuntimeConfig = RuntimeConfig()


class LimitsConfig(Section):
    """What evaluation must reach before a model is published; none: not checked."""

    max_bits_per_byte: float | None = described(None, "held-out bits per byte of pretraining", gt=0)
    min_sft_gain: float | None = described(None, "share by which sft's loss on assistant tokens is below pretraining's")
    min_reward_accuracy: float | None = described(None, "held-out accuracy of the reward model", ge=0, le=1)
    min_reward_gain: float | None = described(None, "mean held-out reward of ppo minus sft, in deviations of sft's")
    max_kl: float | None = described(None, "mean KL of ppo from sft, in nats per reply", gt=0)
    max_length_change: float | None = described(None, "relative change of the mean reply length from sft to ppo", gt=0)
    min_distinct_share: float | None = described(None, "distinct-2 of ppo's replies as a share of sft's", ge=0)
    max_flaw_increase: float | None = described(
        None, "rise of the rate of loops, parroting or shuffled text", ge=0, le=1
    )
    max_toxic_share: float | None = described(None, "share of toxic samples", ge=0, le=1)


class PublishingConfig(Section):
    """The Hugging Face folder that is served, behind a gate."""

    version: ClassVar[int] = 1
    title: str = described("dschat model", "name in the model card")
    license: str = described("other", "licence identifier in the model card")
    limits: LimitsConfig = LimitsConfig()


# ── the run ─────────────────────────────────────────────────────────────────────────────────────────────


class RunConfig(Section):
    """One run of the pipeline. A stage set to null is left out; its product must then be given."""

    name: str = described("chat", "name of the run and of its folder")
    store: str = described("runs/store", "root of the artifacts, a folder or s3:// address, shared by all runs on it")
    runs: str = described("runs", "folder that holds the run's own folder `{runs}/{name}`")
    data: DataConfig = DataConfig()
    validation: ValidationConfig = ValidationConfig()
    tokenization: TokenizationConfig = TokenizationConfig()
    pretraining: PretrainingConfig | None = PretrainingConfig()
    sft: SftConfig | None = SftConfig()
    reward: RewardConfig | None = RewardConfig()
    ppo: PpoConfig | None = PpoConfig()
    evaluation: EvaluationConfig | None = EvaluationConfig()
    publishing: PublishingConfig | None = PublishingConfig()

    @field_validator("name")
    @classmethod
    def _safe_name(cls, value: str) -> str:
        if not RUN_NAME.fullmatch(value) or ".." in value:
            raise ValueError(
                f"{value!r} is not a run name; use 1-64 of A-Z a-z 0-9 . _ - and start with a letter or digit"
            )
        return value

    @field_validator("runs")
    @classmethod
    def _local_folder(cls, value: str) -> str:
        if "://" in value:
            raise ValueError(f"{value!r} is an address; only `store` may be one, a run's own folder is local")
        return value

    def stages(self) -> list[Stage]:
        """The stages that are not left out, in pipeline order."""
        return [stage for stage in STAGES if getattr(self, stage) is not None]

    @property
    def folder(self) -> Path:
        """The run's own folder: resolved config, state, report, links."""
        return Path(self.runs) / self.name

    @model_validator(mode="after")
    def _products_given(self) -> RunConfig:
        needs: tuple[tuple[Stage, Dataset], ...] = (
            ("pretraining", "text"),
            ("sft", "dialogues"),
            ("reward", "preferences"),
            ("ppo", "prompts"),
        )
        for stage, dataset in needs:
            if getattr(self, stage) is not None and getattr(self.data, dataset) is None:
                raise ValueError(f"{stage} needs data.{dataset}; name its files or set {stage}: null")
        if self.sft and not self.pretraining and not self.sft.base_model:
            raise ValueError("pretraining is left out; set sft.base_model to the model to start from")
        for stage in ("reward", "ppo"):
            section = getattr(self, stage)
            if section and not self.sft and not section.base_model:
                raise ValueError(f"sft is left out; set {stage}.base_model to the model to start from")
        if self.ppo and not self.reward and not (self.ppo.reward_model or self.ppo.reward_function):
            raise ValueError("reward is left out; set ppo.reward_model or ppo.reward_function")
        if self.publishing and not (self.evaluation and (self.pretraining or self.sft or self.ppo)):
            raise ValueError("publishing needs evaluation and a trained model; set publishing: null")
        if self.tokenization.base_model is None and self.data.text is None and self.data.dialogues is None:
            raise ValueError("a tokenizer needs data.text or data.dialogues to train on, or tokenization.base_model")
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> RunConfig:
        if self.pretraining is None or self.pretraining.base_model is not None:
            return self
        context = self.pretraining.model.context_length
        lengths: dict[str, int] = {}
        for stage in ("sft", "reward"):
            section = getattr(self, stage)
            if section and not section.base_model:
                lengths[f"{stage}.max_length"] = section.max_length
        if self.ppo and not self.ppo.base_model:
            lengths["ppo.max_prompt_tokens + ppo.reply_limit"] = self.ppo.max_prompt_tokens + self.ppo.reply_limit
        if self.evaluation:
            lengths["evaluation.max_prompt_tokens + evaluation.reply_limit"] = (
                self.evaluation.max_prompt_tokens + self.evaluation.reply_limit
            )
        for name, length in lengths.items():
            if length > context:
                raise ValueError(
                    f"{name}={length} exceeds pretraining.model.context_length={context}; "
                    f"lower the one or raise the other"
                )
        return self

    def warnings(self) -> list[str]:
        """What is allowed but probably not meant."""
        found = []
        if self.ppo and self.ppo.gamma**self.ppo.reply_limit < 0.5:
            found.append(
                f"ppo.gamma={self.ppo.gamma} discounts the score at the end of a {self.ppo.reply_limit}-token reply "
                f"to {self.ppo.gamma**self.ppo.reply_limit:.2g}; consider ppo.gamma=1.0"
            )
        return found


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a YAML file, apply `a.b=value` overrides and check everything that can be checked without data.

    Raises:
        ConfigError: the file is missing or not YAML, a key is unknown, or a value is out of range.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}",
            why=error.strerror or str(error),
            fix="dschat run deployments/runs/demo.yaml",
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", why=str(error), fix=f"save {path} as UTF-8") from None
    try:
        tree = _load_yaml(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML", why=str(error), fix=f"mend {path} at the place named") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}, not a mapping", fix="start it with `name: my-run`")
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree, where=str(path))


def parse_config(tree: Mapping[str, Any], *, where: str) -> RunConfig:
    """Build the checked tree; `where` is named in errors."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, where=where) from None


def load_validation(path: str | Path | None, overrides: Iterable[str] = ()) -> ValidationConfig:
    """The validation section of a YAML file, or the defaults, with overrides such as `pii.action=fail`.

    Raises:
        ConfigError: as `load_config`.
    """
    if path is not None:
        return load_config(path, [f"validation.{override}" for override in overrides]).validation
    tree: dict[str, Any] = {}
    for override in overrides:
        _apply_override(tree, override)
    try:
        return ValidationConfig.model_validate(tree)
    except ValidationError as error:
        raise config_error(error, where="--set") from None


def config_error(error: ValidationError, *, where: str) -> ConfigError:
    """Turn pydantic's findings into one error, a line per key path."""
    rows = []
    for finding in error.errors(include_url=False):
        path = ".".join(str(part) for part in finding["loc"] if part not in _UNION_TAGS) or "config"
        message = finding["msg"].removeprefix("Value error, ")
        if finding["type"] == "extra_forbidden":
            message = "extra inputs are not permitted" + _suggestion(finding["loc"])
        elif finding["type"] != "value_error":
            message += f" (got {finding['input']!r})"
        rows.append(f"{path}: {message}")
    return ConfigError(
        "; ".join(dict.fromkeys(rows)),
        where=where,
        why="the config does not fit the schema (dschat_core/config.py)",
        fix=f"correct {rows[0].split(':')[0]} in {where} or with --set",
    )


_UNION_TAGS = {"int", "constrained-int", "literal['auto']", "str"}


def _suggestion(location: Sequence[int | str]) -> str:
    """` (did you mean X?)` for a misspelt key, from the keys of the section it stands in."""
    import difflib

    section: Any = RunConfig
    for part in location[:-1]:
        field = getattr(section, "model_fields", {}).get(part)
        if field is None:
            return ""
        options = [field.annotation, *get_args(field.annotation)]
        section = next((o for o in options if isinstance(o, type) and issubclass(o, Section)), None)
    close = difflib.get_close_matches(str(location[-1]), getattr(section, "model_fields", {}), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `a.b=value`; the value is YAML. Raises ConfigError if it has no `=` or crosses a plain value."""
    path, separator, value = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(
            f"--set {override!r} is not of the form a.b=value", fix="for example --set sft.learning_rate=1e-5"
        )
    try:
        parsed = _load_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not valid YAML", why=str(error)) from None
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.setdefault(key, {})
        if child is None:
            child = node[key] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        node = child
    node[keys[-1]] = parsed


class _ConfigLoader(yaml.SafeLoader):
    """YAML 1.1 as people expect it: `1e-5` is a number and a repeated key is an error."""


def _load_yaml(text: str) -> Any:
    """What a YAML text holds. Raises yaml.YAMLError, also for what Python itself refuses to build from it."""
    try:
        return yaml.load(text, Loader=_ConfigLoader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except ValueError as error:  # a number of thousands of digits, a 31st of February
        raise yaml.YAMLError(str(error)) from None


def _unique_mapping(loader: _ConfigLoader, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key is not plain text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=deep)


_ConfigLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)
_ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML; `load_config` reads it back to an equal tree."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def result_section(section: Section) -> dict[str, Any]:
    """The part of a section that defines the result: all but `runtime`."""
    return section.model_dump(mode="json", exclude={"runtime"})


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted paths of the keys whose values differ, with both values."""
    rows: list[str] = []
    for key in [*old, *(k for k in new if k not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            rows += differing_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            rows.append(f"{prefix}{key}: {before!r} -> {after!r}")
    return rows
