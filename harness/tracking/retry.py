"""Repeat one request to a tracking server until it succeeds.

Each request is repeated by itself, so a server that refuses a share of them costs only that share. A request whose
answer was lost may have been carried out. So every call that is repeated here must change nothing if it is done twice.
A call that creates something looks for it first.
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
# Statuses that may pass, besides every 5xx: request timeout, too early, too many requests.
_PASSING = frozenset({408, 425, 429})

P = ParamSpec("P")
T = TypeVar("T")


class _Last(threading.local):
    """The last request of this thread.

    status: HTTP status of the answer; None without an answer.
    retry_after: the header Retry-After, as the server sent it.
    asked: whether a request was sent at all.
    """

    status: int | None = None
    retry_after: str | None = None
    asked = False

    def forget(self, asked: bool) -> None:
        """Before a request."""
        self.status = None
        self.retry_after = None
        self.asked = asked


_last = _Last()


class _Connection(HTTPConnection):
    def connect(self) -> None:
        _last.forget(asked=True)
        super().connect()

    def request(self, *given: object, **named: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        _last.forget(asked=True)
        super().request(*given, **named)  # pyright: ignore[reportArgumentType]

    def getresponse(self) -> BaseHTTPResponse:  # pyright: ignore[reportIncompatibleMethodOverride]
        response = super().getresponse()
        _last.status = response.status
        _last.retry_after = response.headers.get("Retry-After")
        return response


class _SecureConnection(_Connection, HTTPSConnection):  # pyright: ignore[reportIncompatibleMethodOverride]
    pass


def listen_to_answers() -> None:
    """Have urllib3 keep the status and Retry-After of each answer: MLflow's exceptions have neither."""
    HTTPConnectionPool.ConnectionCls = _Connection  # pyright: ignore[reportAttributeAccessIssue]
    HTTPSConnectionPool.ConnectionCls = _SecureConnection  # pyright: ignore[reportAttributeAccessIssue]


def asked_pause(retry_after: str | None, now: datetime) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as an HTTP date; at most LONGEST_ASKED.

    None if there is no header, or none that can be read.
    """
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
    """Seconds before the next try, after `failures` in a row.

    asked: seconds that the server asked for.
    share: drawn from 0 to 1, so that many runs that lost one server do not come back all at once.
    """
    if asked is not None:
        return asked + SHORTEST * share
    # Twice as long each time. The exponent is bounded, because a float is.
    doubled = SHORTEST * 2.0 ** min(failures - 1, 20)
    return min(doubled, LONGEST) * (0.5 + 0.5 * share)


def passing(status: int | None, asked: bool) -> bool:
    """Whether the same request may succeed later.

    asked: whether a request was sent at all; an SQL store sends none.
    """
    if status is None:
        return asked
    return status in _PASSING or status >= 500


def cut_off(error: BaseException | None) -> bool:
    """Whether the connection broke, perhaps in the middle of an answer."""
    while error is not None:
        if isinstance(error, ProtocolError | ConnectionError):
            return True
        error = error.__cause__ or error.__context__
    return False


@dataclass
class Retry:
    """Calls that are repeated.

    seconds: time without one success after which the error is raised; None: never.
    said: takes each failure, and how many there were in a row.
    """

    seconds: float | None
    said: Callable[[Exception, int], None]
    _success: float = field(default_factory=time.monotonic)

    def __call__(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> T:
        """What `call` returns. Raises its error if another try would not help."""
        failures = 0
        while True:
            _last.forget(asked=False)
            try:
                made = call(*given, **named)
            except Exception as error:
                # A refusal stays one. Only what may pass is tried again.
                if not (passing(_last.status, _last.asked) or cut_off(error)):
                    raise
                failures += 1
                asked = asked_pause(_last.retry_after, datetime.now(UTC))
                wait = pause(failures, asked, random.random())

                # Time counts from the last success of any call: a server that answers now and then is not given up.
                if self.seconds is not None:
                    deadline = self._success + self.seconds
                    if time.monotonic() + wait > deadline:
                        raise
                self.said(error, failures)
                time.sleep(wait)
            else:
                self._success = time.monotonic()
                return made
