"""The predictions of this checkout's roofline for the step of another checkout, such as an older commit.

    git worktree add /tmp/older 78163a7
    python tests/cuda_on_paper/of_checkout.py /tmp/older

Every room but `harness.estimate` is the other checkout's. Prints one line of JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main(checkout: Path) -> None:
    """Predict the steps of the 8-layer Llama on an H100, in bf16 and in our own FP8."""
    sys.path.insert(0, str(checkout))
    import harness

    room = ROOT / "harness" / "estimate"
    spec = importlib.util.spec_from_file_location(
        "harness.estimate", room / "__init__.py", submodule_search_locations=[str(room)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from harness.estimate import device

    device.load()
    from harness.core.config import load_config
    from harness.estimate.roofline import GIB, find_card, step_seconds, usual_rates
    from harness.estimate.trace import SAMPLED, USUAL, trace
    from harness.precision.recipe import load_recipe

    card, recipe = find_card("H100"), load_recipe("fp8_hybrid")
    config = load_config(str(ROOT / "configs" / "llama3_8b_8layers.yaml"))
    found: dict[str, object] = {"harness": str(Path(harness.__file__ or "").parent)}
    for name in ("autocast:bf16", "native:fp8"):
        rung = next(rung for rung in recipe.ladder if rung.name == name)
        made = trace(config, recipe, card, rung)
        found[name] = {
            "usual_ms": round(step_seconds(made.steps[USUAL], usual_rates(card)) * 1e3, 1),
            "sampled_ms": round(step_seconds(made.steps[SAMPLED], usual_rates(card)) * 1e3, 1),
            "kernels": sum(op.kernels for op in made.steps[USUAL]),
            "gigabytes": round(sum(op.reads + op.writes for op in made.steps[USUAL]) / 1e9, 1),
            "peak_gib": round(made.peak / GIB, 2),
            "waits": len(made.waits),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
