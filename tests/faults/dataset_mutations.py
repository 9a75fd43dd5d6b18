"""The protections of data sets of the user's own, and of models that are bound to them."""

from __future__ import annotations

from mutation import Mutation

DATASET = (
    Mutation(
        8,
        "no update is made of a window with a sample that could not be read",
        "found = UNREADABLE if isinstance(batch, Flawed) else 0",
        "found = 0",
        "tests/e2e/test_own_data.py -k cannot_be_read",
    ),
    Mutation(
        8,
        "labels are held against the number of classes",
        "if labels and classes is not None:",
        "if False:",
        "tests/unit/data/test_dataset.py -k bad_sample",
    ),
    Mutation(
        8,
        "bad samples of the validation are left out",
        "if check_batch(batch, *sizes) & ~NO_LABEL:",
        "if False:",
        "tests/e2e/test_own_data.py -k validation",
    ),
    Mutation(
        8,
        "a sample is read under random numbers of its own",
        "    torch.default_generator.manual_seed(own)\n",
        "",
        "tests/unit/data/test_dataset.py -k augmentation",
    ),
    Mutation(
        8,
        "reading leaves the process its random numbers",
        "        np.random.set_state(of_numpy)\n",
        "",
        "tests/unit/data/test_dataset.py -k leaves_the_process",
    ),
    Mutation(
        8,
        "a run goes on with the data set it began with",
        "_compare(path, data.fingerprint, data.name)",
        "pass",
        "tests/unit/data/test_dataset.py -k goes_on",
    ),
    Mutation(
        8,
        "a required parameter that the batch has by name gets no targets",
        "taken = second.name in names or any",
        "taken = any",
        "tests/unit/models/test_task.py -k mask_of_ours",
    ),
    Mutation(
        8,
        "a sum over samples is not taken for a mean",
        "if loss and abs(twice - 2 * loss) <= 0.01 * abs(twice):",
        "if False:",
        "tests/unit/models/test_task.py -k a_sum",
    ),
    Mutation(
        8,
        "samples in one buffer are kept apart",
        "value.detach().cpu().clone()",
        "value.detach().cpu()",
        "tests/unit/data/test_dataset.py -k one_buffer",
    ),
    Mutation(
        8,
        "texts of one length by chance may differ",
        "if _mostly_alike(leader, name, looked_at):",
        "if True:",
        "tests/unit/data/test_dataset.py -k by_chance",
    ),
    Mutation(
        8,
        "columns of a table are not taken for samples",
        'if (library := kind.__module__.partition(".")[0]) in _TABLES:',
        'if (library := kind.__module__.partition(".")[0]) in ():',
        "tests/unit/data/test_dataset.py -k a_table",
    ),
    Mutation(
        8,
        "numbers of a palette and masked values are refused",
        "if odd := _hides_values(value):",
        'if odd := "":',
        "tests/unit/data/test_dataset.py -k hide_their",
    ),
    Mutation(
        8,
        "own samples that are trained and validated on are noted",
        "    if copies_seen:\n",
        "    if False:\n",
        "tests/unit/data/test_dataset.py -k trained_on",
    ),
)
