"""Lightning, Fabric, Hugging Face's Trainer and accelerate under DDP, and Lightning's under FSDP2: what each rank saw,
as JSON.

    torchrun --standalone --nproc-per-node 2 ddp_cases.py FOLDER

Every second share of the data has inputs that are `LOUD` times as large: what FP8 casts with must still be the same on
both ranks. One process group serves all cases, as one launch costs more than any of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from loop_support import EAGER, ROWS, adamw, codes, forget_accelerator, mlp, recipe
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments
from transformers import Trainer as HfTrainer

from harness import Precision
from harness.integrations.accelerate import prepare
from harness.integrations.lightning import FabricPrecision, HarnessCallback, TrainerPrecision
from harness.integrations.transformers import PrecisionMixin
from harness.integrations.watch import Watch
from harness.precision.recipe import Recipe

RUNGS = ("fp8_hybrid", "bf16", "fp16_scaler", "fp32")
LOUD = 32.0
BATCHES, ACCUMULATE, CLIP = 12, 2, 0.1
BAD = (9, 14, 15, 16)
GUARD = {"max_consecutive_skips": 2, "snapshot_every": 4, "healthy_steps": 2}


class Shared(Dataset[tuple[Tensor, Tensor]]):
    """`batches` for each of two ranks. by_batch: whole batches go round the ranks (accelerate), else single samples.
    bad: batches of the second rank that have a NaN among their targets.
    """

    def __init__(self, batches: int, by_batch: bool, bad: tuple[int, ...] = ()) -> None:
        rows = torch.randn(2, batches * ROWS, 16, generator=torch.Generator().manual_seed(7))
        targets = rows.roll(1, dims=2)
        rows[1] *= LOUD
        for number in bad:
            targets[1, number * ROWS] = torch.nan
        self.inputs, self.targets = (self._dealt(each, by_batch) for each in (rows, targets))

    @staticmethod
    def _dealt(rows: Tensor, by_batch: bool) -> Tensor:
        shares = rows.reshape(2, -1, ROWS, 16) if by_batch else rows.reshape(2, -1, 1, 16)
        return shares.transpose(0, 1).reshape(-1, 16)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Named(Shared):
    """As Hugging Face's Trainer wants them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"x": self.inputs[index], "y": self.targets[index]}


class Told(Watch):
    """Remembers whether this rank wrote."""

    wrote = False

    def begin(self, *args: Any, **kwargs: Any) -> None:
        super().begin(*args, **kwargs)
        self.wrote = self.telemetry is not None and self.telemetry.folder is not None


def loader(
    batches: int, by_batch: bool, bad: tuple[int, ...] = ()
) -> DataLoader[tuple[Tensor, Tensor]]:
    data = Shared(batches, by_batch, bad)
    # Without a sampler Lightning shuffles training data.
    return DataLoader(
        data, ROWS, sampler=None if by_batch else DistributedSampler(data, shuffle=False)
    )


def own_batches(batches: int, bad: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor]]:
    """This rank's, however the library deals them."""
    everything = Shared(batches, True, bad)
    first = dist.get_rank() * ROWS
    starts = range(first, len(everything), 2 * ROWS)
    return [
        (everything.inputs[at : at + ROWS], everything.targets[at : at + ROWS]) for at in starts
    ]


def seen(
    precision: Precision, model: nn.Module, losses: Iterable[float], **more: Any
) -> dict[str, Any]:
    tensors = precision.state_dict()["tensors"]
    facts = precision.facts()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {
        "losses": list(losses),
        "weights": digest(model.parameters()),
        "fp8": digest(value for name, value in sorted(tensors.items()) if name.startswith("fp8")),
        "scale": tensors["loss_scale.scale"].item() if "loss_scale.scale" in tensors else 1.0,
        "steps": precision.prepared.state.step,
        "applied": precision.prepared.applied.item(),
        "norm": facts.grad_norm if facts else None,
        "demoted": precision.demoted,
        **more,
    }


def digest(tensors: Iterable[Tensor]) -> str:
    """Of whole tensors, whoever holds their rows."""
    found = hashlib.sha256()
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def plain(policy: Recipe, schedules: int = 1) -> dict[str, Any]:
    """The explicit loop, under DDP that exchanges gradients in a window's last micro-batch. schedules: steps of the
    scheduler for each of the optimizer's."""
    precision = Precision(policy)
    model = precision.prepare(mlp())
    wrapped = DistributedDataParallel(model)
    optimizer = adamw(model)
    scheduler = StepLR(optimizer, 3, 0.5)
    losses: list[float] = []
    for number, (x, y) in enumerate(own_batches(BATCHES)):
        last = (number + 1) % ACCUMULATE == 0
        with nullcontext() if last else wrapped.no_sync():
            with precision.context():
                loss = nn.functional.mse_loss(wrapped(x).float(), y)
            precision.backward(loss / ACCUMULATE)
        losses.append(loss.item())
        if last:
            precision.step(optimizer, max_grad_norm=CLIP)
            optimizer.zero_grad()
            for _ in range(schedules):
                scheduler.step()
    return seen(precision, model, losses)


class Module(LightningModule):
    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.net = mlp()
        self.losses: list[float] = []
        self.moved: list[int] = []
        self.automatic_optimization = not manual

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor | None:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x).float(), y)
        self.losses.append(loss.item())
        self.moved.append(len(self.trainer.precision_plugin.harness.demoted))  # pyright: ignore
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        last = (number + 1) % ACCUMULATE == 0
        with nullcontext() if last else self.trainer.model.no_sync():  # pyright: ignore
            self.manual_backward(loss / ACCUMULATE)
        if last:
            self.clip_gradients(optimizer, CLIP, "norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()  # pyright: ignore
        return None

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log(
            "val_loss", nn.functional.mse_loss(self.net(batch[0]).float(), batch[1]), sync_dist=True
        )

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        return [optimizer], [{"scheduler": StepLR(optimizer, 3, 0.5), "interval": "step"}]


class ShardedModule(Module):
    """Prepares and shards its net in `configure_model`, which Lightning may call several times."""

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self.harness = precision

    def configure_model(self) -> None:
        if not self.harness.is_prepared:
            self.harness.prepare(self.net)
            sharded(self.net, self.device_mesh)


def sharded(net: nn.Module, mesh: Any) -> nn.Module:
    for layer in net.children():
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def module_of(precision: Precision, is_sharded: bool) -> tuple[Module, dict[str, Any]]:
    """A module, and the options of its Trainer."""
    if not is_sharded:
        return Module(), {}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return ShardedModule(precision), {"strategy": strategy}


def fit(
    folder: Path, precision: Precision, module: Module, data: Any, *more: Any, **options: Any
) -> None:
    given = {
        "enable_checkpointing": False,
        "max_epochs": 1,
        "callbacks": [],
        "strategy": "ddp",
        **options,
    }
    path = given.pop("ckpt_path", None)
    Trainer(
        accelerator="cpu", devices=2, plugins=[TrainerPrecision(precision)], default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, logger=False, **given,
    ).fit(module, data, *more, ckpt_path=path)  # fmt: skip


def lightning(policy: Recipe, folder: Path, manual: bool = False) -> dict[str, Any]:
    precision, module = Precision(policy), Module(manual)
    clip = {} if manual else {"gradient_clip_val": CLIP, "accumulate_grad_batches": ACCUMULATE}
    fit(folder, precision, module, loader(BATCHES, False), loader(2, False), **clip)
    return seen(precision, module.net, module.losses)


def lightning_guarded(folder: Path, is_sharded: bool = False) -> dict[str, Any]:
    precision = Precision(recipe(fallback=EAGER))
    module, more = module_of(precision, is_sharded)
    callback = HarnessCallback()
    callback.watch = watch = Told(folder / "run", GUARD, mlflow=False, fp8_every=1)
    data = loader(24, False, BAD)
    fit(folder, precision, module, data, loader(2, False), callbacks=[callback], **more)
    return watched(precision, module, watch, folder / "run")


def lightning_resumed(folder: Path, is_sharded: bool = False) -> dict[str, Any]:
    def one(where: str, epochs: int, path: Path | None = None) -> dict[str, Any]:
        precision = Precision(recipe())
        module, strategy = module_of(precision, is_sharded)
        saver = ModelCheckpoint(folder / where, every_n_epochs=1, save_top_k=-1, filename="{step}")
        callbacks = [saver, HarnessCallback(guard=GUARD)]
        more = {"enable_checkpointing": True, "max_epochs": epochs, "ckpt_path": path, **strategy}
        fit(folder, precision, module, loader(6, False), callbacks=callbacks, **more)
        return seen(precision, module.net, module.losses)

    whole = one("whole", 2)
    again = one("again", 2, folder / "whole" / "step=6.ckpt")
    return {"whole": whole, "again": again}


def fabric(policy: Recipe, is_sharded: bool = False) -> dict[str, Any]:
    precision = Precision(policy)
    strategy: Any = "ddp"
    if is_sharded:
        strategy = FabricModelParallel(sharded, data_parallel_size=2, tensor_parallel_size=1)
    plugins = [FabricPrecision(precision, CLIP)]
    made = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugins)
    made.launch()
    bare = mlp()
    if is_sharded:
        model = made.setup_module(bare)
        inner = adamw(bare)
        optimizer = made.setup_optimizers(inner)
    else:
        inner = adamw(bare)
        model, optimizer = made.setup(bare, inner)
    scheduler = StepLR(inner, 3, 0.5)
    losses: list[float] = []
    for number, (x, y) in enumerate(made.setup_dataloaders(loader(BATCHES, False))):
        last = (number + 1) % ACCUMULATE == 0
        with made.no_backward_sync(model, enabled=not last):
            loss = nn.functional.mse_loss(model(x), y)
            made.backward(loss / ACCUMULATE)
        losses.append(loss.item())
        if last:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return seen(precision, bare, losses)


class Wired(nn.Module):
    """As Hugging Face's Trainer calls models."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x).float(), y)}


class Ours(PrecisionMixin, HfTrainer):
    losses: list[float]
    moved: list[int]

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # pyright: ignore

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        if torch.is_grad_enabled():
            self.losses.append(found.item())  # pyright: ignore
            self.moved.append(len(self.harness.demoted))
        return found


def trainer(
    precision: Precision,
    folder: Path,
    batches: int,
    bad: tuple[int, ...] = (),
    watch: Watch | None = None,
    **more: Any,
) -> Ours:
    given = arguments(
        folder,
        per_device_train_batch_size=ROWS,
        remove_unused_columns=False,
        label_names=["y"],
        **more,
    )
    model = Wired()
    optimizer = adamw(model)
    made = Ours(
        model, given, train_dataset=Named(batches, True, bad), eval_dataset=Named(2, True),
        optimizers=(optimizer, StepLR(optimizer, 3, 0.5)), precision=precision, watch=watch,
    )  # fmt: skip
    made.losses, made.moved = [], []
    return made


def hf(policy: Recipe, folder: Path) -> dict[str, Any]:
    more = {"max_grad_norm": CLIP, "gradient_accumulation_steps": ACCUMULATE}
    made = trainer(Precision(policy), folder, BATCHES, **more)
    made.train()
    logged = [row["grad_norm"] for row in made.state.log_history if "grad_norm" in row]
    return seen(made.harness, made.model, made.losses, logged=logged)  # pyright: ignore


def hf_tokens(folder: Path) -> dict[str, Any]:
    """A language model whose batches count different numbers of labels, most of them on the first rank."""
    precision = Precision(recipe("fp32"))
    made = Ours(
        tiny_llama(), arguments(folder, per_device_train_batch_size=2, max_grad_norm=0.5), train_dataset=Uneven(),
        precision=precision,
    )  # fmt: skip
    made.losses, made.moved = [], []
    made.train()
    weights = torch.cat(
        [parameter.detach().flatten() for parameter in precision.prepared.model.parameters()]
    )
    return seen(precision, precision.prepared.model, made.losses, all_weights=weights.tolist())


class Uneven(Dataset[dict[str, Tensor]]):
    """16 sequences of 12 tokens; of every four the last two have one label in six."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(index))
        labels = torch.where((torch.arange(12) % 6 == 0) | torch.tensor(index % 4 < 2), ids, -100)
        return {"input_ids": ids, "labels": labels}


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder), use_cpu=True, learning_rate=1e-2, report_to=[], disable_tqdm=True, optim="adamw_torch",
        **{"save_strategy": "no", "num_train_epochs": 1, "logging_steps": 1, **more},
    )  # fmt: skip


def hf_guarded(folder: Path) -> dict[str, Any]:
    watch = Told(folder / "run", GUARD, mlflow=False, fp8_every=1)
    more = {"eval_strategy": "steps", "eval_steps": 12, "max_grad_norm": 0.0}
    made = trainer(Precision(recipe(fallback=EAGER)), folder, 24, BAD, watch, **more)
    made.train()
    return watched(made.harness, made, watch, folder / "run")


def hf_resumed(folder: Path) -> dict[str, Any]:
    def one(where: str, path: Path | None = None) -> dict[str, Any]:
        more = {"save_strategy": "steps", "save_steps": 4, "max_grad_norm": 0.0}
        made = trainer(Precision(recipe()), folder / where, 10, watch=Watch(None, GUARD), **more)
        made.train(resume_from_checkpoint=None if path is None else str(path))
        return seen(made.harness, made.model, made.losses)  # pyright: ignore

    return {"whole": one("whole"), "again": one("again", folder / "whole" / "checkpoint-4")}


class Loop:
    """accelerate's."""

    def __init__(
        self, policy: Recipe, batches: int, accumulate: int, bad: tuple[int, ...] = ()
    ) -> None:
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        self.precision = Precision(policy)
        self.bare = mlp()
        optimizer = adamw(self.bare)
        scheduler = StepLR(optimizer, 3, 0.5)
        clip = CLIP if accumulate > 1 else None
        self.model, self.optimizer, self.batches, self.scheduler = prepare(
            self.accelerator, self.precision, self.bare, optimizer, loader(batches, True, bad), scheduler,
            max_grad_norm=clip,
        )  # fmt: skip
        self.losses: list[float] = []
        self.moved: list[int] = []

    def train(self, skip: int = 0, watch: Watch | None = None, stop: int | None = None) -> None:
        for number, (x, y) in enumerate(self.batches):
            if number < skip:
                continue
            if number == stop:
                break
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())
            self.moved.append(len(self.precision.demoted))
            if watch is not None:
                watch.step_ended()

    def seen(self, **more: Any) -> dict[str, Any]:
        return seen(self.precision, self.bare, self.losses, lr=self.scheduler.get_last_lr(), **more)


def accelerated(policy: Recipe) -> dict[str, Any]:
    loop = Loop(policy, BATCHES, ACCUMULATE)
    loop.train()
    return loop.seen()


def accelerated_guarded(folder: Path) -> dict[str, Any]:
    loop = Loop(recipe(fallback=EAGER), 24, 1, BAD)
    watch = Told(folder / "run", GUARD, mlflow=False, fp8_every=1)
    watch.begin(loop.precision, [loop.optimizer.optimizer], [loop.scheduler.scheduler])
    with watch:
        loop.train(watch=watch)
    return watched(loop.precision, loop, watch, folder / "run")


def accelerated_resumed(folder: Path) -> dict[str, Any]:
    whole = Loop(recipe(), 10, 1)
    whole.train()
    first = Loop(recipe(), 10, 1)
    first.train(stop=4)
    first.accelerator.save_state(str(folder / "saved"))
    again = Loop(recipe(), 10, 1)
    again.accelerator.load_state(str(folder / "saved"))
    again.train(skip=4)
    return {"whole": whole.seen(), "again": again.seen()}


def watched(
    precision: Precision, run: Module | Ours | Loop, watch: Told, folder: Path
) -> dict[str, Any]:
    assert watch.guard is not None
    dist.barrier()  # the folder is the first rank's, and written now
    ledger = precision.prepared.state.ledger
    return seen(
        precision, precision.prepared.model, run.losses, moved=run.moved, counted=watch.guard.step,
        returned=ledger.returned_to, passed_over=ledger.skipped_windows, writes=watch.wrote, codes=codes(folder),
    )  # fmt: skip


def cases(folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    # First, as it makes the process group: from what torchrun has put into the environment.
    yield "tokens", lambda: hf_tokens(folder / "tokens")
    for name in RUNGS:
        yield f"plain {name}", lambda name=name: plain(recipe(name))
        yield f"faster {name}", lambda name=name: plain(recipe(name), schedules=2)
        yield f"lightning {name}", lambda name=name: lightning(recipe(name), folder / "lightning")
        yield f"fabric {name}", lambda name=name: fabric(recipe(name))
        yield f"hf {name}", lambda name=name: hf(recipe(name), folder / "hf")
        yield f"accelerate {name}", lambda name=name: accelerated(recipe(name))
        yield f"fabric sharded {name}", lambda name=name: fabric(recipe(name), is_sharded=True)
    yield (
        "lightning sharded guarded",
        lambda: lightning_guarded(folder / "sharded guarded", is_sharded=True),
    )
    yield (
        "lightning sharded resumed",
        lambda: lightning_resumed(folder / "sharded resumed", is_sharded=True),
    )
    yield "manual fp8_hybrid", lambda: lightning(recipe(), folder / "manual", manual=True)
    yield "lightning guarded", lambda: lightning_guarded(folder / "lightning guarded")
    yield "hf guarded", lambda: hf_guarded(folder / "hf guarded")
    yield "accelerate guarded", lambda: accelerated_guarded(folder / "accelerate guarded")
    yield "lightning resumed", lambda: lightning_resumed(folder / "lightning resumed")
    yield "hf resumed", lambda: hf_resumed(folder / "hf resumed")
    yield "accelerate resumed", lambda: accelerated_resumed(folder / "accelerate resumed")


def main(folder: Path, only: str = "") -> None:
    rank = int(os.environ["RANK"])
    found: dict[str, Any] = {}
    for name, case in cases(folder):
        if only not in name:
            continue
        forget_accelerator()
        try:
            found[name] = case()
        except (
            Exception
        ) as error:  # reported by that case's test; a rank that stops here leaves the other waiting
            found[name] = {
                "error": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
