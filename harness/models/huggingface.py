"""Hugging Face causal language models: `model.target: hf:FOLDER`, their loss, packed samples, and LoRA by peft.

FOLDER is a local folder with config.json and safetensors (one file or shards). With config.json alone the weights are
fresh. Nothing is fetched from the network, code that comes with a model is never run, and pickles are never read.
Weights in bf16 or fp16 become fp32: the optimizer's master weights, from which every lower precision is cast.

For every causal model of transformers, whoever built it, `CausalLM` does what transformers leaves to its caller:

- a loss over targets that are already shifted;
- position_ids that begin at 0 in each document of a packed sample, by which transformers keeps documents apart;
- the auxiliary loss of a mixture of experts;
- a loss without the logits of all tokens in memory (`model.args.loss_chunk`).

`check` tries a model on a few tokens before training: whether it is really causal, really keeps documents apart, and
has the same loss in chunks.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from harness.core import deferred
from harness.core.errors import ConfigError, HarnessError, Problem, near_match, number_of, some
from harness.core.facts import IGNORED
from harness.core.files import read_json
from harness.core.schema import Strict, import_extra, validate
from harness.models.huggingface_later import from_pretrained_later
from harness.models.stored import INDEX, WEIGHTS, weight_files
from harness.models.token_loss import (
    draws,
    dtype_of_head,
    loss_in_chunks,
    loss_of_head,
    sum_of_losses,
)

PREFIX = "hf:"
# Endings of weights in formats that are not read.
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf")
# Logits that differ by less than this share of the largest one differ only by rounding.
_ROUNDING = 1e-5
# Keys of config.json that describe the file, or that `build` sets by itself.
_NOT_OF_THE_MODEL = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
# The attribute in which `check` leaves its result on the model: see `CausalLM.unpackable`.
_UNPACKABLE = "unpackable_because"
# The attribute in which `build` leaves model.args.loss_chunk on the model.
_CHUNK = "loss_chunk"
# The function of transformers.masking_utils that returns the number of each token's document, or None for a single one.
_FINDS_DOCUMENTS = "find_packed_sequence_indices"
# Relative difference between two sums of the same cross-entropies.
_SAME_LOSS = 1e-3
# The same for logits of a document at two places in a sample: other shapes round differently, TF32 above all.
_SHIFTED = 2e-2


class LoraConfig(Strict):
    """Low-rank adapters (arXiv 2106.09685) beside frozen weights."""

    r: Annotated[int, Field(gt=0)] = Field(default=8, description="rank of the adapters")
    alpha: float = Field(default=16.0, gt=0, description="adapters are multiplied by alpha / r")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of the adapters' inputs that is dropped"
    )
    targets: list[str] | None = Field(
        default=None,
        description="ends of the names of the layers that get one; null: every Linear but the head",
    )


class Arguments(Strict):
    """`model.args` of a target hf:FOLDER."""

    weights: Literal["auto", "fresh"] = Field(
        default="auto",
        description="auto: those of the folder, if it has any; fresh: new ones, from train.seed",
    )
    config: dict[str, Any] = Field(
        default_factory=dict, description="keys of config.json with other values"
    )
    attention: str | None = Field(
        default=None, description="attn_implementation; null: what transformers chooses"
    )
    gradient_checkpointing: bool = Field(
        default=False, description="compute each block again in backward"
    )
    loss_chunk: int = Field(
        default=0,
        ge=0,
        description="tokens whose logits are in memory at a time; 0: all of a micro-batch",
    )
    aux_loss: bool = Field(
        default=True, description="train with the routers' auxiliary loss, where there is one"
    )
    ignore: list[str] = Field(
        default_factory=list,
        description="patterns of weights of the folder that the model may leave out",
    )
    lora: LoraConfig | None = Field(
        default=None, description="train adapters, and leave the weights as they are"
    )


def build(folder: str, args: Mapping[str, Any]) -> nn.Module:
    """The causal LM in `folder`, in float32 and in training mode. args: see `Arguments`.

    Raises ConfigError naming everything that is wrong with the folder or the arguments, and where an extra is missing.
    """
    options = validate(Arguments, dict(args), "model.args")
    where = f"model.target {PREFIX}{folder}"
    path = _folder(folder)
    if not (path / "config.json").is_file():
        why = "it has no config.json" if path.is_dir() else "only local folders are read"
        fix = "give a folder with config.json and *.safetensors; fetch one from the hub with `hf download --local-dir`"
        raise ConfigError(Problem("is no folder of a Hugging Face model", where, why, fix))

    # Check the files first: errors of transformers about them are hard to understand.
    transformers = import_extra("transformers", "hf", where)
    problems = [*_config_problems(path, where), *_weight_problems(path, options)]
    if problems:
        raise ConfigError(problems)

    with _quiet(transformers):
        config = _read_config(transformers, path, options, where)
        model = _load(transformers, path, config, options, where)
    model.config.use_cache = False

    # Blocks that are computed again in backward, and adapters beside the weights.
    if options.gradient_checkpointing:
        if not model.supports_gradient_checkpointing:
            what = f"{type(model).__name__} cannot compute its blocks again in backward"
            raise ConfigError(
                Problem(what, "model.args.gradient_checkpointing", fix="leave it out")
            )
        model.activation_checkpointing_enable({"use_reentrant": False})
    setattr(model, _CHUNK, options.loss_chunk)

    if options.lora is not None:
        model = _with_adapters(model, options.lora, where)
        # Checkpoints omit the frozen weights and refer to this folder.
        if options.weights == "auto" and _stored(path):
            model.frozen_from = str(path.resolve())

    model.config_sha256 = _config_hash(path)
    # transformers returns models for evaluation: without dropout, and with gradient checkpointing switched off.
    return model.train()


def has_stored_weights(target: str, args: Mapping[str, Any]) -> bool:
    """Whether the model of `model.target` and `model.args` begins with the weights of a folder."""
    fresh = args.get("weights") == "fresh"
    return target.startswith(PREFIX) and not fresh and _stored(_folder(target.removeprefix(PREFIX)))


def tokenizer_of(target: str) -> Path | None:
    """The tokenizer.json that came with the model of `model.target`; None if there is none."""
    if not target.startswith(PREFIX):
        return None
    found = _folder(target.removeprefix(PREFIX)) / "tokenizer.json"
    return found if found.is_file() else None


def _folder(name: str) -> Path:
    """The folder that is meant; its config.json may be named instead."""
    path = Path(name).expanduser()
    return path.parent if path.name == "config.json" else path


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence progress bars and reports of transformers. Our own errors say what matters in them."""
    own = transformers.utils.logging
    level, bars = own.get_verbosity(), own.is_progress_bar_enabled()
    own.set_verbosity_error()
    own.disable_progress_bar()
    # transformers imports torchao, which warns about kernels for other cards.
    levels: dict[logging.Logger, int] = {}
    for name in ("torchao", "torch.utils._pytree"):
        logger = logging.getLogger(name)
        levels[logger] = logger.level
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, before in levels.items():
            logger.setLevel(before)
        own.set_verbosity(level)
        if bars:
            own.enable_progress_bar()


def _config_problems(path: Path, where: str) -> list[Problem]:
    """Problems of config.json, found without transformers' help."""
    file = path / "config.json"
    fix = "put the model's own config.json there"
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        return [Problem(f"cannot be read: {error}", str(file), fix=fix)]
    if not isinstance(config, dict):
        return [Problem("holds no mapping", str(file), fix=fix)]

    problems: list[Problem] = []
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        what = f"the weights are stored quantised ({method})"
        why = "training starts from weights in bf16 or more: the recipe decides what is computed in less"
        problems.append(Problem(what, where, why, "take the full weights"))
    # A model type that transformers knows needs no code from the folder, even if the folder has some.
    if "auto_map" in config and str(config.get("model_type", "")) not in _known_types():
        what = f"needs code of its own: {config['auto_map']}"
        why = "code that comes with a model is never run"
        problems.append(Problem(what, where, why, "take another model"))
    return problems


def _known_types() -> Any:
    return importlib.import_module("transformers").CONFIG_MAPPING


def _weight_problems(path: Path, options: Arguments) -> list[Problem]:
    """Problems of the files with the weights. Each one is opened, which compares its header with its size."""
    if options.weights == "fresh":
        return []
    from safetensors import SafetensorError, safe_open

    index = path / INDEX
    try:
        names = weight_files(path)
    except (OSError, ValueError) as error:
        return [Problem(f"cannot be read: {error}", str(index), fix="copy the folder again")]

    # Weights that are not found: without an error they would silently be replaced by fresh ones.
    there = sorted(each.name for each in path.iterdir())
    lost = [name for name in there if name.endswith((".safetensors", INDEX))]
    if not names and lost:
        what = f"has no {WEIGHTS} that can be read, but {some(lost, 3)}"
        why = f"shards are found by their {INDEX}; links of a copied cache may lead nowhere"
        fix = "copy the folder again, with what its links lead to (cp -rL); for fresh weights: model.args.weights=fresh"
        return [Problem(what, str(path), why, fix)]

    # The same of weights in another format.
    others = [name for name in there if name.endswith(_OTHER_FORMATS)]
    if not names and others:
        what = f"has no {WEIGHTS}, but {some(others, 3)}"
        why = "only safetensors are read: pickles run code, and other formats are quantised"
        fix = (
            "save the model again with save_pretrained; for fresh weights: model.args.weights=fresh"
        )
        return [Problem(what, str(path), why, fix)]

    problems: list[Problem] = []
    for name in names:
        file = path / name
        if file.parent != path:
            what = f"the index names a file of another folder: {name}"
            problems.append(Problem(what, str(index)))
            continue
        try:
            with safe_open(file, framework="pt"):
                pass
        except MemoryError as error:
            # It is mapped into memory as a whole, which a limit of the process (`ulimit -v`) may refuse.
            what = f"cannot be mapped into memory: {' '.join(str(error).split())}"
            fix = "raise the limit of this process's address space (ulimit -v), or save in smaller shards"
            problems.append(Problem(what, str(file), fix=fix))
        except (OSError, SafetensorError) as error:
            what = f"is damaged: {' '.join(str(error).split())}"
            if not file.is_file():
                what = "is missing"
            problems.append(Problem(what, str(file), fix="copy it again"))
    return problems


def _config_hash(path: Path) -> str:
    """Hash of what config.json says about the model, whatever version wrote it, and in whatever order."""
    config = read_json(path / "config.json")
    of_model = {key: value for key, value in config.items() if key not in _NOT_OF_THE_MODEL}
    return hashlib.sha256(json.dumps(of_model, sort_keys=True).encode()).hexdigest()


def _read_config(transformers: Any, path: Path, options: Arguments, where: str) -> Any:
    """The config of transformers, with the changes of `model.args.config`. Raises ConfigError."""
    try:
        config, unused = transformers.AutoConfig.from_pretrained(
            str(path),
            local_files_only=True,
            trust_remote_code=False,
            return_unused_kwargs=True,
            **options.config,
        )
    except Exception as error:  # whatever a model's own check of its sizes raises
        fix = "put the model's own config.json there; model.args.config may have changed what it must not"
        raise ConfigError(Problem(_short(error), f"{where}: config.json", fix=fix)) from error

    # transformers ignores keys that the model does not have.
    problems: list[Problem] = []
    for key in options.config:
        if key in unused:
            fix = near_match(key, list(config.to_dict()))
            problems.append(Problem(f'no key "{key}" in it', f"{where}: config.json", fix=fix))
    if problems:
        raise ConfigError(problems)

    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        what = f"{config.model_type} has no causal language model"
        fix = "take a decoder that predicts the next token, such as llama or gpt2"
        raise ConfigError(Problem(what, where, fix=fix))

    text = config.get_text_config()
    if hasattr(text, "output_router_logits") and getattr(text, "router_aux_loss_coef", 0):
        text.output_router_logits = options.aux_loss
    return config


def _load(transformers: Any, path: Path, config: Any, options: Arguments, where: str) -> Any:
    """The model with the stored weights, or with fresh ones. Raises ConfigError."""
    # Autocast does not know the other implementations of experts: they would run in float32.
    kind: dict[str, Any] = {"trust_remote_code": False, "experts_implementation": "eager"}
    if options.attention is not None:
        kind["attn_implementation"] = options.attention
    made = transformers.AutoModelForCausalLM
    # Tensors that are fake or on the meta device have no values, so stored ones need not be read.
    probe = torch.empty(0)
    no_values = not deferred.is_building() and (probe.is_meta or isinstance(probe, FakeTensor))
    fresh = options.weights == "fresh" or not _stored(path) or no_values
    try:
        if fresh:
            return made.from_config(config, dtype=torch.float32, **kind)
        wanted = {
            "config": config,
            "dtype": torch.float32,
            "local_files_only": True,
            "use_safetensors": True,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
            **kind,
        }
        if deferred.is_building():
            model, info = from_pretrained_later(transformers, path, wanted)
        else:
            model, info = made.from_pretrained(str(path), **wanted)
    except (HarnessError, deferred.CannotDeferError):
        # `room.watched` found no memory for it, or it cannot be built without its weights.
        raise
    except Exception as error:  # whatever its code raises
        raise ConfigError(
            Problem(f"cannot be built: {_short(error)}", where, fix="look at model.args")
        ) from error
    _check_loaded(info, options, where)
    return model


def _stored(path: Path) -> bool:
    """Whether the folder has weights."""
    return (path / INDEX).is_file() or (path / WEIGHTS).is_file()


class FolderError(ConfigError):
    """The weights of a folder are not those of the model that its config.json describes."""


def _check_loaded(info: Mapping[str, Any], options: Arguments, where: str) -> None:
    """Raise FolderError naming weights that would be random, or that would be left out."""
    problems: list[Problem] = []
    missing = sorted(info["missing_keys"])
    if missing:
        what = f"{number_of(len(missing), 'weight')} missing: {some(missing, 4)}"
        why = "they would be random, and nobody would know"
        fix = "take a folder of the whole causal model; for fresh weights: model.args.weights=fresh"
        problems.append(Problem(what, where, why, fix))

    wrong: list[str] = []
    for name, stored, expected in info["mismatched_keys"]:
        wrong.append(f"{name} {list(stored)}, not {list(expected)}")
    wrong.sort()
    if wrong:
        what = f"{number_of(len(wrong), 'weight')} of another shape: {some(wrong, 4)}"
        fix = "take back what model.args.config changes of the sizes, or model.args.weights=fresh"
        problems.append(Problem(what, where, fix=fix))

    def ignored(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in options.ignore)

    left = sorted(name for name in info["unexpected_keys"] if not ignored(name))
    if left:
        why = "the model has no place for them: what they do would be lost"
        what = f"{number_of(len(left), 'weight')} would be left out: {some(left, 4)}"
        fix = f"take the model that they belong to, or leave them out: model.args.ignore=['{left[0]}']"
        problems.append(Problem(what, where, why, fix))
    if problems:
        raise FolderError(problems)


def _with_adapters(model: Any, lora: LoraConfig, where: str) -> Any:
    """`model` wrapped by peft: frozen weights and trainable adapters. Raises ConfigError."""
    peft = import_extra("peft", "peft", where)
    # GPT-2's Conv1D stores its weight transposed.
    conv1d = any(type(module).__name__ == "Conv1D" for module in model.modules())
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.targets or "all-linear",
        fan_in_fan_out=conv1d,
    )
    try:
        with warnings.catch_warnings():
            # peft calls functions that transformers has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            return peft.get_peft_model(model, config)
    except ValueError as error:
        fix = "name layers of the model"
        raise ConfigError(Problem(_short(error), "model.args.lora.targets", fix=fix)) from error


def _short(error: BaseException) -> str:
    """The error's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]


class CausalLM:
    """Calls a model of transformers (or peft's wrapper of one) and computes its loss.

    kind: the name of its class, for messages.
    vocab_size: number of token ids that it takes.
    chunk: tokens whose logits are in memory at a time; 0: all.
    head: name of the layer that computes the logits; empty without one.
    unpackable: why it would get packed samples wrong; empty if it gets them right.
    """

    def __init__(self, model: Any) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        text = base.config.get_text_config()
        self.kind = type(base).__name__
        self.unpackable = str(getattr(base, _UNPACKABLE, ""))
        self._base = base
        self.chunk = int(getattr(base, _CHUNK, 0))
        positions = int(getattr(text, "max_position_embeddings", None) or 0)
        # XLNet says -1: as many as there are.
        self._positions = positions if positions > 0 else None
        self._coefficient = float(getattr(text, "router_aux_loss_coef", None) or 0.0)

        # Embedding and head may be padded to different sizes. A token id has to fit both.
        ends = (base.get_input_embeddings(), base.get_output_embeddings())
        rows = [end.weight.shape[0] for end in ends if end is not None]
        self.vocab_size = int(min(rows, default=text.vocab_size))
        names = [name for name, module in base.named_modules() if name and module is ends[1]]
        self.head = names[0] if names else ""

    def loss(self, module: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy, float32 0-d, nats per target that counts; in training mode plus the auxiliary loss.

        batch: inputs, targets (already shifted) and perhaps segments, int64 [batch, time]. If no target counts, the
        cross-entropy is 0.
        Raises ConfigError for packed samples that the model would not keep apart, and for samples with more tokens than
        the model has positions.
        """
        targets = batch["targets"].flatten()
        # A mean would be 0 / 0 where no target counts.
        counted = (targets != IGNORED).sum().clamp(min=1)
        if self.chunk:
            with self.loss_for_logits(targets, counted):
                output = self.outputs(module, batch["inputs"], batch.get("segments"))
            loss = output.logits
        else:
            output = self.outputs(module, batch["inputs"], batch.get("segments"))
            loss = sum_of_losses(output.logits.flatten(0, -2), targets) / counted

        # Validation compares models by the cross-entropy alone.
        auxiliary = self.auxiliary(output) if module.training else None
        return loss if auxiliary is None else loss + auxiliary

    @contextmanager
    def loss_for_logits(self, targets: Tensor, counted: Tensor) -> Iterator[list[Tensor]]:
        """In this context the model returns the loss, 0-d, where it has logits. Yields what the head's place returned.

        targets: int64 [tokens]; counted: 0-d, the number of those with a loss.
        """
        head = self._base.get_submodule(self.head)
        made = _LossForLogits(head, targets, counted, self.chunk)
        if made.is_plain:
            # It is called as ever: FSDP2 gathers its weight then, and sees that it takes part.
            head.forward = made.forward
            try:
                yield made.returned
            finally:
                del head.forward
            return

        # As `setattr` would, but hooks on a module's attributes have no part in it.
        place, _, name = self.head.rpartition(".")
        modules = self._base.get_submodule(place)._modules
        modules[name] = made
        try:
            yield made.returned
        finally:
            modules[name] = head

    def auxiliary(self, output: Any) -> Tensor | None:
        """The loss of the routers of a mixture of experts; None without routers, or if it is switched off."""
        found = getattr(output, "aux_loss", None)
        if found is None:
            return None
        return self._coefficient * found

    def outputs(
        self, module: nn.Module, inputs: Tensor, segments: Tensor | None = None, **more: Tensor
    ) -> Any:
        """What forward returns. use_cache is off: with it, transformers takes a packed sample for one document."""
        time = inputs.shape[1]
        if self._positions is not None and time > self._positions:
            what = f"samples of {time} tokens are longer than the {self._positions} positions of {self.kind}"
            fix = f"data.context={self._positions}, or more positions: model.args.config={{max_position_embeddings: N}}"
            raise ConfigError(Problem(what, "data.context", fix=fix))
        if segments is None:
            with _documents_known(None):
                return module(input_ids=inputs, use_cache=False, **more)
        if self.unpackable:
            why, fix = self.unpackable, "take data that is not packed, or another model"
            raise ConfigError(
                Problem(f"{self.kind} cannot train on packed samples", "data", why, fix)
            )
        # From position_ids that begin anew, transformers derives the mask between documents.
        positions = positions_of(segments)
        with _documents_known(segments):
            return module(input_ids=inputs, position_ids=positions, use_cache=False, **more)


@contextmanager
def _documents_known(segments: Tensor | None) -> Iterator[None]:
    """Tells transformers which documents the samples hold: one each (None), or those of `segments`.

    By itself transformers reads that from the positions. In every forward the host then waits for the device to say
    whether a sample holds more than one. Fake tensors have no values to read, and every sample counts as packed:
    `harness estimate` would see attention with a mask, which FlashAttention does not take.
    """
    masks = importlib.import_module("transformers.masking_utils")
    theirs = getattr(masks, _FINDS_DOCUMENTS, None)
    # Another version of transformers may not have it, and then finds out in its own way.
    if theirs is None:
        yield
        return
    documents = None if segments is None else _begins(segments).cumsum(dim=1)
    setattr(masks, _FINDS_DOCUMENTS, lambda position_ids: documents)
    try:
        yield
    finally:
        setattr(masks, _FINDS_DOCUMENTS, theirs)


class _LossForLogits(nn.Module):
    """Stands in the place of a head for one forward, and returns the loss, 0-d, where the head returns logits.

    The logits are computed `chunk` tokens at a time. An nn.Linear stays in its place, and this is its forward. Any
    other head (converted, with an adapter) is called for each chunk, so that its hooks see logits.

    is_plain: whether the head is an nn.Linear that nobody has replaced.
    targets: int64 [tokens].
    counted: 0-d, the number of those with a loss.
    returned: the losses that it returned.
    """

    def __init__(self, head: nn.Module, targets: Tensor, counted: Tensor, chunk: int) -> None:
        super().__init__()
        # In a tuple, or the head would become a submodule.
        self._head = (head,)
        self._targets = targets
        self._counted = counted
        self._chunk = chunk
        self.is_plain = type(head) is nn.Linear and "forward" not in vars(head)
        self.returned: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [batch, time, dim], the head's input."""
        (head,) = self._head
        targets, counted, chunk = self._targets, self._counted, self._chunk
        x = hidden.flatten(0, -2)
        dtype = dtype_of_head(head, x) if self.is_plain else None
        if dtype is None:
            loss = loss_in_chunks(self._share, x, targets, counted, chunk, draws(head))
        else:
            mean = loss_of_head(x, cast(Any, head).weight, targets, chunk, 0.0, dtype)
            # A mean over no target is NaN there.
            loss = torch.where((targets != IGNORED).any(), mean, 0.0)
        self.returned.append(loss)
        return loss

    def _share(self, rows: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        (head,) = self._head
        logits = nn.Linear.forward(cast(Any, head), rows) if self.is_plain else head(rows)
        return sum_of_losses(logits, labels) / counted


def _begins(segments: Tensor) -> Tensor:
    """Whether a document begins at a token, and another one ends before it: bool [batch, time]."""
    begins = torch.zeros_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return begins


def positions_of(segments: Tensor) -> Tensor:
    """Each token's position within its document, from 0: int64 [batch, time].

    segments: int64 [batch, time], the number of each token's document.
    """
    # A token's position is its place minus the place at which its document begins.
    place = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    return place - torch.where(_begins(segments), place, 0).cummax(dim=1).values


def causal_lm(model: nn.Module) -> CausalLM | None:
    """`CausalLM` for a causal LM of transformers, as it is or wrapped by peft; None for every other model."""
    # If the libraries are not imported, the model cannot be one of theirs.
    transformers, peft = sys.modules.get("transformers"), sys.modules.get("peft")
    if transformers is None:
        return None
    base: Any = model
    if peft is not None and isinstance(model, peft.PeftModel):
        base = cast(Any, model).get_base_model()
    if not isinstance(base, transformers.PreTrainedModel):
        return None

    # A user's own subclass of a causal LM is one, too.
    listed = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    names = set(listed.values())
    if any(kind.__name__ in names for kind in type(base).__mro__):
        return CausalLM(model)
    return None


@torch.no_grad()
def check(model: Any, where: str) -> None:
    """Try a causal LM of transformers on twelve tokens, in eval mode and on its device. Other models are not tried.

    Raises ConfigError if model.args.loss_chunk is set and the model does more with its logits than return them.
    Raises ConfigError if its forward fails, and if a token changes the logits of earlier ones. Raises it too if the
    model's own loss is not the mean cross-entropy of its logits (plus the auxiliary loss), because training on logits
    would leave something out.
    The result on packed documents is left on the model, for `CausalLM.unpackable`.
    """
    called = causal_lm(model)
    if called is None or deferred.device_of(model).type == "meta":
        return

    was_training = model.training
    model.eval()
    try:
        if called.chunk:
            _check_chunks(called, model, where)
        # The rest compares values, which fake tensors do not have.
        if not isinstance(torch.empty(0), FakeTensor):
            _check_values(called, model, where)
    except (HarnessError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever its code raises
        what = f"{called.kind} fails on twelve tokens: {_short(error)}"
        why = "sizes of its config.json, or those of model.args.config, may not fit each other"
        fix = "run it in transformers with the same config: model(input_ids), and repair the config"
        raise ConfigError(Problem(what, where, why, fix)) from error
    finally:
        model.train(was_training)


def _check_values(called: CausalLM, model: Any, where: str) -> None:
    """The part of `check` that compares logits and losses of twelve random tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(called.vocab_size, (1, 12), generator=generator, device="cpu")
    ids = ids.to(deferred.device_of(model))
    with torch.random.fork_rng(devices=[]), _quiet(sys.modules["transformers"]):
        _check_causal(called, model, ids, where)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        setattr(base, _UNPACKABLE, _unpackable(called, model, ids))


def _check_causal(called: CausalLM, model: nn.Module, ids: Tensor, where: str) -> None:
    """Raise ConfigError if the model sees later tokens, or if its loss is of another kind."""
    labelled = called.outputs(model, ids, labels=ids)
    logits = labelled.logits.float()

    # Change token 8: the logits of the eight before it must stay.
    changed = _with_another(ids, 8, called.vocab_size)
    after = called.outputs(model, changed).logits.float()
    if _moved(logits[:, :8], after[:, :8], logits) > _ROUNDING:
        why = "it would learn to copy the targets, which are the next inputs"
        fix = "take a decoder; for BERT and its kind: model.args.config={is_decoder: true}"
        raise ConfigError(Problem(f"a token of {called.kind} sees those after it", where, why, fix))

    # The model's own loss for these labels must be the one that is computed here.
    if labelled.loss is None:
        return
    expected = F.cross_entropy(logits[0, :-1], ids[0, 1:])
    auxiliary = called.auxiliary(labelled)
    if auxiliary is not None:
        expected = expected + auxiliary
    own, ours = float(labelled.loss), float(expected)
    if not abs(own - ours) <= _SAME_LOSS * abs(ours):
        why = f"its own is {own:.4f}, the mean cross-entropy of its logits {ours:.4f}"
        fix = (
            "give a module of your own that returns the loss: model.target=package.module:function"
        )
        raise ConfigError(Problem(f"the loss of {called.kind} is of its own kind", where, why, fix))


def _check_chunks(called: CausalLM, model: nn.Module, where: str) -> None:
    """Raise ConfigError if the forward does anything with its logits: in chunks there are none. Needs no values."""
    ids = torch.zeros((1, 12), dtype=torch.int64, device=deferred.device_of(model))
    counted = torch.ones((), device=ids.device)
    what = f"{called.kind} cannot compute its loss in chunks"
    fix = f"leave it out for {where}"
    if not called.head:
        raise ConfigError(
            Problem(what, "model.args.loss_chunk", "it has no output embeddings", fix)
        )
    why = "its forward caps, scales or cuts the logits"
    try:
        with called.loss_for_logits(ids.flatten(), counted) as made:
            output = called.outputs(model, ids)
    except Exception as error:  # whatever its forward does with a loss where it has logits
        raise ConfigError(
            Problem(what, "model.args.loss_chunk", f"{why}: {_short(error)}", fix)
        ) from error
    # The same object, and not changed in place either.
    if len(made) != 1 or output.logits is not made[0] or made[0]._version != 0:
        raise ConfigError(Problem(what, "model.args.loss_chunk", why, fix))


def _unpackable(called: CausalLM, model: nn.Module, ids: Tensor) -> str:
    """Why `model` gets packed documents wrong; empty if it gets them right.

    Three documents are packed: tokens 0 to 4, 5 to 8 and 9 to 11. The logits of the second one must stay the same if a
    last token of the first one changes (a short convolution reaches no further), and if the second one lies elsewhere
    in the sample.
    """
    segments = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3], device=ids.device)
    other = _with_another(ids, 4, called.vocab_size)
    # The same second document, after a first one of two tokens.
    earlier = torch.cat([ids[:, :2], ids[:, 5:9], ids], 1)[:, :12]
    earlier_segments = torch.tensor([[0] * 2 + [1] * 4 + [2] * 6], device=ids.device)
    called.unpackable = ""
    try:
        logits = called.outputs(model, ids, segments).logits.float()
        changed = called.outputs(model, other, segments).logits.float()
        shifted = called.outputs(model, earlier, earlier_segments).logits.float()
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"its forward fails with position_ids: {_short(error)}"

    second = logits[:, 5:9]
    if _moved(second, changed[:, 5:9], logits) > _ROUNDING:
        return "a token of one document moves the logits of the next"
    if _moved(second, shifted[:, 2:6], logits) > _SHIFTED:
        return "a document's logits depend on where in the sample it lies"
    return ""


def _with_another(ids: Tensor, place: int, vocab_size: int) -> Tensor:
    """The ids with another token at `place`."""
    changed = ids.clone()
    changed[:, place] = (changed[:, place] + 1) % vocab_size
    return changed


def _moved(one: Tensor, other: Tensor, logits: Tensor) -> float:
    """The largest difference, as a share of the largest of `logits`; infinite if anything is not finite."""
    # Not under the smallest float: logits may all be zero.
    smallest = torch.finfo(torch.float32).tiny
    largest = logits.abs().max().clamp(min=smallest)
    share = float((one - other).abs().max() / largest)
    return share if math.isfinite(share) else math.inf
