"""What would make a run fit a card that it does not fit.

Each change that is proposed was traced as the run itself was, so its peak is a prediction and no rule of thumb. A
change that does not fit is not proposed. What cannot fit is not even traced: what a change can save at most is known
from the kinds of bytes at the peak, and from those that an update needs whatever the micro-batch is.

The changes, in the order in which they are tried and listed:

1. Those that leave a step's samples and its update as they are: smaller micro-batches, the loss in chunks, recomputed
   activations. Where none of them is enough, all together.
2. More ranks that share the state (FSDP2): the fewest that fit.
3. Another optimizer, with less state. That is another training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.core.config import RunConfig, merge, parse_overrides
from harness.core.errors import ConfigError, clipped
from harness.core.schema import find_target, validate
from harness.estimate.prediction import (
    Prediction,
    Timing,
    Traces,
    snapshot_bytes,
    time_steps,
    trace_rung,
)
from harness.estimate.recorder import COPIES, LASTING, OPTIMIZER_STATE
from harness.estimate.trace import Trace
from harness.models.huggingface import PREFIX, Arguments
from harness.precision.recipe import Recipe

# Tokens whose logits are in memory at a time: fewer save little, and the head's GEMM should stay a large one.
_CHUNK = 1024
# Ranks that are tried at most: the cards of one machine.
_MOST_RANKS = 8
# Optimizers that keep less than the one that is asked for, the one with more state first.
_SMALLER = {"adamw": ("muon", "sgd"), "muon": ("sgd",)}
_ONE = "train.micro_batch=1"
_LONGEST_REASON = 200


@dataclass(frozen=True, slots=True)
class Way:
    """A change under which the run fits, as a step with it was traced.

    overrides: of the config.
    ranks: processes that share the global batch.
    trace, timing: of one rank of that run.
    needed: bytes on the card, CUDA's own included.
    retrains: whether it is another training, with another optimizer.
    """

    overrides: tuple[str, ...]
    ranks: int
    trace: Trace
    timing: Timing
    needed: int
    retrains: bool


def ways_to_fit(
    config: RunConfig,
    recipe: Recipe,
    made: Prediction,
    traces: Traces,
    say: Callable[[str], None],
) -> tuple[Way, ...]:
    """The changes under which the run fits the card of `made`; empty if it fits, or if no change that is tried helps.

    made: the run as it was asked for.
    say: called with what is traced next, which may be some fifteen steps, and with what a change raised that is left
        out for it.
    """
    if made.fits:
        return ()
    return _Search(config, recipe, made, traces, say).run()


class _Search:
    """Tries changes of a run on one card, and keeps those under which it fits."""

    def __init__(
        self,
        config: RunConfig,
        recipe: Recipe,
        made: Prediction,
        traces: Traces,
        say: Callable[[str], None],
    ) -> None:
        self._config, self._recipe, self._made = config, recipe, made
        self._traces, self._say = traces, say
        self._room = made.card.memory - made.calibration.rates.context_bytes
        self._ways: list[Way] = []

    def run(self) -> tuple[Way, ...]:
        choices = self._choices()
        gentle = [each[-1] for each in choices]
        # These changes save activations alone.
        if self._made.trace.lasting <= self._room:
            self._alone_or_together(choices, gentle)
        # What is enough without other ranks or another optimizer needs neither of them.
        if self._ways:
            gentle = []
        self._sharded(gentle)
        self._optimizers(gentle)
        return tuple(self._ways)

    def _choices(self) -> list[list[str]]:
        """The changes that leave training as it is: for each key its values, the one that saves most last."""
        found: list[list[str]] = []
        train, args = self._config.train, self._config.model.args
        if train.micro_batch > 1:
            found.append([_ONE])

        # Only arguments that the user's model knows.
        taken = self._arguments()
        of_text = self._config.data.target is None
        if of_text and "loss_chunk" in taken and not args.get("loss_chunk"):
            found.append([f"model.args.loss_chunk={_CHUNK}"])
        if "recompute" in taken:
            values = {"none": ["mlp", "block"], "mlp": ["block"]}
            better = values.get(args.get("recompute", "none"), [])
            if better:
                found.append([f"model.args.recompute={value}" for value in better])
        if "gradient_checkpointing" in taken and not args.get("gradient_checkpointing"):
            found.append(["model.args.gradient_checkpointing=true"])
        return found

    def _arguments(self) -> frozenset[str]:
        """Names of the arguments that the model's function takes."""
        target = self._config.model.target
        if target.startswith(PREFIX):
            return frozenset(Arguments.model_fields)
        function = find_target(f"model.target {target!r}", target, "models")
        try:
            return frozenset(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            # Of a function that is compiled, Python may not know the arguments.
            return frozenset()

    def _alone_or_together(self, choices: Sequence[Sequence[str]], gentle: Sequence[str]) -> None:
        """Try each change by itself. Only if none of them is enough, try all of them."""
        for values in choices:
            for value in values:
                way = self._try([value])
                if way is not None:
                    self._ways.append(self._larger(way) if value == _ONE else way)
                    break
        if not self._ways and len(gentle) > 1:
            self._keep(self._try(gentle))

    def _larger(self, way: Way) -> Way:
        """The largest micro-batch that fits. way: with a micro-batch of 1.

        The peak grows about linearly with the micro-batch. So only those are traced that should fit by a straight line
        through the two peaks that are known.
        """
        given = self._config.train.micro_batch
        slope = (self._made.trace.peak - way.trace.peak) / (given - 1)
        for size in range(given - 1, 1, -1):
            expected = way.trace.peak + slope * (size - 1)
            if given % size or expected > self._room:
                continue
            larger = self._try([f"train.micro_batch={size}"])
            if larger is not None:
                return larger
        return way

    def _sharded(self, gentle: Sequence[str]) -> None:
        """Try to share the state over the fewest ranks; where that is not enough, with `gentle`."""
        is_sharded = self._config.engine.name == "fsdp"
        engine = [] if is_sharded else ["engine.name=fsdp"]
        now = self._made.ranks if is_sharded else 1
        ranks = 2 * now if is_sharded else max(2, self._made.ranks)
        while ranks <= _MOST_RANKS:
            for more in self._beside_ranks(ranks, now / ranks, gentle):
                if self._keep(self._try([*engine, *more], ranks)):
                    return
            ranks *= 2

    def _beside_ranks(self, ranks: int, share: float, gentle: Sequence[str]) -> list[Sequence[str]]:
        """What is worth a try together with `ranks` ranks. share: of today's state on a card, what each would hold."""
        trace, train = self._made.trace, self._config.train
        if train.global_batch % ranks:
            return []
        found: list[Sequence[str]] = []
        # At best, sharding frees all copies of weights and the other ranks' shares of the state at the peak.
        state = sum(trace.peak_kinds[kind] for kind in LASTING)
        least = trace.peak - trace.peak_kinds[COPIES] - state * (1 - share)
        if train.global_batch % (train.micro_batch * ranks) == 0 and least <= self._room:
            found.append([])
        if gentle and trace.lasting * share <= self._room:
            found.append(gentle)
        return found

    def _optimizers(self, gentle: Sequence[str]) -> None:
        """Try optimizers with less state; where that is not enough, with `gentle`. The first that fits is kept."""
        trace = self._made.trace
        # At best, another optimizer frees the whole state of the present one.
        state = trace.peak_kinds[OPTIMIZER_STATE]
        worth: list[Sequence[str]] = []
        if trace.peak - state <= self._room:
            worth.append([])
        if gentle and trace.lasting - state <= self._room:
            worth.append(gentle)
        for name in _SMALLER.get(self._config.train.optimizer, ()):
            for more in worth:
                way = self._try([f"train.optimizer={name}", *more], retrains=True)
                if self._keep(way):
                    return

    def _keep(self, way: Way | None) -> bool:
        if way is not None:
            self._ways.append(way)
        return way is not None

    def _try(
        self, overrides: Sequence[str], ranks: int | None = None, retrains: bool = False
    ) -> Way | None:
        """Trace the run with `overrides` on the same rung. None if it does not fit, or cannot run like this."""
        ranks = ranks or self._made.ranks
        made, rates = self._made, self._made.calibration.rates
        tried = f"--ranks {ranks} {' '.join(overrides)}"
        self._say(f"would it fit with {tried}?")
        try:
            config = changed(self._config, overrides)
            there, _ = trace_rung(
                config, self._recipe, made.card, made.plan.rung, ranks, self._traces
            )
        except ConfigError:
            # An engine that does not take the optimizer, for one.
            return None
        except Exception as error:
            # A model may raise anything, as batch normalisation does of a single sample. The prediction stands.
            text = clipped(" ".join(str(error).split()), _LONGEST_REASON)
            self._say(f"{tried} is left out: it raised {type(error).__name__}: {text}")
            return None
        snapshots = snapshot_bytes(config, there, made.card, rates)
        if there.peak + snapshots > self._room:
            return None
        timing = time_steps(there.steps, rates, self._recipe.fp8.stats_every)
        needed = there.peak + snapshots + rates.context_bytes
        return Way(tuple(overrides), ranks, there, timing, needed, retrains)


def changed(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """`config` as these words on a command line would change it. Raises ConfigError."""
    whole = merge(config.model_dump(mode="json"), parse_overrides(overrides))
    return validate(RunConfig, whole, "a change that is tried")
