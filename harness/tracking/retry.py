"""How one request to a tracking server is repeated until it succeeds.

Each request is repeated by itself, so a server that refuses a share of them costs only those. A request whose answer
was lost may have been carried out. So every call that is repeated here must change nothing when it is done twice; a
call that creates something looks for it first.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import ParamSpec, TypeVar

from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ProtocolError
from urllib3.response import BaseHTTPResponse

SHORTEST, LONGEST = 0.2, 10.0
LONGEST_ASKED = 60.0
# Besides every 5xx: the server took too long, it is too early, there were too many requests.
_PASSING = frozenset({408, 425, 429})

P = ParamSpec("P")
T = TypeVar("T")


class _Last(threading.local):
    """Of the last request of this thread. status: None without an answer. retry_after: as the server said it."""

    status: int | None = None
    retry_after: str | None = None
    asked = False


_last = _Last()


class _Connection(HTTPConnection):
    def connect(self) -> None:
        _last.status, _last.retry_after, _last.asked = None, None, True
        super().connect()

    def request(self, *given: object, **named: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        _last.status, _last.retry_after, _last.asked = None, None, True
        super().request(*given, **named)  # pyright: ignore[reportArgumentType]

    def getresponse(self) -> BaseHTTPResponse:  # pyright: ignore[reportIncompatibleMethodOverride]
        response = super().getresponse()
        _last.status, _last.retry_after = response.status, response.headers.get("Retry-After")
        return response


class _SecureConnection(_Connection, HTTPSConnection):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


def listen_to_answers() -> None:
    """Have urllib3's connections of this process keep status and Retry-After: MLflow's exceptions carry neither."""
    HTTPConnectionPool.ConnectionCls = _Connection  # pyright: ignore[reportAttributeAccessIssue]
    HTTPSConnectionPool.ConnectionCls = _SecureConnection  # pyright: ignore[reportAttributeAccessIssue]


def asked_pause(retry_after: str | None, now: datetime) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as an HTTP date; at most LONGEST_ASKED. None without a
    header that says so."""
    text = (retry_after or "").strip()
    if not text:
        return None
    if text.isascii() and text.isdigit():
        return min(float(text[:9]), LONGEST_ASKED)
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return min(max(0.0, (moment - now).total_seconds()), LONGEST_ASKED)


def pause(failures: int, asked: float | None, share: float) -> float:
    """Seconds before the next try after `failures` in a row. share: drawn from 0 to 1, so that many runs that lost one
    server do not come back all at once."""
    usual = min(SHORTEST * 2.0 ** min(failures - 1, 20), LONGEST) * (0.5 + 0.5 * share)
    return usual if asked is None else asked + SHORTEST * share


def passing(status: int | None, asked: bool) -> bool:
    """Whether the same request may succeed later. asked: whether one was sent at all, which a database never is."""
    if status is None:
        return asked
    return status in _PASSING or status >= 500


def cut_off(error: BaseException | None) -> bool:
    """Whether the connection broke, perhaps in the middle of an answer that had begun well."""
    while error is not None:
        if isinstance(error, ProtocolError | ConnectionError):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class Retry:
    """seconds: without one success, after which the error is raised; None: never.
    said: takes each failure, and how many there were in a row.
    """

    seconds: float | None
    said: Callable[[Exception, int], None]
    _success: float = field(default_factory=time.monotonic)

    def __call__(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """What `call` returns. Raises what it raises where another try would not help."""
        failures = 0
        while True:
            _last.status, _last.retry_after, _last.asked = None, None, False
            try:
                made = call(*given, **named)
            except Exception as error:
                if not (passing(_last.status, _last.asked) or cut_off(error)):
                    raise
                failures += 1
                wait = pause(
                    failures, asked_pause(_last.retry_after, datetime.now(UTC)), random.random()
                )
                if (
                    self.seconds is not None
                    and time.monotonic() + wait > self._success + self.seconds
                ):
                    raise
                self.said(error, failures)
                time.sleep(wait)
            else:
                self._success = time.monotonic()
                return made
