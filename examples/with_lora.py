"""LoRA in a loop of your own: a frozen base in FP8, adapters by peft. Run: python examples/with_lora.py [recipe]"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

import torch

from harness import Precision

try:
    import peft
    import transformers
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}: in the project's folder: pip install -e '.[peft,hf]'")


def base(folder: Path) -> Path:
    """A folder as one would have fetched it from the hub."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes, **heads
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def main(recipe: str, folder: Path) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    # A frozen base, with trained adapters beside each Linear.
    load = transformers.AutoModelForCausalLM.from_pretrained
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear")
    model = peft.get_peft_model(load(base(folder / "base"), dtype=torch.float32), lora)
    precision = Precision.from_recipe(recipe)
    model = precision.prepare(model.to(device).train())  # before get_peft_model is as good

    # The optimizer gets the adapters alone. A frozen layer computes in FP8 too, and has no weight gradient.
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2, fused=True)
    frozen = sum(row.reason.endswith("no weight gradient") for row in precision.plan.layers)
    layers = f"{len(precision.plan.fp8_layers())} FP8 layers, {frozen} frozen"
    print(f"{recipe} runs as {precision.plan.resolved}: {layers}")
    trained = sum(map(torch.numel, adapters))
    print(f"{trained:,} of {model.num_parameters():,} parameters are trained")

    # The text is this file; a token is a byte.
    tokens = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    for step in range(80):
        starts = torch.randint(len(tokens) - 64, (8,)).tolist()
        ids = torch.stack([tokens[start : start + 64] for start in starts])
        with precision.context():
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        precision.backward(loss)
        precision.step(optimizer, max_grad_norm=1.0)
        optimizer.zero_grad()
        if step % 20 == 0 or step == 79:
            print(f"step {step:2d}  loss {loss.item():.4f}")

    # Adapters are saved and loaded as without the harness.
    model.save_pretrained(folder / "adapters")
    again = load(folder / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(again, folder / "adapters").to(device).eval()
    with torch.no_grad():  # outside of context(): plain float32
        same = torch.equal(again(ids).logits, model.eval()(ids).logits)
    print(f"adapters loaded back: {'the same logits' if same else 'OTHER LOGITS'}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(sys.argv[1] if len(sys.argv) > 1 else "fp8_hybrid", Path(scratch))
