"""Bytes damaged at random, and tests of them that are the same every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.core.errors import HarnessError

SECONDS = 10

# Pieces that mean something to YAML or JSON, among any bytes.
PIECES = [
    b"!!python/object/apply:os.system", b"!", b"&a", b"*a", b"<<", b"? ", b": ", b"- ", b"{", b"}", b"[", b"]", b"|",
    b">", b"'", b'"', b"\\", b"\\ud800", b"\\x00", b"%YAML 1.1\n", b"---\n", b"...\n", b"#", b"\n", b"\t", b"\0",
    b"\xff", b"\xef\xbb\xbf",
    b"0x", b"1e999", b".inf", b".nan", b"NaN", b"-Infinity", b"null", b"~", b"1_0", b"1:59:59", b"2026-13-45",
    b"9" * 50, b"train", b"steps", b"ladder", b"data", b",", b"true", b"\xe2\x80\xa8",
]  # fmt: skip
damage = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "splice", "insert", "repeat", "swap"]),
        st.integers(0),
        st.binary(max_size=8),
    )
    | st.tuples(st.just("insert"), st.integers(0), st.sampled_from(PIECES)),
    min_size=1,
    max_size=6,
)
Damage = list[tuple[str, int, bytes]]


def damaged(content: bytes, changes: Damage) -> bytes:
    """`content` after `changes`, each at a place of its own."""
    for how, number, piece in changes:
        place = number % (len(content) + 1)
        before, after = content[:place], content[place:]
        match how:
            case "flip":
                content = (
                    before + bytes([after[0] ^ (1 << number % 8)]) + after[1:] if after else content
                )
            case "cut":
                content = before
            case "splice":
                content = before + after[number % 64 :]
            case "insert":
                content = before + piece + after
            case "repeat":
                content = before + after[: number % 32] * (number % 50) + after
            case _:
                content = after + before
    return content


def fuzz(
    examples: int,
    test: Callable[[Any], None],
    strategy: st.SearchStrategy[Any],
    figure: Callable[..., None],
    what: str,
) -> None:
    """Run `test` on `examples` examples, the same ones every time, each within SECONDS; record how many there were."""
    done = 0

    def counted(example: Any) -> None:
        nonlocal done
        test(example)
        done += 1

    limited = settings(
        max_examples=examples, deadline=SECONDS * 1000, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    limited(given(strategy)(counted))()
    figure(
        24,
        f"refused by name or skipped, in bounded time, after random damage: {what}",
        (done, done),
    )


def one_screen(error: HarnessError) -> None:
    text = str(error)
    text.encode()
    assert len(text.splitlines()) < 70
    assert len(text) < 20_000
