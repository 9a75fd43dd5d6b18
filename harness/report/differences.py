"""In which settings, data and machines two runs differ, and which of these explain where they diverge. Torch-free.

The journal, plan.json and the newest checkpoint's manifest record what a run was given: config, recipe, plan, data,
libraries and machine. `differences` lists what differs. `likely_causes` takes the first figure that differs, and keeps
of that list what can act at that place of a step: the seed changes the initial weights, but not the third update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.checkpoint.manifest import read_manifest
from harness.core.errors import HarnessError
from harness.core.files import read_mapping
from harness.report.divergence import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    GUARD,
    PARAMETERS,
    THE_LOSS,
    UPDATE,
    VALIDATION,
    Compared,
    Split,
)
from harness.tracking.history import SWITCHED, RunHistory, bare

CONFIG, RECIPE, PLAN, DATA, ORDER = "config", "recipe", "plan", "data", "order"
LIBRARY, MACHINE, START, EVENT = "library", "machine", "start", "event"
SEEDS = ("train.seed", "seed")
"""Parameters with a run's seed: of `harness train`, and of a loop of the user's own."""

# Config keys by what they change, as beginnings of names.
_OF_WEIGHTS = ("model.", *SEEDS)
_OF_DATA = ("data.", "train.global_batch", *SEEDS)
_OF_UPDATES = (
    *("train.lr", "train.warmup_steps", "train.schedule", "train.min_lr_ratio"),
    *("train.decay_share", "train.steps", "train.optimizer", "train.betas", "train.weight_decay"),
    *("train.decay_embeddings", "train.max_grad_norm", "train.micro_batch", "engine.", "lr"),
)
_OF_NUMERICS = ("recipe", "engine.", "train.micro_batch", "train.threads", "model.")
_OF_VALIDATION = ("data.val", "train.eval_every")
_OF_GUARD = ("guard.",)
_WITHOUT_EFFECT = (
    *("tracking.", "checkpoint.", "train.max_minutes", "engine.timeout_seconds"),
    *("data.cache", "guard.measure_every"),
)
# Where the data are, and how they are read. The hash says whether they are the same.
_WAYS_TO_DATA = ("data.path", "data.format", "data.text_key", "data.tokenizer", "data.revision")
PRECISIONS = ("requested", "resolved", "effective")
"""A plan's precisions, as its keys."""
_MACHINE_TAGS = ("card", "tier", "engine", "ranks")
_VERSION = "version."
# Events that change what later steps compute.
_ACTING = (SWITCHED, "guard.rollback", "run.changed")
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two runs were given differently.

    kind: config, recipe, plan, data, library, machine, start (the checkpoint that the run started from); of a cause
        also order (of the data) and event (what the guard did, or a resume changed).
    key: a config key, a layer of the plan, a library, ...
    a, b: the values; None where a run has none.
    """

    kind: str
    key: str
    a: Any
    b: Any

    def as_json(self) -> dict[str, Any]:
        """kind, key, a, b."""
        return {"kind": self.kind, "key": self.key, "a": self.a, "b": self.b}


@dataclass(frozen=True, slots=True)
class Causes:
    """Why two runs may part where they do.

    evidence: what the first figures that differ say, in words.
    likely: differences that can act there, the likeliest first; empty if nothing that is recorded can.
    """

    evidence: str
    likely: Sequence[Difference] = ()


def differences(a: RunHistory, b: RunHistory) -> list[Difference]:
    """Everything recorded that the runs were given differently, config keys first. A plan that one run lacks is no
    difference.
    """
    found = list(_differing(CONFIG, a.run["params"], b.run["params"]))
    found += _differing(RECIPE, _hash(a, "tags", "recipe."), _hash(b, "tags", "recipe."))
    if a.plan and b.plan:
        found += _differing(PLAN, _precisions(a), _precisions(b))
        found += _differing(PLAN, _layers(a), _layers(b))
    found += _differing(DATA, _hash(a, "data", "data."), _hash(b, "data", "data."))
    found += _differing(START, read_start(a), read_start(b))
    # A run whose checkpoints are gone has not lost a library.
    saved = [_saved_versions(run) for run in (a, b)]
    if not all(saved):
        saved = [{}, {}]
    of_a = saved[0] | _tagged_versions(a)
    of_b = saved[1] | _tagged_versions(b)
    found += _differing(LIBRARY, of_a, of_b)
    found += _differing(MACHINE, machine(a), machine(b))
    return found


def _differing(kind: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield Difference(kind, key, a.get(key), b.get(key))


def _hash(history: RunHistory, part: str, prefix: str) -> dict[str, Any]:
    """The recipe's hash, a tag `recipe.sha256`; or the data's, `sha256` among their figures."""
    name = f"{prefix}sha256" if part == "tags" else "sha256"
    value = history.run[part].get(name)
    return {} if value is None else {f"{prefix}sha256": value}


def _precisions(history: RunHistory) -> dict[str, Any]:
    """Requested, resolved and effective precision."""
    return {name: history.plan[name] for name in PRECISIONS if history.plan.get(name)}


def _layers(history: RunHistory) -> dict[str, str]:
    """Layer -> its precision and backend, as planned."""
    found: dict[str, str] = {}
    for layer in history.plan.get("layers", ())[:_MOST_LAYERS]:
        name = bare(layer["module"])
        found[name] = f"{layer['precision']} ({layer['backend']})"
    return found


def read_start(history: RunHistory) -> dict[str, Any]:
    """The checkpoint of another run that this one started from; empty if it began afresh."""
    path = read_mapping(history.run_dir / "started_from.json").get("path")
    if not isinstance(path, str):
        return {}
    return {"started_from": path}


def _saved_versions(history: RunHistory) -> dict[str, str]:
    """Library -> version, from the run's newest checkpoint that can be read; empty if there is none."""
    checkpoints = sorted((history.run_dir / "checkpoints").glob("step-*"), reverse=True)
    for checkpoint in checkpoints:
        try:
            versions = read_manifest(checkpoint)["versions"]
            return {str(name): str(version) for name, version in versions.items()}
        except (HarnessError, OSError, LookupError, TypeError, ValueError, AttributeError):
            continue
    return {}


def _tagged_versions(history: RunHistory) -> dict[str, str]:
    """Library -> version, from the run's tags."""
    found: dict[str, str] = {}
    for name, value in history.run["tags"].items():
        if name.startswith(_VERSION) and value:
            found[name.removeprefix(_VERSION)] = value
        elif name in ("torch", "git.commit"):
            found[name] = value
    return found


def machine(history: RunHistory) -> dict[str, str]:
    """Host, card, tier, engine and number of ranks, as far as they are recorded."""
    tags = history.run["tags"]
    found = {name: tags[name] for name in _MACHINE_TAGS if name in tags}
    host = history.run["where"].get("host")
    if not host:
        return found
    return {"host": str(host), **found}


@dataclass(frozen=True, slots=True)
class _Reading:
    """What the first figures that differ say.

    evidence: in words.
    keys: beginnings of the config keys that can act there, the likeliest first.
    kinds: other kinds of differences that can.
    weights_agree: a seed that differs can then only act by the order of the data.
    """

    evidence: str
    keys: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    weights_agree: bool = False

    def rank(self, each: Difference) -> int | None:
        """The place of a config key among `keys`; 0 for a kind that can act; None for anything else."""
        if each.kind in self.kinds:
            return 0
        if each.kind == CONFIG:
            for place, beginning in enumerate(self.keys):
                if each.key.startswith(beginning):
                    return place
        return None


_LIKELIHOOD = (EVENT, CONFIG, ORDER, START, DATA, RECIPE, PLAN, LIBRARY, MACHINE)
_NUMERICS = (RECIPE, PLAN, LIBRARY, MACHINE)


def likely_causes(compared: Compared, a: RunHistory, b: RunHistory) -> Causes | None:
    """Why the runs part at the first figure that differs; None if none differs.

    What counts is what the runs were given when that step ran: a resume may have changed it since.
    """
    if not compared.splits:
        return None
    reading = _read(compared)
    acts = _acts(a, b, compared)
    step = compared.splits[0].step
    then = [run.as_of(step, counted=compared.again) for run in (a, b)]
    effective = _with_effect(differences(*then))
    since = ""
    if effective != _with_effect(differences(a, b)):
        since = f"; these are the settings of step {step}, which a resume changed later"

    # Kinds come in the order of their likelihood; within a kind, the likeliest key is first.
    ranked: list[tuple[int, int, Difference]] = []
    for each in effective:
        rank = reading.rank(each)
        if rank is None:
            continue
        if reading.weights_agree and each.kind == CONFIG and each.key in SEEDS:
            each = Difference(ORDER, each.key, each.a, each.b)
        ranked.append((_LIKELIHOOD.index(each.kind), rank, each))
    ranked.sort(key=lambda entry: entry[:2])
    likely = [each for *_, each in ranked]
    # Two hosts say little where there is anything else.
    others = [each for each in likely if each.key != "host"]
    likely = others or likely

    if acts:
        evidence = f"only one run did something before this step; {reading.evidence}{since}"
        return Causes(evidence, [*acts, *likely])
    if likely:
        return Causes(reading.evidence + since, likely)

    # Nothing fits: whatever differs and can change a number.
    if effective:
        evidence = f"{reading.evidence}; nothing else that is recorded differs{since}"
        return Causes(evidence, effective)
    return Causes(
        f"{reading.evidence}; nothing that is recorded and can change a number differs: look at operations that are "
        "not deterministic "
        "(engine.deterministic=true), at the code of model and data, and at the hardware"
    )


def _read(compared: Compared) -> _Reading:
    first = compared.splits[0]
    # The earliest thing that differs says which part of a step can be the cause.
    if first.kind == "scale":
        evidence = "the scale differs while earlier amaxes agree"
        return _Reading(evidence, _OF_NUMERICS, (START, *_NUMERICS), True)
    if first.kind == "loss_scale":
        return _Reading("the loss scale differs", _OF_NUMERICS, _NUMERICS, True)
    if first.stage in (PARAMETERS, FORWARD, THE_LOSS):
        return _read_forward(compared)
    if first.stage in (BACKWARD, GRADIENT):
        evidence = "the forward pass agrees, and the gradients do not"
        return _Reading(evidence, _OF_NUMERICS, _NUMERICS, True)
    if first.stage == UPDATE:
        return _Reading("the gradients agree, and the update does not", _OF_UPDATES, (RECIPE,))
    if first.stage == GUARD:
        return _Reading("the guard acted differently on the same figures", _OF_GUARD, (RECIPE,))
    if first.stage == VALIDATION:
        evidence = "training agrees, and validation does not"
        return _Reading(evidence, _OF_VALIDATION, (DATA, *_NUMERICS))
    return _Reading("a figure of your own differs")


def _read_forward(compared: Compared) -> _Reading:
    """Of a first difference in the weights, or in what they are multiplied with."""
    at_start = compared.splits[0].step == compared.first
    if _weights_differ(compared.splits):
        if at_start:
            return _Reading("the initial weights differ", _OF_WEIGHTS, (START, LIBRARY))
        evidence = "the weights differ: the update before this step did"
        return _Reading(evidence, _OF_UPDATES, (RECIPE, PLAN, LIBRARY))

    # Every step has the amaxes of FP8 weights; the norm of all weights is measured in some steps.
    if compared.same_norm:
        evidence = "the weights agree, and the inputs or what is computed of them do not"
        keys = (*_OF_DATA, *_OF_NUMERICS)
        return _Reading(evidence, keys, (DATA, START, *_NUMERICS), True)
    evidence = "the inputs or what is computed of them differ, and of the weights nothing that is recorded does"
    if at_start:
        keys = (*_OF_DATA, *_OF_WEIGHTS, *_OF_NUMERICS)
        return _Reading(evidence, keys, (DATA, START, *_NUMERICS))
    return _Reading(evidence, (*_OF_DATA, *_OF_UPDATES), (DATA, START, *_NUMERICS))


def _weights_differ(splits: Sequence[Split]) -> bool:
    """Whether the figures that differ are of weights, apart from their scales, which a recipe sets."""
    for each in splits:
        is_slot = each.stage == FORWARD and each.role == "weight" and each.kind == "amax"
        if is_slot or each.stage == PARAMETERS:
            return True
    return False


def _with_effect(given: Sequence[Difference]) -> list[Difference]:
    """Those that can change a number, each said once: a recipe by its name, layers of the plan together."""
    same_data = not any(each.kind == DATA for each in given)
    has_name = any(each.kind == CONFIG and each.key == "recipe" for each in given)
    found: list[Difference] = []
    layers: list[Difference] = []
    for each in given:
        if each.kind == CONFIG:
            # Another way to the same data, such as a moved folder, changes no number.
            ways = each.key.startswith(_WAYS_TO_DATA) and same_data
            if not ways and not each.key.startswith(_WITHOUT_EFFECT):
                found.append(each)
        elif each.kind == PLAN and each.key == "resolved":
            found.append(each)
        elif each.kind == PLAN and each.key not in PRECISIONS:
            layers.append(each)
        elif each.kind != PLAN and not (each.kind == RECIPE and has_name):
            found.append(each)
    if layers:
        first = layers[0]
        key = first.key
        if len(layers) > 1:
            key += f" and {len(layers) - 1} more layers"
        found.append(Difference(PLAN, key, first.a, first.b))
    return found


def _acts(a: RunHistory, b: RunHistory, compared: Compared) -> list[Difference]:
    """Switches, rollbacks and changed configs before the first difference that only one of the runs has."""
    step = compared.splits[0].step
    of_a = Counter(_acts_of(a, step, compared.again))
    of_b = Counter(_acts_of(b, step, compared.again))
    # Subtracting counters leaves what one run did more often than the other.
    found: list[Difference] = []
    for key, count in (of_a - of_b).items():
        found.append(Difference(EVENT, key, count, 0))
    for key, count in (of_b - of_a).items():
        found.append(Difference(EVENT, key, 0, count))
    return found


def _acts_of(history: RunHistory, step: int, again: bool) -> Iterator[str]:
    """again: whether `step` is one that ran again after a rollback."""
    for event in history.events:
        if event["code"] not in _ACTING:
            continue
        acted = event["step"]
        if again and event["code"] == "guard.rollback":
            # It is named after the step that it was decided in, and acts on all that ran again.
            acted = min(acted, event.get("to_step", acted))
        # A switch is carried out before the step that its event names.
        latest = step if event["code"] == SWITCHED else step - 1
        if acted > latest:
            continue
        text = f"{event['code']} at step {event['step']}"
        layers = [*event.get("demote", ()), *event.get("promote", ())]
        if layers:
            text += f": {', '.join(layers)}"
        elif event.get("lowered"):
            text += f": the whole run to {event['lowered']}"
        yield text
