"""Carry out a sequence of the attack, and judge its end: one oracle for all of it.

The end is right if the run went through with an undisturbed run's bytes and whole history. On the way there every start
ends with a code and words that are true: what it says is saved verifies, what it refuses is what was touched, and once
that is put back the run goes on. Nothing ends in a traceback, or not at all.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from attack_damage import Damage, contents, differ, keep_older, other_command, power_cut, said_of
from attack_field import PATHS, Field
from attack_job import PATIENCE, Ended, Job, attend
from attack_oracle import (
    TRACEBACK,
    Rows,
    compare,
    events_of_rows,
    figures,
    outcome_of,
    read,
    refusal,
    traceback,
)
from attack_plans import ALONE, VARIANTS, Attack, Episode
from resume_runs import checkpoint
from test_clock_jumps import SITE
from tracking_server import Proxy
from tracking_trainer import check_delivered

from harness.checkpoint.store import Store
from harness.tracking.journal import delivered, read_rows
from tests.support.runs import harness

NO_ROOM = re.compile(
    r"No space left|Read-only file system|room for|cannot be written|cannot be locked|cannot be opened"
)
DISKS = {"disk", "no inodes", "read-only", "full at start"}
TRACKED = {"tracking", "server"}
MET_SECONDS = 60.0
"""Within which whoever delivers to a server that is gone asks it again, on a busy machine."""
# After which a checkpoint, or the mark of a good one, may be missing: those of a disk that took none, or were cut off.
COSTS_CHECKPOINTS = {*DISKS, "failing call", "torn rename", "power cut"}


class Finding(Exception):
    """What must not be. The first words are its kind."""


class Over(Exception):
    """The run is refused, truly: what it needs was deleted while it ran, and nobody has a copy."""


@dataclass
class Result:
    """result: same, refused (and the same once it was mended), known or finding."""

    result: str
    finding: str = ""
    starts: int = 0
    refused: int = 0
    seconds: float = 0.0
    missed: int = 0
    log: list[str] = field(default_factory=list)


def attack_once(field: Field, attack: Attack) -> Result:
    """Carry the sequence out in a folder of its own, which goes if all is well."""
    folder = field.work / f"seed-{attack.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    sequence = _Sequence(field, attack, folder)
    try:
        sequence.carry_out()
        result = Result("refused" if sequence.refused else "same")
    except Over:
        sequence.refused += 1
        result = Result("refused")
    except Finding as finding:
        result = Result("finding", str(finding))
    finally:
        sequence.close()
    result.starts, result.refused, result.log = sequence.starts, sequence.refused, sequence.log
    result.missed, result.seconds = sequence.missed, time.monotonic() - began
    if result.result != "finding":
        shutil.rmtree(folder, ignore_errors=True)
    return result


def credentials(uri: str, attack: Attack) -> dict[str, str]:
    """The variables that bring an address and a secret to MLflow, as the plan has it."""
    secret, host = secrets_of(attack)[0], uri.removeprefix("http://")
    before = {
        "password": f"me:{secret}@",
        "encoded": f"me:{quote(secret, safe='')}@",
        "before the host": f"{secret}@",
    }
    variables = {"MLFLOW_TRACKING_URI": f"http://{before.get(attack.secret, '')}{host}"}
    if attack.secret == "variables":
        variables |= {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": secret}
    if attack.secret == "token":
        variables |= {"MLFLOW_TRACKING_TOKEN": secret}
    return variables


def secrets_of(attack: Attack) -> list[str]:
    """The secret of a plan, and how an address spells it."""
    secret = f"s3cr3t-{attack.seed}" + ("/ö@" if attack.secret == "encoded" else "")
    return [secret, quote(secret, safe="")]


def leaks(folder: Path, secrets: list[str]) -> list[str]:
    """Files in which one of `secrets` stands, whatever they are."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    with_one = [
        path for path in files if any(each.encode() in path.read_bytes() for each in secrets)
    ]
    return [str(path.relative_to(folder)) for path in with_one]


class _Sequence:
    def __init__(self, where: Field, attack: Attack, folder: Path) -> None:
        self.field, self.attack, self.folder = where, attack, folder
        self.run = folder / "runs" / "r"
        self.tracked = bool(TRACKED & {*attack.families})
        self.undisturbed = where.undisturbed(attack.variant, attack.kind, self.tracked)
        self.command = where.command(folder, attack.variant, self.tracked)
        (folder / "clock.py").write_text(SITE.format(offset=str(folder / "offset")))
        self.damage = Damage(self.run, folder / "aside")
        self.starts = self.refused = self.missed = 0
        self.log: list[str] = []
        self.past: list[Episode] = []
        self.before: dict[str, bytes] = {}
        self.rows = Rows()
        self.restarts: list[threading.Thread] = []
        self.proxy: Proxy | None = None
        self.variables: dict[str, str] = {}
        if self.tracked:
            self.server = where.server()
            self.proxy = Proxy(folder / "proxy", self.server.port)
            self.variables = credentials(self.proxy.uri, attack) | {
                "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"
            }

    def close(self) -> None:
        if self.proxy is not None:
            self.proxy.close()
            for each in self.restarts:
                each.join()
            with sqlite3.connect(self.server.folder / "mlflow.db", timeout=60) as database:
                database.execute(
                    "update runs set name = ? where name = 'r'", (f"r-{self.attack.seed}",)
                )

    @property
    def steps(self) -> int:
        return VARIANTS[self.attack.variant]

    def carry_out(self) -> None:
        for episode in self.attack.episodes:
            self.past.append(episode)
            was = figures(self.run)
            for each in episode.damage:
                done = self.run.exists() and not self._through() and self.damage.apply(each)
                self.missed += not done
                self.log.append(f"{'damaged' if done else 'nothing to damage'}: {each}")
            self.rows.change(was, figures(self.run))
            if episode.change:
                self._changed(episode)
                continue
            ended = self.start(episode)
            self._judge(episode, ended)
            for each in episode.after:
                if self.run.exists() and ended.fired and not self._through():
                    was = figures(self.run)
                    self.missed += not power_cut(self.damage, each["seconds"], each["seed"])
                    self.rows.change(was, figures(self.run))
            if self.run.exists():
                keep_older(self.run, self.folder / "older")
        self._calm()

    def start(self, episode: Episode) -> Ended:
        """One start, its faults included; the disk is well again after it."""
        self.starts += 1
        for name in ("size", "size.refused"):
            (self.folder / name).unlink(missing_ok=True)
        self.before = contents(self.run)
        events = self._later(episode.events)
        job = Job(
            self.folder,
            self.attack.kind,
            (*self.command, *episode.arguments),
            events,
            **self.variables,
        )
        ended = attend(
            job,
            episode,
            {"proxy": self.proxy, "again": self._again, "restart": self._restart_server},
        )
        for each in self.restarts:
            each.join()
        (self.folder / "size").unlink(missing_ok=True)
        self.missed += (bool(episode.events) and not ended.fired) + ended.undone
        self.missed += episode.family in DISKS and not (self.folder / "size.refused").exists()
        log = self.folder / f"start-{self.starts}.log"
        log.write_text(ended.output)
        self.log.append(
            f"start {self.starts} ({episode.family}): {ended.codes} after {ended.seconds:.1f} s; {ended.fired}"
        )
        self.rows.lossy |= episode.family in COSTS_CHECKPOINTS - {"power cut"}
        if ended.hung:
            raise Finding(
                f"hang: start {self.starts} did not end in {PATIENCE[self.attack.kind]:.0f} s"
            )
        if ended.orphans:
            raise Finding(f"orphans: {ended.orphans}")
        return ended

    def _through(self) -> bool:
        """Nobody asks any more what is in the files of a run that has finished."""
        outcome = read(self.run / "outcome.json")
        return outcome.get("status") == "done" and checkpoint(self.run, self.steps).is_dir()

    def _later(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same events, all of them later where the run has passed the first already."""
        rows = (
            read_rows(self.run / "journal.jsonl") if (self.run / "journal.jsonl").is_file() else ()
        )
        done = max((row["step"] for row in rows if row["kind"] == "metrics"), default=0)
        places = [each["at"] for each in events if isinstance(each["at"], int)]
        shift = max(0, done + 1 - min(places, default=done + 1))
        last = self.steps - 1
        return [
            {**each, "at": min(each["at"] + shift, last)} if isinstance(each["at"], int) else each
            for each in events
        ]

    def _again(self) -> Job:
        return Job(self.folder, self.attack.kind, self.command, [], "-second", **self.variables)

    def _restart_server(self, up: Path) -> None:
        """MLflow's server is killed while the run delivers to it, and started again; for a while it denies access, as
        one with other credentials does. Each lasts until the run has met it. The file `up` says that it is over.
        """
        assert self.proxy is not None
        proxy, server = self.proxy, self.server
        up.unlink(missing_ok=True)

        def met(fault: str) -> None:
            before, deadline = proxy.hits[fault], time.monotonic() + MET_SECONDS
            while proxy.hits[fault] == before and time.monotonic() < deadline:
                time.sleep(0.05)
            self.missed += proxy.hits[fault] == before

        def restart() -> None:
            server.kill()
            met("dead")
            proxy.switch("denied")
            server.start()
            met("denied")
            proxy.switch("")
            up.touch()

        self.restarts.append(threading.Thread(target=restart))
        self.restarts[-1].start()

    def _judge(self, episode: Episode, ended: Ended) -> None:
        """Whether this end is a true one."""
        told = ended.output
        if found := traceback(told, self.attack.kind):
            raise Finding(f"traceback: {found}")
        self._second(ended)
        if 3 in ended.codes and self._halted(episode, ended):
            raise Over
        if 2 in ended.codes:  # of rank 0 alone, where it alone reads the file
            self._refused(episode, told)
            return
        for code in ended.codes:
            if code not in (0, *episode.may) and not self._unheard(episode, ended):
                raise Finding(f"exit code: {code} in an episode of {episode.family}: {told[-600:]}")
        mute = any(
            each["do"][-1] == "full" for each in episode.events
        )  # which takes no word of it, on the screen either
        words = r"error|failed|lost|exits with return code"  # the last of DeepSpeed's launcher, whose ranks were killed
        if any(code in (1, 4) for code in ended.codes) and not mute and not re.search(words, told):
            raise Finding(f"no word: exit code {ended.codes}, and nothing was said")
        if ended.codes[0] >= 0 and "not ended: still running, or killed" in told:
            raise Finding(
                f"untrue: it ends with {ended.codes}, and says that it has not ended: {told[-600:]}"
            )
        # A second start that came to the lock after the first had let go of it has gone on, to the end.
        self._outcome(next((other for other in ended.others if set(other.codes) == {0}), ended))
        self._claims()
        if any(re.search(r"^step ", line) for line in told.splitlines()):
            self.damage.forget()

    def _unheard(self, episode: Episode, ended: Ended) -> bool:
        """Whether one rank was asked in its first line, and its launcher's signal killed another that had not come to
        its own: for the wrapper, which cannot see who sent it, a rank has died, and it says that and ends with 1.
        """
        early = (
            all(each["at"] == "begin" for each in episode.events)
            and 0 < len(ended.fired) < self.attack.ranks
        )
        said = "a rank died while the others started" in ended.output
        return (
            early and said and self.attack.kind in ("torchrun", "deepspeed") and ended.codes == [1]
        )

    def _halted(self, episode: Episode, ended: Ended) -> bool:
        """Whether a run has ended with 3 for good: that is true where it was to roll back, what was done to it has cost
        the checkpoints to go back to, and it says so. One whose saves fail may end so where its config asks for that.
        """
        outcome, past = outcome_of(self.run, ended.output), {each.family for each in self.past}
        reason = str(outcome.get("reason", ""))
        if set(ended.codes) != {3} or outcome.get("exit_code") != 3:
            raise Finding(
                f"exit code: {ended.codes}, and outcome.json says {outcome}: {ended.output[-600:]}"
            )
        if "checkpoint.on_failure=halt" in episode.arguments and re.search(
            r"could not be saved|saved in", reason
        ):
            return False
        rolls = PATHS[self.attack.variant][-1] == "guard.rollback"
        cost = "checkpoints" in {*self.damage.touched, *self._gone()} or COSTS_CHECKPOINTS & past
        if not (rolls and cost and "no checkpoint is good yet" in reason):
            raise Finding(
                f"exit code: 3, and nothing that was done explains it: {reason}: {ended.output[-600:]}"
            )
        self._claims()
        return True

    def _second(self, ended: Ended) -> None:
        """A second start of a run that goes on is refused, unless the first had let go of its lock."""
        for other in ended.others:
            if TRACEBACK in other.output:
                raise Finding(f"traceback: of a second writer: {other.output[-300:]}")
            refused = (
                set(other.codes) == {2} and "another process is writing this run" in other.output
            )
            if not refused and set(other.codes) != {0}:
                raise Finding(f"exit code: {other.codes} of a second writer: {other.output[-600:]}")

    def _refused(self, episode: Episode, told: str) -> None:
        """A refusal names what was touched, and how to mend it, and changes nothing; then it is put back."""
        said = refusal(told)
        if not said or "fix:" not in said:
            raise Finding(f"no word: exit code 2 without an error and its fix: {told[-600:]}")
        self._unchanged(said)
        if episode.family in DISKS and NO_ROOM.search(said):
            return  # before it came to look at anything
        never = (
            "not one of its checkpoints is whole" in said
        )  # a first one of which the disk has kept a part
        if any(name in said for gone in self._gone() for name in said_of([gone])) or (
            never and {"torn rename", "power cut"} & {*self.attack.families}
        ):
            raise Over
        if not self.damage.pending():
            raise Finding(f"refused without a reason: {told[-600:]}")
        if not any(name in said for name in self.damage.names):
            raise Finding(
                f"refused for another reason than {sorted(self.damage.names)}: {told[-600:]}"
            )
        was = figures(self.run)
        self.damage.undo()
        self.rows.change(was, figures(self.run))
        self.refused += 1

    def _unchanged(self, said: str) -> None:
        """Since this start began, but for what it wrote of its own, and what an unfinished save had left."""
        now = contents(self.run)
        grown = {
            name
            for name in ("journal.jsonl", "fp8_telemetry.bin")
            if now.get(name, b"").startswith(self.before.get(name, b""))
        }
        made = {
            name for name in now if name.startswith("data/") and name not in self.before
        }  # from its source
        left = {
            name for name in self.before if name.startswith("checkpoints/.tmp-") and name not in now
        }
        if changed := sorted(differ(self.before, now) - grown - made - left):
            raise Finding(f"changed by a refusal: {changed}: {said[:300]}")

    def _gone(self) -> list[str]:
        """What was deleted while the run went on, up to now."""
        return [
            word
            for each in self.past
            for event in each.events
            for word in event["do"][1:]
            if event["do"][0] == "gone"
        ]

    def _outcome(self, ended: Ended) -> None:
        """The outcome and the exit code agree, and what was saved verifies."""
        outcome = outcome_of(self.run, ended.output)
        code = ended.codes[0]
        if code < 0:
            return
        if code == 75:
            early = "stopped before training began" in ended.output
            if early:
                return
            if outcome.get("status") != "stopped" or outcome.get("exit_code") != 75:
                raise Finding(f"exit code 75, and outcome.json says {outcome}")
            found = re.search(r"saved in (\S+?)/step-", outcome["reason"])
            store = Store(Path(found[1]) if found else self.run / "checkpoints", readonly=True)
            if problems := store.verify(outcome["step"]):
                raise Finding(
                    f"claim: stopped with 75 at step {outcome['step']}, which does not verify: {problems}"
                )
        if code == 0 and (outcome.get("status") != "done" or outcome.get("step") != self.steps):
            raise Finding(f"claim: exit code 0, and outcome.json says {outcome}")
        lost = re.search(
            r"steps? (\d+)(?: to (\d+))? (?:are|is) lost", str(outcome.get("reason", ""))
        )
        if code == 1 and lost:
            store = Store(self.run / "checkpoints", readonly=True)
            newest = max((step for step in store.steps() if not store.verify(step)), default=0)
            if newest + 1 != int(lost[1]):
                raise Finding(
                    f"claim: {lost[0]}, and the newest checkpoint that verifies is of step {newest}"
                )

    def _claims(self) -> None:
        """Every checkpoint that the run says it has saved, and nobody has touched, is there and verifies."""
        touched = {*self.damage.touched, *self._gone()}
        if not (self.run / "journal.jsonl").is_file() or {"checkpoints", "journal.jsonl"} & touched:
            return
        store = Store(self.run / "checkpoints", readonly=True)
        saved: set[int] = set()
        for row in read_rows(self.run / "journal.jsonl", metrics=False):
            if row["kind"] == "checkpoint" and row["state"] in ("saved", "deleted", "rolled back"):
                (saved.add if row["state"] == "saved" else saved.discard)(row["step"])
            elif row["kind"] == "event" and row["code"] == "guard.rollback":
                saved = {
                    step for step in saved if step <= row["to_step"]
                }  # set aside from then on, file by file
        newest = max(store.steps(), default=0)
        for step in saved:
            # Deleted, or set aside, by a process that was killed before it said so, or while it did so file by file.
            away = list(store.root.glob(f"*-step-{step:08d}*"))
            if store.path(step).exists():
                if away and "torn rename" in {each.family for each in self.past}:
                    continue
            elif away or step < newest or store.path(step).name in self.damage.touched:
                continue
            if problems := store.verify(step):
                raise Finding(
                    f"claim: the checkpoint of step {step} was saved, and does not verify: {problems[0]}"
                )

    def _changed(self, episode: Episode) -> None:
        """Another command is refused by name, and changes nothing."""
        if not (self.run / "config.yaml").exists():
            self.missed += 1
            return
        if episode.change == "text" and self._takes_the_text():
            self.missed += 1
            return
        before = contents(self.run)
        arguments, said, mend = other_command(self.folder, episode.change)
        self.starts += 1
        goes_on = episode.change == "text"  # the run has its own copy
        kind = self.attack.kind if goes_on or self.attack.kind in ALONE else "python"
        job = Job(self.folder, kind, (*self.command, *arguments), [], **self.variables)
        ended = attend(job, episode, {})
        mend()
        (self.folder / f"start-{self.starts}.log").write_text(ended.output)
        self.log.append(
            f"start {self.starts} ({episode.change}): {ended.codes} after {ended.seconds:.1f} s"
        )
        if TRACEBACK in ended.output:
            raise Finding(f"traceback: after a changed {episode.change}: {ended.output[-300:]}")
        if self.damage.pending() and ended.codes == [2]:
            return
        if goes_on and set(ended.codes) <= {0, 75}:
            if "resumed at" in ended.output and "data.source" not in ended.output:
                raise Finding(
                    f"no word: the text has changed, and nobody says so: {ended.output[-600:]}"
                )
            return
        if ended.codes != [2] or not re.search(said, ended.output):
            raise Finding(
                f"not refused: a changed {episode.change}, codes {ended.codes}: {ended.output[-600:]}"
            )
        if contents(self.run) != before:
            raise Finding(
                f"changed by a refusal: {episode.change}: {sorted(differ(before, contents(self.run)))}"
            )

    def _takes_the_text(self) -> bool:
        """Whether a start makes its data of the text again, whatever that is now: its copy was touched, and no
        checkpoint is bound to it. A changed text is then another run's, as in a new folder.
        """
        copied = "data" not in self._gone() and not any(
            each[0] == "data" for each in self.damage.inside()
        )
        store = Store(self.run / "checkpoints", readonly=True)
        return not copied and all(store.verify(step) for step in store.steps())

    def _calm(self) -> None:
        """Nothing happens any more: the run goes through, at once or after what it refuses is put back."""
        self._tools()
        for _ in range(3):
            calm = Episode("calm")
            ended = self.start(calm)
            self._judge(calm, ended)
            if set(ended.codes) == {0}:
                break
        else:
            raise Finding(f"does not go on: {self.log[-1]}")
        if found := compare(self.run, self.undisturbed, self.steps, self.rows):
            raise Finding(found)
        self._alarms()
        if self.tracked:
            self._delivered()

    def _alarms(self) -> None:
        """What the run says of its files was done to them."""
        touched, changed = (
            {*self.damage.touched, *self._gone()},
            {each.change for each in self.past},
        )
        slots = self.rows.lossy or "fp8_telemetry.bin" in touched
        rows = "journal.jsonl" in self.damage.touched
        true = {"resume.mismatch": rows, "data.source": "data" in touched or "text" in changed,
                "fp8.no_table": slots, "fp8.dropped": slots}  # fmt: skip
        for each in events_of_rows(self.run, tuple(true)):
            if not true[each["code"]]:
                raise Finding(
                    f"false alarm: nobody did that, and the run says {each['code']}: {each['text'][:300]}"
                )

    def _tools(self) -> None:
        """What reads a run reads this one, whatever was done to it."""
        if not self.damage.pending():
            return
        for tool in ("explain", "inspect", "verify"):
            done = harness(self.folder, tool, "runs/r")
            if TRACEBACK in done.stderr:
                raise Finding(f"traceback: harness {tool}: {done.stderr.splitlines()[-1][:300]}")

    def _leaks_of_the_server(self) -> list[str]:
        """In what MLflow keeps; the log of its server has every address that it was asked for."""
        found = leaks(self.server.folder, secrets_of(self.attack))
        return [f"MLflow's {name}" for name in found if name != "server.log"]

    def _delivered(self) -> None:
        if not delivered(self.run):
            done = harness(self.folder, "sync", "runs/r", **self.variables)
            (self.folder / "sync.log").write_text(done.stdout + done.stderr)
            if done.returncode:
                raise Finding(
                    f"tracking: sync ends with {done.returncode}: {(done.stdout + done.stderr)[-600:]}"
                )
        database = self.server.folder / "mlflow.db"
        try:
            check_delivered(self.run, database)
        except (AssertionError, ValueError) as error:
            raise Finding(f"tracking: {str(error)[:600]}") from error
        # The run folder, what every start and sync said on the screen, and what MLflow keeps.
        secrets = secrets_of(self.attack)
        if found := [*leaks(self.folder, secrets), *self._leaks_of_the_server()]:
            raise Finding(f"secret: written down in {', '.join(found)}")
