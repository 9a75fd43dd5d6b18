"""Passwords and tokens, taken out of what is written down: logs, the journal, messages, MLflow.

Two ways, one after the other. What stands in an address is found by its place: `scheme://user:password@host`,
`?token=...`. What the environment holds is found by its value, wherever it stands, also percent-encoded or as a part of
an address that an exception quotes.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

MARK = "***"
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*://)(.*)", re.DOTALL)
_SECRET_VARIABLE = re.compile(
    r"(TOKEN|PASSWORD|PASSWD|SECRET|_KEY|APIKEY|CONNECTION_STRING)$", re.IGNORECASE
)
# Settings of addresses that are no secrets; the value of every other one may be.
_PLAIN = frozenset(
    {"sslmode", "ssl", "charset", "timeout", "connect_timeout", "application_name", "check_same_thread", "uri", "mode",
     "cache", "driver", "nolock", "immutable", "isolation_level", "encrypt", "trustservercertificate", "region", "host",
     "port"}
)  # fmt: skip
_NAMED = re.compile(
    r"([?&;][\w.\-]*(?:token|passw|pwd|secret|key|auth|sig|credential)[\w.\-]*=)[^&;\s'\"<>)]+",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(://)[^\s/'\"<>@]+@")
_SHORTEST, _SHORTEST_VALUE = 4, 8


@dataclass(frozen=True)
class Address:
    """An address of a server or database, without its secrets.

    bare: the address without them.
    userinfo: what stood before the host, as `user:password` or a token; empty if nothing did.
    settings: names of settings that were left out.
    secrets: the values that were left out, as they stood.
    """

    bare: str
    userinfo: str = ""
    settings: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Address:
        """Whatever is no address is bare as it is."""
        found = _ADDRESS.fullmatch(text)
        if found is None:
            return cls(text)
        scheme, rest = found.groups()
        userinfo, rest = _split_userinfo(scheme.lower(), rest)
        secrets = [userinfo.partition(":")[2] or userinfo] if userinfo else []
        if not rest.startswith("/"):  # a path of a file may have a # in it
            rest = rest.partition("#")[0]
        path, question, query = rest.partition("?")
        kept, dropped = [], []
        for setting in re.split("[&;]", query) if question else []:
            name, _, value = setting.partition("=")
            if name.lower() in _PLAIN:
                kept.append(setting)
                continue
            dropped.append(name)
            secrets.append(value or name)
        bare = scheme.lower() + _plain_host(path) + ("?" + "&".join(kept) if kept else "")
        return cls(bare, userinfo, tuple(dropped), tuple(secrets))

    @property
    def shown(self) -> str:
        """As a person may see it: with a mark where something was left out."""
        if not self.userinfo:
            return self.bare
        scheme, mark, rest = self.bare.partition("://")
        return f"{scheme}{mark}{MARK}@{rest}"


def _split_userinfo(scheme: str, rest: str) -> tuple[str, str]:
    """`user:password` and what follows it. A password may hold a slash, a question mark or an @ that is not encoded."""
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in authority:
        userinfo, _, _ = authority.rpartition("@")
        if not scheme.startswith("http") or "@" not in rest.partition("?")[0][len(authority) :]:
            return userinfo, rest[len(userinfo) + 1 :]
    _, colon, port = authority.rpartition(":")
    odd_port = bool(colon) and not port.isdigit()
    before_settings = rest.partition("?")[0]
    if authority and odd_port and "@" in rest:
        userinfo, _, after = rest.rpartition("@")
    elif authority and scheme.startswith("http") and "@" in before_settings:
        userinfo = before_settings.rpartition("@")[0]
        after = rest[len(userinfo) + 1 :]
    else:
        return "", rest
    return userinfo, after


def _plain_host(path: str) -> str:
    """One spelling of one server: the host in small letters, no slash at the end."""
    host, slash, more = path.partition("/")
    return host.lower() + (slash + more).rstrip("/") if host else path


def _values(environment: Mapping[str, str]) -> set[str]:
    """Every secret of the environment in every form in which a library may print it."""
    found: set[str] = set()
    for name, text in environment.items():
        if name.lower().endswith("_proxy") and "@" in text and "://" not in text:
            text = f"http://{text}"
        if "://" in text:
            address = Address.of(text)
            for secret in address.secrets:
                # One that is too short to be looked for anywhere is still looked for before an @.
                found.add(
                    secret if len(secret) >= _SHORTEST else f"{secret}@" if address.userinfo else ""
                )
            found.add(address.userinfo)
        elif _SECRET_VARIABLE.search(name) and len(text) >= _SHORTEST_VALUE:
            found.add(text)
    if environment.get("MLFLOW_TRACKING_PASSWORD"):  # however short, it is one
        found.add(environment["MLFLOW_TRACKING_PASSWORD"])
        found.add(
            f"{environment.get('MLFLOW_TRACKING_USERNAME', '')}:{environment['MLFLOW_TRACKING_PASSWORD']}"
        )
    found |= {unquote(each) for each in found}
    found |= {quote(each, safe=safe) for each in found for safe in ("", "/")}
    found |= {base64.b64encode(each.encode()).decode() for each in found if ":" in each}
    return found - {""}


def scrubbed(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without the secrets of addresses in it and of the environment (default: this process's)."""
    for value in sorted(
        _values(os.environ if environment is None else environment), key=len, reverse=True
    ):
        if value in text:
            text = text.replace(value, f"{MARK}@" if value.endswith("@") else MARK)
    text = _USERINFO.sub(rf"\1{MARK}@", text)
    return _NAMED.sub(rf"\1{MARK}", text)


def scrub_all(value: Any) -> Any:
    """`scrubbed` of every text in lists and mappings; names of keys stay."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {name: scrub_all(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(scrub_all, value)) if type(value) in (list, tuple) else value
    return value
