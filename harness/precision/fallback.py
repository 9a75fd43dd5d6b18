"""Which FP8 layers should run in BF16: a pure controller, the same decision on every rank, no torch.

A slot is bad at a step when its saturation ratio is over its role's limit or too many of its non-zero values are
flushed to zero. A layer with a slot that was bad in `hits` of its last `window` observations asks to be demoted. It
may come back once it stayed for its dwell time, which grows with every demotion of the same layer, and its shadow
ratios were under their limits for a whole window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.core.errors import CheckpointError, ConfigError, MisuseError, Problem
from harness.core.facts import SlotStats, StepFacts, Switch, Verdict
from harness.core.protocols import Meta

ROLES = ("input", "weight", "grad_output")
STATISTICS = ("saturation", "underflow")
_LARGEST = float(np.finfo(np.float32).max)
_NEVER = -1


@dataclass(frozen=True, slots=True)
class FallbackPolicy:
    """When a layer leaves FP8 and when it returns.

    saturation_*: ratios amax * scale / fp8_max over which a slot of that role is bad at a step. underflow: share of
    non-zero values flushed to zero, likewise. hits of the last window observations demote. dwell_steps: least stay in
    BF16, multiplied by cooldown_factor at each further demotion of the layer. warmup_steps: applied steps at the start
    without evidence, while scales are still 1. max_demoted_share: of the FP8 layers, but at least one layer unless 0.

    Healthy runs reach ratios of 1.26 (input), 1.01 (weight), 4.5 (grad_output) and an underflow of 0.003, measured on
    a 3M-parameter GPT over 200 steps; the defaults stay clear of all four.

    Raises ConfigError that lists every value out of range.
    """

    enabled: bool = True
    saturation_input: float = 1.5
    saturation_weight: float = 1.25
    saturation_grad_output: float = 8.0
    underflow: float = 0.25
    hits: int = 3
    window: int = 8
    dwell_steps: int = 50
    cooldown_factor: float = 2.0
    warmup_steps: int = 2
    max_demoted_share: float = 0.5

    def __post_init__(self) -> None:
        rules = (
            *((f"saturation_{role}", getattr(self, f"saturation_{role}") > 0, "over 0") for role in ROLES),
            ("underflow", 0 < self.underflow <= 1, "over 0 and at most 1"),
            ("hits", self.hits >= 1, "at least 1"),
            ("window", self.window >= self.hits, f"at least hits ({self.hits})"),
            ("dwell_steps", self.dwell_steps >= 1, "at least 1"),
            ("cooldown_factor", self.cooldown_factor >= 1, "at least 1"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("max_demoted_share", 0 <= self.max_demoted_share <= 1, "between 0 and 1"),
        )
        problems = [
            Problem(f"{getattr(self, name)!r} is out of range", f"fallback.{name}", fix=f"give a value {wanted}")
            for name, ok, wanted in rules
            if not ok
        ]
        if problems:
            raise ConfigError(problems)

    def limits(self) -> npt.NDArray[np.float32]:
        """Limit of each statistic and role, float32 [2, 1, 3]: saturation, then underflow."""
        ratios = [self.saturation_input, self.saturation_weight, self.saturation_grad_output]
        return np.array([[ratios], [[self.underflow] * len(ROLES)]], dtype=np.float32)

    def max_demoted(self, layers: int) -> int:
        """How many of `layers` may be in BF16 at once."""
        return max(1, int(self.max_demoted_share * layers)) if self.max_demoted_share > 0 else 0

    def dwell(self, demotions: int) -> float:
        """Steps that a layer stays in BF16 after its demotion number `demotions` (from 1)."""
        return self.dwell_steps * self.cooldown_factor ** (demotions - 1)


class FallbackController:
    """Proposes switches from slot statistics; what really runs where it reads from `facts.demoted`.

    layers: the FP8 layers of the plan, in order. A proposal is not repeated while it is on its way (facts are judged
    one step late), nor for a window after it was refused. Only a completed step is evidence, so no layer ever switches
    before the first step.

    Verdicts, all healthy (clipping costs accuracy; whether the run suffers is for the loss and gradients to say):
    `precision.demote`, `precision.promote` (one verdict carries both as `precision.demote`), `precision.budget` (more
    layers want to leave than max_demoted_share allows; once per streak), else `precision.ok`.
    """

    def __init__(self, policy: FallbackPolicy, layers: Sequence[str]) -> None:
        self.policy = policy
        self.layers = tuple(layers)
        self._index = {layer: index for index, layer in enumerate(self.layers)}
        self._limits = policy.limits()
        count = len(self.layers)
        # The last `window` observations, newest last: 0 when fine, else the value over the limit; NaN when none yet.
        self._recent: npt.NDArray[np.float32] = np.full((policy.window, 2, count, 3), np.nan, dtype=np.float32)
        self._demoted: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self._fresh: npt.NDArray[np.bool_] = np.zeros(count, dtype=np.bool_)
        self._since: npt.NDArray[np.int64] = np.full(count, _NEVER, dtype=np.int64)
        self._demotions: npt.NDArray[np.int64] = np.zeros(count, dtype=np.int64)
        self._asked: npt.NDArray[np.int64] = np.full(count, _NEVER, dtype=np.int64)
        self._over_budget_at = _NEVER
        self._names: tuple[str, ...] = ()
        self._places: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._present: npt.NDArray[np.bool_] = np.zeros((count, 3), dtype=np.bool_)

    def observe(self, facts: StepFacts) -> Verdict:
        """The verdict on one step; deterministic. Raises MisuseError if facts name a layer or slot not in `layers`."""
        quiet = Verdict("precision.ok", facts.step)
        if not self.policy.enabled or facts.slots is None:
            return quiet
        self._follow(facts)
        if not facts.applied or facts.applied_steps <= self.policy.warmup_steps:
            return quiet
        self._record(facts.slots)
        return self._judge(facts.step) or quiet

    def _follow(self, facts: StepFacts) -> None:
        """Take over what ran in BF16 in this step; a layer that changed starts with no evidence."""
        unknown = [layer for layer in facts.demoted if layer not in self._index]
        if unknown:
            raise MisuseError(_unknown(unknown, "demoted layers"))
        demoted = np.zeros_like(self._demoted)
        demoted[[self._index[layer] for layer in facts.demoted]] = True
        changed = demoted != self._demoted
        if not changed.any():
            return
        self._recent[:, :, changed] = np.nan
        self._asked[changed] = _NEVER
        self._since[changed] = facts.step
        self._demotions += changed & demoted
        self._fresh = (self._fresh | changed) & ~demoted
        self._demoted = demoted

    def _record(self, slots: SlotStats) -> None:
        """Append this step's observations, each slot and statistic to its own window."""
        if slots.names is not self._names and slots.names != self._names:
            self._place(slots.names)
        values = np.full((2, len(self.layers) * 3), np.nan, dtype=np.float32)
        values[:, self._places] = slots.saturation, slots.underflow
        values = values.reshape(2, -1, 3)
        # A layer just back in FP8 used a scale made from shadow values: its first ratio says nothing of the next ones.
        values[:, self._fresh] = np.nan
        self._fresh[:] = False
        hits = np.where(values > self._limits, np.minimum(values, np.float32(_LARGEST)), np.float32(0))
        self._recent = np.where(np.isnan(values), self._recent, np.concatenate([self._recent[1:], hits[None]]))

    def _place(self, names: tuple[str, ...]) -> None:
        parts = [name.rpartition(".") for name in names]
        unknown = [name for name, (layer, _, role) in zip(names, parts, strict=True) if not self._knows(layer, role)]
        if unknown:
            raise MisuseError(_unknown(unknown, "slots"))
        self._places = np.array(
            [self._index[layer] * 3 + ROLES.index(role) for layer, _, role in parts], dtype=np.int64
        )
        self._present[:] = False
        self._present.reshape(-1)[self._places] = True
        self._names = names

    def _knows(self, layer: str, role: str) -> bool:
        return layer in self._index and role in ROLES

    def _judge(self, step: int) -> Verdict | None:
        over = (self._recent > 0).sum(axis=0) >= self.policy.hits
        # One step for the facts' lag, then a window: only then has a proposal that changed nothing been refused.
        ready = (self._asked == _NEVER) | (step > self._asked + self.policy.window)
        wants = over.any(axis=(0, 2)) & ~self._demoted
        on_their_way = ~ready & ~self._demoted
        room = self.policy.max_demoted(len(self.layers)) - int(self._demoted.sum() + on_their_way.sum())
        leaving = self._worst_first(np.flatnonzero(wants & ready))
        demote, stuck = leaving[: max(0, room)], leaving[max(0, room) :]
        promote = self._returning(step, ready) if self._demoted.any() else []
        self._asked[[*demote, *promote]] = step
        in_streak = self._over_budget_at != _NEVER and step - self._over_budget_at <= self.policy.window
        tell = bool(stuck) and not in_streak and not (demote or promote)
        if tell or (stuck and in_streak):
            self._over_budget_at = step
        if demote or promote:
            return self._switch(step, demote, promote, over)
        return self._budget(step, stuck, over) if tell else None

    def _worst_first(self, layers: npt.NDArray[np.int64]) -> list[int]:
        """By how far the worst slot is over its limit; equal ones in the order of the plan."""
        if not layers.size:
            return []
        excess = (np.nan_to_num(self._recent[:, :, layers]) / self._limits).max(axis=(0, 1, 3))
        return layers[np.argsort(-excess, kind="stable")].tolist()

    def _returning(self, step: int, ready: npt.NDArray[np.bool_]) -> list[int]:
        clean = ((self._recent[:, 0] == 0).all(axis=0) | ~self._present).all(axis=-1)
        candidates = np.flatnonzero(self._demoted & clean & ready).tolist()
        return [i for i in candidates if step - self._since[i] >= self.policy.dwell(int(self._demotions[i]))]

    def _switch(self, step: int, demote: list[int], promote: list[int], over: npt.NDArray[np.bool_]) -> Verdict:
        down = {self.layers[i]: self._evidence(i, over) for i in demote}
        up = {self.layers[i]: {"demoted_at": int(self._since[i]), "steps": int(step - self._since[i])} for i in promote}
        told = [f"{layer} to BF16 ({_first_slot(found['slots'])})" for layer, found in down.items()]
        told += [f"{layer} back to FP8 (after {found['steps']} steps in BF16)" for layer, found in up.items()]
        text = "; ".join(told)
        return Verdict(
            "precision.demote" if demote else "precision.promote",
            step,
            text,
            proposal=Switch(tuple(down), tuple(up), text),
            evidence={"demote": down, "promote": up},
        )

    def _budget(self, step: int, stuck: list[int], over: npt.NDArray[np.bool_]) -> Verdict:
        names = [self.layers[i] for i in stuck]
        limit = self.policy.max_demoted(len(self.layers))
        return Verdict(
            "precision.budget",
            step,
            f"{', '.join(names)} should leave FP8, but fallback.max_demoted_share ({self.policy.max_demoted_share:g}) "
            f"allows {limit} of {len(self.layers)} layers in BF16",
            evidence={"layers": {self.layers[i]: self._evidence(i, over) for i in stuck}, "allowed": limit},
        )

    def _evidence(self, layer: int, over: npt.NDArray[np.bool_]) -> dict[str, Any]:
        """The values over the limit, oldest first, of every slot of `layer` that has enough of them."""
        slots: dict[str, dict[str, list[float]]] = {}
        for statistic, role in zip(*np.nonzero(over[:, layer]), strict=True):
            values = self._recent[:, statistic, layer, role]
            figures = [float(f"{value:.4g}") for value in values[values > 0]]
            slots.setdefault(f"{self.layers[layer]}.{ROLES[role]}", {})[STATISTICS[statistic]] = figures
        return {"slots": slots, "demotions_before": int(self._demotions[layer])}

    def state_dict(self) -> Meta:
        """JSON-able; restores every later decision exactly."""
        return {
            "layers": list(self.layers),
            "window": self.policy.window,
            "recent": [None if value != value else value for value in self._recent.ravel().tolist()],
            "demoted": self._demoted.tolist(),
            "fresh": self._fresh.tolist(),
            "since": self._since.tolist(),
            "demotions": self._demotions.tolist(),
            "asked": self._asked.tolist(),
            "over_budget_at": self._over_budget_at,
        }

    def load_state_dict(self, meta: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the state is of other layers or another window."""
        if tuple(meta["layers"]) != self.layers or meta["window"] != self.policy.window:
            raise CheckpointError(
                Problem(
                    "the checkpoint's fallback state is of other FP8 layers or another fallback.window",
                    f"checkpoint: {len(meta['layers'])} layers, window {meta['window']}; "
                    f"this run: {len(self.layers)} layers, window {self.policy.window}",
                    fix="resume with the recipe and model that wrote it",
                )
            )
        recent = [np.nan if value is None else value for value in meta["recent"]]
        self._recent = np.array(recent, dtype=np.float32).reshape(self._recent.shape)
        self._demoted = np.array(meta["demoted"], dtype=np.bool_)
        self._fresh = np.array(meta["fresh"], dtype=np.bool_)
        self._since = np.array(meta["since"], dtype=np.int64)
        self._demotions = np.array(meta["demotions"], dtype=np.int64)
        self._asked = np.array(meta["asked"], dtype=np.int64)
        self._over_budget_at = int(meta["over_budget_at"])


def _first_slot(slots: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """The first slot and its figures, for a line of text."""
    slot, figures = next(iter(slots.items()))
    statistic, values = next(iter(figures.items()))
    return f"{slot} {statistic} {', '.join(f'{value:g}' for value in values)}"


def _unknown(names: Sequence[str], kind: str) -> Problem:
    return Problem(
        f"{kind} that are not of the plan's FP8 layers: {', '.join(names)}",
        "step facts",
        fix=f"give the controller every FP8 layer; slots are <layer>.<role> with role one of {', '.join(ROLES)}",
    )
