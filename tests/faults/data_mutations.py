"""The protections against bad and hostile files: rows 23 and 24."""

from __future__ import annotations

from mutation import Mutation

DATA: tuple[Mutation, ...] = (
    Mutation(
        24,
        "tags of YAML are refused",
        'if getattr(event, "tag", None) is not None:',
        "if False:",
        "tests/faults/test_hostile_files.py -k set",
    ),
    Mutation(
        24,
        "aliases of YAML are refused",
        "if isinstance(event, yaml.AliasEvent):",
        "if False:",
        "tests/faults/test_hostile_files.py -k endless",
    ),
    Mutation(
        24,
        "YAML is nested no deeper than a limit",
        "if self._depth > MAX_DEPTH:",
        "if False:",
        "tests/faults/test_hostile_files.py -k deep",
    ),
    Mutation(
        24,
        "keys of YAML are words",
        "if not isinstance(key, yaml.ScalarNode):",
        "if False:",
        "tests/faults/test_hostile_files.py -k list",
    ),
    Mutation(
        24,
        "numbers are no longer than a number",
        (
            "if (\n"
            '            node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")\n'
            "            and len(node.value) > _MAX_DIGITS\n"
            "        ):"
        ),
        'if node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float") and False:',
        "tests/faults/test_hostile_files.py -k decimal",
    ),
    Mutation(
        24,
        "control characters are refused",
        "found = CONTROL.search(node.value) if isinstance(node, yaml.ScalarNode) else None",
        "found = None",
        "tests/faults/test_hostile_files.py -k escape",
    ),
    Mutation(
        24,
        "thousands of wrong keys make one screen",
        "items[:_MOST]",
        "items",
        "tests/faults/test_hostile_files.py -k many",
    ),
    Mutation(
        24,
        "a backend that is not registered is refused",
        "if name not in tuple(BACKENDS):",
        "if False:",
        "tests/unit/precision/test_backend_registry.py -k not_registered",
    ),
    Mutation(
        24,
        "a JSON key given twice is refused",
        "object_pairs_hook=_unique, ",
        "",
        "tests/faults/test_hostile_files.py::test_hostile_deepspeed_json_is_refused[twice]",
    ),
    Mutation(
        24,
        "JSON is bounded in depth and numbers",
        "    check_plain(value, _STATE_BITS, finite=True)\n",
        "",
        "tests/faults/test_hostile_files.py -k infinite",
    ),
    Mutation(
        24,
        "files are read up to a limit",
        "if max(len(data), status.st_size) > limit:",
        "if False:",
        "tests/faults/test_hostile_files.py -k sparse",
    ),
    Mutation(
        24,
        "names of runs cannot steer a terminal",
        "plain = name.isprintable() and len(name.encode()) <= _MAX_NAME and not _MEANS_MORE & set(name)",
        "plain = True and not _MEANS_MORE & set(name)",
        "tests/faults/test_hostile_files.py -k run_name",
    ),
    Mutation(
        23,
        "messages hold no control characters",
        'return shown("\\n".join(lines))',
        'return "\\n".join(lines)',
        "tests/faults/test_data_faults.py -k one_screen",
    ),
    Mutation(
        24,
        "headers of tensors are checked before they are used",
        "        check_header(path)\n    if path.name",
        "        pass\n    if path.name",
        "tests/faults/test_hostile_runs.py -k forged_tensors",
    ),
    Mutation(
        24,
        "state of another shape is refused by name",
        (
            "except (\n"
            "            LookupError,\n"
            "            TypeError,\n"
            "            ValueError,\n"
            "            AttributeError,\n"
            "            ArithmeticError,\n"
            "            RuntimeError,\n"
            "        ) as error:"
        ),
        "except ZeroDivisionError as error:",
        "tests/faults/test_hostile_runs.py -k forged_state",
    ),
    Mutation(
        24,
        "a record of a bad step names its own folder",
        "return found if path.parent.name == step_name(found.step) else None",
        "return found",
        "tests/faults/test_planted_files.py -k records_of",
    ),
    Mutation(
        24,
        "planted files are taken away first",
        "        path.unlink()\n",
        "",
        "tests/faults/test_planted_files.py -k planted",
    ),
    Mutation(
        24,
        "deep rows of the journal are passed over",
        "except (ValueError, RecursionError):",
        "except ValueError:",
        "tests/faults/test_hostile_runs.py -k journal_has",
    ),
    Mutation(
        24,
        "marks are whole numbers",
        "{step for step in good if type(step) is int and step >= 0}",
        "{int(step) for step in good}",
        "tests/faults/test_hostile_runs.py::test_hostile_advice_is_passed_over[checkpoints/good.json-odd]",
    ),
    Mutation(
        23,
        "a text that shrank under a run is named",
        "if len(read) != count:",
        "if False:",
        "tests/faults/test_data_faults.py -k shrinks_under",
    ),
    Mutation(
        23,
        "the text stays open under a run",
        "return read_fully(self._descriptor, start, count)",
        "return open(self._path, 'rb').read()[start : start + count]",
        "tests/faults/test_data_faults.py -k goes_away",
    ),
    Mutation(
        23,
        "data.bad=fail fails for files that are no text",
        'if bad == "fail" and content != _INSIDE:',
        "if False:",
        "tests/faults/test_data_faults.py -k no_text",
    ),
    Mutation(
        23,
        "data.bad=skip passes over unreadable files",
        'if bad != "skip":',
        "if True:",
        "tests/faults/test_data_faults.py -k cannot_be_read",
    ),
    Mutation(
        23,
        "folders that cannot be listed are reported",
        "    yield from closed\n",
        "",
        "tests/faults/test_data_faults.py -k closed",
    ),
    Mutation(
        23,
        "the snapshot is verified at every start",
        'if own.hexdigest() != info[split]["sha256"]:',
        "if False:",
        "tests/unit/data/test_tokens.py -k flipped",
    ),
    Mutation(
        24,
        "what is in the place of a lock is named",
        "if error.errno in (errno.ELOOP, errno.EISDIR):",
        "if False:",
        "tests/unit/checkpoint/test_lock.py -k in_its_place",
    ),
    Mutation(
        24,
        "a lock is not taken through a link",
        "os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW",
        "os.O_RDWR | os.O_CREAT",
        "tests/faults/test_planted_files.py -k lock",
    ),
    Mutation(
        24,
        "a journal is not written through a link",
        "os.O_APPEND | os.O_NOFOLLOW, 0o644",
        "os.O_APPEND, 0o644",
        "tests/faults/test_planted_files.py -k journal",
    ),
    Mutation(
        24,
        "model.target is none of Python's own functions",
        'if module_name.partition(".")[0] in sys.stdlib_module_names:',
        "if False:",
        "tests/faults/test_planted_files.py -k pythons_own",
    ),
    Mutation(
        24,
        "the owner of a lock is read with care",
        "KeyError, RecursionError):",
        "KeyError):",
        "tests/faults/test_planted_files.py -k hostile_owner",
    ),
    Mutation(
        24,
        "a pickle import is seen",
        "def make_plan(",
        "import pickle\n\n\ndef make_plan(",
        "tests/faults/test_no_execution.py",
    ),
)
