"""`harness estimate` of mixtures of experts from Hugging Face, against counts by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from tests.support import paper
from tests.support.matrix import rest_nightly

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
DIM, LAYERS, HEADS, KEYS, HEAD, VOCAB = 64, 2, 4, 2, 16, 256
TOKENS, CONTEXT = 4 * 64, 64
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
# A block's q, k, v and o; then what is its mixture's: the router, an expert, and what every token meets beside them.
ATTENTION = DIM * HEAD * (2 * HEADS + 2 * KEYS)
MIXTRAL = (4 * DIM, 3 * DIM * 96, 0)
QWEN2 = (8 * DIM, 3 * DIM * 48, 3 * DIM * 96 + DIM)  # a shared expert and its gate
CONFIGS = {
    "mixtral": (
        transformers.MixtralConfig(
            intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, **_COMMON
        ),
        MIXTRAL,
        (4, 2),
    ),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig(
            moe_intermediate_size=48,
            shared_expert_intermediate_size=96,
            num_experts=8,
            num_experts_per_tok=3,
            qkv_bias=False,
            **_COMMON,
        ),
        QWEN2,
        (8, 3),
    ),
}


@pytest.mark.parametrize("kind", rest_nightly(CONFIGS, "mixtral"))
def test_a_token_meets_its_own_experts(kind: str, tmp_path: Path) -> None:
    config, (router, expert, shared), (experts, chosen) = CONFIGS[kind]
    config.save_pretrained(tmp_path)
    asked = ("--config", "tiny", "--recipe", "bf16", "--json")
    done = paper.estimate(*asked, f"model.target=hf:{tmp_path}", "model.args={}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    matrices = LAYERS * (ATTENTION + router + experts * expert + shared) + 2 * VOCAB * DIM
    norms = (2 * LAYERS + 1) * DIM
    assert found["parameters"] == matrices + norms
    active = LAYERS * (ATTENTION + router + chosen * expert + shared) + VOCAB * DIM
    # FlashAttention: two products forward, five backward. The causal half of each is left out.
    product = LAYERS * CONTEXT * HEADS * HEAD
    assert found["flops"] == 6 * TOKENS * active + 2 * TOKENS * product * (2 + 5) / 2
