"""The scenarios: what is planted, when, and what a right answer is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import fallback, outliers
from benchmarks.gauntlet import plants, samples
from benchmarks.gauntlet.samples import BATCH, CONTEXT, SEED, Change, Text
from harness.core.config import RunConfig, load_config
from harness.models.gpt import GPT

STEPS = 120
AT = 61
"""The step of most faults: the guard has limits from step 33 on. Its window, counted from 0, is AT - 1."""


def _no_changes() -> dict[int, Change]:
    return {}


@dataclass(frozen=True)
class Scenario:
    """One pathology.

    name: of the scenario, as --only takes it.
    family: healthy, data, precision, model, optimizer or machine.
    planted: what is wrong.
    at: the first step that has it; 0 for a healthy run.
    right: what a right answer is.
    codes: event codes of which any is the right name of the fault.
    place: what the event's text must hold too, such as a layer.
    model: the model, given `on`.
    changes: faults of samples.
    train: keys of the config's section `train` that are others. The clean run keeps the usual ones.
    own_clean: the clean run is made anew, as the healthy model has other weights.
    half: "bf16", or "fp16" for the bare 16-bit loop and for ours.
    cuts: after a kill the newest checkpoint is cut to half.
    tracker: the loops send their loss to an MLflow server that is gone from step `at` on. Ours never finds it.
    """

    name: str
    family: str
    planted: str
    at: int
    right: str
    codes: tuple[str, ...] = ()
    place: str = ""
    model: Callable[..., GPT] = plants.healthy
    changes: Callable[[], Mapping[int, Change]] = _no_changes
    train: Mapping[str, Any] = field(default_factory=dict[str, Any])
    own_clean: bool = False
    half: str = "bf16"
    cuts: bool = False
    tracker: bool = False

    def as_json(self) -> dict[str, Any]:
        """What the record keeps of it."""
        return {
            "scenario": self.name,
            "family": self.family,
            "planted": self.planted,
            "at": self.at,
            "right": self.right,
            "codes": list(self.codes),
            "place": self.place.format(sample=samples.one_of(AT - 1)),
        }

    @property
    def recipe(self) -> str:
        """The shipped recipe that `harness train` runs with."""
        return "fp16_scaler" if self.half == "fp16" else "fp8_hybrid"


_GROWING, _HOT, _STORM = fallback.SCENARIOS
_SKIPS = ("loss.skip", "gradient.skip", "nonfinite.skip", "guard.rollback")
_KILLS = (35, 70, 100)
"""The windows, counted from 0, in which a process is killed."""


def _outlier(case: fallback.Scenario, on: bool = True) -> GPT:
    """A fault of `benchmarks.fallback`."""
    return getattr(outliers, case.target)(**case.args, **plants.SIZES, on=on)


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("clean", "healthy", "nothing", 0, "no alarm"),
    Scenario(
        "another text in a batch of ten", "healthy", "every tenth window is text of another kind", 0, "no alarm",
        changes=partial(samples.in_windows, range(9, STEPS, 10), samples.other_text),
    ),
    Scenario(
        "batches of one letter", "healthy", "every twelfth window is one letter, repeated", 0, "no alarm",
        changes=partial(samples.in_windows, range(11, STEPS, 12), samples.one_letter),
    ),
    Scenario(
        "one bad batch", "data", "the window of step 61 is random bytes", AT, "skip the update",
        codes=_SKIPS, changes=partial(samples.in_windows, [AT - 1], samples.garbage),
    ),
    Scenario(
        "50 bad windows", "data", "the windows of steps 51 to 100 are random bytes", 51, "skip them, or halt",
        codes=_SKIPS, changes=partial(samples.in_windows, range(50, 100), samples.garbage),
    ),
    Scenario(
        "label out of range", "data", "one label of step 61 is 300, of 256", AT, "name the sample",
        codes=("data.label",), place="{sample}",
        changes=partial(samples.in_one_sample, [AT - 1], samples.bad_label),
    ),
    Scenario(
        "unreadable sample", "data", "reading one sample of step 61 raises OSError", AT,
        "name the sample, skip the update", codes=("data.unreadable",), place="{sample}",
        changes=partial(samples.in_one_sample, [AT - 1], samples.unreadable),
    ),
    Scenario(
        "growing SwiGLU channel", "precision", "one input channel of mlp.down doubles every 4 steps; its weights are 0",
        1, "mlp.down to BF16", codes=("precision.demote",), place="mlp.down", own_clean=True,
        model=partial(_outlier, _GROWING),
    ),
    Scenario(
        "one hot channel", "precision", "four input channels of attn.qkv are 2^24; their weights are 0", 1,
        "attn.qkv to BF16", codes=("precision.demote",), place="attn.qkv", own_clean=True,
        model=partial(_outlier, _HOT),
    ),
    Scenario(
        "gradient storm", "precision", "every 17 or 18 steps the gradient into attn.out is 2^40 times as large", 17,
        "attn.out to BF16", codes=("precision.demote",), place="attn.out", model=partial(_outlier, _STORM),
    ),
    Scenario(
        "activation jump", "precision", "from step 61 on the input of mlp.gate_up is 2^24 times as large", AT,
        "name the layer", codes=("precision.demote", "fp8.saturation", "fp8.underflow"), place="mlp.gate_up",
        model=partial(plants.jump, "blocks.0.mlp.gate_up", AT, 24),
    ),
    Scenario(
        "offset of 64", "precision", "64 is added to every input of mlp.gate_up", 1, "mlp.gate_up to BF16",
        codes=("precision.demote",), place="mlp.gate_up",
        model=partial(plants.offset, "blocks.0.mlp.gate_up", 64.0),
    ),
    Scenario(
        "infinite amax", "precision", "one input of mlp.down is infinite in step 61", AT, "drop it, or skip the update",
        codes=("nonfinite.skip", "fp8.scrubbed"), model=partial(plants.infinite_once, "blocks.0.mlp.down", AT),
    ),
    Scenario(
        "fp16 underflow", "precision", "the gradient into attn.out is 2^-14 times as large; 16-bit loops run in fp16",
        1, "a loss scale that keeps it", half="fp16",
        model=partial(plants.faint_gradient, "blocks.0.attn.out", 2.0**-14),
    ),
    Scenario(
        "fp16 overflow", "precision",
        "four input channels of attn.qkv are 2^24; their weights are 0; 16-bit loops run in fp16", 1, "leave fp16",
        codes=("precision.lowered",), own_clean=True, half="fp16", model=partial(_outlier, _HOT),
    ),
    Scenario(
        "logits without z-loss", "model", "all logits of a row drift together, doubling every 8 steps", 1,
        "name the logits", codes=("loss.rise", "loss.plateau", "loss.spike"), place="logits",
        model=partial(plants.drifting_logits, 8),
    ),
    Scenario(
        "attention without qk-norm", "model", "queries and keys double every 12 steps", 1, "name the growth",
        codes=("loss.rise", "gradient.growth", "loss.spike"), model=partial(plants.growing_attention, 12),
    ),
    Scenario(
        "norm eps of 1e-12", "model", "and every fourth window from step 61 on has a byte whose embedding is 0", AT,
        "report the gradient", codes=("gradient.skip", "gradient.growth"), own_clean=True,
        model=plants.no_epsilon,
        changes=partial(samples.in_one_sample, range(AT - 1, STEPS, 4), samples.rare_byte),
    ),
    Scenario(
        "loss with exp and log", "model", "log(sum(exp(logits))) by hand, over logits that drift", 52,
        "halt with the operation", codes=("nonfinite.skip",), model=partial(plants.exp_and_log, 8),
    ),
    Scenario(
        "dead layer", "model", "from step 61 on the input of mlp.down is 0", AT, "name the layer",
        codes=("fp8.dead",), place="mlp.down", model=partial(plants.dead, "blocks.0.mlp.down", AT),
    ),
    Scenario(
        "init too large", "model", "the initial weights of all Linears are 16 times as large", 1, "warn at once",
        codes=("loss.first",), model=partial(plants.large_init, 16.0),
    ),
    Scenario(
        "warm-up too short", "optimizer", "no warm-up, and 10 times the learning rate", 1, "warn at once",
        codes=("train.lr_high", "train.warmup"), train={"lr": 3e-2, "warmup_steps": 0},
    ),
    Scenario(
        "learning-rate spike", "optimizer", "3 updates from step 61 on at 100 times the learning rate", AT,
        "go back", codes=(*_SKIPS, "loss.spike", "parameters.growth"),
        model=partial(plants.rate_spike, AT, 3, 100.0),
    ),
    Scenario(
        "NaN from one rank", "machine", "in step 61 the gradient of half of the samples is NaN", AT,
        "skip the update", codes=("nonfinite.skip",), model=partial(plants.half_nan_once, AT),
    ),
    Scenario(
        "bit flip in a weight", "machine", "before step 61 the highest exponent bit of a weight of mlp.down flips", AT,
        "go back", codes=("guard.rollback",),
        model=partial(plants.bit_flip, "blocks.0.mlp.down.weight", AT),
    ),
    Scenario(
        "three preemptions", "machine", "SIGKILL in steps 36, 71 and 101, then the same command again", 36,
        "go on from the last checkpoint", changes=partial(samples.in_one_sample, _KILLS, samples.kill),
    ),
    Scenario(
        "half a checkpoint", "machine", "SIGKILL in step 71; the newest checkpoint is cut to half", 71,
        "go on from the one before", codes=("checkpoint.quarantined",), cuts=True,
        changes=partial(samples.in_one_sample, [70], samples.kill),
    ),
    Scenario(
        "dead tracker", "machine", "from step 61 on the MLflow server that gets the losses is not there", AT,
        "train on", tracker=True,
    ),
)  # fmt: skip
BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def model(scenario: str, on: bool) -> GPT:
    """The `model.target` of every run."""
    return BY_NAME[scenario].model(on=on)


def data(scenario: str, on: bool) -> tuple[Text, Text]:
    """The `data.target` of every run."""
    train, validation = samples.text()
    if on:
        train.changes = dict(BY_NAME[scenario].changes())
    return train, validation


def overrides(scenario: Scenario, on: bool, steps: int) -> list[str]:
    """The settings of a run over the config `tiny`, as its command line takes them."""
    given = json.dumps({"scenario": scenario.name, "on": on})
    train = {
        "steps": steps,
        "seed": SEED,
        "global_batch": BATCH,
        "micro_batch": BATCH,
        "lr": 3e-3,
        "warmup_steps": 20,
        "threads": 1,
        **(scenario.train if on else {}),
    }
    return [
        f"model.target={__name__}:model",
        f"model.args={given}",
        f"data.target={__name__}:data",
        f"data.args={given}",
        f"data.context={CONTEXT}",
        "checkpoint.every=20",
        f"tracking.mlflow={str(scenario.tracker and on).lower()}",
        "tracking.report=false",
        *(f"train.{key}={value}" for key, value in train.items()),
    ]


def config(scenario: Scenario, on: bool, steps: int) -> RunConfig:
    """The same settings, for the loops that are not ours."""
    return load_config("tiny", overrides(scenario, on, steps))
