"""The page of a run in a real browser: what it shows, and that it asks nobody for anything. Run by `make test-ui`.

UI_IMAGES: a folder for what the pages looked like.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.core.facts import SlotStats
from harness.report.page import page as made
from harness.tracking.history import RunHistory
from harness.tracking.journal import JOURNAL, Journal
from harness.tracking.slot_file import SLOT_FILE, SlotFile

pytest.importorskip("aiohttp", reason="the browser is driven by aiohttp")
from tests.ui import browser

pytestmark = [
    pytest.mark.skipif(not os.environ.get("UI"), reason="run by make test-ui: it needs a browser"),
    pytest.mark.skipif(
        browser.binary() is None,
        reason=f"no browser: none of {', '.join(browser.NAMES)} is installed",
    ),
]
EVIL = "</script><img src=x onerror=document.title='owned'>"
STEPS = 60
# What a page does wrong is kept from its begin on: errors, refused loads and styles, and messages of errors.
WATCH = """
window.wrong = [];
addEventListener("error", (event) => wrong.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => wrong.push(event.violatedDirective + " " + event.blockedURI));
const told = console.error;
console.error = (...given) => { wrong.push(given.join(" ")); told(...given); };
"""
ROWS = "[...document.querySelectorAll('#slots-table tbody tr')]"
FIRST_SLOT = f"{ROWS}[0].querySelector('button').textContent"


def make_run(
    folder: Path, loss: float = 5.0, layers: tuple[str, str] = ("blocks.0.up", EVIL)
) -> Path:
    """Two FP8 layers; the second, with a hostile name, saturates late. A demotion, a NaN, a rollback."""
    folder.mkdir()
    names = tuple(
        f"{layer}.{role}" for layer in layers for role in ("input", "weight", "grad_output")
    )
    file = SlotFile(folder / SLOT_FILE)
    with Journal(folder / JOURNAL) as journal:
        journal.note("run", tags={"ranks": "1"}, params={}, data={}, where={"host": "h"})
        for step in range(1, STEPS + 1):
            value = math.nan if step == 30 else loss / step
            journal.metrics(step, {"train/loss": value, "train/lr": 0.1, "train/step_applied": 1.0})
            amax = np.full(6, 1.0, np.float32)
            if step > 40:
                amax[3] = 9.0
            none = np.full(6, math.nan, np.float32)
            file.add(
                1, step, SlotStats(names, amax, np.ones(6, np.float32), amax, none, none, none)
            )
        journal.event(20, "loss.spike", text=EVIL, value=9.0)
        # Every object of the page's script has something of this name.
        journal.event(20, "constructor", text="of another program")
        journal.event(50, "precision.switched", demote=["blocks.0.up"], promote=[], lowered="")
        journal.note("end", status="done")
    file.close()
    (folder / "outcome.json").write_text(json.dumps({"status": "done", "step": STEPS}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    one, other = make_run(folder / "one"), make_run(folder / "other", loss=6.0)
    histories = [RunHistory.read(each) for each in (one, other)]
    (folder / "one.html").write_text(made(histories[:1]))
    (folder / "two.html").write_text(made(histories))
    empty = folder / "empty"
    empty.mkdir()
    Journal(empty / JOURNAL).close()
    (folder / "empty.html").write_text(made([RunHistory.read(empty)]))
    return folder


@pytest.fixture
def page(runs: Path) -> Iterator[browser.Browser]:
    """A browser on the page of the first run, which must do nothing wrong until the test's end."""
    with browser.browser() as opened:
        opened.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        show(opened, runs / "one.html")
        yield opened
        assert opened.ask("wrong") == []
        assert opened.ask("performance.getEntriesByType('resource').length") == 0, "it loaded"
        assert opened.ask("document.images.length") == 0
        assert "owned" not in opened.ask("document.title")


def show(opened: browser.Browser, path: Path) -> None:
    opened.open(path.as_uri())
    opened.wait("document.documentElement.dataset.ready")
    if folder := os.environ.get("UI_IMAGES"):
        opened.photograph(Path(folder) / f"report_{path.stem}.png")


def press(opened: browser.Browser, key: str, code: int) -> None:
    for kind in ("keyDown", "keyUp"):
        opened.call(
            "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code
        )


def test_texts_of_a_run_are_shown_as_they_are(page: browser.Browser) -> None:
    text = page.text()
    for part in ("done at step 60", "Demotions and rollbacks", "blocks.0.up to BF16", EVIL):
        assert part in text
    assert page.ask("document.querySelectorAll('[role=alert]').length") == 0
    charts = page.ask("document.querySelectorAll('.uplot canvas').length")
    assert charts == 2 + 3, "loss and rate, and amax, scale and saturation of the worst slot"


def test_slots_are_sorted_by_trouble_searched_and_sorted_by_a_figure(page: browser.Browser) -> None:
    assert page.ask(f"{ROWS}.length") == 6
    assert page.ask(FIRST_SLOT).startswith("blocks.0.up."), "its layer is in BF16"
    assert page.ask(f"{ROWS}[3].textContent").startswith("saturation 9 (limit 1.5)")

    page.ask("document.getElementById('search').focus()")
    page.call("Input.insertText", text="script input")
    assert page.ask(f"{ROWS}.length") == 1
    assert page.ask(FIRST_SLOT) == f"{EVIL}.input"
    page.call("Input.insertText", text=" nothing such")
    assert page.ask(f"{ROWS}.length") == 0
    page.ask("search.value = ''; search.dispatchEvent(new Event('input'))")

    heading = "[...document.querySelectorAll('#slots-table th')].find((th) => th.textContent === 'worst saturation')"
    page.ask(f"{heading}.querySelector('button').click()")
    assert page.ask(f"{heading}.getAttribute('aria-sort')") == "descending"
    assert page.ask(FIRST_SLOT) == f"{EVIL}.input"
    page.ask(f"{heading}.querySelector('button').click()")
    assert page.ask(f"{heading}.getAttribute('aria-sort')") == "ascending"
    assert page.ask(FIRST_SLOT) != f"{EVIL}.input"


def test_a_slot_that_is_chosen_shows_its_histories(page: browser.Browser) -> None:
    page.ask(f"{ROWS}[3].querySelector('button').click()")
    panel = "document.querySelector('#slots .panel')"
    assert EVIL in page.ask(f"{panel}.innerText")
    assert page.ask(f"{panel}.querySelectorAll('canvas').length") == 3
    assert page.ask(f"{ROWS}[3].querySelector('button').getAttribute('aria-pressed')") == "true"


def test_every_chart_is_zoomed_and_the_axis_s_events_with_them(page: browser.Browser) -> None:
    strip = "document.querySelectorAll('.strip button').length"
    page.wait(f"{strip} === 2")
    page.ask("from.value = 15; to.value = 25; to.dispatchEvent(new Event('change'))")
    page.wait(f"{strip} === 1")
    assert page.ask("document.getElementById('from').value") == "15"
    page.ask("document.querySelector('[aria-label=\"all steps\"]').click()")
    page.wait(f"{strip} === 2")


def test_an_event_opens_by_the_keyboard_and_says_what_its_code_means(page: browser.Browser) -> None:
    page.wait("document.querySelectorAll('.strip button').length === 2")
    page.ask("document.querySelector('.strip button').focus()")
    press(page, "ArrowRight", 39)
    press(page, "ArrowLeft", 37)
    assert "step 20" in page.ask("document.activeElement.getAttribute('aria-label')")
    page.ask("document.activeElement.click()")
    assert page.ask("document.activeElement.id") == "event-panel"
    text = page.ask("document.activeElement.innerText")
    assert EVIL in text
    assert "What to do" in text
    assert "of another program" in text


def test_the_first_tab_leads_past_the_menu(page: browser.Browser) -> None:
    press(page, "Tab", 9)
    assert page.ask("document.activeElement.className") == "skip"
    everything = "document.querySelectorAll('button, input, select')"
    named = (
        f"[...{everything}].every((one) => one.innerText || one.labels?.length || one.ariaLabel)"
    )
    assert page.ask(named), "every control has a name"


@pytest.mark.parametrize("width", [390, 1600])
def test_both_themes_and_any_width(page: browser.Browser, width: int) -> None:
    page.resize(width, 900)
    grounds: list[str] = []
    for theme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": theme}
        page.call("Emulation.setEmulatedMedia", features=[feature])
        grounds.append(page.ask("getComputedStyle(document.body).backgroundColor"))
    assert len(set(grounds)) == 2
    page.wait(f"document.querySelector('.uplot').clientWidth <= {width}")
    assert page.ask("document.documentElement.scrollWidth") <= width, (
        "no part is wider than the page"
    )


def make_bf16_run(folder: Path) -> Path:
    """A run without an FP8 layer."""
    folder.mkdir()
    with Journal(folder / JOURNAL) as journal:
        journal.note("run", tags={"ranks": "1"}, params={}, data={}, where={"host": "h"})
        for step in range(1, STEPS + 1):
            journal.metrics(step, {"train/loss": 5.0 / step})
    return folder


def test_slots_that_only_the_second_run_has_are_listed(
    page: browser.Browser, runs: Path, tmp_path: Path
) -> None:
    fp8 = RunHistory.read(runs / "one")
    (tmp_path / "bf16_and_fp8.html").write_text(
        made([RunHistory.read(make_bf16_run(tmp_path / "bf16")), fp8])
    )
    show(page, tmp_path / "bf16_and_fp8.html")
    titles = page.ask("[...document.querySelectorAll('h2')].map((each) => each.textContent)")
    assert "FP8 slots of B" in titles
    assert page.ask(f"{ROWS}.length") == 6
    assert "only in" not in page.ask("document.querySelector('#slots').innerText")
    assert "amax (B)" in page.ask("document.querySelector('#slots .panel').innerText")

    # Both in FP8, with one layer in common: it has A's figures and B's curves.
    third = make_run(tmp_path / "third", layers=("blocks.0.up", "blocks.1.up"))
    (tmp_path / "partly.html").write_text(made([fp8, RunHistory.read(third)]))
    show(page, tmp_path / "partly.html")
    titles = page.ask("[...document.querySelectorAll('h2')].map((each) => each.textContent)")
    assert "FP8 slots of A and B" in titles
    slots = page.ask(f"{ROWS}.map((row) => row.querySelector('.slot').textContent)")
    assert sorted(slots) == sorted(
        [f"blocks.0.up.{role}" for role in ("input", "weight", "grad_output")]
        + [f"{EVIL}.{role} (only in A)" for role in ("input", "weight", "grad_output")]
        + [f"blocks.1.up.{role} (only in B)" for role in ("input", "weight", "grad_output")]
    )
    panel = "document.querySelector('#slots .panel').innerText"
    for name, curves in (("blocks.0.up.input", "AB"), ("blocks.1.up.input", "B")):
        chosen = f"{ROWS}.find((row) => row.textContent.includes({name!r}))"
        page.ask(f"{chosen}.querySelector('button').click()")
        text = page.ask(panel)
        assert [letter for letter in "AB" if f"amax ({letter})" in text] == list(curves)
    assert "saturation 9 (limit 1.5)" in page.ask(f"{chosen}.textContent"), "B's own figure"
    assert page.ask("document.querySelectorAll('#slots .map canvas').length") == 2
    page.ask("search.value = 'only in b'; search.dispatchEvent(new Event('input'))")
    assert page.ask(f"{ROWS}.length") == 3
    assert page.ask("document.querySelectorAll('[role=alert]').length") == 0


def test_two_runs_and_an_empty_one(page: browser.Browser, runs: Path) -> None:
    show(page, runs / "two.html")
    text = page.text()
    assert "training (A)" in text
    assert "training (B)" in text
    assert "First divergence, of steps 1 to 60: step 1" in text
    titles = page.ask("[...document.querySelectorAll('h2')].map((each) => each.textContent)")
    assert titles[:3] == ["Overview", "A and B", "Curves"]
    assert {"Events of A", "Checkpoints of A", "FP8 slots of A"} <= set(titles)
    show(page, runs / "empty.html")
    assert "No step has figures yet." in page.text()
    assert page.ask("document.querySelectorAll('[role=alert]').length") == 0
