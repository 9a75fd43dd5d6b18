"""`harness export`: a run's weights under names that other libraries know, with a model card about their precision.

The card says what each layer really ran in. That is read from the checkpoint (which layers had left FP8, which slots
had ever had an amax) and not from the plan alone, so it is right for every checkpoint of a run.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.core.config import RunConfig
from harness.core.errors import (
    CheckpointError,
    ConfigError,
    ExitCode,
    Problem,
    number_of,
    shown,
    some,
)
from harness.core.facts import as_it_ran
from harness.core.files import MAX_LARGE, file_sha256, read_mapping, sync_folder, write_json
from harness.core.plan_text import effective_text
from harness.core.schema import read_yaml, validate
from harness.core.screen import say
from harness.report import RunFolder, short
from harness.tracking.history import RunHistory, bare, split_slot
from harness.tracking.journal import JOURNAL, read_rows, require_run

if TYPE_CHECKING:
    from torch import Tensor

    from harness.checkpoint.store import Store
    from harness.core.protocols import TensorDict
    from harness.models.gpt import GPT

    Ready = tuple[str, str, Callable[[Path], None]]
    """(what the weights are, the Python that loads them, the function that writes them into a folder)."""

HF = "hf:"
BUILT_IN = ("harness.models.gpt:build", "harness.models.llama:build")
_WEIGHTS = "model.safetensors"
# The files of a tokenizer's folder that transformers reads.
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
# If tokenizer_config.json names no class, transformers takes the one of the model's type, and some (Qwen2's) split text
# in their own way.
_AS_IT_IS = '{"tokenizer_class": "PreTrainedTokenizerFast"}\n'
_OTHER_RECIPE = "not known: the plan is of another recipe"
"""What a layer ran in, if a later resume changed the recipe: plan.json is then that of the new recipe."""
_NAMED = 32
_FROM = 'from_pretrained("THIS FOLDER")'
_LOADS = f"transformers.AutoModelForCausalLM.{_FROM}"


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
        int | None, typer.Option(help="checkpoint's step [default: the newest that verifies]")
    ] = None,
) -> int:
    """Write the weights of a checkpoint, verified by its manifest, and a model card; returns the exit code.

    Raises ConfigError if `run` is no run, its model has no such format, or `out` is taken. Raises CheckpointError if
    the checkpoint is missing or damaged, or the folder cannot be written.
    """
    # Every problem with the request is found before anything is read.
    folder = require_run(run)
    config = _read_config(folder)
    target = config.model.target
    problems = _taken(out)
    if format is Format.hf and target not in BUILT_IN and not target.startswith(HF):
        what = f"model.target {target!r} has no Hugging Face format"
        why = "transformers has no class for it"
        fix = "use --format safetensors: the names of its own state_dict"
        problems.append(Problem(what, "--format hf", why, fix))
    if problems:
        raise ConfigError(problems)

    from safetensors import SafetensorError

    from harness.checkpoint.manifest import failed
    from harness.checkpoint.store import Store
    from harness.tools.restored import choose

    # The weights, in the format asked for.
    store = Store(folder / "checkpoints", readonly=True)
    at = choose(store, step)
    tensors, meta = store.load(at, parts=("model", "fp8"))
    state = tensors["model"]
    of_model = meta["parts"]["model"]
    if format is Format.safetensors:
        ready = _plain(folder, target, state, of_model)
    elif target in BUILT_IN:
        ready = _llama(folder, config, state)
    else:
        ready = _hugging_face(config, state, of_model)
    what, loads, write = ready
    what = f"{what}, after step {at}"

    # Their tokenizer and card.
    tokenizer, tokenizer_text = _tokenizer(folder, config)
    stamp = _stamp(store, at, tensors.get("fp8", {}), meta)
    contents = Contents(f"{what[0].upper()}{what[1:]}.", loads, tokenizer_text)
    card = model_card(RunHistory.read(folder), stamp, config, contents)
    try:
        _write(out, write, card, tokenizer)
    except (OSError, SafetensorError) as error:
        raise failed("the export was not written", out, error) from error
    plain = tokenizer_text.replace("`", "")
    say(f"{short(folder)}: {what}, in {short(out)}; tokenizer: {plain}")
    return int(ExitCode.DONE)


def _read_config(folder: Path) -> RunConfig:
    path = folder / "config.yaml"
    if not path.is_file():
        why = (
            "it was deleted, or a loop of your own trained the run: only that loop knows its model"
        )
        fix = "put config.yaml back, or save the model from that loop"
        raise ConfigError(Problem("the run has no config.yaml", str(folder), why, fix))
    return validate(RunConfig, read_yaml(path), str(path))


def _taken(out: Path) -> list[Problem]:
    """Why `out` cannot become the exported folder; empty if it can."""
    if not os.path.lexists(out):
        return []
    where = f"--out {out}"
    if not out.is_dir() or out.is_symlink():
        return [Problem("is there already, and no folder", where, fix="give a new folder")]
    if any(out.iterdir()):
        fix = "give a new folder, or empty it"
        return [Problem("is there already, and not empty", where, fix=fix)]
    return []


def _tokenizer(folder: Path, config: RunConfig) -> tuple[list[Path], str]:
    """The files of the tokenizer that made the run's data, and a text about it.

    No files if the data are bytes, if the ids came without a tokenizer, or if the tokenizer is gone. A different
    tokenizer is never taken: it would make other ids of a text.
    """
    corpus = read_mapping(folder / "data" / "corpus.json", MAX_LARGE)
    wanted = corpus.get("tokenizer")
    if config.data.target is not None:
        return [], "none: the data are a data set of one's own"
    if corpus.get("kind") == "tokens" and not wanted:
        return [], "not known: the data were token ids, and nobody said whose"
    if not isinstance(wanted, str) or not wanted:
        return [], "none: a token is a byte"

    # Where it was given: its folder has files that transformers reads beside it.
    ids = corpus.get("ids", "?")
    named = f"`{_TOKENIZER[0]}` of {ids} ids, SHA-256 `{wanted}`"
    of_model = config.model.target.removeprefix(HF)
    for place in (config.data.tokenizer, config.data.path, of_model):
        path = Path(place or "").expanduser()
        beside = path if path.is_dir() else path.parent
        file = path if path.name.endswith(".json") else path / _TOKENIZER[0]
        if file.is_file() and file_sha256(file) == wanted:
            files = [file]
            for name in _TOKENIZER[1:]:
                other = beside / name
                if other.is_file():
                    files.append(other)
            return files, f"{named}, as it was given in `{file}`"

    # The run's own copy.
    kept = folder / "data" / _TOKENIZER[0]
    if kept.is_file() and file_sha256(kept) == wanted:
        return [kept], f"{named}, the run's own copy: the file was changed or moved since"
    return [], f"{named}, which is not here: it was gone or changed when this was exported"


def _plain(
    folder: Path,
    target: str,
    state: TensorDict,
    meta: Mapping[str, Any],
) -> Ready:
    """Every key of the model's state_dict but frozen weights; a tied weight is under each of its names."""
    # A checkpoint has a tied weight once. safetensors refuses tensors that share memory, so each name gets a copy.
    whole = dict(state)
    for alias, name in meta["tied"].items():
        if name in state:
            whole[alias] = state[name].clone()
    what = f"{_count(state)} under the names of {target}"
    if "frozen" in meta:
        what += f", without the {meta['frozen']['count']} frozen ones of its folder"

    def write(out: Path) -> None:
        _save(whole, out)
        shutil.copyfile(folder / "config.yaml", out / "config.yaml")

    loads = f'model.load_state_dict(safetensors.torch.load_file("{_WEIGHTS}"))'
    return what, loads, write


def _llama(folder: Path, config: RunConfig, state: TensorDict) -> Ready:
    """The built-in GPT as a Llama or a Qwen3; does not need transformers."""
    from harness.models.llama import ARCHITECTURES, config_of, to_llama

    model = _skeleton(config)
    own = {name: tensor.shape for name, tensor in model.named_parameters()}
    if {name: tensor.shape for name, tensor in state.items()} != own:
        what = "the weights are not those of the model that config.yaml describes"
        fix = "restore config.yaml as the run wrote it"
        raise CheckpointError(Problem(what, "model.args", fix=fix))

    settings = model.settings
    weights = to_llama(state, settings)
    described = config_of(settings, config.data.context)
    # What separated the documents is what ends a generated text.
    corpus = read_mapping(folder / "data" / "corpus.json", MAX_LARGE)
    end = corpus.get("separator")
    described["eos_token_id"] = end if isinstance(end, int) else None

    def write(out: Path) -> None:
        _save(weights, out)
        write_json(out / "config.json", described)

    kind = ARCHITECTURES[described["model_type"]]
    return f"a {kind} of {_count(weights)}", _LOADS, write


def _skeleton(config: RunConfig) -> GPT:
    """The run's model on the meta device, where it takes no memory. Raises ConfigError."""
    import torch

    from harness.models import gpt, llama

    build = gpt.build if config.model.target == BUILT_IN[0] else llama.skeleton
    with torch.device("meta"):
        return build(**config.model.args)


def _hugging_face(
    config: RunConfig,
    state: TensorDict,
    meta: Mapping[str, Any],
) -> Ready:
    """A model of transformers, written by its own save_pretrained; with LoRA, the adapters alone."""
    from harness.engines.parts import ModelPart
    from harness.models import build_model

    model: Any = build_model(config.model)
    ModelPart(model).load_state_dict(state, meta)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = True  # it is off only while training
    base = config.model.target.removeprefix(HF)
    if hasattr(model, "peft_config"):
        # peft saves the adapters alone: the frozen base is where its users have it already.
        weights = dict(model.named_parameters())
        trained = {name: each for name, each in weights.items() if each.requires_grad}
        what = f"adapters of {_count(trained)} for {Path(base).name}"
        loads = f"peft.AutoPeftModelForCausalLM.{_FROM}"
    else:
        what = f"a {type(model).__name__} of {_count(state)}"
        loads = _LOADS
    return what, loads, lambda out: model.save_pretrained(out)


def _count(tensors: Mapping[str, Tensor]) -> str:
    count = sum(tensor.numel() for tensor in tensors.values())
    return f"{count:,} parameters"


def _stamp(store: Store, step: int, fp8: TensorDict, meta: Mapping[str, Any]) -> Stamp:
    from harness.checkpoint.manifest import read_manifest

    # A recipe without delayed scaling keeps no history of amaxes.
    seen: list[bool] = []
    if "history" in fp8:
        largest = fp8["history"].amax(dim=0)
        seen = (largest > 0).tolist()
    versions = read_manifest(store.path(step))["versions"]
    return Stamp(step, versions, meta["parts"]["fp8"], seen, meta["bound"]["recipe"])


def _save(tensors: TensorDict, out: Path) -> None:
    from safetensors.torch import save_file

    # The format "pt" in the file's header is what transformers looks for.
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, out / _WEIGHTS, {"format": "pt"})


def _write(
    out: Path,
    write: Callable[[Path], None],
    card: str,
    tokenizer: list[Path],
) -> None:
    """Write the whole folder or nothing: it is made beside `out` and renamed. Raises OSError."""
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    made = parent / f".{out.name}-{os.getpid()}"
    made.mkdir()
    try:
        write(made)
        # The first of them is the tokenizer itself, whatever its file was called.
        for number, path in enumerate(tokenizer):
            name = path.name if number else _TOKENIZER[0]
            shutil.copyfile(path, made / name)
        if tokenizer and not (made / _TOKENIZER[1]).exists():
            (made / _TOKENIZER[1]).write_text(_AS_IT_IS, encoding="utf-8")
        card_file = made / "README.md"
        card_file.write_text(card, encoding="utf-8")

        # safetensors makes files that nobody else may read: give all of them the card's permissions.
        mode = stat.S_IMODE(card_file.stat().st_mode)
        for path in made.iterdir():
            path.chmod(mode)
        made.replace(out)
        sync_folder(parent)
    finally:
        shutil.rmtree(made, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Stamp:
    """What the card says of the checkpoint.

    step: the step after which it was saved.
    versions: versions of the libraries that wrote it, from its manifest.
    fp8: the meta of its FP8 part.
    seen: for each slot of that part, whether it ever had an amax over 0; empty if the part keeps no slots.
    recipe: SHA-256 of the contents of the recipe that it was trained under.
    """

    step: int
    versions: Mapping[str, str]
    fp8: Mapping[str, Any]
    seen: Sequence[bool]
    recipe: str

    def ran(self, plan: Mapping[str, Any]) -> dict[str, str]:
        """Module -> the precision that it ran in, for every layer of `plan`.

        "unused": it was planned for FP8, and none of its slots had an amax.
        """
        if self.recipe != plan["recipe_sha256"]:  # the plan is a later resume's
            return {layer["module"]: _OTHER_RECIPE for layer in plan["layers"]}

        demoted = {bare(name) for name in self.fp8["demoted"]}
        fell_to = self.fp8["lowered"]

        # Layers with slots of which none had an amax.
        silent: set[str] = set()
        heard: set[str] = set()
        if self.seen:
            for slot, saw in zip(self.fp8["slots"], self.seen, strict=True):
                layer, _ = split_slot(slot)
                of = heard if saw else silent
                of.add(bare(layer))
        silent -= heard

        found: dict[str, str] = {}
        for row in plan["layers"]:
            name = bare(row["module"])
            ran = as_it_ran(row["precision"], fell_to, name in demoted, name in silent)
            found[row["module"]] = ran
        return found


@dataclass(frozen=True, slots=True)
class Contents:
    """What the card says of the exported folder.

    weights: what the weights are.
    loads: the Python that loads them.
    tokenizer: which tokenizer they need.
    """

    weights: str
    loads: str
    tokenizer: str


def model_card(
    history: RunHistory,
    stamp: Stamp,
    config: RunConfig,
    contents: Contents,
) -> str:
    """README.md, in Markdown."""
    # The front matter, from which the Hugging Face Hub takes a model's tags.
    lines = ["---", "tags:", "- hopper-harness"]
    if history.plan:
        recipe = " ".join(history.plan["recipe"].split())
        lines.append(f"- {recipe}")
    lines.append("---")

    lines += [f"# {shown(history.run_dir.name)}", ""]
    lines += [contents.weights, "", "```python", contents.loads, "```", ""]

    facts = [*_training(history, stamp, config), ("tokenizer", contents.tokenizer)]
    lines += ["## Training", "", *_table(("what", ""), facts), ""]

    lines += ["## Precision passport", ""]
    if history.plan:
        lines += _passport(history, stamp)
    else:
        lines.append("The run has no plan.json that can be read: what it ran in is not known.")
    return "\n".join([*lines, ""])


def _training(
    history: RunHistory,
    stamp: Stamp,
    config: RunConfig,
) -> Iterator[tuple[str, str]]:
    """(what, text) of how the model was trained, up to the checkpoint's step."""
    step = stamp.step
    train = config.train
    data = history.run["data"]

    # The journal may go on behind the checkpoint: later steps are no part of these weights.
    applied = history.points("train/step_applied")
    skipped = (applied.figures[applied.steps <= step] == 0).sum()
    yield "steps", f"{step} of {train.steps}, {skipped} updates skipped"

    unit = "" if history.unit == "loss" else f" {history.unit}"
    # The last figures up to the checkpoint's step.
    for key, title in (("train/loss", "training loss"), ("val/loss", "validation loss")):
        points = history.points(key)
        last = int((points.steps <= step).sum()) - 1
        text = "not measured"
        if last >= 0:
            text = f"{points.figures[last]:.6f}{unit}, after step {points.steps[last]}"
        yield title, text

    # A rollback to this very step left its weights as they were.
    back = [each for each in history.rollbacks if each.to_step < step]
    text = "none"
    if back:
        count = sum(len(each.passed_over) for each in back)
        windows = number_of(count, "window")
        text = f"{len(back)}, {windows} of the data skipped"
    yield "rollbacks", text

    # The batch below is the last one: a resume may have changed it, or the learning rate.
    for event in history.events:
        changes = _changes(event) if event["step"] < step else ""
        if changes:
            yield f"changed after step {event['step']}", changes

    source = _last(data.get("source", "not recorded"))
    sha256 = data.get("sha256", "not recorded")
    yield "data", f"`{source}`, SHA-256 `{sha256}`"
    # The samples of a data set of the user's own need not be tokens.
    samples = number_of(train.global_batch, "sample")
    if config.data.target is None:
        samples += f" of {config.data.context} tokens"
    yield "batch", f"{samples} a step"
    yield "seed", str(train.seed)

    # A text among the arguments may be a path, of which the card shows the last part.
    args: dict[str, Any] = {}
    for key, value in config.model.args.items():
        args[key] = _last(value) if isinstance(value, str) else value
    kind, _, of = config.model.target.partition(":")
    yield "model", f"`{kind}:{_last(of)}`, args `{args}`"

    yield "commit", history.run["tags"].get("git.commit", "not recorded")
    versions = sorted(stamp.versions.items())
    yield "versions", ", ".join(f"{name} {version}" for name, version in versions)


def _changes(event: Mapping[str, Any]) -> str:
    """How a resume changed training, if `event` says so. Other keys may hold paths of this machine."""
    changes = event.get("changes")
    if event["code"] != "run.changed" or not isinstance(changes, list):
        return ""
    texts: list[str] = []
    for change in changes:
        if isinstance(change, list) and len(change) == 3 and str(change[0]).startswith("train."):
            key, old, new = change
            texts.append(f"{key} from {old} to {new}")
    return "; ".join(texts)


def _last(path: object) -> str:
    """The last part of a path: a card must not show this machine's folders."""
    return Path(str(path)).name


def _passport(history: RunHistory, stamp: Stamp) -> Iterator[str]:
    """The section on precision: what was asked for, what each layer ran in, and which layers moved."""
    plan = history.plan
    step = stamp.step
    ran = stamp.ran(plan)

    # From what was asked for to what became of it.
    rows = [
        ("recipe", f"{plan['recipe']}, SHA-256 `{plan['recipe_sha256']}`"),
        ("requested", plan["requested"]),
        ("resolved", f"{plan['resolved']} on {plan['tier']}"),
        ("effective", effective_text(ran.values())),
        *(("trained under", text) for text in _recipes(history, step)),
        *(("not taken", text) for text in _not_taken(plan)),
        *(("started before as", text) for text in _elsewhere(history)),
    ]
    yield from _table(("what", ""), rows)
    yield ""

    # Every layer, planned and as it ran.
    layers: list[Sequence[str]] = []
    for layer in plan["layers"]:
        name = layer["module"]
        row = (f"`{name}`", layer["precision"], ran[name], layer["backend"], layer["reason"])
        layers.append(row)
    heading = ("layer", "planned", f"ran in, at step {step}", "backend", "why")
    yield from _table(heading, layers)
    yield ""

    # Which layers moved. The journal says when; the checkpoint says it for layers that the journal does not name.
    moves = [event for event in history.switches if event["step"] <= step]
    unsaid = _demoted_before(history, stamp)
    if moves or unsaid:
        yield "Layers that left FP8, or came back, up to this step:"
    elif len(history.stretches(step)) > 1:
        yield "The journal has no move of a layer out of FP8 up to this step; the recipe changed, as said above."
    else:
        yield "No layer had left FP8 by this step."
    if unsaid:
        yield f"- in BF16 at this step, by the checkpoint; the journal does not say since when: {some(unsaid, _NAMED)}"
    for event in moves:
        parts: list[str] = []
        if event.get("demote"):
            parts.append(f"to BF16: {', '.join(event['demote'])}")
        if event.get("promote"):
            parts.append(f"back in FP8: {', '.join(event['promote'])}")
        if event.get("lowered"):
            parts.append(f"the whole run to {event['lowered']}")
        yield f"- before step {event['step']}: {'; '.join(parts)}"


def _recipes(history: RunHistory, step: int) -> Iterator[str]:
    """Each recipe with its steps, if there were several up to `step`, or the run began from another's checkpoint."""
    began = read_mapping(history.run_dir / "started_from.json").get("path")
    if isinstance(began, str):
        source = Path(began)
        last = source.name.rpartition("-")[2]
        yield shown(f"steps up to {last}: another run, {source.parent.parent.name}")

    # One recipe, the plan's, in all of the run: the first row of the table has named it.
    found = history.stretches(step)
    others = {each.sha256 for each in found} - {"", history.plan["recipe_sha256"]}
    if len(found) < 2 and not others and not isinstance(began, str):
        return
    for place, each in enumerate(found):
        is_last = place + 1 == len(found)
        # A recipe holds until the next one takes over, or to the checkpoint's step.
        last = step if is_last else min(found[place + 1].after, step)
        name = _last(each.recipe) if each.recipe else "a recipe that the journal does not name"
        sha256 = each.sha256 or "not recorded"
        yield f"steps {each.after + 1} to {last}: {name}, SHA-256 `{sha256}`"


def _demoted_before(history: RunHistory, stamp: Stamp) -> list[str]:
    """Layers that are in BF16 in the checkpoint although no event of this journal moved them.

    Another run moved them, from whose checkpoint this one began; or the rows are lost.
    """
    moved: set[str] = set()
    for event in history.switches:
        if event["step"] <= stamp.step:
            moved.update(map(bare, event["demote"]))
    unsaid: set[str] = set()
    for layer in stamp.fp8["demoted"]:
        if bare(layer) not in moved:
            unsaid.add(layer)
    return sorted(unsaid)


def _not_taken(plan: Mapping[str, Any]) -> Iterator[str]:
    """The rungs above the one that was taken, and why not."""
    for rung in plan["rungs"]:
        if rung["taken"]:
            return
        yield f"{rung['rung']}: {rung['reason']}"


def _elsewhere(history: RunHistory) -> list[str]:
    """Rungs of earlier starts that differ from the last one's: the run may have continued on another machine."""
    starts: list[str] = []
    for row in read_rows(history.run_dir / JOURNAL, metrics=False):
        tags = row.get("tags", {})
        if row["kind"] == "run" and "precision.resolved" in tags:
            tier = tags.get("tier", "?")
            starts.append(shown(f"{tags['precision.resolved']} on {tier}"))
    return sorted({*starts[:-1]} - {*starts[-1:]})


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield _row(heading)
    yield "|" + "---|" * len(heading)
    yield from map(_row, rows)


def _row(cells: Sequence[str]) -> str:
    # A bar in a name would begin another cell.
    plain = [cell.replace("|", "\\|").replace("\n", " ") for cell in cells]
    return f"| {' | '.join(plain)} |"
