"""Whether an MLflow server answers. Nothing is sent to it."""

from __future__ import annotations

import socket
import urllib.request
from urllib.parse import urlsplit

from harness.core.findings import Finding
from harness.core.secrets import Address

_SECONDS = 3.0
_PORTS = {"http": 80, "https": 443}


def unanswered(uri: str) -> Finding | None:
    """A warning if nothing listens at the host of `uri`; None if something does, or if `uri` is no server's.

    Behind a proxy nothing is tried: only the proxy knows the way.
    """
    bare = Address.of(uri).bare
    try:
        address = urlsplit(bare)
        port = address.port or _PORTS.get(address.scheme)
    except ValueError:
        return None
    if address.scheme not in _PORTS or not address.hostname or port is None:
        return None
    proxied = urllib.request.getproxies().keys() & {address.scheme, "all"}
    if proxied and not urllib.request.proxy_bypass(address.hostname):
        return None
    try:
        socket.create_connection((address.hostname, port), _SECONDS).close()
    except (OSError, UnicodeError) as error:
        why = str(error) or type(error).__name__
        fix = "start it, or unset MLFLOW_TRACKING_URI; rows wait in the run folder, and harness sync sends them"
        what = "the MLflow server does not answer"
        where = f"{address.hostname}:{port}"
        return Finding("machine.mlflow", "warning", where, what, why, fix)
    return None
