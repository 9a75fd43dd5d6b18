"""`harness export`: a run's weights under names that others know, and a model card that tells their precision."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.core.config import RunConfig
from harness.core.errors import CheckpointError, ConfigError, ExitCode, Problem, some
from harness.core.files import sync_folder, write_json
from harness.core.schema import read_yaml, validate
from harness.report import RunFolder, short
from harness.tracking.journal import require_run

if TYPE_CHECKING:
    from harness.checkpoint.store import Store
    from harness.core.protocols import TensorDict
    from harness.models.gpt import GPT
    from harness.report.passport import Stamp

    Ready = tuple[str, str, Callable[[Path], None]]
    """What the weights are, the Python that loads them, and what writes them into a folder."""

HF = "hf:"
BUILT_IN = ("harness.models.gpt:build", "harness.models.llama:build")
_WEIGHTS = "model.safetensors"
# Of a tokenizer's folder, what transformers reads.
_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
_SHOWN = 8
_HERE = "THIS FOLDER"
_LOADS = f'model = transformers.AutoModelForCausalLM.from_pretrained("{_HERE}")'


class Format(StrEnum):
    """hf: what transformers reads, by from_pretrained. safetensors: the model's own names, for load_state_dict."""

    hf = "hf"
    safetensors = "safetensors"


def command(
    run: RunFolder,
    out: Annotated[Path, typer.Option(help="folder to write, new or empty")],
    format: Annotated[
        Format, typer.Option(help="hf: for from_pretrained; safetensors: the model's own names")
    ] = Format.hf,
    step: Annotated[
        int | None, typer.Option(help="checkpoint of this step [default: the newest that verifies]")
    ] = None,
) -> int:
    """Write the weights of a checkpoint, verified by its manifest, and a model card; the exit code.

    Raises ConfigError if `run` is no run, its model has no such format, or `out` is taken; CheckpointError if the
    checkpoint is missing or damaged, or the folder cannot be written.
    """
    folder = require_run(run)
    config = _read_config(folder)
    target = config.model.target
    tokenizer, problems = _tokenizer(config)
    problems = _taken(out) + problems
    if format is Format.hf and target not in BUILT_IN and not target.startswith(HF):
        fix = "use --format safetensors: the names of its own state_dict"
        what, why = f"model.target {target!r} has no Hugging Face format", "transformers has no class for it"
        problems.append(Problem(what, "--format hf", why, fix))
    if problems:
        raise ConfigError(problems)

    from harness.checkpoint.manifest import failed
    from harness.checkpoint.store import Store
    from harness.report.passport import model_card
    from harness.tracking.history import RunHistory

    store = Store(folder / "checkpoints", readonly=True)
    at = _choose(store, step)
    tensors, meta = store.load(at, parts=("model", "fp8"))
    state, tied = tensors["model"], meta["parts"]["model"]["tied"]
    if format is Format.safetensors:
        ready = _plain(folder, target, state, tied)
    elif target in BUILT_IN:
        ready = _llama(config, state)
    else:
        ready = _hugging_face(config, state, tied)
    what, loads, write = ready
    count = f"{sum(tensor.numel() for tensor in state.values()):,} parameters"
    stamp = _stamp(store, at, tensors.get("fp8", {}), meta)
    card = model_card(RunHistory.read(folder), stamp, config, f"{count}, {what}, after step {at}.", loads)
    try:
        _write(out, write, card, tokenizer)
    except OSError as error:
        raise failed("the export was not written", out, error) from error
    print(f"step {at} of {short(folder)}: {count}, {what}, in {short(out)}")
    return int(ExitCode.DONE)


def _read_config(folder: Path) -> RunConfig:
    path = folder / "config.yaml"
    if not path.is_file():
        why = "a loop of your own trained it, and only that loop knows its model"
        raise ConfigError(Problem("the run has no config.yaml", str(folder), why, "save the model from that loop"))
    return validate(RunConfig, read_yaml(path), str(path))


def _taken(out: Path) -> list[Problem]:
    """Why `out` cannot become the exported folder; empty if it can."""
    if not os.path.lexists(out):
        return []
    if not out.is_dir() or out.is_symlink():
        return [Problem("is there already, and no folder", f"--out {out}", fix="give a new folder")]
    if any(out.iterdir()):
        return [Problem("is there already, and not empty", f"--out {out}", fix="give a new folder, or empty it")]
    return []


def _tokenizer(config: RunConfig) -> tuple[list[Path], list[Problem]]:
    """The files of `data.tokenizer`, and what is wrong with them; none where the data are bytes or ids."""
    given = getattr(config.data, "tokenizer", None)
    if given is None:
        return [], []
    path = Path(given).expanduser()
    files = [path] if path.is_file() else [path / name for name in _TOKENIZER if (path / name).is_file()]
    if not files:
        fix = "put it back where the run found it, or start from a copy of the run with data.tokenizer=null"
        return [], [Problem("the run's tokenizer is not there any more", f"data.tokenizer {given}", fix=fix)]
    return files, []


def _choose(store: Store, step: int | None) -> int:
    """The step to export. Raises CheckpointError if there is none that verifies; says which newer ones do not."""
    steps = store.steps()
    if step is None:
        newest = store.newest_valid()
        if newest is None:
            fix = "train longer, or save earlier with checkpoint.every"
            raise CheckpointError(Problem("the run has no checkpoint", str(store.root), fix=fix))
        if damaged := [each for each in steps if each > newest]:
            print(f"passed over, for they do not verify: steps {some(damaged, _SHOWN)}")
        return newest
    if step not in steps:
        fix = f"there are steps {some(steps, _SHOWN)}" if steps else "the run has no checkpoint"
        raise CheckpointError(Problem(f"no checkpoint of step {step}", str(store.root), fix=fix))
    if problems := store.verify(step):
        raise CheckpointError(problems)
    return step


def _plain(folder: Path, target: str, state: TensorDict, tied: Mapping[str, str]) -> Ready:
    """Every key of the model's state_dict; tied weights under each of their names."""
    whole = state | {alias: state[name].clone() for alias, name in tied.items()}

    def write(out: Path) -> None:
        _save(whole, out)
        shutil.copyfile(folder / "config.yaml", out / "config.yaml")

    return f"under the names of {target}", f'model.load_state_dict(safetensors.torch.load_file("{_WEIGHTS}"))', write


def _llama(config: RunConfig, state: TensorDict) -> Ready:
    """The built-in GPT as a Llama or a Qwen3; nothing of transformers is needed."""
    from harness.models.llama import ARCHITECTURES, config_of, to_llama

    model = _skeleton(config)
    own = {name: tensor.shape for name, tensor in model.named_parameters()}
    if {name: tensor.shape for name, tensor in state.items()} != own:
        what = "the weights are not those of the model that config.yaml describes"
        raise CheckpointError(Problem(what, "model.args", fix="put config.yaml back as the run wrote it"))
    settings = model.settings
    described, weights = config_of(settings, config.data.context), to_llama(state, settings)

    def write(out: Path) -> None:
        _save(weights, out)
        write_json(out / "config.json", described)

    return f"a {ARCHITECTURES[described['model_type']]}", _LOADS, write


def _skeleton(config: RunConfig) -> GPT:
    """The run's model without weights, which takes no memory. Raises ConfigError."""
    import torch

    from harness.models import gpt, llama

    build = gpt.build if config.model.target == BUILT_IN[0] else llama.skeleton
    with torch.device("meta"):
        return build(**config.model.args)


def _hugging_face(config: RunConfig, state: TensorDict, tied: Mapping[str, str]) -> Ready:
    """A model of transformers, which writes itself as it does; of LoRA the adapters alone."""
    from harness.models import build_model

    model: Any = build_model(config.model)
    model.load_state_dict(state | {alias: state[name] for alias, name in tied.items()})
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = True  # off in training alone
    adapters = hasattr(model, "peft_config")
    base = config.model.target.removeprefix(HF)
    what = f"adapters for {base} of all that was trained" if adapters else f"a {type(model).__name__}"
    loads = f'model = peft.AutoPeftModelForCausalLM.from_pretrained("{_HERE}")' if adapters else _LOADS
    return what, loads, lambda out: model.save_pretrained(out)


def _stamp(store: Store, step: int, fp8: TensorDict, meta: Mapping[str, Any]) -> Stamp:
    from harness.checkpoint.manifest import read_manifest
    from harness.report.passport import Stamp

    seen = (fp8["history"].amax(dim=0) > 0).tolist() if "history" in fp8 else []
    return Stamp(step, read_manifest(store.path(step))["versions"], meta["parts"]["fp8"], seen)


def _save(tensors: TensorDict, out: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / _WEIGHTS, {"format": "pt"})


def _write(out: Path, write: Callable[[Path], None], card: str, tokenizer: list[Path]) -> None:
    """All of the folder or nothing. Raises OSError."""
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    made = parent / f".{out.name}-{os.getpid()}"
    made.mkdir()
    try:
        write(made)
        for path in tokenizer:
            shutil.copyfile(path, made / path.name)
        card_file = made / "README.md"
        card_file.write_text(card, encoding="utf-8")
        for path in made.iterdir():
            path.chmod(stat.S_IMODE(card_file.stat().st_mode))  # safetensors makes private files
        made.replace(out)
        sync_folder(parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)
