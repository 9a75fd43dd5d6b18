"""The built-in GPT as others know it: the names and config.json of Llama, or with `qk_norm` of Qwen3, both ways.

The models compute the same. Three things are only called otherwise: queries, keys and values are one matrix here, gate
and up are another, and rope_base is rope_theta. Both rotate pairs of (first half, second half) of a head. Nothing here
needs transformers.

`build` is a `model.target`: a folder with Llama's or Qwen3's weights as the built-in GPT, to train on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.core.errors import ConfigError, Problem, some
from harness.core.files import MAX_LARGE, read_mapping
from harness.models.gpt import GPT, ROPE_BASE, SCALING, Settings
from harness.models.gpt import build as build_gpt

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SHOWN = 4
# What transformers takes where config.json says nothing.
_DEFAULT_EPS = 1e-6
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
    """Each of our names with what its rows are called there: (name, rows), from the first row on; rows -1: all."""
    for ours, theirs in _ENDS.items():
        if ours != "lm_head.weight" or not settings.tied:
            yield ours, [(theirs, -1)]
    queries, keys = settings.heads * settings.head_dim, settings.kv_heads * settings.head_dim
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
            if settings.qk_norm or not ours.endswith(("q_norm.weight", "k_norm.weight")):
                yield f"blocks.{block}.{ours}", [(f"{there}.{theirs}", -1)]
        for ours, parts in fused.items():
            yield (
                f"blocks.{block}.{ours}",
                [(f"{there}.{theirs}.weight", rows) for theirs, rows in parts],
            )


def to_llama(state: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """A state_dict of the GPT under Llama's names; views of the same memory. A tied head is left out, as there."""
    made: dict[str, Tensor] = {}
    for ours, parts in _names(settings):
        tensor = state[ours]
        rows = [count if count >= 0 else len(tensor) for _, count in parts]
        made |= zip((name for name, _ in parts), tensor.split(rows), strict=True)
    return made


def from_llama(state: Mapping[str, Tensor], settings: Settings) -> dict[str, Tensor]:
    """The reverse of `to_llama`, complete: a tied head is there under both of its names."""
    made = {
        ours: torch.cat([state[name] for name, _ in parts])
        if len(parts) > 1
        else state[parts[0][0]]
        for ours, parts in _names(settings)
    }
    return made | ({"lm_head.weight": made["embed.weight"]} if settings.tied else {})


def config_of(settings: Settings, context: int) -> dict[str, Any]:
    """config.json of the same model for transformers. context: tokens that it was trained on at a time."""
    kind = "qwen3" if settings.qk_norm else "llama"
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": settings.rope_base}
    if settings.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **settings.rope_scaling}
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
        # The same once more for readers from before transformers 5.
        "rope_theta": settings.rope_base,
        "rope_scaling": None
        if settings.rope_scaling is None
        else {"rope_type": "llama3", **settings.rope_scaling},
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
    heads, dim = config.get("num_attention_heads", 32), config.get("hidden_size", 4096)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope_kind = rope.get("rope_type", rope.get("type", "default"))
    other = {
        "attention_bias": bool(config.get("attention_bias")),
        "mlp_bias": bool(config.get("mlp_bias")),
        "sliding windows (use_sliding_window)": bool(config.get("use_sliding_window")),
        f"hidden_act {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        f"rope_type {rope_kind}": rope_kind not in ("default", "llama3"),
        "a partial_rotary_factor": (
            rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1
        )
        != 1,
        "quantised weights (quantization_config)": bool(config.get("quantization_config")),
        "dropout in attention": bool(config.get("attention_dropout")),
        f"head_dim {config.get('head_dim')} in a width of {dim} with {heads} heads": (
            config.get("head_dim", 128 if kind == "qwen3" else None) not in (None, dim // heads)
        ),
    }
    if problems := [
        Problem(f"has {name}, which the built-in GPT does not compute", where, fix=fix)
        for name, there in other.items()
        if there
    ]:
        raise ConfigError(problems)
    theta = rope.get("rope_theta") or config.get("rope_theta") or ROPE_BASE
    scaling = None
    if rope_kind == "llama3":
        length = config.get("max_position_embeddings")
        scaling = {key: rope.get(key, length if key == SCALING[-1] else None) for key in SCALING}
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
    """The built-in GPT with the weights in `folder`: config.json and model.safetensors (or its shards) of a Llama or a
    Qwen3, in fp32 whatever they are stored in. The other arguments are `gpt.build`'s.

    Raises ConfigError naming what is missing, unreadable, or not computed by the built-in GPT.
    """
    where = f"model.args.folder {folder}"
    with torch.device("meta"):
        model = skeleton(folder, z_loss, loss_chunk, recompute, recompute_every)
    state = _read(Path(folder).expanduser(), where)
    wanted = {
        name: tensor.shape for name, tensor in to_llama(model.state_dict(), model.settings).items()
    }
    if model.settings.tied:
        state.pop("lm_head.weight", None)
    state = {
        name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")
    }
    problems = [
        Problem(
            f"lacks {len(missing)} weights: {some(missing, _SHOWN)}",
            where,
            fix="give the whole model",
        )
        for missing in [sorted(wanted.keys() - state.keys())]
        if missing
    ]
    if surplus := sorted(state.keys() - wanted.keys()):
        what = f"has {len(surplus)} weights that the built-in GPT has no place for: {some(surplus, _SHOWN)}"
        problems.append(Problem(what, where, fix="use model.target=hf:FOLDER"))
    problems += [
        Problem(
            f"{name} is {list(state[name].shape)}, config.json says {list(shape)}",
            where,
            fix="mend config.json",
        )
        for name, shape in wanted.items()
        if name in state and state[name].shape != shape
    ][:_SHOWN]
    if problems:
        raise ConfigError(problems)
    model.load_state_dict(
        {name: tensor.float() for name, tensor in from_llama(state, model.settings).items()},
        assign=True,
    )
    if model.settings.tied:
        model.lm_head.weight = model.embed.weight
    return model


def skeleton(
    folder: str,
    z_loss: float = 0.0,
    loss_chunk: int = 0,
    recompute: str = "none",
    recompute_every: int = 1,
) -> GPT:
    """`build`'s model with fresh weights: what config.json alone says. Raises ConfigError."""
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
    """Every tensor of the safetensors in `path`, by name. Raises ConfigError."""
    files = [_WEIGHTS]
    if (path / _INDEX).is_file():
        listed = read_mapping(path / _INDEX, MAX_LARGE).get("weight_map")
        files = sorted(set(map(str, listed.values()))) if isinstance(listed, dict) else []
    problems: list[Problem] = []
    state: dict[str, Tensor] = {}
    for name in files:
        try:
            if Path(name).name != name:
                raise ValueError("the index leads out of the folder")
            with safe_open(path / name, framework="pt") as stream:
                state |= {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            problems.append(
                Problem(f"{name} cannot be read: {error}", where, fix="fetch the file again")
            )
    if problems or not files:
        raise ConfigError(
            problems or [Problem(f"{_INDEX} lists no files", where, fix="fetch the file again")]
        )
    return state
