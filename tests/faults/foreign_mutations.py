"""The protections against run folders of somebody else: row 24."""

from __future__ import annotations

from mutation import Mutation

_TESTS = "tests/faults/test_foreign_runs.py"

FOREIGN: tuple[Mutation, ...] = (
    Mutation(
        24,
        "readers go through the attempts of a journal once",
        "        limits = np.array([first(attempt) for attempt in attempts.tolist()])\n"
        "        return np.array(self.steps) >= limits[place]\n",
        "        limits = np.zeros(len(place))\n"
        "        for number, attempt in enumerate(attempts.tolist()):\n"
        "            limits[place == number] = first(attempt)\n"
        "        return np.array(self.steps) >= limits\n",
        "tests/unit/tracking/test_long_journals.py -k by_their_number",
    ),
    Mutation(
        24,
        "a terminal obeys nothing that a run folder says",
        "yield Segment(shown(segment.text), segment.style)",
        "yield segment",
        f"{_TESTS} -k obeys",
    ),
    Mutation(
        24,
        "nor what turns the order of other characters around",
        "_OBEYED.sub(lambda found",
        "CONTROL.sub(lambda found",
        f"{_TESTS} -k obeys",
    ),
    Mutation(
        24,
        "nor what a command prints by itself",
        "print(shown(str(text)), file=file, flush=True)",
        "print(str(text), file=file, flush=True)",
        f"{_TESTS} -k obeys",
    ),
    Mutation(
        24,
        "fields of events of other types are left out",
        "        del event[name]\n",
        "        pass\n",
        f"{_TESTS} -k no_traceback",
    ),
    Mutation(
        24,
        "layers and rungs of a plan are what they should be",
        '    if not lists or "layers" not in plan or not _has_texts(plan, ("requested", "resolved")):\n',
        '    if "layers" not in plan:\n',
        f"{_TESTS} -k no_traceback",
    ),
    Mutation(
        24,
        "an event without a time is reported",
        '    if seconds is None:\n        return "-"\n',
        "",
        f"{_TESTS} -k without_a_time",
    ),
    Mutation(
        24,
        "texts are shown in part",
        "return shown(clipped(value, MAX_TEXT))",
        "return shown(value)",
        f"{_TESTS} -k in_part",
    ),
    Mutation(
        24,
        "what replaced a step is known at once",
        "    return lambda attempt: firsts[bisect_right(attempts, attempt)]\n",
        "    return lambda attempt: min([begins[each] for each in begins if each > attempt], default=math.inf)\n",
        f"{_TESTS} -k by_their_number",
    ),
    Mutation(
        24,
        "names are no formulas",
        'shown(text).replace("$", r"\\$")',
        "shown(text)",
        f"{_TESTS} -k drawn",
    ),
)
