"""The run's config: model, data, optimizer, schedule, guard, checkpoints; and a recipe's section `fallback`, which both
monitors and precision read. Strict, torch-free, every key with a unit.

A setting that the run is too short for, its data too small, or its guard off, is valid and without the effect that it
was set for (`warmup_doubt`, `left_out`, ...). No error: a trial of ten steps is meant to be short. What changes the
training is told as an event, what only leaves something out (a save, a validation, a statistic) in one line before the
first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from harness.core.errors import ConfigError, Problem, some
from harness.core.files import find
from harness.core.schema import Strict, parse_yaml, read_yaml, validate

Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(gt=0)]

OPTIMIZERS = ("adamw", "sgd", "adamw8bit", "adamw_fp8", "muon")
"""What `train.optimizer` may name without a colon."""
Documents = Literal["JSONL", "csv", "Parquet", "Arrow", "webdataset", "text"]
"""Formats of text, of which token ids are made; `data.rows.FORMATS` has their readers."""
_NAMED = 5
_SELDOM, _LONGEST_GAP = 5, 100


class TrainConfig(Strict):
    """Length, batch and update rule."""

    steps: Positive = Field(default=300, description="windows (optimizer steps) to train")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="seed of weights and data order"
    )
    global_batch: Positive = Field(
        default=16, description="samples per optimizer step, over all ranks"
    )
    micro_batch: Positive = Field(
        default=8, description="samples per forward and backward on one rank"
    )
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="clip the global L2 gradient norm to this"
    )
    lr: float = Field(default=2e-3, gt=0, description="peak learning rate")
    warmup_steps: Count = Field(default=20, description="applied steps of linear warm-up")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine",
        description="learning rate after the warm-up; wsd: constant, then linear in decay_share",
    )
    min_lr_ratio: Share = Field(
        default=0.1, description="final learning rate over peak, but for constant"
    )
    decay_share: Share = Field(
        default=0.2, description="wsd: share of train.steps that decays, at the end"
    )
    weight_decay: float = Field(
        default=0.1, ge=0, description="decay on matrices; vectors (norms, biases) get none"
    )
    decay_embeddings: bool = Field(default=True, description="decay embeddings like other matrices")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW moment decay rates"
    )
    optimizer: str = Field(
        default="adamw",
        description="adamw, sgd (momentum betas[0]): fused; adamw8bit, adamw_fp8: torchao's; muon, AdamW for what is "
        'no hidden matrix; or "pkg.mod:Class"',
    )
    optimizer_args: dict[str, Any] = Field(
        default_factory=dict, description="more arguments of the optimizer's class"
    )
    eval_every: Count = Field(
        default=100, description="steps between validations; 0: only at the end"
    )
    threads: Count = Field(
        default=0, description="CPU threads per rank; 0: cores / local ranks, or OMP_NUM_THREADS"
    )
    max_minutes: float = Field(
        default=0.0, ge=0, description="save and stop after this many minutes; 0: never"
    )

    @field_validator("optimizer")
    @classmethod
    def _known(cls, name: str) -> str:
        if ":" not in name and name not in OPTIMIZERS:
            raise ValueError(
                f'{name!r} is neither {", ".join(OPTIMIZERS)} nor "package.module:Class"'
            )
        return name


class HubConfig(Strict):
    """What is taken of a data set of the Hugging Face hub, `hf:NAME`."""

    configuration: str | None = Field(
        default=None, description="of hf:NAME: its configuration (subset); none: its default"
    )
    split: str | None = Field(
        default=None, description="of hf:NAME: the split to train on; none: train, or the only one"
    )
    revision: str | None = Field(
        default=None,
        description="of hf:NAME: branch, tag or commit; none: its main branch as it is at the first start",
    )

    @model_validator(mode="after")
    def _of_the_hub(self) -> Self:
        given = [
            f"data.{name}" for name in HubConfig.model_fields if getattr(self, name) is not None
        ]
        if given and not str(getattr(self, "path", None)).startswith("hf:"):
            raise ValueError(f"{' and '.join(given)}: only a path hf:NAME has one")
        return self


class MixtureConfig(HubConfig):
    """One source of a mixture."""

    path: str = Field(description="as data.path")
    weight: float = Field(gt=0, description="its share of the samples, over the sum of all weights")


class DataConfig(HubConfig):
    """Where data comes from and how it is cut into samples; or a data set of your own."""

    target: str | None = Field(
        default=None,
        description='in place of path, "pkg.mod:fn": fn(**args) -> an object with __len__ and __getitem__',
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the target"
    )
    path: str | None = Field(
        default=None,
        description="text, JSONL, csv, Parquet, Arrow (save_to_disk), webdataset, .bin of token ids, what `harness "
        "data prepare` made, or a folder of one of these; hf:NAME: of the Hugging Face hub; none: the source "
        "of Python's standard library",
    )
    mixture: list[MixtureConfig] = Field(
        default_factory=list, description="several sources with weights, instead of data.path"
    )
    cache: str | None = Field(
        default=None,
        description="folder where hf:NAME is kept; none: that of huggingface_hub (HF_HUB_CACHE, HF_HOME)",
    )
    format: Literal["auto", "tokens", Documents] = Field(
        default="auto", description="what data.path is; auto: looked at"
    )
    tokenizer: str | None = Field(
        default=None,
        description="tokenizer.json, or a Hugging Face folder with one; none: a token is a byte",
    )
    text_key: str = Field(default="text", min_length=1, description="key or column of rows")
    dtype: Literal["uint8", "uint16", "uint32"] = Field(
        default="uint16", description="of headerless .bin files"
    )
    packing: Literal["none", "documents"] = Field(
        default="none",
        description="documents: samples have segments, and no token is predicted from another document's",
    )
    separator: Count | None = Field(
        default=None,
        description="token id that ends a document in .bin files; none: the tokenizer's",
    )
    context: Positive = Field(default=256, description="tokens per sample")
    val_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share held out where the data has no validation of its own",
    )
    val_samples: Positive = Field(
        default=128, description="validation samples, over all ranks, evenly spread"
    )
    bad: Literal["auto", "skip", "fail"] = Field(
        default="auto",
        description="samples unfit to train on, or that cannot be read (or differ from their hash): skip the update, "
        "fail (halt), or auto: fail for labels out of range; files that are no text, and rows without any: skip, fail, "
        "or auto: skip binary and empty ones, fail for others",
    )

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        sources = {
            "path": self.path is not None,
            "mixture": bool(self.mixture),
            "target": self.target is not None,
        }
        given = [f"data.{name}" for name, there in sources.items() if there]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are both given; leave one of them out")
        return self


class ModelConfig(Strict):
    """The shipped Llama-style GPT's sizes, or a target of your own."""

    target: str = Field(
        default="harness.models.gpt:build",
        description='"pkg.mod:fn": fn(**args) -> nn.Module; "hf:FOLDER": a causal LM of Hugging Face',
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the target"
    )


class CheckpointConfig(Strict):
    """When to save and what to keep."""

    every: Count = Field(default=50, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=3, ge=2, description="newest checkpoints kept; at least 2")
    healthy_steps: Count = Field(
        default=10, description="healthy steps after a save before it is a rollback target"
    )
    best: Literal["val_loss", "train_loss", "none"] = Field(
        default="val_loss",
        description="keep the checkpoint with the lowest; val_loss: of those saved when validated",
    )
    background: bool = Field(
        default=True,
        description="write while training goes on (takes one copy of the state in memory)",
    )
    on_failure: Literal["continue", "pause", "halt"] = Field(
        default="pause",
        description="after max_failures: train on, wait on all ranks until a save succeeds, or end the run",
    )
    max_failures: Positive = Field(
        default=3,
        description="saves in a row that fail before on_failure; 1 is as 2: the first is known at the next",
    )
    retry_seconds: float = Field(
        default=30.0, gt=0, description="between tries to save while the run waits"
    )
    emergency_path: str | None = Field(
        default=None,
        description="folder on another disk for the last save of a run whose own takes none; the next start takes it "
        "back; none: there is none",
    )


class TrackingConfig(Strict):
    """What goes into the journal and MLflow, how often."""

    mlflow: bool = Field(default=True, description="ship the journal to MLflow")
    experiment: str = Field(
        default="hopper-harness", min_length=1, description="MLflow experiment name"
    )
    fp8_every: Positive = Field(default=10, description="steps between rows of FP8 statistics")
    fp8_series: Count = Field(
        default=128,
        description="FP8 slots up to which all have series of their own; beyond, those that are picked",
    )
    fp8_slots: list[str] = Field(
        default_factory=list,
        description="patterns of slots that have series of their own whatever there are, such as blocks.*.mlp.down.*",
    )
    report: bool = Field(
        default=True, description="draw the plots and report.html at the end of the run"
    )
    system_seconds: float = Field(
        default=10.0,
        ge=0,
        description="seconds between MLflow's figures of the machine and its GPUs; 0: none",
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, description="wait at exit for MLflow to catch up"
    )


class EngineConfig(Strict):
    """Distributed execution."""

    name: Literal["auto", "single", "ddp", "deepspeed"] = Field(
        default="auto",
        description="auto: deepspeed under its launcher, else ddp, or single for one process",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(default=1, description="DeepSpeed ZeRO stage")
    deepspeed: str | None = Field(
        default=None, description="path of a DeepSpeed JSON merged under ours; none: ours alone"
    )
    timeout_seconds: float = Field(default=600.0, gt=0, description="process-group timeout")
    compile: Literal["none", "blocks"] = Field(
        default="none",
        description="blocks: torch.compile each element of the model's nn.ModuleLists",
    )
    deterministic: bool = Field(
        default=False,
        description="GPU kernels that give the same bits each time; attention's usual gradient may not",
    )


class GuardConfig(Strict):
    """Thresholds and budgets of the guard."""

    enabled: bool = Field(
        default=True, description="monitors and responder; the non-finite gate is always on"
    )
    max_consecutive_skips: Positive = Field(
        default=5,
        description="skipped steps in a row before a rollback, or before large norms are accepted",
    )
    spike_window: Positive = Field(
        default=40, description="applied steps that tell the usual loss and gradient norm"
    )
    spike_sigma: float = Field(
        default=12.0,
        gt=0,
        description="robust sigmas (median/MAD) over the usual loss that make a spike",
    )
    spike_steps: Positive = Field(default=5, description="spiking steps in a row before a rollback")
    skip_growth: float = Field(
        default=5.0,
        gt=1,
        description="a gradient norm this many times the running median is not applied",
    )
    clip_growth: float = Field(
        default=3.0,
        gt=1,
        description="gradients are clipped to this many times the running median norm",
    )
    measure_every: Positive = Field(
        default=10,
        description="steps between measurements of the parameters' norm and of fp16 gradients' shares",
    )
    underflow_rise: Share = Field(
        default=0.05,
        description="rise of the share of exact zeros in fp16 gradients that is reported",
    )
    overflow_share: Share = Field(
        default=0.01,
        description="share of fp16 gradients over half of fp16's largest value that is reported",
    )
    clipping_share: Share = Field(
        default=0.95, description="share of the last 200 updates clipped that is reported"
    )
    parameter_growth: float = Field(
        default=10.0,
        gt=1,
        description="growth of the parameters' norm within 100 steps that is reported",
    )
    snapshot_every: Count = Field(
        default=20,
        description="steps between snapshots in memory; 0: none; the plan names the steps",
    )
    snapshot_seldom_after: Count = Field(
        default=200,
        description="step after which every fifth of them at most is taken, with no gap over 100 steps that "
        "snapshot_every does not ask for; 0: all are",
    )
    loss_rise: Literal["act", "report"] = Field(
        default="act",
        description="what a loss leads to that stays over its first median for 200 updates: act (default; roll back, "
        "then halt) or report; a resume may change it with --accept-changed; every rank decides alike from figures "
        "that were reduced over all",
    )
    rollback_lr_factor: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="the learning rate is multiplied by this at every rollback",
    )
    compare_ranks_every: Count = Field(
        default=100, description="steps between comparisons of the ranks' weights; 0: none"
    )
    max_rollbacks: Count = Field(
        default=3, description="rollbacks within guard.budget_windows before the run is halted"
    )
    max_skips: Positive = Field(
        default=100,
        description="skipped steps within guard.budget_windows before the run is halted",
    )
    budget_windows: Positive = Field(
        default=10_000,
        description="windows that max_skips and max_rollbacks count within, through rollbacks and resumes; default "
        "10,000; a resume may change it with --accept-changed; every rank decides alike from figures that were reduced "
        "over all",
    )
    max_switches: Count = Field(
        default=64, description="layer switches in total; more are refused and logged"
    )


class FallbackConfig(Strict):
    """When a layer leaves FP8 and when it returns; see docs/reference/runbook.md, `precision.demote`.

    A slot is bad at a step when saturation (amax * scale / fp8_max) is over its role's limit, times up to two while the
    tensor has been growing, which excuses what it clips, too (see `Evidence`); clipped or underflow (shares of all, of
    non-zero values, flushed to zero) are over theirs, the latter without a sample where the saturation says that
    all was lost; sqnr_db or even_db is under its limit; centred_db has been under its limit for centred_steps steps,
    for what the rows have in common; its amax is infinite; or, unless None, its amax is over amax_over or amax_growth
    times what it was a window before.

    Evidence is a score for each slot and statistic, a CUSUM (Page, Continuous inspection schemes, 1954). An observation
    beyond its limit adds 1, and half as much for each factor of two beyond it (6 dB, for decibels); one within it takes
    1 / (2 * (window - hits)) away. A score of hits - 1/2 that at least hits bad observations made demotes. So do hits
    of window, and those that keep coming further apart, the sooner the further they are beyond. A stay in BF16 of
    dwell_steps is multiplied by cooldown_factor each time that the layer leaves again before it was back in FP8 for as
    long as that product; a layer that was starts over. max_demoted_share always allows one layer. failed_steps: see
    `WholeRunFallback`.

    The limits let healthy runs at learning rates up to 1e-2 pass, and see what docs/studies/fallback.md says.
    """

    enabled: bool = Field(
        default=True, description="switch single layers between FP8 and BF16 at run time"
    )
    saturation_input: Ratio = Field(
        default=1.5, description="amax * scale / fp8_max over which an input slot counts as bad"
    )
    saturation_weight: Ratio = Field(default=1.25, description="the same for weights")
    saturation_grad_output: Ratio = Field(default=8.0, description="the same for output gradients")
    underflow: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of non-zero values flushed to zero that counts as bad",
    )
    underflow_grad_output: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="the same for output gradients, of which saturated attention loses many",
    )
    clipped: float = Field(
        default=0.05, gt=0, le=1, description="share of values cut off that counts as bad"
    )
    sqnr_db: float = Field(
        default=5.0, description="signal over quantisation noise, dB, under which a slot is bad"
    )
    even_db_input: float = Field(
        default=8.0,
        description="SQNR of which every value is an equal part, dB, under which an input slot is bad",
    )
    even_db_weight: float = Field(default=22.0, description="the same for weights")
    even_db_grad_output: float = Field(
        default=7.0,
        description="SQNR of which every row is an equal part, dB, under which an output gradient is bad",
    )
    centred_db: float = Field(
        default=5.0,
        description="SQNR of what varies from row to row, without each channel's mean, dB, under which a slot is bad; "
        "default 5, a resume may change it with --accept-changed recipe, every rank decides alike from the same "
        "figures",
    )
    centred_steps: int = Field(
        default=200,
        ge=1,
        description="steps for which a slot must be under centred_db throughout before it counts; default 200, a "
        "resume may change it with --accept-changed recipe, every rank decides alike from the same figures",
    )
    amax_growth: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="amax over that of a window before that counts as bad; null: not looked at",
    )
    amax_over: Ratio | None = Field(
        default=None,
        description="amax that counts as bad, whatever the scale; null: not looked at, which is right",
    )
    hits: int = Field(
        default=3,
        ge=1,
        description="bad observations in a window that demote a layer; further apart too if they are far over it",
    )
    window: int = Field(default=8, ge=1, description="observations in the window")
    dwell_steps: int = Field(
        default=50, ge=1, description="steps a demoted layer stays in BF16 at least"
    )
    cooldown_factor: float = Field(
        default=2.0,
        ge=1,
        description="dwell grows by this where a layer leaves again before it was back that long",
    )
    warmup_steps: int = Field(
        default=2,
        ge=1,
        description="first steps, in which scales are not set yet, give no evidence",
    )
    max_demoted_share: float = Field(
        default=0.5, gt=0, le=1, description="share of FP8 layers that may be in BF16 at once"
    )
    over_budget: Literal["bf16", "stay"] = Field(
        default="bf16",
        description="when more want to leave: the whole run goes to BF16 for good, or they stay in FP8",
    )
    failed_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=3,
        description="failed fp16 updates in a row after which the run goes to BF16 or FP32; null: never",
    )

    @model_validator(mode="after")
    def _k_of_n(self) -> FallbackConfig:
        if self.hits > self.window:
            raise ValueError(
                f"hits ({self.hits}) is more than window ({self.window}): no layer could ever be demoted"
            )
        return self

    def max_demoted(self, layers: int) -> int:
        """How many of `layers` may be in BF16 at once."""
        return max(1, int(self.max_demoted_share * layers))

    def dwell(self, stays: int) -> float:
        """Steps of stay number `stays` (from 1) in BF16, of those that follow each other closely."""
        return self.dwell_steps * self.cooldown_factor ** (stays - 1)


class RunConfig(Strict):
    """One run. `recipe` names the precision policy; everything else is here."""

    recipe: str = Field(default="auto", description="name or path of the precision recipe")
    train: TrainConfig = Field(default_factory=TrainConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        train = self.train
        if train.global_batch % train.micro_batch:
            raise ValueError(
                f"train.global_batch ({train.global_batch}) is not a multiple of "
                f"train.micro_batch ({train.micro_batch})"
            )
        for section, target in (("model", self.model.target), ("data", self.data.target)):
            if target is not None and ":" not in target:
                raise ValueError(
                    f'{section}.target {target!r} is not of the form "package.module:function"'
                )
        return self


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """`["train.lr=1e-3"]` as a nested mapping; values are YAML. Raises ConfigError naming every malformed one."""
    nested: dict[str, Any] = {}
    problems: list[Problem] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        parts = key.split(".")
        if not equals or not all(part.isidentifier() for part in parts):
            problems.append(
                Problem(
                    f"{override!r} is not an override",
                    "command line",
                    fix="write key.path=value, e.g. train.lr=1e-3",
                )
            )
            continue
        section = nested
        for part in parts[:-1]:
            inner = section.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = section[part] = {}
            section = inner
        section[parts[-1]] = parse_yaml(value, f"command line: {key}")
    if problems:
        raise ConfigError(problems)
    return nested


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `over` laid on top, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = (
            merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def load_config(
    name_or_path: str, overrides: Sequence[str] = (), recipe: str | None = None
) -> RunConfig:
    """The resolved config of a run: the file, then overrides, then `recipe` if given.

    Raises ConfigError that lists every problem of file and command line together.
    """
    path = find("configs", name_or_path)
    over = parse_overrides(overrides)
    if recipe is not None:
        over = merge(over, {"recipe": recipe})
    source = f"{path}" if not overrides else f"{path} + command line"
    base = read_yaml(path)
    model = over.get("model")
    if isinstance(model, dict) and "target" in model and isinstance(base.get("model"), dict):
        base["model"].pop("args", None)  # they are another target's
    return validate(RunConfig, merge(base, over), source)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a dumped config, or of any mapping of mappings, by dotted keys."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ between two config dumps."""
    keys: list[str] = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            keys += changed_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            keys.append(prefix + key)
    return keys


def warmup_doubt(train: TrainConfig) -> str:
    """What is wrong with the warm-up of a run of this length; empty if nothing is.

    Update n of the warm-up has n / warmup_steps of the peak (`optim.schedule.Schedule`).
    """
    steps, warmup = train.steps, train.warmup_steps
    fix = f"set train.warmup_steps={max(1, steps // 10)}, or more train.steps"
    if warmup > steps:
        return (
            f"the warm-up is longer than the run (train.warmup_steps {warmup}, train.steps {steps}): the learning rate "
            f"ends at {train.lr * steps / warmup:.3g}, {steps / warmup:.0%} of train.lr, and never reaches it; {fix}"
        )
    if warmup == steps and warmup > 1:
        return (
            f"the warm-up is as long as the run (train.warmup_steps {warmup}, train.steps {steps}): the learning rate "
            f"reaches train.lr at the last update, and there is no {_after_warmup(train)}; {fix}"
        )
    decay = round(train.decay_share * steps)
    if train.schedule == "wsd" and warmup and warmup + decay > steps:
        return (
            f"warm-up and decay are longer together than the run (train.warmup_steps {warmup}, train.decay_share "
            f"{train.decay_share:g} of train.steps {steps}): the decay begins with the end of the warm-up, has "
            f"{steps - warmup} steps in place of {decay}, and nothing lies between them; lower one of the two"
        )
    return ""


def _after_warmup(train: TrainConfig) -> str:
    return "time at it" if train.schedule == "constant" else f"decay ({train.schedule}) after it"


def left_out(config: RunConfig, stats_every: int | None, ranks: int = 1) -> str:
    """What does not happen in a run of this length, in a line; empty if everything does.

    stats_every: of the recipe; None: nothing runs in FP8.
    """
    steps, guard = config.train.steps, config.guard
    periods = [
        ("train.eval_every", config.train.eval_every, "validated at its end only"),
        ("checkpoint.every", config.checkpoint.every, "saved at its end only"),
    ]
    if stats_every is not None:
        periods.append(("fp8.stats_every", stats_every, "underflow and SQNR sampled once at most"))
    if guard.enabled:
        periods.append(
            ("guard.snapshot_every", guard.snapshot_every, "no snapshot to roll back to")
        )
        if ranks > 1:
            periods.append(
                (
                    "guard.compare_ranks_every",
                    guard.compare_ranks_every,
                    "the ranks' weights not compared",
                )
            )
    told = [f"{why} ({name} {period})" for name, period, why in periods if period > steps]
    return f"in {steps:,} step{'s' if steps > 1 else ''}: {'; '.join(told)}" if told else ""


def snapshot_gap(guard: GuardConfig, step: int) -> int:
    """Steps between snapshots in memory where `step` is; 0: none are taken. One is due where it divides `step`.

    A copy of the state takes a GPU as long as some steps of a few thousand tokens, and runs break most while they are
    young: later ones are fewer, but no gap is over 100 steps unless `snapshot_every` is.
    """
    every, seldom_after = guard.snapshot_every, guard.snapshot_seldom_after
    if not (every and seldom_after and step > seldom_after):
        return every
    return every * max(1, min(_SELDOM, _LONGEST_GAP // every))


def snapshot_plan(guard: GuardConfig, steps: int) -> str:
    """At which of `steps` steps snapshots are taken, in a line."""
    often, seldom_after = guard.snapshot_every, guard.snapshot_seldom_after
    seldom = snapshot_gap(guard, seldom_after + 1)
    last = steps // seldom * seldom if seldom else 0
    if often and last <= seldom_after:
        last = min(steps, seldom_after or steps) // often * often
    if not last:
        return f"snapshots in memory: none in {steps:,} steps (guard.snapshot_every {often}); rollbacks are from disk"
    told = f"every {often} steps" + (
        f" up to step {seldom_after}, then every {seldom}" if seldom > often else ""
    )
    return f"snapshots in memory: {told}; the last after step {last} (guard.snapshot_every, snapshot_seldom_after)"


def unwatched(guard: bool, fallback: bool, in_fp8: bool) -> str:
    """What a guard that is off takes with it; empty if nothing that is on. in_fp8: the run has FP8 layers."""
    if guard or not (fallback and in_fp8):
        return ""
    return (
        "guard.enabled is false, so the recipe's fallback is off, too: no layer leaves FP8, whatever it loses there; "
        "leave the guard on, or say fallback.enabled: false in the recipe"
    )


def data_doubts(config: RunConfig, facts: Mapping[str, Any]) -> list[str]:
    """Settings that the data are too small for, each in a line. facts: what the data say of themselves."""
    told: list[str] = []
    samples, batch, counted = (
        facts.get("train_samples"),
        config.train.global_batch,
        facts.get("counted", "tokens"),
    )
    if samples is not None and samples < batch:
        told.append(
            f"a step takes {batch:,} samples (train.global_batch) and there are {samples:,}: every step has some of "
            "them more than once"
        )
    told += [
        f"of {part['source']} a step takes {part['share'] * batch:.3g} samples, and it has {part['train_samples']:,}: "
        "every step has some of them more than once"
        for part in facts.get("mixture", ())
        if part["share"] * batch > part["train_samples"]
    ]
    if copies := facts.get("repeated"):
        told.append(
            f"{len(copies):,} of the files to validate on have the content of one to train on "
            f"({some(copies, _NAMED)}): their loss is no validation; take the copies out"
        )
    used = facts.get("val_used", facts.get("val_samples"))
    if used is not None and used < config.data.val_samples:
        told.append(
            f"validation has {used:,} samples, data.val_samples asks for {config.data.val_samples:,}"
        )
    longest = facts.get("longest_document")
    if longest is not None and counted == "tokens" and longest <= config.data.context // 2:
        told.append(
            f"the longest document has {longest:,} tokens: no position of the {config.data.context:,} of data.context "
            "after that is ever trained, since positions begin anew with each document"
        )
    return told
