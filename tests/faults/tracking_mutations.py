"""The protections of journal, shipper and clock: rows 18, 19 and 26."""

from __future__ import annotations

from mutation import Mutation

TRACKING: tuple[Mutation, ...] = (
    Mutation(
        18,
        "a request whose answer was lost is looked up, not repeated",
        'FIXED = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}',
        'FIXED = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}',
        "tests/faults/test_tracking_outages.py::test_a_server_that_fails_delays_delivery_and_nothing_else[swallow]",
    ),
    Mutation(
        18,
        "a resumed run is running again",
        'if self._status != "RUNNING":',
        "if False:",
        "tests/faults/test_tracking_outages.py::test_a_server_that_fails_delays_delivery_and_nothing_else[refuse]",
    ),
    Mutation(
        18,
        "rows keep the journal's time, by which MLflow knows them again",
        "stamp = _milliseconds(row)",
        'stamp = __import__("time").time_ns() // 10**6',
        "tests/unit/tracking/test_shipper.py -k killed_midway",
    ),
    Mutation(
        18,
        "a run delivered late has the times of the run",
        "start_time=_milliseconds(first) if first else None,",
        "start_time=None,",
        "tests/faults/test_tracking_outages.py::test_a_run_that_ends_in_an_outage_can_be_delivered_from_elsewhere[error]",
    ),
    Mutation(
        19,
        "half a row is taken back before the next",
        "            self._torn = end\n",
        "",
        "tests/faults/test_journal_disk.py -k half_a_row",
    ),
    Mutation(
        19,
        "a disk that refuses a row is not raised into training",
        "        except OSError:\n            pass\n",
        "        except KeyError:\n            pass\n",
        "tests/faults/test_journal_disk.py -k any_call_costs",
    ),
    Mutation(
        19,
        "rows lost are counted and told",
        "self._lost += 1",
        "pass",
        "tests/faults/test_journal_disk.py -k any_call_costs",
    ),
    Mutation(
        18,
        "the default database is in the working folder or the run is refused",
        "if config.mlflow and (why := misplaced()):",
        "if False:",
        "tests/unit/tools/test_places.py -k refuse",
    ),
    Mutation(
        24,
        "names of runs mean nothing to a shell",
        " and not _MEANS_MORE & set(name)",
        "",
        "tests/faults/test_hostile_files.py -k means_nothing_else",
    ),
    Mutation(
        19,
        "rows wait in memory for a disk that is full",
        "patience = 64 << 20",
        "patience = 0",
        "tests/faults/test_journal_disk.py -k wait_in_memory",
    ),
    Mutation(
        26,
        "times of rows come from a clock that nobody can set",
        "return self._offset + _elapsed()",
        "return time.time()",
        "tests/faults/test_clock_jumps.py -k rows_keep",
    ),
    Mutation(
        26,
        "a resume goes on from the time of the last row",
        "max(time.time(), not_before)",
        "time.time()",
        "tests/faults/test_clock_jumps.py -k rows_keep",
    ),
    Mutation(
        26,
        "time limits follow a clock that nobody can set",
        "and time.monotonic() >= self._deadline",
        "and time.time() >= self._deadline",
        "tests/faults/test_clock_jumps.py -k only_the_rows_clock",
    ),
    Mutation(
        18,
        "a run that another shipper delivered to its end has ended",
        "if self.pid is not None and not ended:",
        "if self.pid is not None:",
        "tests/unit/tracking/test_shipper.py -k delivered_to_its_end",
    ),
)
