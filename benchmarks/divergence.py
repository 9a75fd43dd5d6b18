"""About a hundred differences, put into runs one at a time: does `harness compare` name each, at its step?

    python -m benchmarks.divergence [--work FOLDER] [--minutes 15] [--only KIND] [--without FILE] [--out FILE]

A base run of a tiny model, and for each injected difference a second run. Each pair is compared twice: from what is
recorded anyway, and with `--replay`. Counted are, by kind of difference:

- recorded: the step; and the tensor, which is the first recorded figure that is computed of the difference
- replayed: the step and the tensor itself. What no config says (a bit flipped in the middle of a step, another
  library) a re-run cannot repeat: there it must name the run that does not come back, and the step.

Kinds take turns, so that a measurement cut short by `--minutes` has some of each. Runs train in forked processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import harness.build
import harness.run
from benchmarks.results_file import write_results
from harness.checkpoint.store import Store
from harness.cli import app
from harness.core.files import find
from harness.data.order import sample_numbers
from harness.replay.parting import Search  # noqa: F401  (loaded before processes fork)
from harness.tools.compare import compare_runs
from harness.tools.compare_replay import replay_pair
from harness.tracking.history import RunHistory

RESULTS = Path(__file__).resolve().parent / "results" / "divergence_cpu.json"
TEXT = Path(__file__).resolve().parents[1] / "tests" / "golden" / "text"
STEPS, CONTEXT, BATCH = 5, 32, 4
SAVED = (2, 4)
"""Steps of checkpoints that runs with a damaged one go on from."""
LINEARS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
LAYERS = tuple(f"blocks.{block}.{linear}" for block in (0, 1) for linear in LINEARS)
OTHERS = ("embed", "blocks.0.attn_norm", "blocks.1.mlp_norm", "norm")
ARGUMENTS = {"dim": 64, "layers": 2, "heads": 2, "ffn": 176, "tied": True}
MODEL = """
import torch
from harness.models.gpt import build as gpt

def build(init=0, **args):
    torch.manual_seed(init)
    return gpt(**args)
"""

Fault = Callable[[Any], list[Any]]
"""Puts a fault into a run that is about to take a step. Returns the hooks to remove after it."""


@dataclass(frozen=True)
class Injection:
    """One difference.

    kind, name: for the table and the list.
    step: the first step that computes something else.
    recorded: how the first recorded figure of it may be called; empty: none is computed of it.
    tensor: what a replay must name; empty: the run cannot come back, and must be named.
    arguments: of `harness train`.
    after: the checkpoint that the run goes on from; 0: it begins afresh.
    flip: part and name of a tensor in that checkpoint, and the bit to flip in one of its elements.
    recipe: text of the recipe that is replaced, and by what.
    byte: which byte of the text is changed.
    fault: put into the step `step` of the training process; with `always`, into all from there.
    """

    kind: str
    name: str
    step: int
    recorded: Sequence[str] = ()
    tensor: str = ""
    arguments: Sequence[str] = ()
    after: int = 0
    flip: tuple[str, str, int] | None = None
    recipe: tuple[str, str] | None = None
    byte: int | None = None
    fault: Fault | None = None
    always: bool = False


def slot(layer: str, role: str) -> str:
    """How recorded figures name a slot: numbers have two digits."""
    return f"{layer.replace('blocks.', 'blocks.0')}.{role}"


FIRST = slot(LAYERS[0], "input")
NORM = "parameters"


def injections(text_bytes: int) -> list[Injection]:
    """All of them, kinds taking turns. text_bytes: length of the base run's text."""
    made = [
        *_of_checkpoints(),
        *_of_data(text_bytes),
        *_of_settings(),
        *_of_faults(),
    ]
    turn: Counter[str] = Counter()
    order: list[tuple[int, int]] = []
    for place, each in enumerate(made):
        order.append((turn[each.kind], place))
        turn[each.kind] += 1
    return [made[place] for _, place in sorted(order)]


def _of_checkpoints() -> Iterator[Injection]:
    """Bits flipped in a checkpoint that a run goes on from."""
    for number, layer in enumerate(LAYERS):
        for bit in (1, 21):
            after = SAVED[number % 2]
            name = f"{layer}.weight"
            yield Injection(
                "weight in a checkpoint",
                f"{name}, bit {bit}",
                after + 1,
                (slot(layer, "weight"), NORM),
                name,
                after=after,
                flip=("model", name, bit),
            )
    for layer in OTHERS:
        name = f"{layer}.weight"
        yield Injection(
            "weight in a checkpoint",
            name,
            3,
            (FIRST, NORM),
            name,
            after=2,
            flip=("model", name, 20),
        )
    for layer in LAYERS[1:7]:
        name = f"{layer}.weight.exp_avg"
        recorded = (slot(layer, "weight"), NORM)
        yield Injection(
            "optimizer in a checkpoint",
            name,
            3,
            recorded,
            name,
            after=2,
            flip=("optimizer", name, 22),
        )
    for number, part in enumerate(("scale", "history") * 3):
        column = 3 * number + 1
        yield Injection(
            "FP8 state in a checkpoint",
            f"{part} of slot {column}",
            3,
            ("*",),
            "*",
            after=2,
            flip=("fp8", f"{part}:{column}", 23),
        )


def _of_data(text_bytes: int) -> Iterator[Injection]:
    """Other bytes in the samples of one step, another order, micro-batches of another size."""
    total = int(text_bytes * 0.9) // CONTEXT
    seen: set[int] = set()
    for step in range(1, STEPS + 1):
        window = set(sample_numbers(0, step - 1, BATCH, total - 1).tolist())
        fresh = sorted(window - seen - {each + 1 for each in seen})
        for sample in fresh[:2]:
            byte = sample * CONTEXT + CONTEXT // 2
            yield Injection("data", f"byte {byte}", step, (FIRST,), "inputs", byte=byte)
        seen |= window
    for seed in range(1, 6):
        yield Injection(
            "order", f"train.seed={seed}", 1, (FIRST,), "window", (f"train.seed={seed}",)
        )
    yield Injection("data", "micro-batches of 1", 1, (FIRST,), "inputs", ("train.micro_batch=1",))


def _of_settings() -> Iterator[Injection]:
    """Initial weights, recipe and config, from the start or from a resume on."""
    for init in range(1, 6):
        arguments = (f"model.args={json.dumps({**ARGUMENTS, 'init': init})}",)
        yield Injection("initial weights", f"init {init}", 1, (NORM,), "embed.weight", arguments)
    for margin in (1, 2):
        yield Injection(
            "recipe",
            f"margin {margin}",
            1,
            (FIRST,),
            FIRST,
            recipe=("margin: 0", f"margin: {margin}"),
        )
    for length in (8, 32):
        change = ("amax_history_len: 16", f"amax_history_len: {length}")
        yield Injection("recipe", f"history {length}", 1, (), FIRST, recipe=change)
    for number, layer in enumerate(LAYERS):
        after = slot(LAYERS[number + 1], "input") if number < 7 else "loss"
        change = ("fp8:\n", f"layers:\n  exclude: [{layer}]\nfp8:\n")
        yield Injection("recipe", f"{layer} in BF16", 1, (after,), layer, recipe=change)
    settings = {
        "train.lr=0.004": ("lr", "update"),
        "train.lr=0.001": ("lr", "update"),
        "train.weight_decay=0.5": ("embed.weight", NORM),
        "train.max_grad_norm=0.01": ("embed.weight", NORM),
        "train.betas=[0.5,0.9]": ("embed.weight", NORM),
    }
    for setting, (tensor, recorded) in settings.items():
        yield Injection("config", setting, 1, (recorded,), tensor, (setting,))
    for after in SAVED:
        for setting in ("train.lr=0.004", "train.lr=0.0001", "train.weight_decay=0.5"):
            tensor, recorded = settings.get(setting, ("lr", "update"))
            key = setting.partition("=")[0]
            arguments = (setting, "--accept-changed", key)
            name = f"{setting} after step {after}"
            yield Injection("config", name, after + 1, (recorded,), tensor, arguments, after=after)


def _of_faults() -> Iterator[Injection]:
    """What no config says: the re-run must name the run that does not come back."""
    for number, layer in enumerate(LAYERS):
        after = slot(LAYERS[number + 1], "input") if number < 7 else "loss"
        step = number % STEPS + 1
        fault = partial(flip_output, layer)
        yield Injection("bit of an output", f"{layer}, step {step}", step, (after,), fault=fault)
    for number, layer in enumerate(LAYERS[:6]):
        step = number % STEPS + 1
        fault = partial(flip_gradient, f"{layer}.weight")
        recorded = ("gradient",)
        yield Injection("bit of a gradient", f"{layer}, step {step}", step, recorded, fault=fault)
    for number, layer in enumerate(LAYERS[2:]):
        step = number % 3 + 2
        fault = partial(flip_weight, f"{layer}.weight")
        recorded = (slot(layer, "weight"), NORM)
        yield Injection("bit of a weight", f"{layer}, step {step}", step, recorded, fault=fault)
    for step in (2, 3, 4):
        yield Injection("dropped micro-batch", f"step {step}", step, ("*",), fault=drop)
        yield Injection("swapped sample", f"step {step}", step, (FIRST,), fault=swap)
    for layer in OTHERS[1:]:
        after = {"blocks.0.attn_norm": FIRST, "blocks.1.mlp_norm": slot(LAYERS[6], "input")}
        recorded = (after.get(layer, "loss"),)
        fault = partial(round_otherwise, layer)
        yield Injection("library", layer, 1, recorded, fault=fault, always=True)


# Faults. Each is put into one step, and takes its hooks off at the step's end.


def flipped(tensor: Tensor) -> Tensor:
    """A copy with the highest bit of the mantissa of its largest element flipped."""
    copy = tensor.detach().clone().reshape(-1)
    kind, bit = {2: (torch.int16, 6), 4: (torch.int32, 22)}[tensor.element_size()]
    at = int(copy.abs().argmax())
    bits = copy.view(kind)
    bits[at] = bits[at] ^ (1 << bit)
    return copy.reshape(tensor.shape)


def flip_output(layer: str, run: Any) -> list[Any]:
    """One bit in the output of a module."""

    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + (flipped(output) - output.detach())

    return [_module(run, layer).register_forward_hook(change)]


def round_otherwise(layer: str, run: Any) -> list[Any]:
    """A module's output a little larger, as of a kernel that rounds to bf16 another way."""

    def change(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * (1 + 2**-8)

    return [_module(run, layer).register_forward_hook(change)]


def flip_gradient(name: str, run: Any) -> list[Any]:
    """One bit in the gradient of a parameter."""
    return [_parameter(run, name).register_hook(flipped)]


def flip_weight(name: str, run: Any) -> list[Any]:
    """One bit of a weight, before the step."""
    with torch.no_grad():
        parameter = _parameter(run, name)
        parameter.copy_(flipped(parameter))
    return []


def drop(run: Any) -> list[Any]:
    """The step's second micro-batch is left out."""
    return [_Shares(run, lambda batches: batches[:1])]


def swap(run: Any) -> list[Any]:
    """Another sample in place of the step's first."""

    def change(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
        first = {name: values.clone() for name, values in batches[0].items()}
        for values in first.values():
            values[0] = values[0].flip(0)
        return [first, *batches[1:]]

    return [_Shares(run, change)]


class _Shares:
    """Changes a run's micro-batches until `remove`."""

    def __init__(self, run: Any, change: Callable[[Any], Any]) -> None:
        self._run, self._own = run, run.data.micro_batches
        run.data.micro_batches = lambda *place: change(list(self._own(*place)))

    def remove(self) -> None:
        self._run.data.micro_batches = self._own


def _module(run: Any, name: str) -> nn.Module:
    return dict(run.engine.module.named_modules())[name]


def _parameter(run: Any, name: str) -> Tensor:
    return dict(run.engine.module.named_parameters())[name]


def with_fault(each: Injection) -> None:
    """From now on this process puts the fault into its steps."""
    own = harness.run.train_step
    fault = each.fault
    assert fault is not None

    def train_step(run: Any, *given: Any, **named: Any) -> Any:
        step = run.state.step + 1
        if step != each.step and not (each.always and step > each.step):
            return own(run, *given, **named)
        hooks = fault(run)
        try:
            return own(run, *given, **named)
        finally:
            for hook in hooks:
                hook.remove()

    harness.run.train_step = train_step


# Runs.


def in_child(folder: Path, log: Path, action: Callable[[], object]) -> bool:
    """Run `action` in a forked process that starts in `folder`; whether it ended well."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            with log.open("ab") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            action()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 0


def train(
    folder: Path, name: str, *arguments: str, before: Callable[[], object] | None = None
) -> None:
    """One run of the tiny model. before: called in its process."""
    fixed = (
        *("--config", "tiny", "--name", name, "data.path=text", f"train.steps={STEPS}"),
        *("train.schedule=constant", "train.warmup_steps=2", f"train.global_batch={BATCH}"),
        *("train.threads=1", f"data.context={CONTEXT}", "data.val_samples=2"),
        *(f"checkpoint.every={SAVED[0]}", "checkpoint.keep=9"),
        *("tracking.mlflow=false", "tracking.report=false"),
        *("model.target=divergence_model:build", f"model.args={json.dumps(ARGUMENTS)}"),
    )

    def action() -> None:
        if before is not None:
            before()
        app(["train", *fixed, *arguments])

    if not in_child(folder, folder / "log.txt", action):
        raise RuntimeError(f"{name} did not train: {(folder / 'log.txt').read_text()[-2000:]}")


def prepare(folder: Path, text: bytes) -> None:
    """The base run, and runs that stopped at each of SAVED."""
    (folder / "divergence_model.py").write_text(MODEL)
    (folder / "text").mkdir()
    (folder / "text" / "text.txt").write_bytes(text)
    train(folder, "base")
    for step in SAVED:
        train(folder, f"to-{step}", f"train.steps={step}")


def inject(folder: Path, each: Injection, text: bytes) -> str:
    """Make the second run; returns its name."""
    arguments = list(each.arguments)
    name = "other"
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)
    if each.after:
        shutil.copytree(folder / "runs" / f"to-{each.after}", folder / "runs" / name)
    if each.flip is not None:
        flip_saved(folder / "runs" / name / "checkpoints", each.after, *each.flip)
    if each.recipe is not None:
        recipe = find("recipes", "fp8_hybrid").read_text()
        assert each.recipe[0] in recipe
        path = folder / "changed.yaml"
        path.write_text(recipe.replace(*each.recipe))
        arguments += ["--recipe", str(path)]
    if each.byte is not None:
        changed = bytearray(text)
        changed[each.byte] ^= 1
        (folder / "other-text").mkdir(exist_ok=True)
        (folder / "other-text" / "text.txt").write_bytes(changed)
        arguments += ["data.path=other-text"]
    before = None if each.fault is None else partial(with_fault, each)
    train(folder, name, *arguments, before=before)
    return name


def flip_saved(root: Path, step: int, part: str, name: str, bit: int) -> None:
    """Flip a bit of one element of a tensor in a checkpoint, and write the checkpoint anew."""
    tensors, meta = Store(root, readonly=True).load(step)
    metrics = Store(root, readonly=True).metrics(step)
    tensor, _, column = name.partition(":")
    values = tensors[part][tensor]
    values = values.clone()
    flat = values[..., int(column) : int(column) + 1] if column else values.reshape(-1)
    at = random.Random(name).randrange(flat.numel())
    if column:
        # Of a history the newest amax, which is the last: the first row is empty between steps.
        at = flat.numel() - 1
    row = flat.reshape(-1)
    row.view(torch.int32)[at] ^= 1 << bit
    if column:
        values[..., int(column)] = row.reshape(values[..., int(column)].shape)
    tensors[part][tensor] = values
    shutil.rmtree(root)
    Store(root, {}).save(step, tensors, meta, metrics)


def compared(folder: Path, name: str) -> dict[str, Any]:
    """What `harness compare --json` gives of the base run and that one, without and with --replay."""
    out = folder / "found.json"
    out.unlink(missing_ok=True)

    def action() -> None:
        runs = [RunHistory.read(folder / "runs" / each) for each in ("base", name)]
        made = compare_runs(runs)
        begun = time.monotonic()
        replay = replay_pair(made.pair, made.compared)
        found = {
            "recorded": made.as_json()["first_divergence"],
            "replay": replay.as_json(),
            "seconds": time.monotonic() - begun,
        }
        out.write_text(json.dumps(found))

    if not in_child(folder, folder / "log.txt", action):
        raise RuntimeError(f"no comparison: {(folder / 'log.txt').read_text()[-2000:]}")
    return json.loads(out.read_text())


def judged(each: Injection, found: dict[str, Any]) -> dict[str, Any]:
    """Whether step and tensor are those of the difference."""
    recorded, replay = found["recorded"] or {}, found["replay"]
    first, strangers = replay["first_difference"] or {}, replay["not_reproduced"]
    right = first.get("step") == each.step
    if each.tensor:
        named = right and not strangers
        tensor = named and _fits(first["tensor"], (each.tensor, f"{each.tensor}.exp_avg"))
    else:
        # A bit that was flipped before a checkpoint was written is seen in that checkpoint.
        why = strangers.get("b", {}).get("why", "")
        named = "a" not in strangers and why.startswith(f"step {each.step},")
        tensor = named = named or (right and replay["changed_checkpoints"] == ["b"])
    return {
        "kind": each.kind,
        "name": each.name,
        "step": each.step,
        "recorded_step": recorded.get("step") == each.step,
        "recorded_tensor": recorded.get("step") == each.step
        and _fits(recorded["tensor"], each.recorded),
        "replayed_step": named,
        "replayed_tensor": tensor,
        "recorded": [recorded.get("step"), recorded.get("tensor"), recorded.get("kind")],
        "replayed": [first.get("step"), first.get("tensor"), first.get("kind")],
        "not_reproduced": {letter: text["why"] for letter, text in strangers.items()},
        "meaning": replay["meaning"],
        "seconds": found["seconds"],
    }


def _fits(tensor: str, names: Sequence[str]) -> bool:
    return "*" in names or tensor in names


_COUNTED = ("recorded_step", "recorded_tensor", "replayed_step", "replayed_tensor")


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Counts by kind, and of all."""
    kinds = [*dict.fromkeys(row["kind"] for row in rows), "all"]
    lines = [f"{'kind':28} injected  {'  '.join(_COUNTED)}"]
    for kind in kinds:
        of_kind = [row for row in rows if kind in (row["kind"], "all")]
        counts = [str(sum(row[name] for row in of_kind)) for name in _COUNTED]
        padded = "  ".join(
            f"{text:>{len(name)}}" for name, text in zip(_COUNTED, counts, strict=True)
        )
        lines.append(f"{kind:28} {len(of_kind):8}  {padded}")
    return lines


def controls(folder: Path, text: bytes) -> list[dict[str, Any]]:
    """Runs without a difference: the same command again, and a resume of it."""
    found: list[dict[str, Any]] = []
    for name, after in (("the same command", 0), ("a resume", SAVED[0])):
        other = inject(folder, Injection("control", name, 0, after=after), text)
        seen = compared(folder, other)
        named = [seen["recorded"], seen["replay"]["first_difference"]]
        found.append({"name": name, "differences": [each for each in named if each]})
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", type=Path, help="an empty folder for the runs; default: a temporary one"
    )
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="no further difference after so long"
    )
    parser.add_argument("--only", help="one kind of differences")
    parser.add_argument("--without", type=Path, help="leave out what this record has")
    parser.add_argument("--most", type=int, default=10_000, help="no more than so many differences")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    begun = time.monotonic()
    # Not a TemporaryDirectory: every forked process would delete it as it ends.
    folder = options.work or Path(tempfile.mkdtemp(prefix="divergence-"))
    text = b"".join(path.read_bytes() for path in sorted(TEXT.iterdir()))
    prepare(folder, text)
    without = controls(folder, text)
    every = injections(len(text))
    done: set[tuple[str, str]] = set()
    if options.without is not None:
        record = json.loads(options.without.read_text())
        done = {(row["kind"], row["name"]) for row in record["results"]["rows"]}
    wanted = [each for each in every if options.only in (None, each.kind)]
    chosen = [each for each in wanted if (each.kind, each.name) not in done][: options.most]
    rows: list[dict[str, Any]] = []
    for each in chosen:
        if time.monotonic() - begun > 60 * options.minutes:
            break
        rows.append(judged(each, compared(folder, inject(folder, each, text))))
        print(json.dumps(rows[-1]), flush=True)
    if options.work is None:
        shutil.rmtree(folder)
    minutes = (time.monotonic() - begun) / 60
    results = {
        "defined": len(every),
        "injected": len(rows),
        "minutes": minutes,
        "controls": without,
        "rows": rows,
    }
    write_results(options.out, "benchmarks.divergence", arguments, 1, results)
    print("\n".join(table(rows)))
    print(f"controls: {without}")


if __name__ == "__main__":
    main()
