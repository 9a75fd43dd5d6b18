"""`harness.Guard` in a loop that is not ours: what it puts back, what it refuses, and where it ends the loop."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from api_support import (
    EAGER,
    adamw,
    batch,
    differences,
    forward_backward,
    prepared,
    recipe,
    train_step,
)
from own_loop_support import SETTINGS, Keeper, Loop, OwnRate
from torch import nn
from torch.optim.lr_scheduler import LinearLR, LRScheduler, MultiStepLR, SequentialLR

from harness import Guard, Precision, Telemetry
from harness.checkpoint.overlapped import Copier
from harness.checkpoint.snapshots import Snapshots
from harness.core.errors import CheckpointError, HaltedError
from harness.core.facts import Continue, Rollback, Switch
from tests.support.copy_streams import LaterStreams


@pytest.mark.parametrize("name", ["fp8_hybrid", "fp16_scaler", "bf16"])
def test_a_rollback_puts_back_model_optimizer_schedule_and_precision(name: str) -> None:
    loop = Loop(recipe(name), poison=(10, 11))
    for _ in range(4):
        assert loop.step() == Continue()
    then = loop.everything()
    actions = [loop.step() for _ in range(8)]
    assert [isinstance(action, Rollback) for action in actions] == [False] * 7 + [True]
    assert loop.guard.step == 8, "the newest snapshot that two healthy steps followed"
    again = Loop(recipe(name))
    for _ in range(8):
        again.step()
    now, expected = loop.everything(), again.everything()
    for part in ("model", "optimizer", "scheduler"):
        assert differences(now[part], expected[part]) == [], part
    fp8 = {
        key: value
        for key, value in now["tensors"].items()
        if key.startswith(("fp8.", "loss_scale."))
    }
    assert differences(fp8, {key: expected["tensors"][key] for key in fp8}) == []
    assert differences(then["model"], now["model"]), "it is not the snapshot before"
    assert all(parameter.grad is None for parameter in loop.model.parameters())
    assert loop.guard.window == 8
    for _ in range(3):
        loop.step()
    assert loop.windows[-3:] == [8, 9, 12], "the windows of the two bad losses are passed over"


def test_a_rollback_restores_what_the_optimizers_train_beside_the_model() -> None:
    """A temperature in the model's optimizer, and a bias in an optimizer of its own; nothing is in `keep`."""
    precision, model = prepared(recipe())
    temperature, bias = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(16))
    first = torch.optim.AdamW([*model.parameters(), temperature], lr=1e-2)
    wrapped = precision.wrap([first, torch.optim.SGD([bias], lr=0.1)])
    guard = Guard.for_precision(precision, wrapped, streams=True, **SETTINGS)
    then: dict[int, tuple[float, list[float]]] = {}
    for number in range(12):
        x, y = batch(number)
        poison = math.nan if number in (10, 11) else 0.0
        (nn.functional.mse_loss(model(x) * temperature + bias, y) + poison).backward()
        wrapped.step()
        wrapped.zero_grad()
        action = guard.end_step()
        if not isinstance(action, Rollback):
            then[guard.step] = temperature.item(), bias.tolist()
    assert guard.step == 8, "two bad losses led back to a snapshot"
    assert (temperature.item(), bias.tolist()) == then[8] != then[9]


@pytest.mark.parametrize(
    ("poison", "settings", "told"),
    [
        ((10, 12, 14), {"max_skips": 2}, "more than guard.max_skips (2)"),
        ((10, 11, 14, 15), {"max_rollbacks": 1}, "all of guard.max_rollbacks (1) are spent"),
        ((1, 2), {}, "no snapshot is good"),
    ],
)
def test_a_halt_tells_a_loop_of_ones_own_what_it_can_do_there(
    poison: tuple[int, ...], settings: dict[str, Any], told: str
) -> None:
    """No command of ours starts it again, and it has no run folder and no `train` section."""
    loop = Loop(poison=poison, **settings)
    with pytest.raises(HaltedError) as caught:
        loop.steps(40)
    text = str(caught.value)
    assert told in text
    assert "checkpoint of your own" in text
    for word in (
        "--name",
        "--resume",
        "runs/<run>",
        "train.",
        "journal",
        "data.bad",
        "bf16 recipe, or look",
    ):
        assert word not in text


@pytest.mark.parametrize(
    ("after", "taken"), [(8, [2, 4, 6, 8, 10, 20, 30]), (0, list(range(2, 31, 2)))]
)
def test_snapshots_are_taken_seldom_once_a_run_is_old(
    after: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, seen = Loop(snapshot_every=2, snapshot_seldom_after=after), list[int]()
    memory = loop.guard.memory
    assert memory is not None
    take = memory.take
    monkeypatch.setattr(
        memory, "take", lambda step, *state: (seen.append(step), take(step, *state))
    )
    loop.steps(31)
    assert seen == taken


def test_what_the_user_moved_since_the_snapshot_stays_where_it_was_put() -> None:
    loop = Loop(poison=(10, 11))
    loop.precision.demote("2")
    for _ in range(12):
        if loop.guard.step == 10:
            loop.precision.demote("0")
            loop.precision.promote("2")
        loop.step()
    assert loop.guard.step == 8, "it rolled back to before that"
    assert loop.precision.demoted == ("00",)
    assert loop.precision.state_dict()["meta"]["state"]["parts"]["own"]["held"] == ["00"]


def test_an_optimizer_that_grew_goes_back_to_no_snapshot_of_before() -> None:
    def grow(loop: Loop, at: int) -> None:
        loop.steps(at)
        loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 1e-3})

    early = Loop(poison=(10, 11))
    grow(early, 2)
    early.steps(10)
    assert early.guard.step == 8, "a snapshot that was taken since is good"
    late = Loop(poison=(10, 11))
    grow(late, 9)
    with pytest.raises(HaltedError, match="no snapshot is good"):
        late.steps(3)


def test_without_the_guard_the_same_faults_are_only_skipped() -> None:
    precision, model = prepared(recipe())
    optimizer = adamw(model)
    for step in range(12):
        forward_backward(precision, model, step, poison=math.nan if step in (10, 11) else 0.0)
        outcome = precision.step(optimizer)
        optimizer.zero_grad()
        assert outcome.was_applied == (step not in (10, 11))


@pytest.mark.parametrize("fused", [True, False])
def test_a_bad_batch_leaves_nothing_in_running_means(fused: bool) -> None:
    """BatchNorm writes them in forward, before anybody knows: evaluation would be NaN for good."""
    precision = Precision(recipe("bf16"))
    model = precision.prepare(
        nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 16))
    )
    optimizer = adamw(model, fused=fused)
    guard = Guard.for_precision(precision, optimizer, **SETTINGS)
    for step in range(8):
        before = copy.deepcopy(model.state_dict())
        inputs, targets = batch(step)
        for micro in range(2):  # the second micro-batch is the bad one
            with precision.context():
                bad = inputs * (math.nan if step == 5 and micro == 1 else 1.0)
                loss = nn.functional.mse_loss(model(bad).float(), targets) / 2
            precision.backward(loss)
        outcome = precision.step(optimizer)
        optimizer.zero_grad()
        guard.end_step()
        assert outcome.was_applied == (step != 5)
        changed = set(differences(before, model.state_dict()))
        assert ({"/1.running_mean", "/1.num_batches_tracked"} <= changed) == (step != 5)
        assert changed == set() or step != 5
    model.eval()
    with torch.no_grad(), precision.context():
        assert model(batch(8)[0]).isfinite().all()


def test_a_window_that_was_given_up_leaves_no_trace() -> None:
    """An error between backward and step, which the loop survives; without `drop_window` its loss would be added."""
    states = []
    for given_up in (False, True):
        loop = Loop()
        for step in range(6):
            if given_up and step == 3:
                forward_backward(loop.precision, loop.model, 99)
                loop.precision.drop_window()
                loop.optimizer.zero_grad()
            loop.step()
        facts = loop.precision.facts()
        assert facts is not None
        states.append({**loop.everything(), "loss": facts.loss})
        states[-1]["tensors"].pop("last")  # it holds how long the step took
    assert differences(*states) == []


def test_where_no_snapshot_is_good_the_loop_is_ended() -> None:
    loop = Loop(poison=(1, 2))
    with pytest.raises(HaltedError, match="no snapshot is good") as raised:
        loop.steps(5)
    assert int(raised.value.exit_code) == 3
    assert loop.forwards == 4, "two bad steps, and one more before the second was judged"


def test_a_second_rollback_to_one_snapshot_is_none() -> None:
    loop = Loop(poison=(6, 7, 9, 10))
    with pytest.raises(HaltedError, match="no snapshot is good"):
        loop.steps(20)


def test_limits_reach_the_update() -> None:
    loop = Loop(max_skips=1000, lr=1e-4)
    for _ in range(60):
        loop.step()
    assert math.isfinite(loop.guard.judge.terms().limits.norm), "armed by now"
    x = torch.randn(16, 16)
    with loop.precision.context():
        loss = loop.model(x).float().square().mean() * 1e4
    loop.precision.backward(loss)
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    outcome = loop.precision.step(loop.optimizer)
    assert math.isfinite(outcome.grad_norm.item())
    assert not outcome.was_applied, "finite, but over the guard's limits"
    assert differences(before, loop.model.state_dict()) == []


def test_layers_move_at_the_same_step_with_and_without_a_guard() -> None:
    loop = Loop(recipe(fallback=EAGER))
    moved = [
        (loop.guard.step, action.demote)
        for _ in range(8)
        if isinstance(action := loop.step(), Switch)
    ]
    precision, model = prepared(recipe(fallback=EAGER))
    optimizer = adamw(model)
    alone = []
    for step in range(8):
        forward_backward(precision, model, step)
        outcome = precision.step(optimizer)
        optimizer.zero_grad()
        if outcome.switch is not None and outcome.switch.demote:
            alone.append((step + 1, outcome.switch.demote))
    assert moved, "the fallback acted"
    assert loop.precision.demoted == precision.demoted != ()
    assert moved[0] == alone[0]


def test_a_loop_goes_on_from_what_it_saved() -> None:
    whole = Loop(poison=(17,))
    for _ in range(20):
        whole.step()
    first = Loop(poison=(17,))
    for _ in range(13):
        first.step()
    saved = {"model": first.model.state_dict(), "optimizer": first.optimizer.state_dict(),
             "precision": first.precision.state_dict(), "scheduler": first.scheduler.state_dict()}  # fmt: skip
    second = Loop(poison=(17,))
    second.model.load_state_dict(saved["model"])
    second.optimizer.load_state_dict(saved["optimizer"])
    second.scheduler.load_state_dict(saved["scheduler"])
    second.precision.load_state_dict(saved["precision"])
    second.forwards = 13
    assert second.guard.step == 13
    for _ in range(7):
        second.step()
    assert whole.guard.state.ledger.skips == 1
    assert differences(whole.everything(), second.everything()) == []


def test_a_rate_that_rollbacks_lowered_is_not_raised_by_a_resume() -> None:
    loop = Loop(poison=(10, 11), rollback_lr_factor=0.5)
    loop.steps(10)
    unbroken = loop.precision.state_dict()
    loop.steps(4)
    saved = loop.precision.state_dict()
    for other in (prepared(recipe())[0], Loop().precision):
        with pytest.raises(
            CheckpointError, match=r"rollback_lr_factor=0.5 would go on at 1\n.*make a Guard with"
        ):
            other.load_state_dict(saved)
        other.load_state_dict(unbroken)
    again = Loop(rollback_lr_factor=0.5)
    again.precision.load_state_dict(saved)
    assert again.guard.judge.lr_factor == 0.5


def test_a_state_from_before_a_rollback_does_not_undo_it() -> None:
    loop = Loop(poison=(10, 11))
    for _ in range(6):
        loop.step()
    early = loop.precision.state_dict()
    for _ in range(7):
        loop.step()
    assert loop.guard.state.ledger.attempt == 2
    loop.precision.load_state_dict(early)
    assert loop.guard.step == 6
    assert loop.guard.state.ledger.skipped_windows == [10, 11], (
        "they broke the run, and would again"
    )


def test_a_loop_that_went_back_by_itself_is_not_rolled_forward() -> None:
    loop = Loop(poison=(12, 13))
    loop.steps(6)
    early = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
    early, state = copy.deepcopy(early), loop.precision.state_dict()
    loop.steps(5)
    assert loop.guard.memory is not None
    assert loop.guard.memory.good == 8
    loop.model.load_state_dict(early["model"])
    loop.optimizer.load_state_dict(early["optimizer"])
    loop.precision.load_state_dict(state)
    with pytest.raises(HaltedError, match="no snapshot is good"):
        loop.steps(9)


def test_what_is_kept_comes_back_even_where_two_places_are_spelled_alike() -> None:
    def state(factor: float) -> dict[Any, Any]:
        one, two, three, four = (torch.tensor(factor * number) for number in range(1, 5))
        return {
            1: one,
            "1": two,
            "a": {"b": three},
            "a.b": four,
            "best": math.inf,
            "at": (None, [factor]),
        }

    kept = Keeper(state(1.0))
    loop = Loop(poison=(10, 11), keep=[kept])
    for _ in range(12):
        if loop.guard.step == 9:  # after the snapshot
            kept.state = state(5.0)
        loop.step()
    assert loop.guard.step == 8, "it rolled back"
    assert differences(kept.state, state(1.0)) == []


def milestones(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Its second schedule is asked for a rate out of turn, which it takes from a Counter."""
    later = MultiStepLR(optimizer, [3, 6])
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 12), later], [12])


def test_a_schedule_of_milestones_goes_on_after_a_rollback() -> None:
    rates = []
    for poison in ((), (10, 11)):
        loop = Loop(poison=poison, schedule=milestones)
        while loop.guard.step < 16:
            loop.step()
        rates.append(loop.scheduler.get_last_lr())
    assert loop.guard.state.ledger.rollbacks == 1
    assert rates[0] == rates[1]


class Peculiar(torch.optim.SGD):
    """An optimizer that keeps something odd from its third step on."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"odd": object()} if self.steps > 2 else {})

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


def test_what_turns_out_not_to_be_copied_ends_the_snapshots_and_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    precision, model = prepared(recipe("bf16"))
    optimizer = Peculiar(model.parameters(), lr=1e-2)
    guard = Guard.for_precision(precision, optimizer, **SETTINGS)
    for step in range(6):
        train_step(precision, model, optimizer, step)
        guard.end_step()
    assert guard.memory is None
    assert (
        "snapshot.off: Peculiar keeps a object at odd, which is not copied: nothing to roll"
        in capsys.readouterr().err
    )


def overlapped(loop: Loop, streams: LaterStreams) -> None:
    """Let the loop's snapshots be copied behind its steps."""
    healthy = SETTINGS["healthy_steps"]
    loop.guard.memory = Snapshots(healthy, copier=Copier(streams, loop.guard.telemetry.event, 4096))


@pytest.mark.parametrize("free", [1 << 40, 0])
def test_a_rollback_to_a_snapshot_that_training_did_not_wait_for_is_exact(free: int) -> None:
    waited, went_on = Loop(poison=(10, 11)), Loop(poison=(10, 11))
    overlapped(went_on, LaterStreams(free=free))
    waited.steps(20)
    went_on.steps(20)
    assert went_on.guard.state.ledger.returned_to == [8]
    assert went_on.windows == waited.windows
    assert differences(went_on.everything(), waited.everything()) == []


@pytest.mark.parametrize("how", ["on its way", "no memory"])
def test_a_failed_copy_is_not_restored_and_ends_the_snapshots(
    how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    loop = Loop(poison=(10, 11))
    # The first snapshot is of step 4, the second, to which it would go back, of step 8.
    streams = LaterStreams(most=0)
    if how == "on its way":
        streams = LaterStreams()
        loop_of_one = Loop()
        overlapped(loop_of_one, streams)
        loop_of_one.steps(5)
        streams = LaterStreams(fails_at=len(streams.queued) + 1)
    overlapped(loop, streams)
    with pytest.raises(HaltedError, match="no snapshots are taken"):
        loop.steps(20)
    assert loop.guard.memory is None
    assert "snapshot.off: the copy failed (CUDA" in capsys.readouterr().err
    assert loop.guard.state.ledger.returned_to == []


def rolled_back(precision: Precision, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two losses in a row are NaN, and the guard goes back to step 8."""
    guard = Guard.for_precision(precision, optimizer, **SETTINGS)
    for forward in range(13):
        forward_backward(
            precision, model, guard.window, poison=math.nan if forward in (10, 11) else 0.0
        )
        precision.step(optimizer)
        optimizer.zero_grad()
        guard.end_step()
    assert guard.state.ledger.returned_to == [8]


def test_an_optimizer_without_a_rate_is_put_back_too() -> None:
    precision, model = prepared(recipe("bf16"))
    rolled_back(precision, model, OwnRate(model.parameters()))
    assert math.isnan(precision.facts().lr)  # type: ignore[union-attr]


def test_one_thing_is_kept_without_a_list() -> None:
    precision, model = prepared(recipe("bf16"))
    average = nn.Sequential(nn.Linear(2, 2))
    guard = Guard.for_precision(precision, adamw(model), keep=average)
    assert guard.state.state_dict()[0]["kept.0"].keys() == {"0", "1"}


class Coarse(torch.optim.Optimizer):
    """It keeps its momentum in bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault(
                "m", torch.zeros_like(parameter, dtype=torch.bfloat16)
            )
            parameter.data.sub_(momentum.mul_(0.9).add_(parameter.grad.bfloat16()), alpha=1e-2)


def test_moments_come_back_in_their_own_dtype() -> None:
    precision, model = prepared(recipe("bf16"))
    optimizer = Coarse(model.parameters())
    rolled_back(precision, model, optimizer)
    assert {each["m"].dtype for each in optimizer.state.values()} == {torch.bfloat16}


def test_without_snapshots_the_halt_says_so() -> None:
    with pytest.raises(HaltedError, match="no snapshots are taken"):
        Loop(poison=(10, 11), snapshot_every=0).steps(20)


def test_switched_off_it_judges_nothing_and_the_gate_stays() -> None:
    loop = Loop(poison=(3, 4, 5, 6), enabled=False)
    for _ in range(10):
        assert loop.step() == Continue()
    assert loop.precision.facts().applied_steps == 6  # type: ignore[union-attr]


@pytest.mark.parametrize(("fallback", "told"), [(True, 1), (False, 0)])
def test_that_it_takes_the_fallback_with_it_is_told(
    tmp_path: Path, fallback: bool, told: int
) -> None:
    for enabled in (False, True):
        precision, model = prepared(recipe(fallback={"enabled": fallback}))
        folder = tmp_path / str(enabled)
        with Telemetry.for_precision(folder, precision, steps=1, mlflow=False) as telemetry:
            Guard.for_precision(precision, adamw(model), telemetry=telemetry, enabled=enabled)
        journal = (folder / "journal.jsonl").read_text()
        assert journal.count("precision.unwatched") == (0 if enabled else told)


def test_a_rate_that_is_a_tensor_stays_that_tensor() -> None:
    precision, model = prepared(recipe("bf16"))
    rate = torch.tensor(1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    guard = Guard.for_precision(precision, optimizer, rollback_lr_factor=0.5, **SETTINGS)
    told = []
    for forward in range(16):
        forward_backward(
            precision, model, guard.window, poison=math.nan if forward in (6, 7) else 0.0
        )
        precision.step(optimizer)
        told.append(precision.facts().lr)  # type: ignore[union-attr]
        optimizer.zero_grad()
        guard.end_step()
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == pytest.approx(1e-2), "the factor is the update's alone"
    assert told[0] == pytest.approx(1e-2)
    assert told[-1] == pytest.approx(5e-3)


def test_the_interface_is_at_the_top() -> None:
    import harness

    assert harness.Guard is Guard
    assert harness.Precision is Precision
