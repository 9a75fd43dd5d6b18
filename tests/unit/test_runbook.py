"""Every event code is explained, docs/reference/runbook.md is made from that, and the code on that page works."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from harness.core.config import RunConfig
from harness.core.metrics import page as metrics_page
from harness.precision.recipe import Recipe
from harness.report.explain import Catalogue, catalogue, runbook

ROOT = Path(__file__).resolve().parents[2]
RUNBOOK = (ROOT / "docs" / "reference" / "runbook.md").read_text()
CODE = re.compile(r"[a-z0-9]+\.[a-z]+(?:_[a-z]+)*")
SPEAKS = re.compile(r"\b(?:Verdict|Doubt|event|tell)\(|\"code\"")
FIELDS = ["What happened", "Why", "What to do"]
EFFECT = "Effect"
LOOK = "Where to look"
SYMPTOM_FIELDS = ("How to recognise it", "Cause", "What to change")
SPANS = re.compile(r"`([^`]+)`")
PROSE = re.sub(r"```.*?```", "", RUNBOOK, flags=re.DOTALL)
KEY = re.compile(
    r"(train|data|model|checkpoint|tracking|engine|guard|fp8|layers|fallback|loss_scale)\.[a-z_0-9]+"
)


def texts(node: ast.AST) -> set[str]:
    """Every constant in `node` that has the form of a code."""
    found = {
        part.value
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    }
    return {text for text in found if CODE.fullmatch(text) and not text.endswith(".ok")}


def said(source: str) -> set[str]:
    """Codes given to `Verdict(...)`, `Doubt(...)`, `<tracker>.event(...)` or `.tell(...)`, whichever branch of an
    expression gives them, and those of rows written as a mapping with a "code"."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                found |= (
                    texts(value) if isinstance(key, ast.Constant) and key.value == "code" else set()
                )
        if isinstance(node, ast.Call):
            name = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            if name in ("Verdict", "Doubt", "event", "tell"):
                given = [
                    *node.args[:2],
                    *(keyword.value for keyword in node.keywords if keyword.arg == "code"),
                ]
                found |= {code for each in given for code in texts(each)}
    return found


@cache
def all_codes() -> list[str]:
    """Those said anywhere, and all that a monitor knows: it may hand its code on in a variable."""
    sources = {path: path.read_text() for path in (ROOT / "harness").rglob("*.py")}
    # Parsing all of them takes seconds.
    speaking = [text for text in sources.values() if SPEAKS.search(text)]
    found = {code for text in speaking for code in said(text)}
    monitors = [text for path, text in sources.items() if path.parent.name == "monitors"]
    return sorted(found | {code for text in monitors for code in texts(ast.parse(text))})


KNOWN: Catalogue = catalogue()
SYMPTOMS = [entry for entry in KNOWN.entries if entry.is_symptom]
EXPLAINED = {name for entry in KNOWN.entries if not entry.is_symptom for name in entry.names}
RANKED = {code for code, *_ in KNOWN.ranking}


def test_the_codes_are_found() -> None:
    known = {
        "nonfinite.skip",
        "precision.demote",
        "precision.lowered",
        "guard.rollback",
        "run.failed",
    }
    assert known | {"journal.dropped"} <= set(all_codes())


def test_the_page_is_made_from_the_entries() -> None:
    assert runbook() == RUNBOOK, (
        "write it anew: python -m harness.report.explain > docs/reference/runbook.md"
    )


def test_what_nothing_says_is_not_explained() -> None:
    assert EXPLAINED - set(all_codes()) == set()


def test_the_runbook_explains_every_code() -> None:
    for code in all_codes():
        entry = KNOWN.find(code)
        optional = [label for label in (EFFECT, LOOK) if label in entry.fields]
        assert list(entry.fields) == [*FIELDS[:2], *optional, *FIELDS[2:]], code
        # The table has the effect of a code that is ranked.
        assert EFFECT in entry.fields or set(entry.names) <= RANKED, code
        assert all(text.strip() for text in entry.fields.values()), code


def test_a_symptom_says_how_to_see_it_what_it_is_and_what_to_change() -> None:
    for entry in SYMPTOMS:
        assert tuple(entry.fields) == SYMPTOM_FIELDS, entry.names


def test_what_practitioners_meet_is_there() -> None:
    expected = {
        "nan-after-hours", "nan-always-at-the-same-step", "clipping-that-does-nothing", "loss-scale-that-collapses",
        "spikes-after-warm-up", "loss-that-plateaus", "fp8-slower-than-bf16", "resume-that-jumps", "growing-logits",
        "initialisation", "layernorm-eps", "custom-losses", "rank-that-hangs-at-its-end", "which-recipe",
    }  # fmt: skip
    assert expected <= {entry.names[0] for entry in SYMPTOMS}


def test_every_explained_code_is_ranked_but_for_what_the_run_itself_does() -> None:
    acts = {"guard.rollback", "guard.halt", "precision.switched"}
    acts |= {"run.stopped", "run.resumed", "run.started_from", "run.changed"}
    acts |= {"deterministic.knobs", "deterministic.proven", "scaler.grew", "scaler.backed_off"}
    assert acts == EXPLAINED - RANKED
    assert RANKED <= EXPLAINED
    assert len(RANKED) == len(KNOWN.ranking)


def test_what_the_runbook_tells_to_type_can_be_explained() -> None:
    topics = {
        topic
        for topic in re.findall(r"harness\s+explain\s+([a-z0-9.-]+)", RUNBOOK)
        if topic != "runs"
    }
    assert "custom-losses" in topics
    for topic in topics:
        KNOWN.find(topic)


def test_links_lead_to_headings() -> None:
    headings = re.findall(r"^#+ (.+)$", RUNBOOK, re.MULTILINE)
    anchors = {
        re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings
    }
    links = set(re.findall(r"\]\(#([^)]+)\)", RUNBOOK))
    assert len(links) > 20
    assert links <= anchors


def schema_keys(model: type, prefix: str = "") -> set[str]:
    """Dotted names of every key of a config model, sections included."""
    keys: set[str] = set()
    for name, info in model.model_fields.items():  # type: ignore[attr-defined]
        keys.add(prefix + name)
        if isinstance(info.annotation, type) and hasattr(info.annotation, "model_fields"):
            keys |= schema_keys(info.annotation, f"{prefix}{name}.")
    return keys


def test_the_keys_that_it_names_exist() -> None:
    known = schema_keys(RunConfig) | schema_keys(Recipe)
    spans = {span.split(":")[0].split("=")[0] for span in SPANS.findall(PROSE)}
    named = {span for span in spans if KEY.fullmatch(span)} - RANKED
    assert len(named) > 25
    assert sorted(named - known) == []


def test_the_metrics_that_it_names_exist() -> None:
    written = metrics_page()
    named = {
        span.split("/<")[0]
        for span in SPANS.findall(PROSE)
        if re.match(r"(train|val|guard)/[a-z_]+$", span)
    }
    assert len(named) > 5
    assert [name for name in sorted(named) if f"| `{name}` |" not in written] == []


def functions_shown() -> dict[str, Any]:
    names: dict[str, Any] = {"torch": torch, "F": F}
    for block in re.findall(r"```python\n(.*?)```", RUNBOOK, re.DOTALL):
        exec(block, names)
    return names


def test_the_stable_forms_stay_finite_in_fp16_where_the_naive_do_not() -> None:
    stable = functions_shown()["stable"]
    logits = torch.tensor([[60.0, 0.0, -60.0]], requires_grad=True)
    x = torch.zeros(1, 3, requires_grad=True)
    weights = torch.zeros(1, 3)
    with torch.autocast("cpu", dtype=torch.float16):
        results = stable(logits.half(), x.half(), weights.half())
        naive = logits.half().exp().sum(-1).log()
    torch.stack([result.sum() for result in results]).sum().backward()
    assert not torch.isfinite(naive).all(), "the fault must be one that autocast does not cure"
    assert all(torch.isfinite(result).all() and result.dtype == torch.float32 for result in results)
    assert logits.grad is not None
    assert x.grad is not None
    assert torch.isfinite(logits.grad).all()
    assert torch.isfinite(x.grad).all()


def test_the_norm_and_the_z_loss_that_it_shows() -> None:
    shown = functions_shown()
    rms_norm, loss_with_z = shown["rms_norm"], shown["loss_with_z"]
    rows = torch.tensor([[300.0, 400.0], [0.0, 0.0]], dtype=torch.float16)
    assert torch.isinf(rows[0].square()).any(), "the square alone overflows"
    expected = F.rms_norm(rows.float(), (2,), eps=1e-6).half()
    assert torch.equal(rms_norm(rows, torch.ones(2)), expected)
    targets = torch.tensor([[1, 0]])
    small, shifted = torch.zeros(1, 2, 4), torch.full((1, 2, 4), 100.0)
    plain = F.cross_entropy(small.flatten(0, 1), targets.flatten())
    assert loss_with_z(shifted, targets) > loss_with_z(small, targets) >= plain, (
        "a common shift of the logits costs"
    )
