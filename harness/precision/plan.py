"""The plan: for every module of a model its precision, its backend and the reason. Torch-free when imported.

Three questions, in this order:
1. Which rung? `judge` says what one machine can do with each rung of the recipe's ladder, `agree_on_rung` what all
   ranks can do together.
2. Which modules? `make_plan` gives every module a row.
3. What did each really run in? `Plan.as_it_ran` answers when a run ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from harness.capability.cards import Tier, tier_of
from harness.core.errors import ConfigError, MachineError, Problem, some
from harness.core.facts import ROLES, LayerPlan, RungVerdict, as_it_ran, pad_numbers
from harness.core.plan_text import effective_text, plan_text
from harness.precision.backends.registry import BACKENDS, PLAIN, can_run
from harness.precision.recipe import Recipe, Rung

if TYPE_CHECKING:
    import torch
    from torch import nn

    from harness.capability.probe import MachineFacts
    from harness.core.protocols import PrecisionBackend
    from harness.precision.layers import LayerFilter


Made = TypeVar("Made")


class NoFp8LayerError(ConfigError):
    """No layer of the model runs in FP8 on a rung: none can, or none may."""


class Judgement(NamedTuple):
    """What one machine can do with one rung.

    able: hardware and libraries can run it.
    listed: the recipe names the machine's tier.
    reason: why, for both.
    """

    able: bool
    listed: bool
    reason: str

    @property
    def takes(self) -> bool:
        """Whether this machine would take the rung if it were alone."""
        return self.able and self.listed


def judge(recipe: Recipe, facts: MachineFacts) -> list[Judgement]:
    """Judge every rung of `recipe` on this machine, in the ladder's order.

    If fp8.backend names a backend, no other rung may be taken.
    """
    tier, _ = tier_of(facts)
    judged: list[Judgement] = []
    for rung in recipe.ladder:
        scaling = recipe.fp8.scaling
        able, reason = can_run(rung.backend, rung.precision, facts, tier, scaling)
        listed = tier.name in rung.tiers
        if not listed:
            reason = f"not for tier {tier.name} (for {', '.join(rung.tiers)})"
        if recipe.named_backend and not recipe.is_named(rung):
            able, reason = False, f"fp8.backend names {recipe.named_backend}"
        judged.append(Judgement(able, listed, reason))
    return judged


def first_taken(judged: Sequence[Judgement]) -> int | None:
    """Index of the first rung that one machine takes alone; None if it can take none."""
    for index, judgement in enumerate(judged):
        if judgement.takes:
            return index
    return None


def common_rungs(able: Sequence[Sequence[bool]], listed: Sequence[Sequence[bool]]) -> list[int]:
    """Indices of the rungs that several machines can take together. able, listed: [rank][rung].

    The weakest ranks decide. They are the ranks whose own first rung is furthest down the ladder. A rung must be one
    that they take by the recipe and that every other rank is able to run. The recipe need not list the tiers of the
    others: on an H100 beside a T4 the T4's fp16 is right, though no recipe would give fp16 to an H100.
    """
    # Which rungs each rank takes, and the first of them.
    takes: list[list[bool]] = []
    firsts: list[int] = []
    for able_here, listed_here in zip(able, listed, strict=True):
        both: list[bool] = []
        for is_able, is_listed in zip(able_here, listed_here, strict=True):
            both.append(is_able and is_listed)
        if True not in both:
            return []
        takes.append(both)
        firsts.append(both.index(True))

    # The weakest ranks must take the rung; for all others it is enough to be able to.
    asked = list(able)
    for row, first in zip(takes, firsts, strict=True):
        if first == max(firsts):
            asked.append(row)
    common: list[int] = []
    for index, answers in enumerate(zip(*asked, strict=True)):
        if all(answers):
            common.append(index)
    return common


def verdicts(
    ladder: Sequence[Rung], judged: Sequence[Judgement], chosen: int | None
) -> list[RungVerdict]:
    """This machine's verdict on every rung, given that all ranks take rung `chosen` (None: none)."""
    own = first_taken(judged)
    found: list[RungVerdict] = []
    for index, (rung, judgement) in enumerate(zip(ladder, judged, strict=True)):
        reason = judgement.reason
        if index == chosen and index != own:
            reason = "the best that every rank can take"
        elif chosen is not None and index < chosen and judgement.takes:
            reason = "another rank cannot take it"
        elif chosen is not None and index > chosen and judgement.listed:
            reason = f"not needed: {ladder[chosen].name} runs"
        found.append(RungVerdict(rung.name, index == chosen, reason))
    return found


_TF32_TIERS = (Tier.BLACKWELL, Tier.HOPPER, Tier.ADA, Tier.AMPERE)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """What will run, per module, and why. Printed, it is the table at the start of a run.

    recipe, recipe_sha256: name and hash of the policy.
    tier: of this machine.
    requested: the recipe's name.
    rung: the one that is taken; its name is `resolved`.
    rungs: the verdict on every rung of the ladder.
    layers: one row for each module.
    notes: what holds for the whole run.
    keep_fp32: names of modules that compute in float32 on this rung.
    compiled: whether the model's blocks are compiled (engine.compile).
    compile_failed: why blocks run eager although engine.compile=auto was to compile them; else empty.
    backend_choice: what fp8.backend=auto chose and measured (`backend_choice.Choice`); None under another value.
    """

    recipe: str
    recipe_sha256: str
    tier: str
    requested: str
    rung: Rung
    rungs: tuple[RungVerdict, ...]
    layers: tuple[LayerPlan, ...]
    notes: tuple[str, ...] = field(default_factory=tuple)
    keep_fp32: tuple[str, ...] = field(default_factory=tuple)
    compiled: bool = False
    compile_failed: str = ""
    backend_choice: Mapping[str, Any] | None = None

    def __repr__(self) -> str:
        counts = Counter(layer.precision for layer in self.layers)
        listed = [f"{precision}: {count}" for precision, count in sorted(counts.items())]
        modules = ", ".join(listed)
        return f"Plan({self.recipe} on {self.tier}: {self.resolved}; modules in {modules})"

    def __str__(self) -> str:
        return plan_text(self.as_dict())

    @property
    def resolved(self) -> str:
        """The rung taken, `backend:precision`."""
        return self.rung.name

    def _in_fp8(self) -> list[LayerPlan]:
        """The rows of the layers that run in FP8."""
        return [layer for layer in self.layers if layer.precision == "fp8"]

    def fp8_layers(self) -> tuple[str, ...]:
        """Names, as in the model, of the layers that run in FP8."""
        return tuple(layer.module for layer in self._in_fp8())

    def fused_norms(self) -> dict[str, str]:
        """FP8 layer -> the norm that is computed together with it. Names as in the model."""
        return {layer.module: layer.norm for layer in self._in_fp8() if layer.norm}

    def fused_mlps(self) -> dict[str, str]:
        """Second Linear of an MLP -> the first, which is computed together with it. Names as in the model."""
        return {layer.module: layer.first for layer in self._in_fp8() if layer.first}

    def fp8_weights(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The weight of each FP8 layer, by the layer's name with numbers padded. `model` is not converted yet.

        A weight of several layers is left out: its gradient says nothing about one of them.
        """
        weights: dict[str, nn.Parameter] = {}
        for name in self.fp8_layers():
            weights[pad_numbers(name)] = model.get_parameter(f"{name}.weight")
        owners = Counter(id(weight) for weight in weights.values())
        own = [name for name, weight in weights.items() if owners[id(weight)] == 1]
        return {name: weights[name] for name in own}

    @staticmethod
    def names_of(weights: Mapping[str, nn.Parameter], model: nn.Module) -> dict[str, str]:
        """The name in the converted `model` of each of `fp8_weights`.

        Whoever held the weights themselves would keep them whole when the model is sharded.
        """
        names = {id(param): name for name, param in model.named_parameters()}
        return {layer: names[id(weight)] for layer, weight in weights.items()}

    def slot_names(self) -> tuple[str, ...]:
        """`<layer>.<role>` of every FP8 layer, numbers padded. All FP8 state and statistics have this order."""
        names: list[str] = []
        for layer in map(pad_numbers, self.fp8_layers()):
            names += [f"{layer}.{role}" for role in ROLES]
        return tuple(names)

    def as_dict(self) -> dict[str, Any]:
        """What plan.json holds. `effective` is filled in after the run."""
        chosen: dict[str, Any] = {}
        if self.backend_choice is not None:
            chosen["backend_choice"] = dict(self.backend_choice)
        return {
            "recipe": self.recipe,
            "recipe_sha256": self.recipe_sha256,
            "tier": self.tier,
            "requested": self.requested,
            "resolved": self.resolved,
            "effective": None,
            "keeps_amax": BACKENDS[self.rung.backend].keeps_amax,
            "compiled": self.compiled,
            "rungs": [asdict(rung) for rung in self.rungs],
            "layers": [asdict(layer) for layer in self.layers],
            "notes": list(self.notes),
            **chosen,
        }

    def as_it_ran(self, backend: PrecisionBackend) -> dict[str, Any]:
        """`as_dict` with what every module really ran in, when a run ends.

        An FP8 layer counts as FP8 only if its slots saw a nonzero amax.
        """
        # FP8 has to show that it ran. A layer that is never called keeps amaxes of 0.
        used: set[str] = set()
        if backend.slot_names:
            tensors, _ = backend.state_dict()
            nonzero = (tensors["history"].amax(dim=0) > 0).tolist()
            for slot, saw_amax in zip(backend.slot_names, nonzero, strict=True):
                if saw_amax:
                    used.add(slot.rpartition(".")[0])

        # A layer that was moved out of FP8 counts as what it was moved to.
        fell_to = backend.fell_back_to
        demoted = backend.demoted
        layers: dict[str, str] = {}
        for layer in self.layers:
            name = pad_numbers(layer.module)
            was_demoted = name in demoted
            unused = name not in used
            ran = as_it_ran(layer.precision, fell_to, was_demoted, unused)
            layers[layer.module] = ran

        effective = effective_text(layers.values())
        return {**self.as_dict(), "effective": effective, "effective_layers": layers}


def resolve(recipe: Recipe, facts: MachineFacts) -> tuple[Rung | None, list[RungVerdict]]:
    """The first rung of the ladder that this machine supports (None if none), and a verdict on each."""
    judged = judge(recipe, facts)
    chosen = first_taken(judged)
    rung = None if chosen is None else recipe.ladder[chosen]
    return rung, verdicts(recipe.ladder, judged, chosen)


def make_plan(
    recipe: Recipe, facts: MachineFacts, rung: Rung, rungs: Sequence[RungVerdict], model: nn.Module
) -> Plan:
    """Decide for every module of `model` that has parameters of its own, and for every module kept in fp32.

    A module with several names has one row, under its first name.

    Raises ConfigError naming every pattern of the recipe that matches nothing, with the nearest match, and every block
    to skip that does not exist. Raises NoFp8LayerError, which is a ConfigError, if `rung` is one of FP8 and no layer
    can run in it.
    """
    from harness.precision.layers import LayerFilter, find_kept, names_of, plan_fusion

    # What the recipe's patterns mean on this model; everything wrong with them is reported together.
    section = f"recipe {recipe.name}: layers"
    fp8 = rung.precision == "fp8"
    layers: LayerFilter | None = None
    if fp8:
        refuses = "" if BACKENDS[rung.backend].transposed else rung.backend
        multiple = recipe.fp8_multiple(rung.backend)
        layers = LayerFilter(model, recipe.layers, multiple, section, refuses)
    kept, problems = find_kept(model, recipe.layers.keep_fp32, f"{section}.keep_fp32")
    problems += layers.problems if layers else []
    if problems:
        raise ConfigError(problems)

    # One row for each module. On an FP8 rung at least one must be in FP8; else `take_rung` tries the next rung.
    names = names_of(model)
    rows: list[LayerPlan] = []
    for module in names:
        row = _row(module, names, kept, layers, rung)
        if row is not None:
            rows.append(row)
    if fp8:
        require_fp8(rows, recipe)

    # What holds for the whole run. Fusion comes last: it starts from the rows, and changes them.
    tier, _ = tier_of(facts)
    keep = tuple(names[module][0] for module in kept)
    notes = _notes(recipe, rung, tier)
    if fp8 and recipe.fp8.weight_gradients == "float32":
        notes = (*notes, _gradient_note(model, rows))
    if recipe.layers.fuse:
        rows, note = plan_fusion(model, rows, recipe, rung, kept)
        notes = (*notes, note)
    return Plan(
        recipe=recipe.name,
        recipe_sha256=recipe.sha256(),
        tier=tier.name,
        requested=recipe.name,
        rung=rung,
        rungs=tuple(rungs),
        layers=tuple(rows),
        notes=notes,
        keep_fp32=keep,
    )


def _row(
    module: nn.Module,
    names: Mapping[nn.Module, list[str]],
    kept: Mapping[nn.Module, str],
    layers: LayerFilter | None,
    rung: Rung,
) -> LayerPlan | None:
    """The plan's row for `module`; None if it has no parameters of its own and is not kept in fp32.

    names: all names of every module.
    kept: modules kept in fp32, with their patterns.
    layers: which layers run in FP8; None on a rung without it.
    """
    from harness.precision.layers import enclosing, features, is_linear, kind_of

    name, *others = names[module]
    kind = kind_of(module)
    shape = features(module) if is_linear(module) else ()

    # Kept in fp32, by its own name or that of a module around it.
    if module in kept:
        return LayerPlan(name, kind, "fp32", PLAIN, f"kept in fp32 ({kept[module]})", shape)
    if next(module.parameters(recurse=False), None) is None:
        return None
    around = enclosing(kept, names, module)
    if around:
        reason = f"inside {around}, which is kept in fp32"
        return LayerPlan(name, kind, "fp32", PLAIN, reason, shape)

    if not is_linear(module):
        return _other_module(name, module, rung)
    if layers is None:
        return LayerPlan(name, kind, rung.precision, rung.backend, "rung of the recipe", shape)

    # A Linear on an FP8 rung: there has to be a reason to leave it out.
    reason = layers.kept_out(module)
    if reason:
        return LayerPlan(name, kind, "bf16", PLAIN, reason, shape)
    reason = "converted"
    if others:
        reason += f", also known as {', '.join(others)}"
    frozen = not module.weight.requires_grad
    if frozen:
        reason += ", frozen: no weight gradient"
    return LayerPlan(name, kind, "fp8", rung.backend, reason, shape, frozen=frozen)


def _other_module(name: str, module: nn.Module, rung: Rung) -> LayerPlan:
    """The row of a module with parameters that is not a Linear: what it computes in, measured where possible.

    A module of the user's own may multiply with its matrices (experts, a router) or only add them (positions). Autocast
    casts for torch's operations only. It does not know the kernels of other libraries.
    """
    from harness.precision.products import NAMES, half_of, is_embedding, products_in

    kind = type(module).__name__
    parameters = list(module.parameters(recurse=False))
    if ran := products_in(module, half_of(rung.precision)):
        reason = f"not a Linear: fp32 weights, its matrix products run in {ran} (measured on a small one)"
        return LayerPlan(name, kind, ran, PLAIN, reason)

    # Weights of experts have three dimensions, but so have those of a convolution over one dimension.
    what = "not a Linear"
    stacks = [each for each in parameters if each.ndim == 3 and len(each) > 1]
    if stacks and not hasattr(module, "kernel_size"):
        experts = len(stacks[0])
        what = f"3-D weights (of {experts} experts): no backend has FP8 layers for those"

    # What cannot be measured: autocast decides for every operation of torch, and does not know other kernels.
    half = half_of(rung.precision)
    own = not type(module).__module__.startswith("torch.") and not is_embedding(module)
    has_matrix = any(parameter.ndim >= 2 for parameter in parameters)
    if half is None or not own or not has_matrix:
        reason = f"{what}: fp32 weights, autocast decides per op"
        return LayerPlan(name, kind, "fp32", PLAIN, reason)
    ran = NAMES[half]
    reason = f"{what}: fp32 weights, their matrix products run in {ran}, but by kernels that autocast does not know"
    return LayerPlan(name, kind, f"{ran} or fp32", PLAIN, reason)


def require_fp8(rows: Sequence[LayerPlan], recipe: Recipe) -> None:
    """Raise NoFp8LayerError, with the reasons of some layers, if no row of an FP8 rung's plan is in FP8."""
    if any(row.precision == "fp8" for row in rows):
        return
    # Most layers of a model share a reason, so each reason is given once, with some of its layers.
    what = "no layer of this model can run in FP8"
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.shape:
            names.setdefault(row.reason, []).append(row.module)
    reasons = [f"{some(layers, 3)}: {reason}" for reason, layers in names.items()]
    why = "; ".join(reasons) or "the model has no Linear"
    fix = (
        "widen layers.include, lower layers.min_features, change the sizes, or take the recipe bf16"
    )
    raise NoFp8LayerError(Problem(what, f"recipe {recipe.name}", why, fix))


def _notes(recipe: Recipe, rung: Rung, tier: Tier) -> tuple[str, ...]:
    """What holds for the whole run: the precision of float32 matrix products, and the loss scale of fp16."""
    if recipe.float32_matmul == "highest":
        tf32 = "no TF32"
    elif tier in _TF32_TIERS:
        tf32 = "TF32"
    else:
        tf32 = "would allow TF32, which this tier has not"
    notes = [f"float32 matmul precision: {recipe.float32_matmul} ({tf32})"]
    if rung.precision == "fp16":
        scale = recipe.loss_scale
        notes.append(
            f"loss scale ({scale.preset}): starts at {scale.init:g}, x{scale.growth_factor:g} after "
            f"{scale.growth_interval} good steps, x{scale.backoff_factor:g} after a bad one, "
            f"within {scale.floor:g} and {scale.cap:g}"
        )
    return tuple(notes)


def _gradient_note(model: nn.Module, rows: Sequence[LayerPlan]) -> str:
    """What `fp8.weight_gradients: float32` does for the FP8 layers of `rows`."""
    narrow: list[str] = []
    for row in rows:
        if row.precision != "fp8":
            continue
        dtype = model.get_parameter(f"{row.module}.weight").dtype
        if str(dtype) != "torch.float32":
            narrow.append(row.module)
    note = "weight gradients of FP8 layers: float32"
    if narrow:
        note += f", but not of {some(narrow, 3)}: their weights are no float32"
    return note


def take_rung(
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    make: Callable[[Rung, list[RungVerdict]], Made],
    preferred: str = "",
) -> Made:
    """Call `make` on the first rung that every rank can take and that the model can use. Returns what `make` made.

    preferred: name of the rung to take instead, if every rank can take it and the model can use it.

    A rung on which `make` raises NoFp8LayerError is skipped, with the reason in its verdict. A ConvNet, for example,
    has nothing for FP8 and trains on the rung below.

    Collective, as `agree_on_rung`, and raises as it does; NoFp8LayerError if the ladder has no rung below.
    """
    refused: dict[str, NoFp8LayerError] = {}
    while True:
        try:
            chosen, rungs = agree_on_rung(recipe, facts, device, refused, preferred)
        except MachineError:
            # The model's own reason says more than a ladder without rungs.
            if refused:
                raise next(iter(refused.values())) from None
            raise
        try:
            return make(chosen, rungs)
        except NoFp8LayerError as error:
            refused[chosen.name] = error


def agree_on_rung(
    recipe: Recipe,
    facts: MachineFacts,
    device: torch.device,
    refused: Mapping[str, NoFp8LayerError] | None = None,
    preferred: str = "",
) -> tuple[Rung, list[RungVerdict]]:
    """The rung that every rank can take (the weakest ranks decide), and this rank's verdict on each.

    refused: rungs, by name, that the model cannot use.
    preferred: name of the rung to take, if every rank can take it; else it is the first.

    Collective. If there is no such rung, raises the same MachineError on every rank, with what each kind of machine
    lacks.
    """
    import torch

    from harness.core.collectives import gather_over_ranks

    judged: list[Judgement] = []
    for rung, judgement in zip(recipe.ladder, judge(recipe, facts), strict=True):
        if refused is not None and rung.name in refused:
            judgement = _refused(refused[rung.name].problems[0])
        judged.append(judgement)

    # [rank, able or listed, rung], so that every rank decides from the same numbers.
    able = [judgement.able for judgement in judged]
    listed = [judgement.listed for judgement in judged]
    mine = torch.tensor([able, listed], dtype=torch.float32, device=device)
    everyone = gather_over_ranks(mine) > 0
    common = common_rungs(everyone[:, 0].tolist(), everyone[:, 1].tolist())
    if not common:
        raise _no_common_rung(recipe, facts, judged)
    chosen = common[0]
    for index in common:
        if recipe.ladder[index].name == preferred:
            chosen = index
            break

    # A rung that only the preference passes over was able: its verdict has to name the preference.
    skipped = common[: common.index(chosen)]
    for better in skipped:
        reason = f"fp8.backend auto takes {preferred}"
        judged[better] = Judgement(able=False, listed=True, reason=reason)
    return recipe.ladder[chosen], verdicts(recipe.ladder, judged, chosen)


def _refused(problem: Problem) -> Judgement:
    return Judgement(able=False, listed=True, reason=f"{problem.what}: {problem.why}")


def _no_common_rung(
    recipe: Recipe, facts: MachineFacts, judged: Sequence[Judgement]
) -> MachineError:
    """The error, the same on every rank. It names each kind of machine once, with its ranks."""
    from harness.core.collectives import gather_texts

    tier, why = tier_of(facts)
    reasons: list[str] = []
    for rung, judgement in zip(recipe.ladder, judged, strict=True):
        reasons.append(f"{rung.name}: {judgement.reason}")
    lacks = "; ".join(reasons)

    # Ranks with equal texts are machines of one kind.
    machines = gather_texts(f"tier {tier.name} ({why}): {lacks}")
    ranks_of: dict[str, list[str]] = {}
    for rank, machine in enumerate(machines):
        ranks_of.setdefault(machine, []).append(str(rank))

    where = f"recipe {recipe.name}: ladder"
    what = f"no rung of recipe {recipe.name} runs on"
    fix = 'use the recipe "auto", or add a rung for this tier to the recipe'
    if recipe.named_backend:
        where = f"recipe {recipe.name}: fp8.backend"
        what = f"recipe {recipe.name} names {recipe.named_backend} for FP8, and it does not run on"
        fix = "set fp8.backend to first or auto, which go down the ladder"
    # One kind of machine lacks the same on every rank. Of several kinds each is named with its ranks.
    if len(ranks_of) == 1:
        return MachineError(Problem(f"{what} tier {tier.name} ({why})", where, lacks, fix))
    kinds: list[str] = []
    for machine, ranks in ranks_of.items():
        kinds.append(f"rank {', '.join(ranks)} is {machine}")
    if not recipe.named_backend:
        fix = "use ranks of one kind, or add a rung that all of them can run to the recipe"
    return MachineError(Problem(f"{what} every rank", where, "; ".join(kinds), fix))


def agree_on_fallback(facts: MachineFacts, device: torch.device) -> str:
    """What a run that must leave fp16 changes to: "bf16" if every rank's card has it, else "fp32". Collective."""
    import torch

    from harness.core.collectives import max_over_ranks

    tier, _ = tier_of(facts)
    able, _ = can_run(PLAIN, "bf16", facts, tier)
    # One card without bf16 decides for all ranks.
    lacks_it = torch.tensor([float(not able)], device=device)
    some_lack_it = max_over_ranks(lacks_it).item()
    return "fp32" if some_lack_it else "bf16"
