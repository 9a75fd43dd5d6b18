"""The protections of the built-in GPT, and of what is exported of a run."""

from __future__ import annotations

from mutation import Mutation

MODELS: tuple[Mutation, ...] = (
    Mutation(
        5,
        "a model that memory cannot hold is refused before it is built",
        "    if not there or weights + objects <= there:\n",
        "    if True:\n",
        "tests/unit/models/test_room.py -k last_byte",
    ),
    Mutation(
        5,
        "a model of one's own is stopped before it has taken all memory",
        "        if left < _LEAST_LEFT * there:\n",
        "        if False:\n",
        "tests/unit/models/test_room.py -k ones_own_stops",
    ),
    Mutation(
        5,
        "training on a CPU that exceeds memory is refused before the first step",
        "    if not place.bytes or place.ranks * needs.total <= place.bytes:\n",
        "    if True:\n",
        "tests/unit/tools/test_train_memory.py",
    ),
    Mutation(
        15,
        "a layer that is read and not called is named after the first step",
        "        if uncalled:\n",
        "        if False:\n",
        "tests/unit/precision/test_api_misuse.py -k never_called",
    ),
    Mutation(
        15,
        "layers that share a weight are not taken for ones that nobody calls",
        "if owners[id(weight)] == 1]",
        "if owners[id(weight)]]",
        "tests/unit/precision/test_api_misuse.py -k idle_zero_or_tied",
    ),
    Mutation(
        23,
        "a tokenizer that came alone is not read by the rules of the model's kind",
        "if tokenizer and not (made / _TOKENIZER[1]).exists():",
        "if False:",
        "tests/extras/test_export_hf.py -k came_alone",
    ),
    Mutation(
        23,
        "attention stays within a document",
        "same & (place[:, None] >= place)",
        "(place[:, None] >= place).expand(len(document), -1, -1)",
        "tests/unit/models/test_gpt_options.py -k documents",
    ),
    Mutation(
        17,
        "gradients of a loss in chunks are summed in fp32",
        "dtype=dtype, cache_enabled=False",
        "dtype=dtype, cache_enabled=True",
        "tests/unit/models/test_gpt_options.py -k chunks_sum",
    ),
    Mutation(
        25,
        "weights of another model than config.yaml's are not exported",
        "if {name: tensor.shape for name, tensor in state.items()} != own:",
        "if False:",
        "tests/unit/tools/test_export.py -k another_model",
    ),
    Mutation(
        7,
        "a folder in use is not exported into",
        "    problems = _taken(out)\n",
        "    problems = []\n",
        "tests/unit/tools/test_export.py -k in_use",
    ),
    Mutation(
        24,
        "an index of weights cannot lead out of its folder",
        "if Path(name).name != name:",
        "if False:",
        "tests/unit/models/test_llama.py -k damaged",
    ),
    Mutation(
        25,
        "what the built-in GPT does not compute of a Llama is refused",
        "        if present:\n            what = ",
        "        if False:\n            what = ",
        "tests/unit/models/test_llama.py -k not_compute",
    ),
    Mutation(
        25,
        "weights that a folder lacks are named",
        "missing = sorted(wanted.keys() - state.keys())",
        "missing = []",
        "tests/unit/models/test_llama.py -k lacks",
    ),
    Mutation(
        9,
        "a model that trains on masked labels is refused",
        "        if found.wrong:\n",
        "        if False:\n",
        "tests/unit/models/test_masks.py -k counts_them_is_refused",
    ),
    Mutation(
        9,
        "a head that begins at zero is asked with other weights",
        "            parameter.normal_()\n",
        "            pass\n",
        "tests/unit/models/test_masks.py -k counts_them_is_refused",
    ),
    Mutation(
        9,
        "a loss that divides by all positions is no sum",
        "        if _close(doubled, 2 * everything, tolerance):\n",
        "        if True:\n",
        "tests/unit/models/test_masks.py -k mean_of_everything",
    ),
)
