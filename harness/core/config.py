"""The schema of a run's config, and of a recipe's section `fallback`, which monitors and precision read. Torch-free.

Each key's description names its unit; docs/reference/config.md is made from the descriptions
(`harness.core.config_page`).

Some settings are valid and yet have no effect, because the run is too short, its data too small, or its guard off
(`warmup_doubt`, `left_out`, ...). These are no errors: a trial of ten steps is meant to be short. Those that change the
training are reported as events; those that only leave something out (a save, a validation, a statistic) as one line
before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from harness.core.errors import ConfigError, Problem, number_of, some
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
"""Formats of text, which is made into token ids; `data.rows.FORMATS` has their readers."""

RESUME_DECIDED_BY = {
    "train.steps": "all alike",
    "train.max_minutes": "the first rank whose time is over",
    "train.profile_steps": "all alike",
    "train.profile_ranks": "each rank for itself",
    "checkpoint.": "all alike; where the disk fails, rank 0",
    "engine.timeout_seconds": "the first rank that has waited so long",
    "engine.compile": "all together",
    "guard.hunt": "all alike",
}
"""Prefixes of the keys that a resume may change freely, and which rank decides by the key's value while the run trains.

Other keys need --accept-changed. All ranks are given the same values, or the start is refused."""
RESUME_MAY_CHANGE = tuple(RESUME_DECIDED_BY)
DATA_MAY_CHANGE = ("data.context", "data.val_samples", "data.bad")
"""Keys of `data` that --accept-changed opens: they only say how the same data are cut into samples."""
RESUME_NEVER = ("train.optimizer",)
"""Keys that --accept-changed does not open, besides the others of `data`: the saved state belongs to the old value."""

MOST_PROFILED = 20
"""Most steps in one profile: a step of a large model is tens of megabytes of trace."""

TEXT_COUNTS = ("repeated_documents", "kept_characters")
"""Facts of data that were made into token ids (`text_doubts`). Each is two numbers: how many, and of how many."""
_REPEATED_SHARE = 0.01  # of documents: a few are normal, as a line that many write
_KEPT_SHARE = 0.9  # of characters: tokenizers may leave accents out

# Most names in a message.
_NAMED = 5
_SELDOM, _LONGEST_GAP = 5, 100


class TrainConfig(Strict):
    """Length, batch, learning rate and optimizer."""

    steps: Positive = Field(default=300, description="steps of the run, skipped ones included")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        default=0, description="seed of initial weights and data order"
    )
    global_batch: Positive = Field(
        default=16,
        description="samples of a step, over all ranks; a multiple of train.micro_batch",
    )
    micro_batch: Positive = Field(default=8, description="samples per pass and rank")
    max_grad_norm: float = Field(
        default=1.0, gt=0, description="L2 norm to which gradients are clipped"
    )
    lr: float = Field(default=2e-3, gt=0, description="peak learning rate")
    warmup_steps: Count = Field(default=20, description="applied updates until train.lr is reached")
    schedule: Literal["cosine", "linear", "wsd", "constant"] = Field(
        default="cosine",
        description="learning rate after the warm-up; wsd: constant, then linear over train.decay_share",
    )
    min_lr_ratio: Share = Field(
        default=0.1,
        description="last learning rate, as a share of train.lr",
    )
    decay_share: Share = Field(
        default=0.2, description="share of train.steps over which wsd decays"
    )
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="weight decay rate of matrices; norms and biases have none",
    )
    decay_embeddings: bool = Field(default=True, description="embeddings decay too")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95),
        strict=False,
        description="AdamW's decay rates of both moments",
    )
    optimizer: str = Field(
        default="adamw",
        description="adamw, sgd (momentum: betas[0]): torch's fused kernels; adamw8bit, adamw_fp8: torchao's; muon: "
        'hidden matrices, AdamW for the rest; or your class, "pkg.mod:Class"',
    )
    optimizer_args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of the optimizer"
    )
    eval_every: Count = Field(
        default=100, description="steps between validations; 0: only at the end"
    )
    threads: Count = Field(
        default=0,
        description="CPU threads per rank; 0: OMP_NUM_THREADS, else cores / local ranks",
    )
    max_minutes: float = Field(
        default=0.0, ge=0, description="minutes until the run saves and stops; 0: never"
    )
    profile_steps: tuple[Positive, Positive] | None = Field(
        default=None,
        strict=False,
        description="first and last profiled step, at most 20: a Perfetto trace and a table; null: none",
    )
    profile_ranks: Literal[0, "all"] = Field(default=0, description="profiled ranks")

    @field_validator("profile_steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is None:
            return None
        first, last = steps
        if last < first:
            raise ValueError(f"the last step ({last}) comes before the first ({first})")
        if last - first >= MOST_PROFILED:
            count = last - first + 1
            raise ValueError(f"{count} steps, and at most {MOST_PROFILED} can be profiled")
        return steps

    @field_validator("optimizer")
    @classmethod
    def _known(cls, name: str) -> str:
        if ":" not in name and name not in OPTIMIZERS:
            raise ValueError(
                f'{name!r} is neither {", ".join(OPTIMIZERS)} nor "package.module:Class"'
            )
        return name


class HubConfig(Strict):
    """Which part of a data set of the Hugging Face hub, `hf:NAME`."""

    configuration: str | None = Field(
        default=None, description="configuration (subset) of hf:NAME; null: default"
    )
    split: str | None = Field(
        default=None, description="training split of hf:NAME; null: train, or the only one"
    )
    revision: str | None = Field(
        default=None,
        description="branch, tag or commit of hf:NAME; null: main at the run's first start",
    )

    @model_validator(mode="after")
    def _of_the_hub(self) -> Self:
        fields = HubConfig.model_fields
        given = [f"data.{name}" for name in fields if getattr(self, name) is not None]
        if given and not str(getattr(self, "path", None)).startswith("hf:"):
            raise ValueError(f"{' and '.join(given)}: only a path hf:NAME has one")
        return self


class MixtureConfig(HubConfig):
    """One source of a mixture."""

    path: str = Field(description="as data.path")
    weight: float = Field(
        gt=0,
        description="weight; its share of the samples is weight / sum of weights",
    )


class DataConfig(HubConfig):
    """Where the data come from and how they are cut into samples."""

    target: str | None = Field(
        default=None,
        description='"pkg.mod:fn"; fn(**args) returns your data set',
    )
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of data.target")
    path: str | None = Field(
        default=None,
        description="file or folder of text, JSONL, csv, Parquet, Arrow (save_to_disk), webdataset or .bin token ids; "
        "`harness data prepare`'s folder; or hf:NAME; null: Python's standard library",
    )
    mixture: list[MixtureConfig] = Field(
        default_factory=list, description="weighted sources instead of data.path"
    )
    cache: str | None = Field(
        default=None,
        description="folder for hf:NAME; null: HF_HUB_CACHE, HF_HOME",
    )
    format: Literal["auto", "tokens", Documents] = Field(
        default="auto", description="format of data.path; auto: detected"
    )
    tokenizer: str | None = Field(
        default=None,
        description="tokenizer.json, or its folder; null: a token is a byte",
    )
    text_key: str = Field(default="text", min_length=1, description="key or column with the text")
    dtype: Literal["uint8", "uint16", "uint32"] = Field(
        default="uint16", description="type of ids in headerless .bin files"
    )
    packing: Literal["none", "documents"] = Field(
        default="none",
        description="documents: predict no token from another document's",
    )
    separator: Count | None = Field(
        default=None,
        description="document-ending token id in .bin files; null: the tokenizer's",
    )
    context: Positive = Field(default=256, description="tokens in one sample")
    val_fraction: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="share held out if the data have no validation part",
    )
    val_samples: Positive = Field(
        default=128,
        description="samples of a validation, over all ranks; with train.micro_batch=1 rounded down to a multiple of "
        "the ranks",
    )
    bad: Literal["auto", "skip", "fail"] = Field(
        default="auto",
        description="bad samples: skip skips the update, fail halts, auto halts only for labels out of range; files "
        "and rows without text: skip leaves them out, fail refuses, auto leaves out binary and empty ones",
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
    """The model: the built-in Llama-style GPT, or your own."""

    target: str = Field(
        default="harness.models.gpt:build",
        description='"pkg.mod:fn"; fn(**args) returns an nn.Module; or "hf:FOLDER", a Hugging Face causal LM',
    )
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of model.target")


class CheckpointConfig(Strict):
    """When to save, and which checkpoints to keep."""

    every: Count = Field(default=50, description="steps between checkpoints; 0: only at the end")
    keep: int = Field(default=3, ge=2, description="number of newest checkpoints kept")
    healthy_steps: Count = Field(
        default=10,
        description="healthy steps that make a checkpoint a rollback target",
    )
    best: Literal["val_loss", "train_loss", "none"] = Field(
        default="val_loss",
        description="also keep the checkpoint lowest in this; val_loss: of those saved at a validation",
    )
    background: bool = Field(
        default=True,
        description="write from a copy in memory while training goes on",
    )
    on_failure: Literal["continue", "pause", "halt"] = Field(
        default="pause",
        description="after checkpoint.max_failures: train on, wait on all ranks, or end",
    )
    max_failures: Positive = Field(
        default=3,
        description="failed saves in a row until checkpoint.on_failure; 1 acts as 2",
    )
    retry_seconds: float = Field(
        default=30.0, gt=0, description="seconds between tries while the run waits"
    )
    emergency_path: str | None = Field(
        default=None,
        description="folder on another disk for the last save if the run's own is full",
    )


class TrackingConfig(Strict):
    """What goes into the journal and MLflow, and how often."""

    mlflow: bool = Field(default=True, description="send the journal to MLflow")
    experiment: str = Field(
        default="hopper-harness", min_length=1, description="MLflow's experiment"
    )
    fp8_every: Positive = Field(default=10, description="steps between rows of FP8 statistics")
    fp8_series: Count = Field(
        default=128,
        description="number of FP8 slots up to which all have series; beyond it, picked ones",
    )
    fp8_slots: list[str] = Field(
        default_factory=list,
        description="patterns of slots that always have series: blocks.*.mlp.down.*",
    )
    report: bool = Field(default=True, description="write report.html and plots at the end")
    system_seconds: float = Field(
        default=10.0,
        ge=0,
        description="seconds between MLflow's machine and GPU metrics; 0: none",
    )
    drain_seconds: float = Field(
        default=30.0, ge=0, description="most seconds to wait for MLflow at the end"
    )


class EngineConfig(Strict):
    """Ranks, compilation and determinism."""

    name: Literal["auto", "single", "ddp", "fsdp", "deepspeed"] = Field(
        default="auto",
        description="auto: deepspeed under its launcher, ddp for several ranks, else single; fsdp: a sharded model",
    )
    gradient_sync: Literal["window", "micro_batch"] = Field(
        default="window",
        description="when fsdp exchanges gradients: once a window, or every micro-batch, in less memory",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=1, description="DeepSpeed's ZeRO stage; 3 is refused"
    )
    deepspeed: str | None = Field(
        default=None,
        description="DeepSpeed JSON file; keys that differ from the run's are refused",
    )
    timeout_seconds: float = Field(
        default=600.0,
        gt=0,
        description="seconds ranks wait for each other before the run fails",
    )
    compile: Literal["auto", "none", "blocks"] = Field(
        default="auto",
        description="blocks: torch.compile every nn.ModuleList's elements; auto: on a GPU, where that works",
    )
    deterministic: bool = Field(
        default=False,
        description="kernels that repeat their bits; each start tests it on two steps",
    )

    def may_compile(self, on_gpu: bool) -> bool:
        """Whether blocks are compiled if nothing on the machine or in the model is against it."""
        return self.compile == "blocks" or (self.compile == "auto" and on_gpu)


class GuardConfig(Strict):
    """Limits and budgets of the guard. Every rank decides alike, from figures that were reduced over all ranks."""

    enabled: bool = Field(
        default=True,
        description="judge steps; non-finite updates are skipped in any case",
    )
    max_consecutive_skips: Positive = Field(
        default=5,
        description="skipped steps in a row until a rollback, or until large norms are accepted",
    )
    # Of fewer losses the usual spread may come out as 0, and any rise would be a spike.
    spike_window: int = Field(
        default=40,
        ge=8,
        description="applied steps that define the usual loss and norm",
    )
    spike_sigma: float = Field(
        default=12.0,
        gt=0,
        description="robust sigmas (median/MAD) over the usual loss: a spike",
    )
    spike_steps: Positive = Field(default=5, description="spiking steps in a row until a rollback")
    skip_growth: float = Field(
        default=5.0,
        gt=1,
        description="times the usual norm that skips an update, or e^(6 sigma) times if more",
    )
    clip_growth: float = Field(
        default=3.0,
        gt=1,
        description="times the usual norm that gradients are clipped to",
    )
    measure_every: Positive = Field(
        default=10,
        description="steps between measurements of weights' norm and fp16 gradients",
    )
    underflow_rise: Share = Field(
        default=0.05,
        description="reported rise in the share of zero fp16 gradients",
    )
    overflow_share: Share = Field(
        default=0.01,
        description="reported share of fp16 gradients over half of the largest value",
    )
    clipping_share: Share = Field(
        default=0.95, description="reported share of clipped updates in the last 200"
    )
    parameter_growth: float = Field(
        default=10.0,
        gt=1,
        description="reported growth of the weights' norm: times its smallest of 100 steps",
    )
    hunt: Literal["auto", True, False] = Field(
        default="auto",
        description="every layer's gradient norm at every step; auto: in the 50 steps after a rollback",
    )
    snapshot_every: Count = Field(
        default=20,
        description="steps between snapshots in memory; 0: none",
    )
    snapshot_seldom_after: Count = Field(
        default=200,
        description="step after which snapshots are five times as far apart, up to 100 steps; 0: never",
    )
    snapshot_copy: Literal["blocking", "overlapped"] = Field(
        default="blocking",
        description="blocking: training waits for the copy; overlapped: it goes on after a copy on the card, where "
        "that has room",
    )
    loss_rise: Literal["act", "report"] = Field(
        default="act",
        description="a loss over its first median for 200 updates: act rolls back, then halts; report logs",
    )
    rollback_lr_factor: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="factor on the learning rate at each rollback",
    )
    compare_ranks_every: Count = Field(
        default=100, description="steps between comparisons of ranks' weights; 0: never"
    )
    max_rollbacks: Count = Field(
        default=3,
        description="number of rollbacks in guard.budget_windows; the next halts",
    )
    max_skips: Positive = Field(
        default=100,
        description="skipped steps in guard.budget_windows; the next halts",
    )
    budget_windows: Positive = Field(
        default=10_000,
        description="windows over which both budgets count",
    )
    max_switches: Count = Field(
        default=64,
        description="number of layer switches in a run",
    )


class FallbackConfig(Strict):
    """When a layer leaves FP8 and when it returns. docs/guide/fallback.md has it for users.

    Statistics of a slot:
    - saturation is amax * scale / fp8_max. While a tensor grows, its limit is up to twice as large, and clipped values
      are excused too (see `Evidence`).
    - clipped is a share of all values, underflow a share of the non-zero ones. Both are sampled. Underflow counts
      without a sample where the saturation shows that every value was flushed to zero.
    - sqnr_db, even_db and centred_db are bad under their limits. centred_db counts only after centred_steps steps in a
      row, and only for what the rows have in common.
    - An infinite amax is always bad. amax_over and amax_growth (against the value `window` observations before) are off
      while None.

    Evidence is a score for each slot and statistic, a CUSUM (Page, Continuous inspection schemes, 1954):
    - An observation beyond its limit adds 1, and half as much for each factor of two beyond it (6 dB, for decibels).
    - An observation within its limit takes 1 / (2 * (window - hits)) away, or 1 if window is hits.
    - A layer is demoted when a score reaches `hits` - 1/2, or `hits` if `window` equals `hits`. At least `hits` bad
      observations must have made that score. `hits` bad ones among the last `window` demote it, too.
    - Rare bad observations demote as well if they keep coming. The larger they are, the sooner.

    A stay in BF16 takes dwell_steps. The next stay is cooldown_factor times as long, unless the layer was back in FP8
    for at least that long; then it is dwell_steps again. max_demoted_share always allows one layer.
    failed_steps: see `WholeRunFallback`.

    With these limits healthy runs at learning rates up to 1e-2 keep FP8; docs/studies/fallback.md has what they find.
    """

    enabled: bool = Field(default=True, description="whether layers move between FP8 and BF16")
    saturation_input: Ratio = Field(
        default=1.5,
        description="saturation ratio, amax * scale / fp8_max, of inputs",
    )
    saturation_weight: Ratio = Field(default=1.25, description="that ratio of weights")
    saturation_grad_output: Ratio = Field(default=8.0, description="that ratio of output gradients")
    underflow: float = Field(
        default=0.25,
        gt=0,
        le=1,
        description="share of non-zero values flushed to zero",
    )
    underflow_grad_output: float = Field(
        default=0.85,
        gt=0,
        le=1,
        description="that share of output gradients",
    )
    clipped: float = Field(default=0.05, gt=0, le=1, description="share of clipped values")
    sqnr_db: float = Field(default=5.0, description="SQNR in dB")
    even_db_input: float = Field(default=8.0, description="per-element SQNR in dB of inputs")
    even_db_weight: float = Field(default=22.0, description="that in dB of weights")
    even_db_grad_output: float = Field(
        default=7.0, description="that in dB, per row, of output gradients"
    )
    centred_db: float = Field(
        default=5.0,
        description="SQNR in dB without each channel's mean",
    )
    centred_steps: int = Field(
        default=200,
        ge=1,
        description="steps on end under centred_db",
    )
    amax_growth: Annotated[float, Field(gt=1)] | None = Field(
        default=None,
        description="times its amax of fallback.window observations ago; null: off",
    )
    amax_over: Ratio | None = Field(
        default=None,
        description="amax; null: off",
    )
    hits: int = Field(
        default=3,
        ge=1,
        description="bad ones of fallback.window observations that demote a layer; far over a limit, also further "
        "apart",
    )
    window: int = Field(default=8, ge=1, description="number of last observations that count")
    dwell_steps: int = Field(default=50, ge=1, description="least steps in BF16 after a demotion")
    cooldown_factor: float = Field(
        default=2.0,
        ge=1,
        description="factor on the next stay, unless the layer was back in FP8 for as long as that",
    )
    warmup_steps: int = Field(
        default=2,
        ge=1,
        description="first steps, which do not count",
    )
    max_demoted_share: float = Field(
        default=0.5, gt=0, le=1, description="share of FP8 layers that may be in BF16 at once"
    )
    over_budget: Literal["bf16", "stay"] = Field(
        default="bf16",
        description="if more want to leave: bf16 moves the whole run, stay keeps them in FP8",
    )
    failed_steps: Annotated[int, Field(ge=1)] | None = Field(
        default=3,
        description="failed fp16 updates in a row that move the run to BF16 (or FP32); null: never",
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
        """Length in steps of stay number `stays` (from 1) in BF16, among stays that follow each other closely."""
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
                f"train.micro_batch ({train.micro_batch}), the samples of one forward pass"
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
            fix = "write key.path=value, e.g. train.lr=1e-3"
            problems.append(Problem(f"{override!r} is not an override", "command line", fix=fix))
            continue

        # Walk to the key's section, making those that are not there yet.
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
    """`base` with the values of `over` in place of its own, section by section."""
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            value = merge(old, value)
        merged[key] = value
    return merged


def load_config(
    name_or_path: str, overrides: Sequence[str] = (), recipe: str | None = None
) -> RunConfig:
    """The resolved config of a run: the file, then overrides, then `recipe` if given.

    Raises ConfigError for a file that is not there, then for malformed overrides, and last for all values together.
    """
    path = find("configs", name_or_path)
    over = parse_overrides(overrides)
    if recipe is not None:
        over = merge(over, {"recipe": recipe})
    source = str(path)
    if overrides:
        source += " + command line"
    base = read_yaml(path)

    # Another model.target: the file's model.args belong to the file's target.
    model, of_file = over.get("model"), base.get("model")
    is_another = isinstance(model, dict) and "target" in model
    if is_another and isinstance(of_file, dict):
        of_file.pop("args", None)
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


def changed_keys(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    prefix: str = "",
) -> list[str]:
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
    """A warning about the warm-up of a run of this length; empty if it is sound.

    Update n of the warm-up, counted from 1, has n / warmup_steps of the peak (`optim.schedule.Schedule`).
    """
    steps, warmup = train.steps, train.warmup_steps
    # A tenth of the run is a usual warm-up.
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
    # Warm-up, stable, decay: the two ends must leave something between them.
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
    """One line on what never happens in a run of this length; empty if everything does.

    Snapshots have a line of their own, `snapshot_plan`.

    stats_every: `fp8.stats_every` of the recipe; None if nothing runs in FP8.
    """
    steps, guard = config.train.steps, config.guard
    # Each period with what a run that is shorter than it does without.
    periods = [
        ("train.eval_every", config.train.eval_every, "validated at its end only"),
        ("checkpoint.every", config.checkpoint.every, "saved at its end only"),
    ]
    if stats_every is not None:
        why = "underflow and SQNR sampled once at most"
        periods.append(("fp8.stats_every", stats_every, why))
    if guard.enabled and ranks > 1:
        why = "the ranks' weights not compared"
        periods.append(("guard.compare_ranks_every", guard.compare_ranks_every, why))
    if config.train.profile_steps is not None:
        first, last = config.train.profile_steps
        # It begins in a run that has its first step, and then ends with the run.
        why = "no step profiled" if first > steps else f"no step after {steps} profiled"
        periods.append(("train.profile_steps", last, why))
    too_long = [each for each in periods if each[1] > steps]
    if not too_long:
        return ""
    missing = "; ".join(f"{why} ({name} {period})" for name, period, why in too_long)
    return f"in {number_of(steps, 'step')}: {missing}"


def snapshot_gap(guard: GuardConfig, step: int) -> int:
    """Steps between snapshots in memory at `step`; 0: none are taken. One is due if the gap divides `step`.

    On a GPU, copying the state takes as long as some steps of a few thousand tokens. Most runs that break do so early,
    so later snapshots are fewer. No gap is over 100 steps unless `snapshot_every` is.
    """
    every, seldom_after = guard.snapshot_every, guard.snapshot_seldom_after
    if not (every and seldom_after and step > seldom_after):
        return every
    return every * max(1, min(_SELDOM, _LONGEST_GAP // every))


def snapshot_plan(guard: GuardConfig, steps: int) -> str:
    """One line on the steps at which snapshots are taken, in a run of `steps` steps."""
    often, seldom_after = guard.snapshot_every, guard.snapshot_seldom_after
    seldom = snapshot_gap(guard, seldom_after + 1)
    last = steps // seldom * seldom if seldom else 0
    if often and last <= seldom_after:
        last = min(steps, seldom_after or steps) // often * often
    if not last:
        none = f"none in {number_of(steps, 'step')} (guard.snapshot_every {often})"
        return f"snapshots in memory: {none}; rollbacks are from disk"
    rhythm = "every step" if often == 1 else f"every {often} steps"
    if seldom > often:
        rhythm += f" up to step {seldom_after}, then every {seldom}"
    keys = "guard.snapshot_every, snapshot_seldom_after"
    if guard.snapshot_copy == "overlapped":
        rhythm += ", on a GPU copied while training goes on"
        keys += ", snapshot_copy"
    return f"snapshots in memory: {rhythm}; the last after step {last} ({keys})"


def unwatched(guard: bool, fallback: bool, in_fp8: bool) -> str:
    """A warning that the fallback is off because the guard is; empty if it is not.

    in_fp8: whether the run has FP8 layers.
    """
    if guard or not (fallback and in_fp8):
        return ""
    return (
        "guard.enabled is false, so the recipe's fallback is off, too: no layer leaves FP8, whatever it loses there; "
        "leave the guard on, or say fallback.enabled: false in the recipe"
    )


def text_doubts(facts: Mapping[str, Any]) -> list[str]:
    """What to doubt of rows and text that were made into token ids. facts: of the data, or of a prepared folder."""
    doubts: list[str] = []
    copies, of_all = facts.get("repeated_documents", (0, 0))
    if copies and copies >= _REPEATED_SHARE * of_all:
        doubts.append(
            f"{copies:,} of the {of_all:,} documents to validate on are among those to train on, too: their loss is no "
            "validation; remove duplicates before the data are split"
        )
    kept, looked_at = facts.get("kept_characters", (0, 0))
    if kept < _KEPT_SHARE * looked_at:
        doubts.append(
            f"of the text that was looked at, {kept / looked_at:.0%} comes back from its token ids: the tokenizer "
            "drops the rest, or has one token for all that it does not know; take one that was made for such text"
        )
    return doubts


def data_doubts(config: RunConfig, facts: Mapping[str, Any]) -> list[str]:
    """A line for each setting that the data are too small for. facts: the data's own figures (`data.facts()`)."""
    doubts: list[str] = []
    # A sample that is in a step twice weighs twice.
    samples = facts.get("train_samples")
    batch = config.train.global_batch
    if samples is not None and samples < batch:
        doubts.append(
            f"a step takes {number_of(batch, 'sample')} (train.global_batch) and there are {samples:,}: "
            "every step has some of them more than once"
        )
    for part in facts.get("mixture", ()):
        taken = part["share"] * batch
        if taken > part["train_samples"]:
            doubts.append(
                f"of {part['source']} a step takes {taken:.3g} samples, and it has {part['train_samples']:,}: "
                "every step has some of them more than once"
            )
    if copies := facts.get("repeated"):
        doubts.append(
            f"{len(copies):,} of the files to validate on have the content of one to train on "
            f"({some(copies, _NAMED)}): their loss is no validation; take the copies out"
        )
    doubts += text_doubts(facts)
    if padded := facts.get("padded_unmarked"):
        doubts.append(
            f"{some(padded, _NAMED)}: texts of different lengths are padded with the data set's pad_id (else 0), "
            "as no field is called labels, label or targets. Those are padded with -100, which cross-entropy ignores. "
            "Here the loss itself must leave the padding out"
        )
    copies_seen, seen = facts.get("repeated_samples", (0, 0))
    if copies_seen:
        doubts.append(
            f"{copies_seen} of the {seen} samples to validate on that were looked at equal one to train on: their loss "
            "is no validation; return (training, validation) without common samples"
        )

    # Less is validated than was asked for, or positions are never reached.
    used = facts.get("val_used", facts.get("val_samples"))
    if used is not None and used < config.data.val_samples:
        doubts.append(
            f"validation has {number_of(used, 'sample')}, data.val_samples asks for {config.data.val_samples:,}"
        )
    longest = facts.get("longest_document")
    counts_tokens = facts.get("counted", "tokens") == "tokens"
    context = config.data.context
    if longest is not None and counts_tokens and longest <= context // 2:
        doubts.append(
            f"the longest document has {longest:,} tokens: no position of the {context:,} of data.context "
            "after that is ever trained, since positions begin anew with each document"
        )
    return doubts
