"""The exercises of a drill: what is done to a run, and what is read afterwards. Torch-free.

Each is a function of the bench that returns an Account. It raises Missed if an event does not come that it waits for.
The judgements are in judge.py.
"""

from __future__ import annotations

import resource
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.core.errors import ExitCode
from harness.core.files import parse_json, read_mapping, step_name
from harness.drill.bench import TRACKER, USERS, Bench, is_saving, last_step, saved_steps
from harness.drill.child import Child, Missed
from harness.drill.judge import (
    Account,
    Check,
    Ran,
    code_text,
    ended_well,
    failed_save,
    found_by_verify,
    full_disk_met,
    killed,
    near,
    not_applicable,
    on_ranks,
    rolled_back,
    same_bits,
    stopped,
    sync_named,
    went_on_from,
)
from harness.report.divergence import compare
from harness.tracking.existing import LOSS
from harness.tracking.history import RunHistory
from harness.tracking.journal import delivered

# Runs that are tried until a fault meets one in time: a short run of a small model may be over first.
_TRIES = 3
_CLI = ("-m", "harness.cli")
_MOST_FINDINGS = 20
# The fault of exercises that do none to the run.
_UNDISTURBED = "no fault"
# Seconds between two looks at a log.
_LOOK = 0.1


def preflight(bench: Bench) -> Account:
    """`harness doctor` and `harness train --dry-run` of the user's config, with all of its steps."""
    doctor = bench.start(
        "doctor", *_CLI, "doctor", "--config", USERS, "--json", separate_stderr=True
    )
    code = doctor.finish(bench.patience)
    found = _findings(doctor.screen)
    errors = [each for each in found if each["severity"] == "error"]
    warnings = len(found) - len(errors)
    counts = f"{_counted(len(errors), 'error')}, {_counted(warnings, 'warning')}"
    seen = f"{code_text(code)}: {counts}"
    checks = [Check("harness doctor finds no error", seen, code == ExitCode.DONE)]

    # What doctor calls sound must also be what a start accepts.
    dry = bench.start("dry-run", *_CLI, "train", "--config", USERS, "--name", "dry", "--dry-run")
    code = dry.finish(bench.patience)
    lines = dry.screen.strip().splitlines()
    complaints = [line.strip() for line in lines if line.startswith("error")]
    seen = "; ".join([code_text(code), *(complaints or lines[-1:])])
    checks.append(Check("harness train --dry-run passes", seen, code == ExitCode.DONE))

    notes = [f"{each['severity']} {each['code']}: {each['what']}" for each in found]
    done = "harness doctor and harness train --dry-run on the config as it is"
    fault = f"{_UNDISTURBED}; harness doctor: {counts}"
    return Account(done, fault, checks, notes=notes[:_MOST_FINDINGS])


def _counted(number: int, what: str) -> str:
    """`1 warning`, `2 warnings`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _findings(text: str) -> list[dict[str, Any]]:
    """The findings in what `harness doctor --json` printed; empty if it printed none."""
    try:
        return list(parse_json(text.encode())["findings"])
    except (ValueError, KeyError, TypeError):
        return []


def soak(bench: Bench) -> Account:
    """Two undisturbed runs: are they the same, bit for bit?"""
    done = f"{bench.steps} steps, twice, from the same config"
    try:
        first = bench.undisturbed()
    except Missed as error:
        ended = Check("the first run ends as planned", str(error), False)
        return Account(done, _UNDISTURBED, [ended])
    # The first run is the one that every other exercise is compared with.
    ran, second = bench.to_its_end("soak-2")
    checks = [
        ended_well(ran, bench.steps),
        same_bits(compare(second, first), bench.steps, "the first run's"),
    ]
    notes: list[str] = []
    if bench.delivers:
        got = "has all rows" if delivered(first.run_dir) else "had not got all rows in time"
        notes.append(f"MLflow ({TRACKER} in the drill's folder) {got}")
    return Account(done, f"{_UNDISTURBED}; two runs of {bench.steps} steps", checks, notes=notes)


def sigterm(bench: Bench) -> Account:
    """SIGTERM in the middle of a run, then the same command."""
    reference = bench.undisturbed()
    name, first = _stopped(bench, "sigterm")
    ran, history = bench.to_its_end(name)
    checks = [
        stopped(first),
        went_on_from(ran, first.step, "where it stopped"),
        ended_well(ran, bench.steps),
        same_bits(compare(history, reference), bench.steps),
    ]
    done = "SIGTERM while it trained, then the same command again"
    fault = f"{code_text(first.code)} after SIGTERM, at step {first.step} of {bench.steps}"
    return Account(done, fault, checks)


def _stopped(bench: Bench, name: str) -> tuple[str, Ran]:
    """A run that got SIGTERM before its end: its name and what it was then. Raises Missed if all were faster."""
    for attempt in _names(name):
        child = bench.train(attempt)
        run = bench.run(attempt)
        child.until(lambda run=run: last_step(run) > 0, "its first step", bench.patience)
        child.process.send_signal(signal.SIGTERM)
        code = child.finish(bench.patience)
        ran, _ = bench.ran(attempt, code)
        if ran.status != "done":
            return attempt, ran
    raise Missed(f"{_TRIES} runs ended before SIGTERM reached them; more --steps make them longer")


def _names(name: str) -> Iterator[str]:
    """Names of the runs that are tried, until a fault meets one."""
    yield name
    for number in range(2, _TRIES + 1):
        yield f"{name}-{number}"


def sigkill(bench: Bench) -> Account:
    """SIGKILL between two saves, and again in the middle of one."""
    reference = bench.undisturbed()
    # The first kill, between two saves; the run goes on from the newest one.
    name, faults, saved = _killed_in_a_step(bench)
    child = bench.train(name, "checkpoint.every=1")
    run = bench.run(name)

    # The second kill. The process is frozen first, so that the save cannot end before the signal comes.
    if not child.freeze_at(lambda: is_saving(run), bench.patience):
        child.kill()
        raise Missed("no save lasted long enough to be caught; more --steps give more saves")
    written = sorted(path.name for path in (run / "checkpoints").glob(".tmp-step-*"))
    newest = saved_steps(run)[-1]
    code = child.kill()
    middle, _ = bench.ran(name, code)
    evidence = killed(code, (run / "outcome.json").exists())
    fault = f"{faults}; then {evidence}, while {', '.join(written)} was being written"
    checks = [went_on_from(middle, saved)]

    ran, history = bench.to_its_end(name)
    checks += [
        went_on_from(ran, newest),
        ended_well(ran, bench.steps),
        same_bits(compare(history, reference), bench.steps),
    ]
    done = "SIGKILL between two saves, the same command, SIGKILL during a save, the same command"
    return Account(done, fault if faults and evidence else "", checks)


def _killed_in_a_step(bench: Bench) -> tuple[str, str, int]:
    """(name, evidence, newest checkpoint) of a run that was killed with steps that no checkpoint has. Raises Missed."""
    for attempt in _names("sigkill"):
        child = bench.train(attempt)
        run = bench.run(attempt)

        def in_a_step(run: Path = run) -> bool:
            saved = saved_steps(run)
            return bool(saved) and saved[-1] < last_step(run) < bench.steps and not is_saving(run)

        if child.freeze_at(in_a_step, bench.patience):
            # Frozen, the run does no further step and no save: these two belong together.
            newest = saved_steps(run)[-1]
            step = last_step(run)
            code = child.kill()
            evidence = killed(code, (run / "outcome.json").exists())
            if evidence:
                evidence += f", after step {step}, the newest checkpoint of step {newest}"
            return attempt, evidence, newest
        child.kill()
    raise Missed(f"{_TRIES} runs ended before SIGKILL reached them; more --steps make them longer")


def bit(bench: Bench) -> Account:
    """One flipped bit in the newest checkpoint of a run that was killed."""
    reference = bench.undisturbed()
    name = _killed_with_two_checkpoints(bench)
    run = bench.run(name)
    # The newest checkpoint is damaged, so the run has to go on from the one before it.
    before, newest = saved_steps(run)[-2:]
    checkpoint = run / "checkpoints" / step_name(newest)
    # The middle of the largest file is in a stored tensor.
    file = max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)
    fault = flip_bit(file)

    # The damage must be found when it is looked for, and when the run goes on.
    verify = bench.start("verify", *_CLI, "verify", str(run))
    code = verify.finish(bench.patience)
    checks = [found_by_verify(code, verify.screen, checkpoint, file.name)]
    ran, history = bench.to_its_end(name)
    checks += [
        went_on_from(ran, before, "the checkpoint before the damaged one"),
        ended_well(ran, bench.steps),
        same_bits(compare(history, reference), bench.steps),
    ]
    done = (
        "a run killed; one bit of its newest checkpoint flipped; harness verify; the same command"
    )
    return Account(done, fault, checks)


def _killed_with_two_checkpoints(bench: Bench) -> str:
    """The name of a run that was killed with two checkpoints and steps to go. Raises Missed."""
    for attempt in _names("bit"):
        child = bench.train(attempt)
        run = bench.run(attempt)

        def has_two(run: Path = run) -> bool:
            saved = saved_steps(run)
            return len(saved) >= 2 and saved[-1] < bench.steps and not is_saving(run)

        caught = child.freeze_at(has_two, bench.patience)
        child.kill()
        if caught:
            return attempt
    raise Missed(f"{_TRIES} runs ended before they were killed; more --steps make them longer")


def flip_bit(file: Path) -> str:
    """Flip the lowest bit of the byte in the middle of `file`; returns what was done, read back from the file."""
    place = file.stat().st_size // 2
    with file.open("r+b") as stream:
        stream.seek(place)
        old = stream.read(1)[0]
        stream.seek(place)
        stream.write(bytes([old ^ 1]))
    with file.open("rb") as stream:
        stream.seek(place)
        new = stream.read(1)[0]
    if new == old:
        return ""
    return f"{file.parent.name}/{file.name}, byte {place:,}: {old:#04x} is {new:#04x} now"


def disk(bench: Bench) -> Account:
    """No room for checkpoints for a while: a limit on the size of the run's files, set from outside."""
    reference = bench.undisturbed()
    name, child, limit = _limited(bench)

    # A run that pauses waits for room; with another checkpoint.on_failure it comes to its end without.
    policy = bench.config.checkpoint.on_failure
    if policy == "pause":
        paused = "checkpoint.paused"
        child.until(lambda: paused in child.screen or child.ended, paused, bench.patience)
        _limit_files(child, None)
    code = child.finish(bench.patience)
    met = full_disk_met(policy, code)
    ran, history = bench.ran(name, code)
    if code != ExitCode.DONE:
        ran, history = bench.to_its_end(name)
    checks = [
        met,
        ended_well(ran, bench.steps),
        same_bits(compare(history, reference), bench.steps),
    ]
    why = failed_save(child.screen)
    fault = ""
    if why:
        fault = f"files limited to {limit:,} bytes (RLIMIT_FSIZE): {why}"
    done = "after its first save the run's files may not grow beyond half a checkpoint's; later they may again"
    return Account(done, fault, checks)


def _limited(bench: Bench) -> tuple[str, Child, int]:
    """(name, process, bytes) of a run whose files may not become as large as a checkpoint's. Raises Missed."""
    for attempt in _names("disk"):
        # Two failed saves are enough to act upon, and room is looked for twice a second.
        child = bench.train(attempt, "checkpoint.max_failures=2", "checkpoint.retry_seconds=0.5")
        run = bench.run(attempt)

        def saved_once(run: Path = run) -> bool:
            saved = saved_steps(run)
            return bool(saved) and saved[-1] <= bench.steps // 2 and not is_saving(run)

        if child.freeze_at(saved_once, bench.patience):
            newest = run / "checkpoints" / step_name(saved_steps(run)[-1])
            limit = max(path.stat().st_size for path in newest.iterdir()) // 2
            _limit_files(child, limit)
            child.let_go()
            return attempt, child, limit
        child.kill()
    raise Missed(f"{_TRIES} runs ended before the limit was set; more --steps make them longer")


def _limit_files(child: Child, limit: int | None) -> None:
    """Set the largest size of a file that the process may write; None: as before. No other process is touched."""
    if child.ended:
        return
    _, hard = resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE)
    soft = hard if limit is None else limit
    resource.prlimit(child.process.pid, resource.RLIMIT_FSIZE, (soft, hard))


def tracker(bench: Bench) -> Account:
    """A tracking server that does not answer."""
    if not bench.delivers:
        return not_applicable("tracking.mlflow is false: this config has no tracker")
    reference = bench.undisturbed()
    with closed_port() as port:
        address = f"http://127.0.0.1:{port}"
        # A proxy would be asked in its place.
        variables = {
            "MLFLOW_TRACKING_URI": address,
            "no_proxy": "127.0.0.1",
            "NO_PROXY": "127.0.0.1",
        }
        overrides = ("tracking.mlflow=true", "tracking.drain_seconds=10")
        child = bench.train("tracker", *overrides, variables=variables)
        code = child.finish(bench.patience)
        ran, history = bench.ran("tracker", code)
        # The shipper outlives its run by half a minute. It may not have called anybody yet.
        log = history.run_dir / "shipper.log"
        while not _refused(log, port) and bench.has_processes():
            time.sleep(_LOOK)
        refused = _refused(log, port)
    checks = [
        ended_well(ran, bench.steps),
        same_bits(compare(history, reference), bench.steps),
        sync_named(child.screen),
    ]
    done = f"MLFLOW_TRACKING_URI={address}, where nothing listens"
    return Account(done, refused, checks)


def _refused(log: Path, port: int) -> str:
    """How often the shipper was refused at `port`, by its log; empty if it was not."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    refused = [line for line in lines if f":{port}" in line and "refused" in line]
    if not refused:
        return ""
    return f"{log.name}: {_counted(len(refused), 'call')} refused at port {port}"


@contextmanager
def closed_port() -> Iterator[int]:
    """A port of the loopback interface that nobody listens on, kept from other programs meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def ranks(bench: Bench) -> Account:
    """A run of one rank goes on with two."""
    why = lacks_ranks(bench)
    if why:
        return not_applicable(why)
    reference = bench.undisturbed()
    name, first = _stopped(bench, "ranks")
    with tempfile.TemporaryDirectory() as folder:
        # As launch/torchrun.sh: no port is open to other machines.
        launcher = ["-m", "torch.distributed.run", "--rdzv_backend", "c10d"]
        launcher += ["--rdzv_conf", "store_type=file", "--rdzv_endpoint", f"{folder}/rendezvous"]
        launcher += ["--local_addr", "127.0.0.1", "--nproc_per_node", "2", *_CLI]
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        child = bench.train(name, program=launcher, variables=variables)
        code = child.finish(bench.patience)
    ran, history = bench.ran(name, code)
    checks = [
        stopped(first),
        went_on_from(ran, first.step, "where one rank stopped"),
        on_ranks(ran, 2),
        ended_well(ran, bench.steps),
        near(history.points(LOSS), reference.points(LOSS), first.step + 1),
    ]
    done = "one rank stopped by SIGTERM; two ranks under torchrun go on"
    return Account(done, f"stopped with 1 rank at step {first.step} of {bench.steps}", checks)


def lacks_ranks(bench: Bench) -> str:
    """Why this config or machine has no place for two ranks; empty if it has."""
    train, engine = bench.config.train, bench.config.engine.name
    if engine not in ("auto", "ddp", "fsdp"):
        return f"engine.name={engine} runs in one process"
    if train.global_batch % (2 * train.micro_batch):
        return (
            f"train.global_batch ({train.global_batch}) is no multiple of two ranks' train.micro_batch "
            f"({train.micro_batch})"
        )
    from harness.capability.probe import probe

    devices = probe().devices
    # Without a GPU ranks run on the processor; one GPU serves one rank.
    if len(devices) == 1:
        return "this machine has one GPU"
    return ""


def rollback(bench: Bench) -> Account:
    """A weight that becomes NaN: only an earlier state helps."""
    guard = bench.config.guard
    if not guard.enabled or not guard.max_rollbacks:
        return not_applicable("guard.enabled is false or guard.max_rollbacks is 0: no rollbacks")
    damaged = bench.steps // 2
    evidence = bench.folder / "nan_weight.json"
    program = ("-m", "harness.drill.nan_weight", str(damaged), str(evidence))
    # So that a short run has a good state to go back to.
    overrides = (
        "guard.snapshot_every=1",
        "checkpoint.healthy_steps=1",
        "guard.max_consecutive_skips=2",
    )
    child = bench.train("rollback", *overrides, program=program)
    ran, history = bench.ran("rollback", child.finish(bench.patience))
    content = read_mapping(evidence)
    fault = ""
    if content:
        shape = "x".join(map(str, content["shape"])) or "one value"
        fault = f"a weight ({shape}) was NaN after optimizer step {content['step']}"
    checks = [rolled_back(ran, damaged), ended_well(ran, bench.steps)]
    done = f"one weight set to NaN after optimizer step {damaged}; {', '.join(overrides)}"
    return Account(done, fault, checks, notes=_skips(history))


def _skips(history: RunHistory) -> list[str]:
    """How many updates the run skipped before it went back."""
    skipped = [event for event in history.events if event["code"] == "nonfinite.skip"]
    if not skipped:
        return []
    return [f"updates skipped for NaN: {len(skipped)}"]


EXERCISES: dict[str, tuple[Callable[[Bench], Account], str]] = {
    "preflight": (preflight, "data, model, plan, memory and disk"),
    "soak": (soak, "the same run twice, bit for bit"),
    "sigterm": (sigterm, "stop by SIGTERM, and resume"),
    "sigkill": (sigkill, "SIGKILL in a step and in a save, and resume"),
    "bit": (bit, "a flipped bit in a checkpoint"),
    "disk": (disk, "a full disk"),
    "tracker": (tracker, "a dead tracker"),
    "ranks": (ranks, "resume on two ranks"),
    "rollback": (rollback, "a NaN in the weights"),
}
"""Name -> (exercise, what it is about), in the order in which they run."""
