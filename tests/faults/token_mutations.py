"""The protections of token ids in files: row 23."""

from __future__ import annotations

from mutation import Mutation

TOKENS: tuple[Mutation, ...] = (
    Mutation(
        23,
        "every block of token ids is compared as it is read",
        "if digest(block) != _nth(self._digests, number):",
        "if False:",
        "tests/faults/test_token_data.py -k rot_are",
    ),
    Mutation(
        23,
        "a touched file of token ids is hashed from end to end",
        'untouched = stamp == Stamp(file["size"], file["mtime_ns"], file["inode"])',
        "untouched = True",
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
        'if _upper_is_small(data, "<"):',
        "if False:",
        "tests/unit/data/test_token_files.py -k wider",
    ),
    Mutation(
        23,
        "ids of one byte are not read as uint16",
        "if _alike(lower, upper, len(pairs), most):",
        "if False:",
        "tests/unit/data/test_token_files.py -k uint8-uint16",
    ),
    Mutation(
        23,
        "ids of two bytes are not read as bytes",
        "if _is_upper(first, second):",
        "if False:",
        "tests/unit/data/test_token_files.py -k uint16-uint8",
    ),
    Mutation(
        23,
        "ids of two bytes are not read as ids of four",
        "if _alike(lower, upper, len(halves) // 2, np.inf):",
        "if False:",
        "tests/unit/data/test_token_files.py -k DNA-uint16-uint32",
    ),
    Mutation(
        23,
        "bytes of small pairs are not taken for wider ids",
        "elif not lows.all():",
        "elif False:",
        "tests/unit/data/test_token_files.py -k notes",
    ),
    Mutation(
        23,
        "sound is not taken for wider ids",
        "if (upper >= 0xF0).mean() > (upper < 0x10).mean() / 100:",
        "if False:",
        "tests/unit/data/test_token_files.py -k sound",
    ),
    Mutation(
        23,
        "int64 ids are rewritten by the first fix",
        "if 2 * len(ids) > len(numbers) and",
        "if False and",
        "tests/unit/data/test_token_files.py -k the_command",
    ),
    Mutation(
        23,
        "a header of another version is no ids",
        "if magic in _MAGICS:",
        "if False:",
        "tests/unit/data/test_token_files.py -k header_that_is_not_known",
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
        'batch["targets"].masked_fill_(begins[:, 1:], IGNORED)',
        "pass",
        "tests/unit/data/test_packing.py",
    ),
    Mutation(
        23,
        "a read that hangs is reported",
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
        "a source that changed since its copy was made is reported",
        (
            "if touched and (\n"
            "            written[0] != str(stamp.size) or not file_sha256(files[name]).startswith(hashed)\n"
            "        ):"
        ),
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
        'kept = [name for name in names if said_by(name) != "test"]',
        "kept = list(names)",
        "tests/unit/data/test_what_people_have.py -k test_split_is_never",
    ),
    Mutation(
        23,
        "text that is called val is not trained on",
        'if "" in words or "train" not in words or len(words) == 1:',
        "if True:",
        "tests/unit/data/test_what_people_have.py -k test_split_is_never",
    ),
    Mutation(
        23,
        "what is called .bin and begins like something else is no token ids",
        "if what := _other_content(head, dtype):",
        'if what := "":',
        "tests/unit/data/test_what_people_have.py -k called_bin",
    ),
    Mutation(
        23,
        "rows are not trained on as text",
        "if rows and size_of_rows >= _MOST_ROWS * size_of_all:",
        "if False:",
        "tests/unit/data/test_what_people_have.py -k several_kinds",
    ),
    Mutation(
        23,
        "a pipe or a socket in the source is no change of it",
        "new = sorted(stamps(there).keys() - record.files.keys() - set(record.others or ()))",
        "new = sorted(there.keys() - record.files.keys() - set(record.others or ()))",
        "tests/unit/data/test_source_changes.py -k no_file",
    ),
    Mutation(
        23,
        "a text that the tokenizer's library gives up on is named",
        (
            "if isinstance(error, MemoryError) or not (\n"
            "                isinstance(error, Exception) or _is_panic(error)\n"
            "            ):"
        ),
        "if True:",
        "tests/extras/test_tokenized.py -k fails_on",
    ),
    Mutation(
        23,
        "a file of rows that does not fit into memory is named",
        "        except MemoryError as error:\n            why = f",
        "        except ZeroDivisionError as error:\n            why = f",
        "tests/extras/test_odd_columns.py -k into_memory",
    ),
    Mutation(
        23,
        "numbers among texts are not trained on as JSON",
        "if any(steps[: len(field)] == [*field] for field in encoded):",
        "if False:",
        "tests/unit/data/test_prepare.py -k library_cannot_read",
    ),
    Mutation(
        23,
        "a file by zstd that was cut short is refused",
        "    _zstd_by_arrow()\n",
        "",
        "tests/unit/data/test_what_people_have.py -k cut_short",
    ),
    Mutation(
        23,
        "fields of a table stay as they stand",
        (
            "return {\n"
            '            "features": _features(key),\n'
            '            "sep": separator,\n'
            '            "keep_default_na": False,\n'
            '            "chunksize": _TABLE_ROWS,\n'
            "        }"
        ),
        'return {"features": _features(key), "sep": separator, "chunksize": _TABLE_ROWS}',
        "tests/unit/data/test_what_people_have.py -k as_they_stand",
    ),
    Mutation(
        23,
        "brackets and stars of a name are no pattern",
        'files = lists.DataFilesDict({"train": lists.DataFilesList([path], [()])})',
        'files = {"train": path}',
        "tests/unit/data/test_what_people_have.py -k no_patterns",
    ),
    Mutation(
        24,
        "a data set of the hub that names files outside of it is refused",
        "if outside := [str(path) for path in inside if not path.is_relative_to(outline)]:",
        "if outside := list[str]():",
        "tests/unit/data/test_hub.py -k there_is_not",
    ),
    Mutation(
        23,
        "what does not fit into the cache is not fetched",
        "if needed > free:",
        "if False:",
        "tests/unit/data/test_hub.py -k does_not_fit",
    ),
    Mutation(
        23,
        "more than a run takes is not fetched",
        "        if size > most:\n            raise too_large",
        "        if False:\n            raise too_large",
        "tests/unit/data/test_hub.py -k more_than",
    ),
    Mutation(
        23,
        "a cache that does not say what it lacks is reported",
        "    if unlisted:\n        left_out.append(_UNLISTED)\n",
        "",
        "tests/unit/data/test_hub.py -k does_not_say",
    ),
    Mutation(
        23,
        "a worker that dies is reported",
        "except BrokenProcessPool as error:",
        "except ZeroDivisionError as error:",
        "tests/extras/test_tokenized.py -k dies",
    ),
    Mutation(
        23,
        "a document keeps its end where the tokenizer fails on its last piece",
        "if inside and piece.ends else None",
        "if False else None",
        "tests/extras/test_tokenized.py -k keeps_its_end",
    ),
    Mutation(
        23,
        "columns of a table are not taken for others",
        "if _PANDAS_INDEX in names:",
        "if False:",
        "tests/unit/data/test_what_people_have.py -k more_fields",
    ),
)
