"""Converts the built-in GPT to and from Llama's weight names and config.json; with `qk_norm`, Qwen3's.

The models compute the same and differ in three names. Queries, keys and values are one matrix here, and three there.
Gate and up are one matrix here, and two there. `rope_base` is called `rope_theta` there. Both rotate pairs of (first
half, second half) of a head, so no weight is permuted. Nothing here needs transformers.

`build` is a `model.target`: it loads a folder with Llama's or Qwen3's weights into the built-in GPT, to train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from harness.core.errors import ConfigError, Problem, number_of, some
from harness.core.files import read_mapping
from harness.models.gpt import GPT, ROPE_BASE, SCALING, Settings
from harness.models.gpt import build as build_gpt
from harness.models.stored import INDEX, WEIGHTS, read_later, weight_files

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# The most problems of one kind that an error lists.
_SHOWN = 4
# What transformers takes if config.json has no rms_norm_eps.
_DEFAULT_EPS = 1e-6
# Our names and theirs. First outside of the blocks, then within one; these tensors are the same on both sides.
_ENDS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_SINGLE = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.out.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def _names(settings: Settings) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """For each of our tensors its name, and the tensors that its rows are in Llama: [(name, number of rows)].

    They follow each other from the first row on. -1 rows: the whole tensor.
    """
    for ours, theirs in _ENDS.items():
        # A tied head is the embedding.
        if ours != "lm_head.weight" or not settings.tied:
            yield ours, [(theirs, -1)]

    # Matrices that are one here and several there. One product of all is one launch, and in FP8 one cast of the input.
    queries = settings.heads * settings.head_dim
    keys = settings.kv_heads * settings.head_dim
    fused = {
        "attn.qkv.weight": [
            ("self_attn.q_proj", queries),
            ("self_attn.k_proj", keys),
            ("self_attn.v_proj", keys),
        ],
        "mlp.gate_up.weight": [("mlp.gate_proj", settings.ffn), ("mlp.up_proj", settings.ffn)],
    }

    for block in range(settings.layers):
        there = f"model.layers.{block}"
        for ours, theirs in _SINGLE.items():
            # Only Qwen3 has norms of queries and keys.
            if settings.qk_norm or not ours.endswith(("q_norm.weight", "k_norm.weight")):
                yield f"blocks.{block}.{ours}", [(f"{there}.{theirs}", -1)]
        for ours, parts in fused.items():
            split = [(f"{there}.{theirs}.weight", rows) for theirs, rows in parts]
            yield f"blocks.{block}.{ours}", split


def to_llama(state: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """A state_dict of the GPT under Llama's names, as views of the same memory. Llama omits a tied head, too."""
    made: dict[str, Tensor] = {}
    for ours, parts in _names(settings):
        tensor = state[ours]
        first = 0
        for name, rows in parts:
            last = len(tensor) if rows < 0 else first + rows
            made[name] = tensor[first:last]
            first = last
    return made


def from_llama(state: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The reverse of `to_llama`. The result is complete: a tied head is there under both of its names."""
    made: dict[str, Tensor] = {}
    for ours, parts in _names(settings):
        tensors = [state[name] for name, _ in parts]
        # A single one is not copied: it would be in memory twice while a large model is loaded.
        made[ours] = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
    if settings.tied:
        made["lm_head.weight"] = made["embed.weight"]
    return made


def config_of(settings: Settings, context: int) -> dict[str, Any]:
    """config.json of the same model, for transformers. context: length of the samples that it was trained on."""
    kind = "qwen3" if settings.qk_norm else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.rope_base}
    scaling: dict[str, Any] | None = None
    if settings.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **settings.rope_scaling}
        rope |= scaling
    return {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": settings.vocab,
        "hidden_size": settings.dim,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads,
        "head_dim": settings.head_dim,
        "intermediate_size": settings.ffn,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": settings.norm_eps,
        "rope_parameters": rope,
        # The same again, as versions before transformers 5 read it.
        "rope_theta": settings.rope_base,
        "rope_scaling": scaling,
        "max_position_embeddings": context,
        "tie_word_embeddings": settings.tied,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
        "torch_dtype": "float32",
    }


def settings_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`gpt.build`'s arguments for the model that a config.json describes; the reverse of `config_of`.

    Raises ConfigError naming everything in it that the built-in GPT does not compute.
    """
    kind = config.get("model_type")
    fix = "use model.target=hf:FOLDER, which takes the model as transformers builds it"
    if kind not in ARCHITECTURES:
        raise ConfigError(
            Problem(f"model_type {kind!r} is neither llama nor qwen3", where, fix=fix)
        )
    # Defaults are those of transformers.
    heads = config.get("num_attention_heads", 32)
    dim = config.get("hidden_size", 4096)
    # transformers 5 writes rope_parameters, earlier versions rope_scaling.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_kind = rope.get("rope_type", rope.get("type", "default"))

    # Options under which the model would compute something else: refused by name, never ignored.
    rotated = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
    default_head_dim = 128 if kind == "qwen3" else None
    head_dim = config.get("head_dim", default_head_dim)
    unlike = {
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding windows (use_sliding_window)": bool(config.get("use_sliding_window")),
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        f"rope_type {rope_kind}": rope_kind not in ("default", "llama3"),
        "a partial_rotary_factor": rotated != 1,
        "quantised weights (quantization_config)": bool(config.get("quantization_config")),
        "dropout in attention": bool(config.get("attention_dropout")),
        f"head_dim {config.get('head_dim')} in a width of {dim} with {heads} heads": (
            head_dim not in (None, dim // heads)
        ),
    }
    problems: list[Problem] = []
    for name, present in unlike.items():
        if present:
            what = f"has {name}, which the built-in GPT does not compute"
            problems.append(Problem(what, where, fix=fix))
    if problems:
        raise ConfigError(problems)

    theta = rope.get("rope_theta") or config.get("rope_theta") or ROPE_BASE
    scaling = None
    if rope_kind == "llama3":
        scaling = {key: rope.get(key) for key in SCALING}
        # transformers takes the model's own length if the original one is not given.
        original = SCALING[-1]
        scaling[original] = rope.get(original, config.get("max_position_embeddings"))
    return {
        "vocab": config.get("vocab_size"),
        "dim": dim,
        "layers": config.get("num_hidden_layers"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "ffn": config.get("intermediate_size"),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "qk_norm": kind == "qwen3",
        "rope_base": theta,
        "rope_scaling": scaling,
        "norm_eps": config.get("rms_norm_eps", _DEFAULT_EPS),
    }


def build(
    folder: str,
    z_loss: float = 0.0,
    loss_chunk: int = 0,
    recompute: str = "none",
    recompute_every: int = 1,
) -> GPT:
    """The built-in GPT with the weights of a Llama or Qwen3, in fp32 whatever they are stored in.

    folder: has config.json, and model.safetensors or its shards. The other arguments are `gpt.build`'s.
    Raises ConfigError naming what is missing, unreadable, or not computed by the built-in GPT.
    """
    where = f"model.args.folder {folder}"
    # On the meta device: the weights come from the files, so memory for fresh ones would be wasted.
    with torch.device("meta"):
        model = skeleton(folder, z_loss, loss_chunk, recompute, recompute_every)
    settings = model.settings

    # The stored weights, without what some writers store in addition: a tied head, and constants of the rotation.
    state: dict[str, Tensor] = {}
    for name, tensor in _read(Path(folder).expanduser(), where).items():
        tied_head = settings.tied and name == "lm_head.weight"
        if not tied_head and not name.endswith("rotary_emb.inv_freq"):
            state[name] = tensor

    named = to_llama(model.state_dict(), settings)
    shapes = {name: tensor.shape for name, tensor in named.items()}
    _check_weights(state, shapes, where)

    # float32 are the optimizer's master weights, from which every lower precision is cast.
    ours = from_llama(state, settings)
    weights = {name: tensor.float() for name, tensor in ours.items()}
    model.load_state_dict(weights, assign=True)
    # Assigning has made two Parameters of a tied weight.
    if settings.tied:
        model.lm_head.weight = model.embed.weight
    return model


def _check_weights(
    state: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], where: str
) -> None:
    """Raise ConfigError naming weights that are missing, that have no place, or that have another shape."""
    problems: list[Problem] = []
    missing = sorted(wanted.keys() - state.keys())
    if missing:
        what = f"lacks {number_of(len(missing), 'weight')}: {some(missing, _SHOWN)}"
        problems.append(Problem(what, where, fix="give the whole model"))

    surplus = sorted(state.keys() - wanted.keys())
    if surplus:
        weights = number_of(len(surplus), "weight")
        what = f"has {weights} that the built-in GPT has no place for: {some(surplus, _SHOWN)}"
        problems.append(Problem(what, where, fix="use model.target=hf:FOLDER"))

    # Of a wrong size in config.json hundreds of weights differ: the first few show which size it is.
    both = [name for name in wanted if name in state]
    mismatched = [name for name in both if state[name].shape != wanted[name]]
    for name in mismatched[:_SHOWN]:
        shape = list(state[name].shape)
        what = f"{name} is {shape}, config.json says {list(wanted[name])}"
        problems.append(Problem(what, where, fix="mend config.json"))
    if problems:
        raise ConfigError(problems)


def skeleton(
    folder: str,
    z_loss: float = 0.0,
    loss_chunk: int = 0,
    recompute: str = "none",
    recompute_every: int = 1,
) -> GPT:
    """The model that config.json describes, with fresh weights. The arguments are `build`'s. Raises ConfigError."""
    path = Path(folder).expanduser() / "config.json"
    if not path.is_file():
        fix = "give a folder with config.json and *.safetensors"
        raise ConfigError(Problem("has no config.json", f"model.args.folder {folder}", fix=fix))
    sizes = settings_of(read_mapping(path), str(path))
    return build_gpt(
        **sizes,
        z_loss=z_loss,
        loss_chunk=loss_chunk,
        recompute=recompute,
        recompute_every=recompute_every,
    )


def _read(path: Path, where: str) -> dict[str, Tensor]:
    """Every tensor of the safetensors in `path`, by name. Raises ConfigError naming every file that cannot be read."""
    # Without an index the single file is the one that is missed.
    files = [WEIGHTS]
    if (path / INDEX).is_file():
        try:
            files = weight_files(path)
        except (OSError, ValueError):
            files = []

    problems: list[Problem] = []
    state: dict[str, Tensor] = {}
    for name in files:
        try:
            if Path(name).name != name:
                raise ValueError("the index names a file outside of the folder")
            state |= read_later([path / name])
        except (OSError, SafetensorError, ValueError) as error:
            problems.append(
                Problem(f"{name} cannot be read: {error}", where, fix="fetch the file again")
            )

    if not files:
        problems.append(Problem(f"{INDEX} lists no files", where, fix="fetch the file again"))
    if problems:
        raise ConfigError(problems)
    return state
