"""Carry out a sequence of the attack, and judge its end: one oracle for all of it.

The end is right if the run went through with an undisturbed run's bytes and whole history. On the way there every start
ends with a code and words that are true: what it says is saved verifies, what it refuses is what was touched, and once
that is put back the run goes on. Nothing ends in a traceback, or not at all.
"""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attack_damage import Damage, contents, differ, keep_older, other_command, power_cut
from attack_job import PATIENCE, Ended, Job
from attack_oracle import TRACEBACK, compare, compare_history, events_of_rows, read, traceback
from attack_plans import VARIANTS, Attack, Episode
from resume_models import write_text
from resume_runs import BATCH, arguments, checkpoint, codes
from test_clock_jumps import SITE
from tracking_server import Proxy, real_server
from tracking_trainer import check_delivered

from harness.checkpoint.store import Store
from harness.tracking.journal import delivered, read_rows
from tests.support.runs import ROOT, TEXT, harness

# Windows whose loss is NaN, forwards in which FP8 tensors outgrow their scales, steps between snapshots in memory, and
# what must come of it.
PATHS = {
    "plain": ((), (), 0, ""),
    "rolled": ((9, 20, 21), (), 0, "guard.rollback"),
    "remembered": ((9, 20, 21), (), 5, "guard.rollback"),
    "switched": ((9,), (16, 24), 0, "precision.demote"),
}
COMMON = ("--name", "r", "--recipe", "recipe.yaml", "data.path=text", "train.eval_every=10", "tracking.report=false",
          "engine.timeout_seconds=10", "tracking.drain_seconds=1")  # fmt: skip
NO_ROOM = re.compile(
    r"No space left|Read-only file system|room for|cannot be written|cannot be locked|cannot be opened"
)


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


class Field:
    """Where sequences are carried out: a folder for each, and the undisturbed runs that they are compared with."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._undisturbed: dict[tuple[str, str, bool], Path] = {}
        self._stack = ExitStack()
        self._server: tuple[Path, int] | None = None

    def __enter__(self) -> Field:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, folder: Path, variant: str, tracked: bool) -> tuple[str, ...]:
        """Text, recipe and arguments of a run in `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        steps, text = VARIANTS[variant], folder / "text"
        if not text.exists():
            shutil.copytree(TEXT, text) if variant == "plain" else write_text(text, steps * BATCH + 60)
            shutil.copy(ROOT / "recipes" / "fp8_hybrid.yaml", folder / "recipe.yaml")
        fixed = ("--config", "tiny", *COMMON, f"tracking.mlflow={str(tracked).lower()}", f"train.steps={steps}")
        if variant == "plain":
            return (*fixed, "checkpoint.every=5")
        bad, outlier, snapshots, _ = PATHS[variant]
        own = arguments(text, "recipe.yaml", steps, bad=bad, outlier=outlier)
        given = ("--name", "r", "--recipe", "recipe.yaml")
        kept = [each for each in own if not each.startswith("data.path=") and each not in given]
        guard = ("guard.max_consecutive_skips=2", "checkpoint.healthy_steps=3", f"guard.snapshot_every={snapshots}")
        return (*fixed, *kept, *guard, "checkpoint.every=4")

    def undisturbed(self, variant: str, kind: str, tracked: bool) -> Path:
        """The run folder of one that nothing happened to."""
        kind = kind.removesuffix(" ranks")
        key = (variant, kind, tracked)
        if key not in self._undisturbed:
            folder = self.work / f"undisturbed-{variant}-{kind}{'-tracked' * tracked}"
            shutil.rmtree(folder, ignore_errors=True)
            command = self.command(folder, variant, tracked=False)
            ended = attend(
                Job(folder, kind if kind == "python" else f"{kind} ranks", command, []), Episode("none"), self, {}
            )
            assert ended.codes in ([0], [0, 0]), ended.output
            assert PATHS[variant][-1] in {*codes(folder / "runs" / "r"), ""}, ended.output
            assert not compare_history(folder / "runs" / "r", folder / "runs" / "r", VARIANTS[variant])
            self._undisturbed[key] = folder / "runs" / "r"
        return self._undisturbed[key]

    def server(self) -> tuple[Path, int]:
        """A real MLflow server, for all sequences that want one: folder of its database, and port."""
        if self._server is None:
            folder = self.work / "server"
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier attack in the same place
            folder.mkdir()
            self._server = folder, self._stack.enter_context(real_server(folder))
        return self._server

    def attack(self, attack: Attack) -> Result:
        """Carry the sequence out in a folder of its own, which goes if all is well."""
        folder = self.work / f"seed-{attack.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        sequence = _Sequence(self, attack, folder)
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


class _Sequence:
    def __init__(self, where: Field, attack: Attack, folder: Path) -> None:
        self.field, self.attack, self.folder = where, attack, folder
        self.run = folder / "runs" / "r"
        self.tracked = "tracking" in attack.families
        self.undisturbed = where.undisturbed(attack.variant, attack.kind, self.tracked)
        self.command = where.command(folder, attack.variant, self.tracked)
        (folder / "clock.py").write_text(SITE.format(offset=str(folder / "offset")))
        self.damage = Damage(self.run, folder / "aside")
        self.starts = self.refused = self.missed = 0
        self.log: list[str] = []
        self.past: list[Episode] = []
        self.before: dict[str, bytes] = {}
        self.proxy: Proxy | None = None
        self.variables: dict[str, str] = {}
        if self.tracked:
            self.database, port = where.server()
            self.proxy = Proxy(folder / "proxy", port)
            self.variables = {"MLFLOW_TRACKING_URI": self.proxy.uri, "MLFLOW_HTTP_REQUEST_TIMEOUT": "2"}

    def close(self) -> None:
        if self.proxy is not None:
            self.proxy.close()
            with sqlite3.connect(self.database / "mlflow.db", timeout=60) as database:
                database.execute("update runs set name = ? where name = 'r'", (f"r-{self.attack.seed}",))

    @property
    def steps(self) -> int:
        return VARIANTS[self.attack.variant]

    def carry_out(self) -> None:
        for episode in self.attack.episodes:
            self.past.append(episode)
            for each in episode.damage:
                done = self.run.exists() and not self._through() and self.damage.apply(each)
                self.missed += not done
                self.log.append(f"{'damaged' if done else 'nothing to damage'}: {each}")
            if episode.change:
                self._changed(episode)
                continue
            ended = self.start(episode)
            self._judge(episode, ended)
            for each in episode.after:
                if self.run.exists() and ended.fired and not self._through():
                    self.missed += not power_cut(self.damage, each["seconds"], each["seed"])
            if self.run.exists():
                keep_older(self.run, self.folder / "older")
        self._calm()

    def start(self, episode: Episode) -> Ended:
        """One start, its faults included; the disk is well again after it."""
        self.starts += 1
        (self.folder / "size").unlink(missing_ok=True)
        self.before = contents(self.run) if self.damage.pending() else {}
        events = self._later(episode.events)
        job = Job(self.folder, self.attack.kind, (*self.command, *episode.arguments), events, **self.variables)
        ended = attend(job, episode, self.field, {"proxy": self.proxy, "again": self._again})
        (self.folder / "size").unlink(missing_ok=True)
        self.missed += bool(episode.events) and not ended.fired
        log = self.folder / f"start-{self.starts}.log"
        log.write_text(ended.output)
        self.log.append(
            f"start {self.starts} ({episode.family}): {ended.codes} after {ended.seconds:.1f} s; {ended.fired}"
        )
        if ended.hung:
            raise Finding(f"hang: start {self.starts} did not end in {PATIENCE[self.attack.kind]:.0f} s")
        if ended.orphans:
            raise Finding(f"orphans: {ended.orphans}")
        return ended

    def _through(self) -> bool:
        """Nobody asks any more what is in the files of a run that has finished."""
        outcome = read(self.run / "outcome.json")
        return outcome.get("status") == "done" and checkpoint(self.run, self.steps).is_dir()

    def _later(self, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same events, all of them later where the run has passed the first already."""
        rows = read_rows(self.run / "journal.jsonl") if (self.run / "journal.jsonl").is_file() else ()
        done = max((row["step"] for row in rows if row["kind"] == "metrics"), default=0)
        places = [each["at"] for each in events if isinstance(each["at"], int)]
        shift = max(0, done + 1 - min(places, default=done + 1))
        last = self.steps - 1
        return [
            {**each, "at": min(each["at"] + shift, last)} if isinstance(each["at"], int) else each for each in events
        ]

    def _again(self) -> Job:
        return Job(self.folder, self.attack.kind, self.command, [], "-second", **self.variables)

    def _judge(self, episode: Episode, ended: Ended) -> None:
        """Whether this end is a true one."""
        told = ended.output
        if found := traceback(told, self.attack.kind):
            raise Finding(f"traceback: {found}")
        self._second(ended)
        if 3 in ended.codes and 3 not in episode.may and self._lacks_targets():
            raise Over  # of the budget, by name: nothing to roll back to is left
        if 2 in ended.codes:  # of rank 0 alone, where it alone reads the file
            self._refused(episode, told)
            return
        for code in ended.codes:
            if code not in (0, *episode.may):
                raise Finding(f"exit code: {code} in an episode of {episode.family}: {told[-600:]}")
        mute = any(
            each["do"][-1] == "full" for each in episode.events
        )  # which takes no word of it, on the screen either
        if any(code in (1, 4) for code in ended.codes) and not mute and not re.search(r"error|failed|lost", told):
            raise Finding(f"no word: exit code {ended.codes}, and nothing was said")
        self._outcome(ended)
        self._claims()
        if any(re.search(r"^step ", line) for line in told.splitlines()):
            self.damage.forget()

    def _lacks_targets(self) -> bool:
        """Whether something before has cost checkpoints, or the marks of good ones, so that a rollback finds none."""
        return bool(
            {*self.attack.families} - {"start", "kill", "signals", "freeze", "clock", "changed", "writers", "tracking"}
        )

    def _second(self, ended: Ended) -> None:
        """A second start of a run that goes on is refused, unless the lock was taken away from the first."""
        for other in ended.others:
            if TRACEBACK in other.output:
                raise Finding(f"traceback: of a second writer: {other.output[-300:]}")
            refused = set(other.codes) == {2} and "another process is writing this run" in other.output
            if not refused and set(other.codes) != {0}:
                raise Finding(f"exit code: {other.codes} of a second writer: {other.output[-600:]}")

    def _refused(self, episode: Episode, told: str) -> None:
        """A refusal names what was touched, and how to mend it; then it is put back."""
        if "error" not in told or "fix:" not in told:
            raise Finding(f"no word: exit code 2 without an error and its fix: {told[-600:]}")
        never = "not one of its checkpoints is whole" in told  # a first one of which the disk has kept a part
        if any(name in told for name in self._gone()) or (
            never and {"torn rename", "power cut"} & {*self.attack.families}
        ):
            raise Over
        if self.damage.pending():
            if not any(name in told for name in self.damage.names):
                raise Finding(f"refused for another reason than {sorted(self.damage.names)}: {told[-600:]}")
            now = contents(self.run)
            grown = {
                name
                for name in ("journal.jsonl", "fp8_telemetry.bin")
                if now.get(name, b"").startswith(self.before.get(name, b""))
            }
            made = {name for name in now if name.startswith("data/") and name not in self.before}  # from its source
            if changed := sorted(differ(self.before, now) - grown - made):
                raise Finding(f"changed by a refusal: {changed}: {told[-300:]}")
            self.damage.undo()
            self.refused += 1
        elif not (episode.family in ("disk", "full at start") and NO_ROOM.search(told)):
            raise Finding(f"refused without a reason: {told[-600:]}")

    def _gone(self) -> list[str]:
        """What was deleted while the run went on, up to now."""
        return [
            word for each in self.past for event in each.events for word in event["do"][1:] if event["do"][0] == "gone"
        ]

    def _outcome(self, ended: Ended) -> None:
        """outcome.json and the exit code agree, and what was saved verifies."""
        outcome = read(self.run / "outcome.json")
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
                raise Finding(f"claim: stopped with 75 at step {outcome['step']}, which does not verify: {problems}")
        if code == 0 and (outcome.get("status") != "done" or outcome.get("step") != self.steps):
            raise Finding(f"claim: exit code 0, and outcome.json says {outcome}")
        lost = re.search(r"steps? (\d+)(?: to (\d+))? (?:are|is) lost", str(outcome.get("reason", "")))
        if code == 1 and lost:
            store = Store(self.run / "checkpoints", readonly=True)
            newest = max((step for step in store.steps() if not store.verify(step)), default=0)
            if newest + 1 != int(lost[1]):
                raise Finding(f"claim: {lost[0]}, and the newest checkpoint that verifies is of step {newest}")

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
        newest = max(store.steps(), default=0)
        for step in saved:
            # Deleted, or set aside, by a process that was killed before it said so.
            if not store.path(step).exists() and (step < newest or list(store.root.glob(f"*-step-{step:08d}*"))):
                continue
            if problems := store.verify(step):
                raise Finding(f"claim: the checkpoint of step {step} was saved, and does not verify: {problems[0]}")

    def _changed(self, episode: Episode) -> None:
        """Another command is refused by name, and changes nothing."""
        if not (self.run / "config.yaml").exists():
            self.missed += 1
            return
        before = contents(self.run)
        arguments, said, mend = other_command(self.folder, episode.change)
        self.starts += 1
        goes_on = episode.change == "text"  # the run has its own copy
        kind = self.attack.kind if goes_on else "python"
        job = Job(self.folder, kind, (*self.command, *arguments), [], **self.variables)
        ended = attend(job, episode, self.field, {})
        mend()
        (self.folder / f"start-{self.starts}.log").write_text(ended.output)
        self.log.append(f"start {self.starts} ({episode.change}): {ended.codes} after {ended.seconds:.1f} s")
        if TRACEBACK in ended.output:
            raise Finding(f"traceback: after a changed {episode.change}: {ended.output[-300:]}")
        if self.damage.pending() and ended.codes == [2]:
            return
        if goes_on and set(ended.codes) <= {0, 75}:
            return
        if ended.codes != [2] or not re.search(said, ended.output):
            raise Finding(f"not refused: a changed {episode.change}, codes {ended.codes}: {ended.output[-600:]}")
        if contents(self.run) != before:
            raise Finding(f"changed by a refusal: {episode.change}: {sorted(differ(before, contents(self.run)))}")

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
        if found := compare(self.run, self.undisturbed, self.steps):
            raise Finding(found)
        told = [each for each in events_of_rows(self.run) if each["code"] == "journal.changed"]
        if told and "journal.jsonl" not in {*self.damage.touched, *self._gone()} and not self._lacks_targets():
            raise Finding(f"false alarm: nobody touched the journal, and the run says: {told[0]['text'][:300]}")
        if self.tracked:
            self._delivered()

    def _tools(self) -> None:
        """What reads a run reads this one, whatever was done to it."""
        if not self.damage.pending():
            return
        for tool in ("explain", "inspect", "verify"):
            done = harness(self.folder, tool, "runs/r")
            if TRACEBACK in done.stderr:
                raise Finding(f"traceback: harness {tool}: {done.stderr.splitlines()[-1][:300]}")

    def _delivered(self) -> None:
        if not delivered(self.run):
            done = harness(self.folder, "sync", "runs/r", **self.variables)
            if done.returncode:
                raise Finding(f"tracking: sync ends with {done.returncode}: {(done.stdout + done.stderr)[-600:]}")
        database = self.database / "mlflow.db"
        try:
            check_delivered(self.run, database)
        except (AssertionError, ValueError) as error:
            raise Finding(f"tracking: {str(error)[:600]}") from error


def attend(job: Job, episode: Episode, where: Field, hands: Mapping[str, Any]) -> Ended:
    """See the start to its end, doing what the episode has the attacker do."""
    waiting = [dict(each) for each in episode.reactions]
    seconds: list[Job] = []
    limit = PATIENCE[job.kind]
    while job.running() and job.age() < limit:
        now = time.monotonic()
        for each in waiting:
            if "due" not in each and _happened(each["when"], job):
                each["due"] = now + each["after"]
                if each.get("stop"):
                    job.signal_all(signal.SIGSTOP)
        for each in [each for each in waiting if each.get("due", now + 1) <= now]:
            waiting.remove(each)
            react(each["do"], job, hands, seconds)
        time.sleep(0.01)
    ended = job.end(hung=job.running())
    for second in seconds:
        deadline = time.monotonic() + limit
        while second.running() and time.monotonic() < deadline:
            time.sleep(0.01)
        other = second.end(hung=second.running())
        ended.hung |= other.hung
        ended.others.append(other)
    if hands.get("proxy") is not None:
        hands["proxy"].switch("")
    return ended


def _happened(when: str, job: Job) -> bool:
    if when == "started":
        return True
    return bool(job.fired()) if when == "fired" else "checkpoint.paused" in job.output()


def react(do: str, job: Job, hands: Mapping[str, Any], seconds: list[Job]) -> None:
    """One thing that the attacker does from outside."""
    match do.split():
        case ["kill", "all"]:
            job.signal_all(signal.SIGKILL)
        case ["continue", *_]:
            job.signal_all(signal.SIGCONT)
        case ["room"]:
            (job.folder / "size").unlink(missing_ok=True)
        case ["stop", *_]:
            job.ask(signal.SIGTERM)
        case ["interrupt", *_]:
            job.ask(signal.SIGINT)
        case ["kill", "launcher"]:
            job.kill_launcher()
        case ["second"]:
            seconds.append(hands["again"]())
        case ["server", fault]:
            hands["proxy"].switch(fault)
        case _:
            raise ValueError(do)
