"""Every engine there is, and which of them runs a run: `engine.name`, or what the launcher suggests."""

from __future__ import annotations

from harness.core.errors import ConfigError, Problem
from harness.engines.deepspeed import DeepSpeedEngine
from harness.engines.process_group import Launch
from harness.engines.torch_engine import TorchEngine

ENGINES: dict[str, type[TorchEngine] | type[DeepSpeedEngine]] = {
    "single": TorchEngine,
    "ddp": TorchEngine,
    "deepspeed": DeepSpeedEngine,
}
"""By their names in `engine.name`; what an engine needs and can do is declared in its class."""


def choose_engine(name: str, launcher: str, launch: Launch) -> str:
    """The key in ENGINES for `engine.name`; auto: DeepSpeed under its own launcher, else torch's engines by ranks.

    launcher: "python", "torchrun" or "deepspeed". Raises ConfigError if the processes there are do not fit `name`.
    """
    if name == "auto":
        return "deepspeed" if launcher == "deepspeed" else "ddp" if launch.world_size > 1 else "single"
    where = f"engine.name={name}"
    if name == "single" and launch.world_size > 1:
        what, fix = f"{launch.world_size} ranks were started", "set engine.name to auto, or start one process"
        raise ConfigError(Problem(what, where, "each of them would train a model of its own", fix))
    if name != "single" and not launch.launched:
        fix = "torchrun --nproc-per-node N launch/train.py ..., or engine.name=auto"
        raise ConfigError(Problem("no launcher started this process", where, "it has nobody to share work with", fix))
    return name
