"""Models of transformers and adapters: what is read, what would train wrongly. Rows 23, 24 and 27."""

from __future__ import annotations

from mutation import Mutation

_MODELS, _LORA = "tests/extras/test_huggingface.py", "tests/extras/test_lora.py"
_CHUNKS = "tests/extras/test_hf_chunks.py"
_RANKS = "tests/extras/test_hf_ranks.py"

HUGGING_FACE = (
    Mutation(
        23,
        "copies of a folder on several machines are compared",
        "flags = (sums != sums[0]).any(dim=0).tolist()",
        "flags = [False] * len(order)",
        f"{_RANKS} -k read_their_rows",
    ),
    Mutation(
        23,
        "a folder that one rank cannot use ends all ranks",
        'texts = gather_texts("" if refused is None else str(refused))',
        'texts = [""]',
        f"{_RANKS} -k cannot_use",
    ),
    Mutation(
        23,
        "a file of weights that changes while ranks read it is refused",
        "if _place(os.fstat(stream.fileno())) != self.place:",
        "if False:",
        "tests/unit/models/test_stored.py -k changes_meanwhile",
    ),
    Mutation(
        23,
        "what was changed after it was read is not read by rows",
        "if len(log) != 1 or log[0].random",
        "if log[0].random",
        "tests/unit/core/test_deferred.py -k without_the_others",
    ),
    Mutation(
        23,
        "the trial of a model reads no matrix of its folder",
        "recording.made_up = True",
        "recording.made_up = False",
        "tests/unit/core/test_deferred.py -k trial_reads",
    ),
    Mutation(
        23,
        "a model is not refused for random values in the place of its weights",
        "                if not found:\n                    return found\n",
        "                return found\n",
        "tests/unit/core/test_deferred.py -k trial_reads",
    ),
    Mutation(
        24,
        "what torchao logs of kernels for other machines does not come first",
        "    return kernels or ",
        "    return True or ",
        "tests/unit/core/test_noise.py",
    ),
    Mutation(
        27,
        "adapters beside other frozen weights are refused",
        'theirs["sha256"] != ours["sha256"]',
        "False",
        f"{_LORA} -k hold_the_adapters",
    ),
    Mutation(
        23,
        "weights that are missing are refused",
        'missing = sorted(info["missing_keys"])',
        "missing = []",
        f"{_MODELS} -k left_out_weights",
    ),
    Mutation(
        23,
        "weights that would be left out are named",
        "    if left:\n        why = ",
        "    if False:\n        why = ",
        f"{_MODELS} -k left_out_weights",
    ),
    Mutation(
        23,
        "every shard is opened before a model is built",
        'with safe_open(file, framework="pt"',
        'with memoryview(b"") if file.is_file() else safe_open(file, framework="pt"',
        f"{_MODELS} -k wrong_with_the_weights",
    ),
    Mutation(
        23,
        "a model that mixes packed documents is refused",
        "        if self.unpackable:\n",
        "        if False:\n",
        f"{_MODELS} -k mixes_packed",
    ),
    Mutation(
        23,
        "a model that sees its targets is refused",
        "if _moved(logits[:, :8], after[:, :8], logits) > _ROUNDING:",
        "if False:",
        f"{_MODELS} -k sees_its_targets",
    ),
    Mutation(
        24,
        "code that comes with a model is refused",
        'if "auto_map" in config and ',
        'if "auto_map" in config and False and ',
        f"{_MODELS} -k foreign_code",
    ),
    Mutation(
        23,
        "a model is trained in training mode",
        "    return model.train()\n",
        "    return model\n",
        f"{_MODELS} -k dropout_is_on",
    ),
    Mutation(
        23,
        "a packed sample is never computed with a cache",
        "position_ids=positions, use_cache=False",
        "position_ids=positions, use_cache=True",
        f"{_MODELS} -k packed_documents",
    ),
    Mutation(
        23,
        "packed documents that are known stay apart",
        "documents = None if segments is None else _begins(segments).cumsum(dim=1)",
        "documents = None",
        f"{_MODELS} -k packed_documents",
    ),
    Mutation(
        24,
        "the logits of a model of transformers have no float32 copy",
        "loss = sum_of_losses(output.logits.flatten(0, -2), targets)",
        "loss = sum_of_losses(output.logits.float().flatten(0, -2), targets)",
        f"{_MODELS} -k float32_copy",
    ),
    Mutation(
        24,
        "a model that does more with its logits than return them has no loss in chunks",
        "if len(made) != 1 or output.logits is not made[0] or made[0]._version != 0:",
        "if len(made) != 1:",
        f"{_CHUNKS} -k after_the_head",
    ),
    Mutation(
        24,
        "the loss in chunks of a batch without a target is 0",
        "loss = torch.where((targets != IGNORED).any(), mean, 0.0)",
        "loss = mean",
        f"{_CHUNKS} -k without_a_target",
    ),
    Mutation(
        24,
        "an adapter's dropout on the head is the same in forward and backward",
        "preserve_rng_state=random)",
        "preserve_rng_state=False)",
        f"{_CHUNKS} -k dropout",
    ),
    Mutation(
        24,
        "after a loss in chunks the head returns logits",
        "            del head.forward\n",
        "            pass\n",
        f"{_CHUNKS} -k itself_returns_logits",
    ),
    Mutation(
        24,
        "logits of tokens have no float32 copy",
        "return sum_of_losses(logits, labels) / (labels",
        "return sum_of_losses(logits.float(), labels) / (labels",
        "tests/unit/models/test_task.py -k float32_copy",
    ),
    Mutation(
        24,
        "blocks that are not called as modules are named",
        "if name in self.uncalled:",
        "if True:",
        "tests/unit/precision/test_compiling.py -k not_called_as_modules",
    ),
    Mutation(
        24,
        "an estimate of packed documents has their mask",
        'if config.data.packing == "documents":\n            names',
        "if False:\n            names",
        "tests/cuda_on_paper/test_cards.py -k grouped",
    ),
)
