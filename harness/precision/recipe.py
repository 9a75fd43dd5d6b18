"""The precision recipe: what should run in which precision, as a strictly validated YAML file. Torch-free.

Its `ladder` lists rungs from best to last. A rung is a backend and a precision, with the tiers of cards that may take
it. A run takes the first rung that its machine can run. The other sections say how FP8 scales are set (`fp8`), which
layers get FP8 (`layers`), when a layer leaves FP8 during the run (`fallback`), and how fp16 scales the loss
(`loss_scale`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError

from harness.core import key_table
from harness.core.config import FallbackConfig, Ratio
from harness.core.files import find
from harness.core.schema import Strict, read_yaml, validate
from harness.precision.backends.registry import BACKENDS

TIERS = ("BLACKWELL", "HOPPER", "ADA", "AMPERE", "TURING", "VOLTA", "CPU")
TierName = Literal["BLACKWELL", "HOPPER", "ADA", "AMPERE", "TURING", "VOLTA", "CPU"]
PrecisionName = Literal["fp8", "bf16", "fp16", "fp32"]

# Keys of the section fp8 that recipes did not have from the beginning.
_LATER_KEYS: tuple[str, ...] = ("backend", "weight_gradients")
# Keys that have no effect without an amax history.
_DELAYED_ONLY = ("margin", "amax_history_len", "amax_compute_algo", "roll", "scrub_inf")


def _declared(name: Any) -> Any:
    """Check a backend's name against the registry, with the error of a Literal.

    The registry is asked when a recipe is read, so a backend that was added to it by then counts.
    """
    if name not in tuple(BACKENDS):
        *others, last = map(repr, BACKENDS)
        expected = f"{', '.join(others)} or {last}"
        raise PydanticKnownError("literal_error", {"expected": expected})
    return name


BackendName = Annotated[str, BeforeValidator(_declared)]


def _way_to_choose(value: Any) -> Any:
    """Check `fp8.backend`: a way to choose among the ladder's backends, or the name of one."""
    return value if value in ("first", "auto") else _declared(value)


class Rung(Strict):
    """One way to compute. It may be taken if the machine's tier is listed and its libraries and hardware can run it."""

    backend: BackendName = Field(description=f"what computes: {', '.join(BACKENDS)}")
    precision: PrecisionName = Field(description="of the matrix multiplications")
    tiers: list[TierName] = Field(min_length=1, description="where this rung may be taken")

    @model_validator(mode="after")
    def _pairs(self) -> Rung:
        allowed = BACKENDS[self.backend].computes
        if self.precision not in allowed:
            computes = " or ".join(allowed)
            raise ValueError(f"backend {self.backend} computes {computes}, not {self.precision}")
        return self

    @property
    def name(self) -> str:
        """`backend:precision`, as the plan shows it."""
        return f"{self.backend}:{self.precision}"


class Fp8Config(Strict):
    """How FP8 scales are set. Defaults are Transformer Engine's, except where the description says so."""

    scaling: Literal["delayed", "current", "block"] = Field(
        default="delayed",
        description="transformer_engine: by amax history, this tensor's amax, or blocks of 128",
    )
    format: Literal["hybrid", "e4m3"] = Field(
        default="hybrid", description="hybrid: E4M3 forward, E5M2 gradients"
    )
    margin: int = Field(
        default=0, ge=0, le=15, description="powers of two under the format's maximum"
    )
    amax_history_len: int = Field(
        default=16, ge=2, description="updates in the amax history (TE's default: 1024)"
    )
    amax_compute_algo: Literal["max", "most_recent"] = Field(
        default="max", description="the history's amax that sets the scale"
    )
    roll: Literal["step", "micro_batch"] = Field(
        default="step", description="once a step, or as TE once a micro-batch"
    )
    dynamic: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        default="tensorwise",
        description="torchao's recipe name",
    )
    scrub_inf: bool = Field(
        default=True, description="drop an infinite amax; false: as TE, it freezes the scale"
    )
    backend: Annotated[str, BeforeValidator(_way_to_choose)] = Field(
        default="first",
        description="of the ladder's: first, auto (the fastest) or a name",
    )
    weight_gradients: Literal["bfloat16", "float32"] = Field(
        default="bfloat16",
        description="native: as the GEMM gives them; float32 saves a rounding and a cast",
    )
    stats_every: int = Field(
        default=10,
        ge=1,
        description="one in so many steps measures underflow, clipped and SQNR",
    )

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> Fp8Config:
        # A value that nothing reads would be believed to be in force. One that equals the default changes nothing.
        changed = self.changed(_DELAYED_ONLY)
        if self.scaling != "delayed" and changed:
            why = f"scaling {self.scaling} has no amax history"
            raise ValueError(f"{', '.join(changed)} would have no effect: {why}")
        return self

    def changed(self, keys: Sequence[str]) -> list[str]:
        """Those of `keys` whose values are not their defaults."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].default]


class LayersConfig(Strict):
    """Which Linear layers get FP8, and which modules compute in FP32. Shell patterns on module names."""

    include: list[str] = Field(
        default_factory=lambda: ["*"], min_length=1, description="patterns of layers to convert"
    )
    exclude: list[str] = Field(
        default_factory=list, description="patterns kept out; each must match"
    )
    exclude_if_present: list[str] = Field(
        default_factory=lambda: ["lm_head", "*.lm_head"],
        description="the same; may match nothing",
    )
    skip_first_blocks: int = Field(default=0, ge=0, description="first blocks that stay in BF16")
    skip_last_blocks: int = Field(default=0, ge=0, description="last blocks that stay in BF16")
    min_features: int = Field(
        default=64, ge=1, description="layers with fewer in or out features stay in BF16"
    )
    probe: bool = Field(
        default=False,
        description="on a GPU, keep in BF16 layers that FP8 slows down",
    )
    probe_tokens: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="its tokens; null: micro_batch * context, else 2048",
    )
    keep_fp32: list[str] = Field(
        default_factory=list,
        description="patterns of modules in FP32 on every rung; each must match",
    )
    fuse: bool = Field(
        default=False,
        description="transformer_engine, delayed: declared norms, Linears and SwiGLU MLPs in one; native, compiled: "
        "cast to FP8 by the kernel that makes a tensor",
    )


# What each preset changes. A key that the recipe gives wins over the preset.
_LOSS_SCALE_PRESETS: dict[str, dict[str, float]] = {
    "default": {},
    "underflow": {"init": 2.0**17, "backoff_factor": 0.75, "growth_interval": 1000},
    "overflow": {"init": 2.0**15, "growth_interval": 4000},
}


class LossScaleConfig(Strict):
    """The loss scale of fp16: GradScaler's rule with a floor and a cap."""

    preset: Literal["default", "underflow", "overflow"] = Field(
        default="default", description="sets init, backoff_factor and growth_interval"
    )
    init: Ratio = Field(
        default=65536.0, description="first loss scale (underflow: 131072, overflow: 32768)"
    )
    growth_factor: float = Field(
        default=2.0, gt=1, description="multiplier after growth_interval good steps"
    )
    backoff_factor: float = Field(
        default=0.5, gt=0, lt=1, description="multiplier after a bad step (underflow: 0.75)"
    )
    growth_interval: int = Field(
        default=2000,
        ge=1,
        description="good steps in a row before growth (underflow: 1000, overflow: 4000)",
    )
    floor: Ratio = Field(default=1.0, description="least scale (at 0 the next step writes NaN)")
    cap: Ratio = Field(default=2.0**24, description="largest scale")

    @model_validator(mode="before")
    @classmethod
    def _under_given_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # An unknown preset is left for the field's own check, which lists the known ones.
        preset = _LOSS_SCALE_PRESETS.get(str(data.get("preset")), {})
        return {**preset, **data}

    @model_validator(mode="after")
    def _ordered(self) -> LossScaleConfig:
        if not self.floor <= self.init <= self.cap:
            given = f"{self.floor}, {self.init}, {self.cap}"
            raise ValueError(f"floor <= init <= cap does not hold: {given}")
        return self


class Recipe(Strict):
    """A precision policy for any machine: the ladder says what runs where the best rung cannot."""

    name: str = Field(min_length=1, description="its name in plans and tags")
    description: str = Field(default="", description="one line for people")
    ladder: list[Rung] = Field(
        min_length=1, description="rungs from best to last; the first that can run is taken"
    )
    fp8: Fp8Config = Field(default_factory=Fp8Config)
    layers: LayersConfig = Field(default_factory=LayersConfig)
    fallback: FallbackConfig = Field(default_factory=FallbackConfig)
    loss_scale: LossScaleConfig = Field(default_factory=LossScaleConfig)
    float32_matmul: Literal["highest", "high", "medium"] = Field(
        default="high",
        description="torch.set_float32_matmul_precision; high allows TF32 on Ampere and later",
    )

    @model_validator(mode="after")
    def _scaling_is_computed(self) -> Recipe:
        # Every rung of the ladder, not only the first: another machine may take another one.
        scaling = self.fp8.scaling
        used = dict.fromkeys(rung.backend for rung in self.ladder)
        computed = {name: BACKENDS[name].scalings for name in used}
        for backend, scalings in computed.items():
            if scalings and scaling not in scalings:
                able = " or ".join(scalings)
                what = f"{backend} rungs compute {able} scaling only, fp8.scaling is {scaling}"
                raise ValueError(f"{what}: take them out")

        # Delayed is the default, and no sign that somebody wants it.
        if scaling != "delayed" and not any(computed.values()):
            able = [name for name in BACKENDS if scaling in BACKENDS[name].scalings]
            needed = " or ".join(able)
            what = f"fp8.scaling {scaling} needs a {needed} rung"
            raise ValueError(f"{what} (torchao rungs go by fp8.dynamic)")
        return self

    @model_validator(mode="after")
    def _named_is_there(self) -> Recipe:
        named = self.named_backend
        if named and not any(self.is_named(rung) for rung in self.ladder):
            what = f"fp8.backend names {named}, and the ladder has no FP8 rung of it"
            raise ValueError(f"{what}: add one, or set fp8.backend to first")
        return self

    @model_validator(mode="after")
    def _gradients_are_computed(self) -> Recipe:
        if self.fp8.weight_gradients == "bfloat16":
            return self
        # Rungs that may be taken: those of the backend that fp8.backend names, if it names one.
        rungs = [rung for rung in self.ladder if rung.precision == "fp8"]
        if self.named_backend:
            rungs = [rung for rung in rungs if self.is_named(rung)]
        backends = dict.fromkeys(rung.backend for rung in rungs)
        unable = [name for name in backends if not BACKENDS[name].wide_gradients]
        asked = "fp8.weight_gradients is float32"
        if unable:
            named = " and ".join(unable)
            what = f"{named} rungs give weight gradients in bfloat16"
            raise ValueError(f"{what}, {asked}: take them out, or name another (fp8.backend)")
        if not backends:
            able = [name for name in BACKENDS if BACKENDS[name].wide_gradients]
            needed = " or ".join(able)
            raise ValueError(f"{asked}, which needs a {needed} rung")
        return self

    @property
    def named_backend(self) -> str:
        """The backend that fp8.backend names; empty if it names none."""
        named = self.fp8.backend
        if named in ("first", "auto"):
            return ""
        return named

    def is_named(self, rung: Rung) -> bool:
        """Whether `rung` is one that fp8.backend names."""
        return rung.precision == "fp8" and rung.backend == self.named_backend

    def fp8_multiple(self, backend: str) -> int:
        """Under `backend`, in and out features of an FP8 layer must be multiples of this number."""
        return BACKENDS[backend].multiples.get(self.fp8.scaling, 16)

    def sha256(self) -> str:
        """Hash of the validated policy. Equal recipes have equal hashes, however their YAML is written.

        A key that the hash did not have from the beginning is in it only where it changes something.
        """
        changed = self.fp8.changed(_LATER_KEYS)
        unset = set(_LATER_KEYS) - set(changed)
        policy = self.model_dump_json(exclude={"fp8": unset})
        return hashlib.sha256(policy.encode()).hexdigest()


def load_recipe(name_or_path: str) -> Recipe:
    """Load a shipped recipe by name, or one from a path. Raises ConfigError with every problem in it."""
    path = find("recipes", name_or_path)
    return validate(Recipe, read_yaml(path), str(path))


def page() -> str:
    """The page of every recipe key: `python -m harness.precision.recipe > docs/reference/recipe-keys.md`."""
    rows: list[list[str]] = []
    for key, field in key_table.keys(Recipe):
        # A section has no row of its own: its keys have.
        if key_table.section(field.annotation) is not None:
            continue
        kind = key_table.kind(field)
        default = key_table.default(field)
        rows.append([f"`{key}`", kind, default, field.description or ""])
    table = key_table.table(["key", "type", "default", "meaning"], rows)
    return "\n".join([*_PAGE_HEAD, table]) + "\n"


_PAGE_HEAD = (
    "# Recipe keys",
    "",
    "<!-- Made from the schema: python -m harness.precision.recipe > docs/reference/recipe-keys.md -->",
    "Every key of a recipe, for whoever writes one ([how](../guide/recipes.md#write-your-own)).",
    "",
    "```python",
    "from harness.precision.recipe import load_recipe",
    "",
    'recipe = load_recipe("fp8_hybrid")  # a shipped recipe by name, or a file',
    "print(recipe.ladder[0].name, recipe.fp8.amax_history_len, recipe.fallback.hits)",
    "```",
    "",
    "A slot is bad over a limit of `fallback`, or under one in dB.",
    "",
)


if __name__ == "__main__":
    print(page(), end="")
