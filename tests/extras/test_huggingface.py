"""Models of transformers from local folders: their weights, their loss, packed samples, and what is refused."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from harness.core.config import ModelConfig
from harness.core.errors import CheckpointError, ConfigError
from harness.engines.parts import ModelPart
from harness.models import Task, build_model
from harness.models.huggingface import causal_lm, check, positions_of, tokenizer_of
from harness.precision.api import Precision
from tests.extras.tiny_models import CONFIGS, VOCAB, batch, estimated, fresh, load, save
from tests.support.waits import HostReads
from tests.support.wide import Wide

KINDS = sorted(CONFIGS)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_folder(kind: str, tmp_path: Path) -> None:
    model = load(save(tmp_path, kind))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    ours = model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert model.training


def test_sharded_bf16_weights_become_fp32_masters(tmp_path: Path) -> None:
    save(tmp_path, "llama", torch.bfloat16, shard="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    model = load(tmp_path)
    stored = {
        name: value
        for file in tmp_path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, stored[name].float())


def test_a_config_alone_gives_weights_of_the_seed(tmp_path: Path) -> None:
    CONFIGS["llama"]().save_pretrained(tmp_path)
    made = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        made.append(build_model(ModelConfig(target=f"hf:{tmp_path}/config.json")).state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])
    assert not torch.equal(made[0]["lm_head.weight"], made[2]["lm_head.weight"])


def test_fresh_weights_and_other_sizes_in_place_of_the_stored(tmp_path: Path) -> None:
    model: Any = load(save(tmp_path, "llama"), weights="fresh", config={"num_hidden_layers": 3})
    assert len(model.model.layers) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_the_cross_entropy_of_the_successors(kind: str, tmp_path: Path) -> None:
    model, tokens = load(save(tmp_path, kind), aux_loss=False), batch()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = F.cross_entropy(
            theirs(tokens["inputs"]).logits.flatten(0, 1), tokens["targets"].flatten()
        )
        ours = Task(model.eval(), "hf").loss(model, tokens)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_ignored_targets_have_no_loss(tmp_path: Path) -> None:
    model, tokens = load(save(tmp_path, "llama")), batch(1, 8)
    with torch.no_grad():
        each = F.cross_entropy(
            model(tokens["inputs"]).logits[0], tokens["targets"][0], reduction="none"
        )
        tokens["targets"][0, 2:] = -100
        two = Task(model, "hf").loss(model, tokens)
        tokens["targets"][:] = -100
        none = Task(model, "hf").loss(model, tokens)
    torch.testing.assert_close(two, each[:2].mean())
    assert none.item() == 0


def test_logits_have_no_float32_copy(tmp_path: Path) -> None:
    """Llama 3's vocabulary has 2^17 ids. Of 256 tokens, 32 are in float32 at a time."""
    vocab = 2**17
    model = load(
        save(tmp_path, "llama", vocab_size=vocab, hidden_size=16, max_position_embeddings=128)
    )
    tokens = batch(2, 128)
    with Wide(vocab) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        Task(model, "hf").loss(model, tokens).backward()
    assert 0 < seen.largest <= 2**22


def test_routers_loss_is_trained_on_and_not_validated_on(tmp_path: Path) -> None:
    tokens = batch()
    model, without = load(save(tmp_path, "mixtral")), load(tmp_path, aux_loss=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    out = theirs(tokens["inputs"], output_router_logits=True)
    extra = theirs.config.router_aux_loss_coef * out.aux_loss
    assert extra > 1e-4
    losses = [Task(each, "hf").loss(each, tokens) for each in (model, without)]
    losses.append(Task(model, "hf").loss(model.eval(), tokens))
    torch.testing.assert_close(losses[0], losses[1] + extra)
    torch.testing.assert_close(losses[2], losses[1])


SEGMENTS = torch.tensor([[0] * 7 + [1] * 1 + [2] * 12 + [3] * 12, [0] * 32])


def test_positions_begin_anew_in_each_document() -> None:
    assert positions_of(torch.tensor([[0, 0, 0, 1, 2, 2], [4, 4, 1, 1, 1, 1]])).tolist() == [
        [0, 1, 2, 0, 0, 1],
        [0, 1, 0, 1, 2, 3],
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_as_each_alone(kind: str, attention: str, tmp_path: Path) -> None:
    model = load(save(tmp_path, kind), attention=attention).eval()
    task, tokens = Task(model, "hf"), batch()
    with torch.no_grad():
        packed = task.loss(model, {**tokens, "segments": SEGMENTS})
        losses, counts = [], []
        for row in range(2):
            for number in SEGMENTS[row].unique():
                here = SEGMENTS[row] == number
                losses.append(
                    task.loss(
                        model, {name: each[row : row + 1, here] for name, each in tokens.items()}
                    )
                )
                counts.append(int(here.sum()))
        unpacked = task.loss(model, tokens)
    alone = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    assert abs(unpacked - alone) > 1e-4  # what attention across documents would give


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixtral"])
def test_a_forward_reads_no_value_from_the_device(kind: str, packed: bool, tmp_path: Path) -> None:
    """transformers asks in each forward whether a sample is packed. A mixture's loop over experts waits anyway."""
    model, tokens = load(save(tmp_path, kind)), batch()
    given = {**tokens, "segments": SEGMENTS} if packed else tokens
    task = Task(model, "hf")
    with HostReads() as seen:
        task.loss(model, given)
    assert seen.count == 0

    asked = HostReads()
    with asked:
        model(tokens["inputs"], use_cache=False)
    assert asked.count > 0, "transformers asks no more: `_documents_known` can go"


def test_an_estimate_attends_as_training_does(tmp_path: Path) -> None:
    """Without a mask, so in a fused kernel. With one, 2048 tokens would keep 4 heads x 2048^2 numbers a layer."""
    folder = save(tmp_path, "llama", max_position_embeddings=2048)
    made = estimated(folder, "H100", 2048)
    assert made["at_peak_gib"]["activations"] * 2**30 < 4 * 2048**2 * 2


def test_a_model_that_mixes_packed_documents_is_refused(tmp_path: Path) -> None:
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        ffn_dim=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=64,
    )
    config.save_pretrained(tmp_path)
    model = load(tmp_path)
    task = Task(model, "hf")
    assert task.loss(model, batch()).item() > 0
    with pytest.raises(ConfigError, match="OPTForCausalLM cannot train on packed samples"):
        task.loss(model, {**batch(), "segments": SEGMENTS})


def test_a_model_that_sees_its_targets_is_refused(tmp_path: Path) -> None:
    transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sees those after it"):
        load(tmp_path)
    assert load(tmp_path, config={"is_decoder": True}).training


def test_vocabulary_and_positions_bound_the_samples(tmp_path: Path) -> None:
    model = load(save(tmp_path, "gpt2", vocab_size=208))
    task = Task(model, "hf")
    assert task.vocab_size == 208
    with pytest.raises(
        ConfigError, match="65 tokens are longer than the 64 positions of GPT2LMHeadModel"
    ):
        task.loss(model, {name: each % 208 for name, each in batch(1, 65).items()})


def test_dropout_is_on_in_training_and_off_in_evaluation(tmp_path: Path) -> None:
    model, tokens = load(save(tmp_path, "gpt2", resid_pdrop=0.5)), batch()
    task = Task(model, "hf")
    with torch.no_grad():
        assert task.loss(model, tokens) != task.loss(model, tokens)
        model.eval()
        assert task.loss(model, tokens) == task.loss(model, tokens)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("llama", "fp8_hybrid"),
        ("gpt2", "fp8_hybrid"),
        ("mixtral", "fp8_hybrid"),
        ("llama", "fp8_dynamic"),
        ("mixtral", "fp8_dynamic"),
    ],
)
def test_gradient_checkpointing_changes_no_bit(kind: str, recipe: str, tmp_path: Path) -> None:
    """With dropout (GPT-2), under FP8: losses, weights and amaxes of three steps."""
    save(tmp_path, kind, **({"resid_pdrop": 0.3, "attn_pdrop": 0.3} if kind == "gpt2" else {}))
    ends = []
    for checkpointing in (False, True):
        model = load(tmp_path, gradient_checkpointing=checkpointing)
        calls = _count_calls(model)
        precision = Precision.from_recipe(recipe)
        precision.prepare(model)
        task, optimizer = (
            Task(model, "hf"),
            torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        )
        torch.manual_seed(0)
        losses = []
        for step in range(3):
            with precision.context():
                loss = task.loss(model, batch(seed=step))
            precision.backward(loss)
            precision.step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        stats = precision.stats()
        assert stats is not None
        ends.append(
            (losses, list(stats.amax), [p.detach().clone() for p in model.parameters()], len(calls))
        )
    (losses, amax, weights, once), (again, amax_again, weights_again, twice) = ends
    assert twice == 2 * once  # blocks really were computed again
    assert losses == again
    assert amax == amax_again
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_again, strict=True))


def _count_calls(model: Any) -> list[int]:
    calls: list[int] = []
    part = (
        model.transformer.h[0].ln_1
        if hasattr(model, "transformer")
        else model.model.layers[0].input_layernorm
    )
    part.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_everything_wrong_with_the_weights_is_named(tmp_path: Path) -> None:
    save(tmp_path, "llama", shard="50KB")
    first, second, third, *_ = sorted(tmp_path.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    told = str(caught.value)
    assert f"{first}: is missing" in told
    assert f"{second}: is damaged" in told
    assert str(third) not in told


def test_missing_and_left_out_weights_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    weights = load_file(tmp_path / "model.safetensors")
    head = weights.pop("lm_head.weight")
    weights["score.weight"] = head[:2].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    told = str(caught.value)
    assert "1 weight missing: lm_head.weight" in told
    assert "1 weight would be left out: score.weight" in told
    weights["lm_head.weight"] = head
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert load(tmp_path, ignore=["score.*"]).training


def test_a_checkpoint_of_another_description_is_refused(tmp_path: Path) -> None:
    part = ModelPart(load(save(tmp_path, "llama")))
    tensors, meta = part.state_dict()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "use_cache": False, "transformers_version": "5.0.0"})
    )
    ModelPart(load(tmp_path)).load_state_dict(tensors, meta)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(
        CheckpointError,
        match="description of the model has changed since the checkpoint was written",
    ):
        ModelPart(load(tmp_path)).load_state_dict(tensors, meta)


def test_weights_of_other_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"of another shape: .*\[128, 64\], not \[192, 64\]"):
        load(save(tmp_path, "llama"), config={"intermediate_size": 192})


def test_pickles_quantised_weights_and_foreign_code_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    strange = {**config, "model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (tmp_path / "config.json").write_text(
        json.dumps({**strange, "quantization_config": {"quant_method": "fp8"}})
    )
    (tmp_path / "mine.py").write_text("raise SystemExit('code of the model was run')")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    told = str(caught.value)
    assert "has no model.safetensors, but pytorch_model.bin" in told
    assert "stored quantised (fp8)" in told
    assert "needs code of its own" in told


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def dangling_index(folder: Path) -> None:
    """As of a snapshot of the hub's cache that was copied without the blobs."""
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
        file.symlink_to("../../blobs/0123")


def dangling_file(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/0123")


@pytest.mark.parametrize("broken", [no_index, dangling_index, dangling_file])
def test_weights_that_cannot_be_found_are_not_replaced_by_new_ones(
    tmp_path: Path, broken: Callable[[Path], None]
) -> None:
    save(tmp_path, "llama", shard="100KB")
    broken(tmp_path)
    with pytest.raises(ConfigError, match=r"has no model\.safetensors that can be read, but model"):
        load(tmp_path)
    assert load(tmp_path, weights="fresh").training


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"atention": "eager"}, "attention"),
        ({"attention": "fast"}, "cannot be built"),
        ({"config": {"hidden_sise": 3}}, 'did you mean "hidden_size"'),
        ({"lora": {"r": 0}}, "lora"),
        ({"lora": {"targets": ["nothing"]}}, "nothing"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        load(save(tmp_path, "llama"), **args)


def test_sizes_that_do_not_fit_each_other_are_named(tmp_path: Path) -> None:
    wrong = {"num_key_value_heads": 3}
    with pytest.raises(ConfigError, match="LlamaForCausalLM fails on twelve tokens: RuntimeError"):
        load(save(tmp_path, "llama"), weights="fresh", config=wrong)


def test_any_number_of_positions_is_no_bound(tmp_path: Path) -> None:
    """XLNet says -1. It is refused for what it is: a model that sees later tokens."""
    transformers.XLNetConfig(
        vocab_size=VOCAB, d_model=32, n_layer=1, n_head=2, d_inner=64
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sees those after it"):
        load(tmp_path)


def test_one_short_convolution_does_not_keep_documents_apart(tmp_path: Path) -> None:
    """It moves the logits of two tokens after the last one of a document, and no others."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64}
    layers = ["conv", "full_attention"]
    config = transformers.Lfm2Config(
        **sizes,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        layer_types=layers,
    )
    config.save_pretrained(tmp_path)
    model = load(tmp_path)
    with pytest.raises(ConfigError, match="a token of one document moves the logits of the next"):
        Task(model, "hf").loss(model, {**batch(), "segments": SEGMENTS})


def test_a_name_of_the_hub_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="only local folders are read"):
        build_model(ModelConfig(target="hf:meta-llama/Llama-3.1-8B"))


def test_the_network_is_never_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("the network was asked")

    save(tmp_path, "llama")
    monkeypatch.setattr(socket.socket, "connect", refused)
    monkeypatch.setattr(socket, "getaddrinfo", refused)
    assert load(tmp_path, lora={"r": 2}).training


def test_a_target_of_ones_own_may_return_such_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_hf.py").write_text(
        "from tests.extras.tiny_models import fresh\ndef build():\n    return fresh('qwen2').train()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = build_model(ModelConfig(target="own_hf:build"))
    with torch.no_grad():
        expected = F.cross_entropy(
            fresh("qwen2")(batch()["inputs"]).logits.flatten(0, 1), batch()["targets"].flatten()
        )
        torch.testing.assert_close(Task(model, "own_hf:build").loss(model, batch()), expected)


def test_models_for_other_tasks_are_left_to_their_own_loss() -> None:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    masked = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=64, **sizes))
    images = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=8, **sizes)
    )
    assert causal_lm(masked) is None
    assert causal_lm(images) is None
    check(masked, "here")
    assert Task(images, "own:model").vocab_size is None
    own = type("Own", (transformers.LlamaForCausalLM,), {})(CONFIGS["llama"]())
    assert causal_lm(own) is not None


def test_the_folder_offers_its_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_of(f"hf:{tmp_path}") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_of(f"hf:{tmp_path}") == tmp_path / "tokenizer.json"
    assert tokenizer_of(f"hf:{tmp_path}/config.json") == tmp_path / "tokenizer.json"
    assert tokenizer_of("harness.models.gpt:build") is None
