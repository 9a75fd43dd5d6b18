"""What the attack does: a sequence of episodes, drawn from a seed alone. Everything here is data; nothing is done.

An episode is one start of a run with what is damaged before it, what happens within it (see attack_driver), and what
the attacker does meanwhile. Steps of later episodes are later, so that a run is not through before its faults are.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("python", "new python", "torchrun ranks", "deepspeed ranks", "torchrun", "deepspeed")
"""One process, forked from one that has imported everything, or a new interpreter; two that take themselves for a
launcher's ranks (forked too: nine tenths of the cost of a launcher is its imports); two under the launcher itself."""
SHARES = {
    "python": 65,
    "new python": 8,
    "torchrun ranks": 12,
    "deepspeed ranks": 6,
    "torchrun": 5,
    "deepspeed": 4,
}
ALONE = ("python", "new python")
VARIANTS: Mapping[str, int] = {"plain": 24, "rolled": 30, "remembered": 30, "switched": 32}
"""Runs, and their steps: one without anything; with a step that is skipped and a rollback over two windows, to a
checkpoint or to a snapshot in memory; with layers that leave FP8."""

START_SECONDS = {"new python": 4.0, "torchrun": 6.0, "deepspeed": 8.0}
"""Within which a start that imports everything has begun to train."""
SIGNALS = (("SIGTERM",), ("SIGINT",), ("SIGUSR1",), ("SIGHUP",), ("SIGINT", "SIGTERM"), ("SIGTERM", "SIGTERM"),
           ("SIGHUP", "SIGTERM"), ("SIGTERM", "SIGINT", "SIGHUP"))  # fmt: skip
STAGES = (
    "begin",
    "join_worker",
    "build_plan",
    "build_data",
    "open_store",
    "open_telemetry",
    "build_run",
    "save",
)
FILES = ("checkpoint", "older checkpoint", "manifest", "state", "good.json", "incidents.json", "config.yaml",
         "plan.json", "outcome.json", "data", "journal.jsonl", "slots", "lock")  # fmt: skip
HOWS = ("flip", "cut", "empty", "zero", "delete", "older", "folder", "link", "twice")
# JSON that no reader may choke on; `hostile.JSON` by name, and values of the right shape that are wrong.
FORGED = (
    "deep",
    "nested",
    "digits",
    "nan",
    "infinite",
    "twice",
    "nul",
    "not utf-8",
    "list",
    "empty",
    "large",
)
SECRETS = ("password", "encoded", "before the host", "variables", "token")
CHANGES = ("lr", "seed", "batch", "model", "context", "recipe contents", "recipe name", "huge recipe", "huge config",
           "text", "unknown key", "optimizer")  # fmt: skip


@dataclass
class Episode:
    """family: what it is counted as. damage: to the run folder, before the start. events: for the driver. reactions:
    what the attacker does once something has happened. arguments: more of the command line. change: what is wrong with
    this command, so that it is to be refused. may: exit codes that are true here, beside 0; -9 where it is killed.
    """

    family: str
    damage: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    reactions: list[dict[str, Any]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    change: str = ""
    may: list[int] = field(default_factory=list)
    after: list[dict[str, Any]] = field(default_factory=list)

    def count(self) -> int:
        """Faults in it."""
        return (
            len(self.damage)
            + len(self.events)
            + len(self.reactions)
            + len(self.after)
            + bool(self.change)
        )


@dataclass
class Attack:
    """One attack on one run. secret: where the tracking server's credentials stand, if it has one."""

    seed: int
    kind: str
    variant: str
    episodes: list[Episode]
    secret: str = ""

    @property
    def ranks(self) -> int:
        return 1 if self.kind in ALONE else 2

    @property
    def families(self) -> list[str]:
        return [each.family for each in self.episodes]


@dataclass(frozen=True)
class Scene:
    """What a family has to work with: steps from which and up to which, and in what it runs."""

    chance: random.Random
    kind: str
    first: int
    last: int

    @property
    def ranks(self) -> int:
        return 1 if self.kind in ALONE else 2

    def step(self) -> int:
        return self.chance.randint(self.first, self.last)

    def rank(self) -> int:
        return self.chance.randrange(self.ranks)

    def end(self, after: int = 0) -> list[dict[str, Any]]:
        """The end of an episode whose faults leave the run alive."""
        name = self.chance.choice(("SIGKILL", "SIGTERM"))
        at = max(self.last + 1, after + 1)
        # A rank that is killed is another family's: all of them are.
        return [{"at": at, "do": ["signal", name], "rank": rank} for rank in range(self.ranks)]


def kill(scene: Scene) -> Episode:
    """SIGKILL: after a step, at the n-th file call after it, or at random."""
    how, at = scene.chance.choice(("step", "call", "call", "call", "moment", "stage")), scene.step()
    if how == "moment":
        after = round(scene.chance.uniform(0.05, START_SECONDS.get(scene.kind, 0.9)), 3)
        return Episode(
            "kill",
            reactions=[{"when": "started", "after": after, "do": "kill all"}],
            may=[-9, 1, 75],
        )
    if how in ("step", "stage"):
        place = at if how == "step" else scene.chance.choice(STAGES)
        events = [
            {"at": place, "do": ["signal", "SIGKILL"], "rank": rank} for rank in range(scene.ranks)
        ]
        return Episode("kill", events=events, may=[-9, 1])
    number = scene.chance.randint(1, 120)
    return Episode("kill", events=[{"at": at, "do": ["call", str(number), "kill"]}], may=[-9, 1])


def signals(scene: Scene) -> Episode:
    """Requests to stop, at a step, a start or a save."""
    names = scene.chance.choice(SIGNALS)
    at: int | str = scene.step() if scene.chance.random() < 0.6 else scene.chance.choice(STAGES)
    # Before the ranks have met, only a signal to all of them ends all of them.
    ranks = (
        range(scene.ranks)
        if isinstance(at, str) and at not in ("save",)
        else [0 if at == "save" else scene.rank()]
    )
    return Episode(
        "signals", events=[{"at": at, "do": ["signal", *names], "rank": r} for r in ranks], may=[75]
    )


def freeze(scene: Scene) -> Episode:
    """One rank, or all processes, pause."""
    at, seconds = scene.step(), round(scene.chance.uniform(0.1, 2.0), 2)
    if scene.ranks > 1 and scene.chance.random() < 0.2:
        seconds = 14.0  # engine.timeout_seconds are over
    everything = scene.chance.random() < 0.5
    do = "continue all" if everything else "continue"
    reaction = {"when": "fired", "after": seconds, "do": do, "stop": everything}
    return Episode("freeze", events=[{"at": at, "do": ["signal", "SIGSTOP"], "rank": scene.rank()}, *scene.end(at)],
                   reactions=[reaction], may=[-9, 75, 1])  # fmt: skip


def disk(scene: Scene) -> Episode:
    """Disk full from a step on; then room, a stop, or a kill."""
    return _disk(
        scene, "disk", scene.chance.choice(("0", str(scene.chance.choice((1, 100, 5000, 200_000)))))
    )


def no_names(scene: Scene) -> Episode:
    """No inodes left from a step on."""
    return _disk(scene, "no inodes", "names")


def read_only(scene: Scene) -> Episode:
    """No file can change from a step on."""
    return _disk(scene, "read-only", "readonly")


def _disk(scene: Scene, family: str, state: str) -> Episode:
    chance, at = scene.chance, scene.step()
    policy = chance.choice(("pause", "pause", "continue", "halt"))
    arguments = [
        f"checkpoint.on_failure={policy}",
        "checkpoint.max_failures=2",
        "checkpoint.retry_seconds=0.2",
    ]
    if chance.random() < 0.2:
        arguments.append("checkpoint.emergency_path=elsewhere")
    when, do = chance.choice(
        (
            ("paused", "room"),
            ("paused", "stop"),
            ("paused", "kill all"),
            ("fired", "room"),
            ("fired", "stop"),
        )
    )
    reactions = [{"when": when, "after": round(chance.uniform(0.0, 1.0), 2), "do": do},
                 {"when": "paused", "after": 4.0, "do": "room"}]  # fmt: skip
    return Episode(family, events=[{"at": at, "do": ["disk", state]}], reactions=reactions, arguments=arguments,
                   may=[-9, 1, 3, 75])  # fmt: skip


def full_at_start(scene: Scene) -> Episode:
    """Disk full at a start."""
    state = scene.chance.choice(("0", "names", "readonly", "100"))
    return Episode("full at start", events=[{"at": "begin", "do": ["disk", state]}],
                   reactions=[{"when": "paused", "after": 0.5, "do": "room"}],
                   arguments=["checkpoint.max_failures=2", "checkpoint.retry_seconds=0.2"], may=[1, 2, 4])  # fmt: skip


def failing_call(scene: Scene) -> Episode:
    """One file call fails (EIO), or all from it on (ENOSPC)."""
    at, number = scene.step(), scene.chance.randint(1, 100)
    mode = scene.chance.choice(("once", "once", "full"))
    # Which may not even take the word that the run waits.
    stop = [{"when": "fired", "after": 4.0, "do": "stop"}] if mode == "full" else []
    arguments = ["checkpoint.max_failures=2", "checkpoint.retry_seconds=0.2"]
    return Episode("failing call", events=[{"at": at, "do": ["call", str(number), mode]}, *scene.end(at)],
                   reactions=stop, arguments=arguments, may=[-9, 1, 75])  # fmt: skip


def torn_rename(scene: Scene) -> Episode:
    """A kill within a rename of several calls."""
    at, number = scene.step(), scene.chance.randint(1, 120)
    return Episode("torn rename", events=[{"at": "begin", "do": ["disk", "parts"]},
                                          {"at": at, "do": ["call", str(number), "kill"]}], may=[-9, 1])  # fmt: skip


def power_cut(scene: Scene) -> Episode:
    """Everything killed, and parts of the last confirmed writes missing."""
    at = scene.step()
    lost = {
        "what": "power",
        "seconds": round(scene.chance.uniform(0.05, 0.6), 3),
        "seed": scene.chance.randrange(1 << 30),
    }
    return Episode("power cut", events=[{"at": at, "do": ["signal", "SIGKILL"], "rank": r} for r in range(scene.ranks)],
                   after=[lost], may=[-9, 1])  # fmt: skip


def files(scene: Scene) -> Episode:
    """One or two of the run's files damaged, lost, swapped or older."""
    damage = [
        {
            "what": scene.chance.choice(FILES),
            "how": scene.chance.choice(HOWS),
            "seed": scene.chance.randrange(1 << 30),
        }
        for _ in range(scene.chance.choice((1, 1, 1, 2)))
    ]
    return Episode("files", damage=damage, events=scene.end(), may=[-9, 2, 75, 1])


def lost(scene: Scene) -> Episode:
    """All checkpoints, the newest, the data, or all but checkpoints gone."""
    what = scene.chance.choice(
        ("all checkpoints", "newest checkpoint", "data folder", "all but checkpoints")
    )
    return Episode(
        "lost",
        damage=[{"what": what, "how": "delete", "seed": 0}],
        events=scene.end(),
        may=[-9, 2, 75, 1],
    )


def forged(scene: Scene) -> Episode:
    """A file of the run has foreign content."""
    what = scene.chance.choice(("good.json", "incidents.json", "plan.json", "outcome.json", "manifest", "state",
                                "corpus.json", "journal.jsonl", "config.yaml"))  # fmt: skip
    how = scene.chance.choice(FORGED) if scene.chance.random() < 0.5 else "value"
    damage = [{"what": what, "how": f"forged {how}", "seed": scene.chance.randrange(1 << 30)}]
    return Episode("forged", damage=damage, events=scene.end(), may=[-9, 2, 75, 1])


def changed(scene: Scene) -> Episode:
    """Other settings, which must be refused by name and change nothing."""
    return Episode("changed", change=scene.chance.choice(CHANGES), may=[2])


def live(scene: Scene) -> Episode:
    """A file in use is deleted."""
    names = (
        "incidents.json",
        "config.yaml",
        "plan.json",
        "checkpoints",
        "fp8_telemetry.bin",
        "data",
    )
    what = scene.chance.choice(names)
    at = scene.step()
    return Episode(
        "live", events=[{"at": at, "do": ["gone", what]}, *scene.end(at)], may=[-9, 1, 2, 75]
    )


def writers(scene: Scene) -> Episode:
    """A second start while the first goes on."""
    at = scene.step()
    events = [{"at": at, "do": ["wait", "1.5"]}, *scene.end(at)]
    return Episode("writers", events=events, reactions=[{"when": "fired", "after": 0.0, "do": "second"}],
                   may=[-9, 1, 75])  # fmt: skip


def suspend(scene: Scene) -> Episode:
    """Every process sleeps, and the clock has moved.
    Some sleep for longer than the ranks would wait for each other.
    """
    at, jump = scene.step(), scene.chance.choice((-3600, -5, 60, 28_800, 31_536_000))
    seconds = 12.0 if scene.chance.random() < 0.15 else round(scene.chance.uniform(0.2, 2.0), 2)
    reactions = [{"when": "fired", "after": 0.0, "do": f"suspend {jump}"},
                 {"when": "fired", "after": seconds, "do": "continue all"}]  # fmt: skip
    return Episode("suspend", events=[{"at": at, "do": ["wait", "0.2"]}, *scene.end(at)], reactions=reactions,
                   may=[-9, 75, 1])  # fmt: skip


def clock(scene: Scene) -> Episode:
    """The wall clock is set, between and within starts."""
    events = [{"at": at, "do": ["clock", str(scene.chance.choice((-3600, 3600, 31_536_000, -31_536_000, 0, 7)))]}
              for at in sorted({scene.step(), scene.step()})]  # fmt: skip
    return Episode("clock", events=[*events, *scene.end(scene.last)], may=[-9, 75, 1])


def ranks(scene: Scene) -> Episode:
    """One rank killed or frozen too long; or its launcher killed or stopped."""
    at = scene.step()
    if scene.kind in ("torchrun", "deepspeed") and scene.chance.random() < 0.6:
        do = scene.chance.choice(("kill launcher", "stop launcher", "interrupt launcher"))
        return Episode("ranks", events=[{"at": at, "do": ["wait", "0.05"]}],
                       reactions=[{"when": "fired", "after": 0.0, "do": do}], may=[75, 1])  # fmt: skip
    return Episode(
        "ranks", events=[{"at": at, "do": ["signal", "SIGKILL"], "rank": scene.rank()}], may=[-9, 1]
    )


def tracking(scene: Scene) -> Episode:
    """MLflow comes and goes ten times, denies access, or fails three in ten requests."""
    kinds = ("refuse", "denied", "error", "swallow", "share", "share", "denied", "refuse")
    faults = [scene.chance.choice(kinds) for _ in range(10)]
    reactions = [{"when": "started", "after": round(0.4 * (number + 1), 2), "do": f"server {fault}"}
                 for number, fault in enumerate(faults)]  # fmt: skip
    return Episode("tracking", events=[{"at": scene.step(), "do": ["wait", "3"]}, *scene.end(scene.last)],
                   reactions=reactions, may=[-9, 75, 1])  # fmt: skip


def server(scene: Scene) -> Episode:
    """MLflow's server restarted, with other credentials at first."""
    at = scene.step()
    return Episode("server", events=[{"at": at, "do": ["wait", "0.1"]}, {"at": at, "do": ["until", "server-up", "240"]},
                                     *scene.end(at)],
                   reactions=[{"when": "fired", "after": 0.0, "do": "restart server"}], may=[-9, 75, 1])  # fmt: skip


def threads(scene: Scene) -> Episode:
    """Two other models train in two threads of the run's process, between two of its steps."""
    at = scene.step()
    do = ["threads", str(scene.chance.randrange(1000))]
    return Episode(
        "threads",
        events=[{"at": at, "do": do, "rank": scene.rank()}, *scene.end(at)],
        may=[-9, 75, 1],
    )


def start(scene: Scene) -> Episode:
    """A run to begin with."""
    return Episode("start", events=scene.end(), may=[-9, 75, 1])


FAMILIES: Mapping[str, tuple[int, Callable[[Scene], Episode]]] = {
    "kill": (20, kill),
    "signals": (10, signals),
    "freeze": (3, freeze),
    "disk": (8, disk),
    "no inodes": (4, no_names),
    "read-only": (4, read_only),
    "full at start": (4, full_at_start),
    "failing call": (10, failing_call),
    "torn rename": (8, torn_rename),
    "power cut": (8, power_cut),
    "files": (14, files),
    "lost": (4, lost),
    "forged": (10, forged),
    "changed": (6, changed),
    "live": (5, live),
    "writers": (3, writers),
    "clock": (4, clock),
    "suspend": (4, suspend),
    "ranks": (8, ranks),
    "tracking": (1, tracking),
    "server": (1, server),
    "threads": (2, threads),
}


AT_REST = ("files", "lost", "forged", "changed")


def fits(name: str, kind: str) -> bool:
    """Whether a family makes sense there."""
    if name == "ranks":
        return kind not in ALONE
    # A rank's process group would have every rank prepare the other models.
    return kind in ALONE if name in ("tracking", "server", "writers", "clock", "threads") else True


def draw(seed: int, only: Sequence[str] = (), kind: str = "") -> Attack:
    """The sequence of a seed. only: families to draw from; kind: instead of a random one."""
    chance = random.Random(seed)
    drawn = chance.choices(KINDS, [SHARES[each] for each in KINDS])[0]
    variant = chance.choices(tuple(VARIANTS), (4, 2, 1, 1))[0]
    kind = kind or drawn
    if only and not any(fits(name, kind) for name in only):
        kind = "torchrun ranks" if kind in ALONE else "python"
    if variant == "switched" and kind.startswith("deepspeed"):
        variant = "rolled"  # whose optimizer undoes what the model does to its own weights: nothing outgrows its scale
    names = [name for name in (only or FAMILIES) if fits(name, kind)]
    count = (
        chance.choices((1, 2, 3, 4), (3, 4, 3, 2))[0]
        if kind not in ("torchrun", "deepspeed")
        else 2
    )
    drawn_names = chance.choices(names, [FAMILIES[each][0] for each in names], k=count)
    if drawn_names[0] in AT_REST:  # which need a run to begin with
        drawn_names.insert(0, "start")
    edges = [
        1 + (VARIANTS[variant] - 5) * number // len(drawn_names)
        for number in range(len(drawn_names) + 1)
    ]
    episodes = []
    for name, (first, last) in zip(drawn_names, itertools.pairwise(edges), strict=True):
        scene = Scene(chance, kind, first, max(first, last - 2))
        episodes.append(start(scene) if name == "start" else FAMILIES[name][1](scene))
    return Attack(seed, kind, variant, episodes, chance.choice(SECRETS))
