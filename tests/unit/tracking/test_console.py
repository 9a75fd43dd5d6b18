"""What a run prints: every line that must be there, and nothing that can hurt training."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from harness.core.errors import clock
from harness.core.facts import StepFacts
from harness.tracking.console import Console, plan_table, rate

REPO = Path(__file__).resolve().parents[3]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


class GoneTerminal(Terminal, Gone):
    pass


def facts(step: int, seconds: float = 0.5) -> StepFacts:
    return StepFacts(step, step - 1, 2.3412, 0.4149, 1.9e-3, 1.0, True, step, 4096, seconds)


def layer(
    module: str,
    precision: str = "fp8",
    reason: str = "emulation",
    shape: tuple[int, ...] = (256, 688),
) -> dict:
    backend = "native" if precision == "fp8" else "autocast"
    return {
        "module": module,
        "kind": "Linear",
        "precision": precision,
        "backend": backend,
        "reason": reason,
        "shape": shape,
    }


PLAN = {
    "recipe": "fp8_hybrid",
    "recipe_sha256": "0" * 64,
    "tier": "CPU",
    "requested": "fp8",
    "resolved": "native:fp8",
    "effective": None,
    "rungs": [
        {"rung": "te:fp8", "taken": False, "reason": "no GPU of compute capability 8.9"},
        {"rung": "native:fp8", "taken": True, "reason": "emulation in PyTorch"},
        {"rung": "autocast:bf16", "taken": False, "reason": "not needed"},
    ],
    "layers": [
        *(layer(f"blocks.{i:02d}.mlp.down") for i in range(4)),
        *(layer(f"blocks.{i:02d}.attn.q") for i in (0, 1, 3, 5)),
        layer("blocks.02.attn.q", "bf16", "excluded by [rule]"),
        layer("head", "bf16", "excluded: head", (256, 256)),
    ],
}


def test_plain_lines_first_last_and_thirty_between() -> None:
    stream = io.StringIO()
    console = Console(300, stream=stream)
    for step in range(1, 301):
        console.step(facts(step), 27, 28, 2, 0)
    console.close()
    lines = stream.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, *range(10, 301, 10)]
    expected = "step   120/300  loss 2.3412  lr 1.9e-03  |g| 0.41  8.2k tok/s  fp8 27/28  skipped 2  eta 1:30"
    assert lines[12] == expected
    assert lines[-1].endswith("eta 0:00")


def test_memory_and_mfu_are_shown_where_they_are_known() -> None:
    stream = io.StringIO()
    Console(10, stream=stream).step(
        replace(facts(1), peak_memory=61.27, ideal_seconds=0.2), 0, 0, 0, 0
    )
    assert "8.2k tok/s  MFU 40%  61.3 GiB  fp8 0/0" in stream.getvalue()


def test_a_loop_that_tells_of_no_tokens_has_its_steps_counted() -> None:
    stream = io.StringIO()
    Console(10, stream=stream).step(replace(facts(1), tokens=0, seconds=0.08), 0, 0, 0, 0)
    assert "  12.5 steps/s  fp8 0/0" in stream.getvalue()


def test_rollbacks_are_shown_once_there_are_any() -> None:
    stream = io.StringIO()
    Console(10, stream=stream).step(facts(1), 0, 0, 0, 3)
    assert "rollbacks 3" in stream.getvalue()


def test_the_first_step_does_not_set_the_pace() -> None:
    stream = io.StringIO()
    console = Console(3, stream=stream)
    console.step(facts(1, seconds=100.0), 0, 0, 0, 0)
    console.step(facts(2, seconds=1.0), 0, 0, 0, 0)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("eta 3:20")
    assert second.endswith("eta 0:01")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["plain", "terminal"])
def test_events_text_and_validation_always_come_out(stream: io.StringIO) -> None:
    console = Console(100, stream=stream)
    console.step(facts(1), 28, 28, 0, 0)
    console.event("blocks.03.up to BF16 [input 2.1]")
    console.say("plain [words]")
    console.say(plan_table(PLAN))
    console.validation(50, 1.386294361)
    console.close()
    console.close()
    console.say("after the end")
    text = stream.getvalue()
    for expected in (
        "blocks.03.up to BF16 [input 2.1]",
        "plain [words]",
        "[256, 688]",
        "after the end",
    ):
        assert expected in text
    assert "validation after step 50: 1.3863 nats = 2.0000 bits per byte" in text


def test_the_first_alert_of_each_code_says_how_to_learn_more() -> None:
    stream = io.StringIO()
    console = Console(100, stream=stream)
    told = [
        "step 3: loss.spike: loss 9",
        "step 4: loss.spike: loss 8",
        "step 4: fp8.dead: x",
        "rolled back: to step 3",
    ]
    for text in told:
        console.event(text)
    first, second, other, plain = stream.getvalue().splitlines()
    assert first == "! step 3: loss.spike: loss 9 [harness explain loss.spike]"
    assert second == "! step 4: loss.spike: loss 8"
    assert other.endswith("[harness explain fp8.dead]")
    assert plain == "! rolled back: to step 3"


def test_a_terminal_shows_every_figure_live() -> None:
    stream = Terminal()
    console = Console(300, stream=stream)
    console.validation(100, 1.386294361)
    console.step(facts(300), 27, 28, 4, 0)
    console.close()
    last = stream.getvalue().split("\r")[-1]
    for figure in ("300/300", "2.3412", "2.000", "8.2k tok/s", "27/28", "skipped 4"):
        assert figure in last


@pytest.mark.parametrize("stream", [Gone(), GoneTerminal()], ids=["plain", "terminal"])
def test_a_closed_terminal_does_not_end_training(stream: io.StringIO) -> None:
    console = Console(10, stream=stream)
    for step in range(1, 11):
        console.step(facts(step), 1, 1, 0, 0)
        console.event("text")
    console.validation(10, 1.0)
    console.close()


def test_a_stream_of_another_alphabet_gets_what_it_can_show() -> None:
    raw = io.BytesIO()
    console = Console(10, stream=io.TextIOWrapper(raw, encoding="ascii"))
    console.say("caf\u00e9")
    console.say("still here")
    assert raw.getvalue() == b"caf?\nstill here\n"


def test_a_stream_of_another_alphabet_that_went_away_is_lost_too() -> None:
    class GoneAscii(Gone):
        def write(self, text: str) -> int:
            text.encode("ascii")
            raise BrokenPipeError

    console = Console(10, stream=GoneAscii())
    console.say("caf\u00e9")
    console.say("still here")


def test_layers_that_differ_in_the_block_number_alone_are_folded() -> None:
    output = io.StringIO()
    RichConsole(file=output, width=140).print(plan_table(PLAN))
    lines = [line.split() for line in output.getvalue().splitlines() if line.strip()]
    assert output.getvalue().startswith(
        "recipe fp8_hybrid on CPU: requested fp8, resolved native:fp8\n"
    )
    rows = {line[0]: line[1:3] for line in lines}
    assert rows["blocks.00-03.mlp.down"] == ["fp8", "native"]
    assert rows["blocks.00-01,03,05.attn.q"] == ["fp8", "native"]
    assert rows["blocks.02.attn.q"] == ["bf16", "autocast"]
    assert rows["head"] == ["bf16", "autocast"]
    text = output.getvalue()
    assert "te:fp8: not taken: no GPU of compute capability 8.9" in text
    assert "not needed" not in text, "rungs below the one taken are no news"
    assert "excluded by [rule]" in text


@pytest.mark.parametrize(
    ("value", "text"), [(950.0, "950 tok/s"), (9800.0, "9.8k tok/s"), (2.5e6, "2.5M tok/s")]
)
def test_rate(value: float, text: str) -> None:
    assert rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(41.2, "0:41"), (7509, "2:05:09"), (-3, "0:00"), (float("nan"), "-")]
)
def test_clock(value: float, text: str) -> None:
    assert clock(value) == text


def test_the_console_starts_without_torch() -> None:
    code = (
        "import sys, harness.tracking.console, harness.report.page; print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=os.environ, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr
