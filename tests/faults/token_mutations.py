"""The protections of token ids in files: row 23."""

from __future__ import annotations

from mutation import Mutation

TOKENS: tuple[Mutation, ...] = (
    Mutation(
        23,
        "every block of token ids is compared as it is read",
        "if digest(block) != self._digests[number * DIGEST : (number + 1) * DIGEST]:",
        "if False:",
        "tests/faults/test_token_data.py -k rot_are",
    ),
    Mutation(
        23,
        "a touched file of token ids is hashed from end to end",
        'same = asdict(stamp) == {key: file[key] for key in ("size", "mtime_ns", "inode")}',
        "same = True",
        "tests/unit/data/test_token_files.py -k flipped_bit",
    ),
    Mutation(
        23,
        "a vocabulary that is too small is refused",
        "if isinstance(given, int) and given < ids:",
        "if False:",
        "tests/faults/test_token_data.py -k larger_ids",
    ),
    Mutation(
        23,
        "ids that a tokenizer has not are refused",
        "if vocabulary is not None and seen.largest >= vocabulary.ids:",
        "if False:",
        "tests/extras/test_tokenized.py -k tokenizer_has_not",
    ),
    Mutation(
        23,
        "uint32 ids are not read as uint16",
        "if upper.max() <= 0x3F and",
        "if False and",
        "tests/unit/data/test_token_files.py -k wider",
    ),
    Mutation(
        23,
        "ids of one byte and big-endian ones are not read as uint16",
        "if other := _of_other_bytes(ids):",
        "if other := None:",
        "tests/unit/data/test_token_files.py -k big_endian",
    ),
    Mutation(
        23,
        "ids that another source of a mixture has not got are refused",
        "part.tokenizer is None and part.ids > least.ids",
        "False",
        "tests/unit/data/test_mixture.py -k no_bytes",
    ),
    Mutation(
        23,
        "an index that points past its file is refused",
        "elif total > size:",
        "elif False:",
        "tests/unit/data/test_token_files.py -k past",
    ),
    Mutation(
        23,
        "a shard that is cut short is refused",
        "if there != wanted:",
        "if False:",
        "tests/unit/data/test_token_files.py -k shard",
    ),
    Mutation(
        23,
        "no token is predicted from another document's",
        'made["targets"].masked_fill_(begins[:, 1:], IGNORED)',
        "pass",
        "tests/unit/data/test_packing.py",
    ),
    Mutation(
        23,
        "a read that hangs is told",
        "while not job.done.wait(patience):",
        "while not job.done.wait():",
        "tests/faults/test_token_data.py -k hangs",
    ),
    Mutation(
        23,
        "a mixture takes nothing of a start that was killed",
        '(own / "corpus.json").unlink(missing_ok=True)',
        "pass",
        "tests/unit/data/test_mixture.py -k leftover",
    ),
    Mutation(
        23,
        "a source that changed since its copy was made is told",
        "if stamp.size != int(entry[0]) or fingerprint_file(files[name], whole) != entry[3]:",
        "if False:",
        "tests/unit/data/test_source_changes.py -k named",
    ),
    Mutation(
        23,
        "a source that changes while it is prepared is refused",
        "if changed := [path for path, stamp in files.items() if Stamp.of(path) != stamp]:",
        "if changed := list[Path]():",
        "tests/unit/data/test_source_changes.py -k while_it_is",
    ),
    Mutation(
        23,
        "a test split is not trained on",
        "kept = [name for name in names if not is_test(name)]",
        "kept = list(names)",
        "tests/unit/data/test_what_people_have.py -k test_split_is_never",
    ),
    Mutation(
        23,
        "text that is called val is not trained on",
        'if "" in splits or "train" not in splits or len(splits) == 1:',
        "if True:",
        "tests/unit/data/test_what_people_have.py -k test_split_is_never",
    ),
    Mutation(
        23,
        "what is called .bin and begins like something else is no token ids",
        "if what := _no_ids(head, dtype):",
        'if what := "":',
        "tests/unit/data/test_what_people_have.py -k called_bin",
    ),
    Mutation(
        23,
        "rows are not trained on as text",
        "if rows and sizes[0] >= _ROWS * sizes[1]:",
        "if False:",
        "tests/unit/data/test_what_people_have.py -k several_kinds",
    ),
)
