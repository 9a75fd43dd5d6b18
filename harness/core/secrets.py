"""Takes passwords and tokens out of what is written: logs, the journal, messages, MLflow.

Secrets are found in two ways, one after the other:

1. **By value.** Every secret that the environment holds is replaced wherever it occurs, also percent-encoded, or in an
   address that an exception quotes.
2. **By place.** In any address, what is before the host (`scheme://user:password@host`) is replaced, and the values of
   settings whose names suggest a secret (`?token=...`).
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
# Settings of addresses that are no secrets; the value of any other setting may be one.
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
# Characters below which a text is too common to be replaced wherever it occurs: of a secret in an address, and of the
# value of a variable that is named like a secret.
_SHORTEST, _SHORTEST_VALUE = 4, 8


@dataclass(frozen=True)
class Address:
    """An address of a server or database, without its secrets.

    bare: the address without them.
    userinfo: what came before the host, as `user:password` or a token; empty if nothing did.
    settings: names of settings that were left out.
    secrets: the values that were left out, as they were written.
    """

    bare: str
    userinfo: str = ""
    settings: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> Address:
        """The parts of `text`; a text that is not an address is `bare` as it is."""
        found = _ADDRESS.fullmatch(text)
        if found is None:
            return cls(text)
        scheme, rest = found.groups()

        # User and password, or a token. A path of a file may have a # in it; elsewhere it begins what servers ignore.
        userinfo, rest = _split_userinfo(scheme.lower(), rest)
        secrets: list[str] = []
        if userinfo:
            secrets.append(userinfo.partition(":")[2] or userinfo)
        if not rest.startswith("/"):
            rest = rest.partition("#")[0]

        # Settings: only those that are known to be harmless stay.
        path, question, query = rest.partition("?")
        kept: list[str] = []
        dropped: list[str] = []
        for setting in re.split("[&;]", query) if question else []:
            name, _, value = setting.partition("=")
            if name.lower() in _PLAIN:
                kept.append(setting)
                continue
            dropped.append(name)
            secrets.append(value or name)

        bare = scheme.lower() + _plain_host(path)
        if kept:
            bare += "?" + "&".join(kept)
        return cls(bare, userinfo, tuple(dropped), tuple(secrets))

    @property
    def shown(self) -> str:
        """The address for people, with a mark in the place of user and password."""
        if not self.userinfo:
            return self.bare
        scheme, mark, rest = self.bare.partition("://")
        return f"{scheme}{mark}{MARK}@{rest}"


def _split_userinfo(scheme: str, rest: str) -> tuple[str, str]:
    """`user:password` and what follows it.

    A password may hold a slash, a question mark or an @ that is not encoded. So the first of those need not end the
    host, and the last @ that may belong to the password is looked for.
    """
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    before_settings = rest.partition("?")[0]

    # The common case: an @ in front of the first slash.
    if "@" in authority:
        userinfo, _, _ = authority.rpartition("@")
        another_at = "@" in before_settings[len(authority) :]
        if not scheme.startswith("http") or not another_at:
            return userinfo, rest[len(userinfo) + 1 :]

    # What looks like a port and is no number is the beginning of a password.
    _, colon, port = authority.rpartition(":")
    odd_port = bool(colon) and not port.isdigit()
    if authority and odd_port and "@" in rest:
        userinfo, _, after = rest.rpartition("@")
        return userinfo, after

    # Anything else before an @ in a web address; its settings may hold an @ of their own.
    if authority and scheme.startswith("http") and "@" in before_settings:
        userinfo = before_settings.rpartition("@")[0]
        return userinfo, rest[len(userinfo) + 1 :]
    return "", rest


def _plain_host(path: str) -> str:
    """One spelling for one server: the host in small letters, no slash at the end."""
    host, slash, more = path.partition("/")
    if not host:
        return path
    return host.lower() + (slash + more).rstrip("/")


def _values(environment: Mapping[str, str]) -> set[str]:
    """Every secret of the environment, in every form in which a library may print it."""
    found: set[str] = set()
    for name, text in environment.items():
        # A proxy's address may lack its scheme.
        if name.lower().endswith("_proxy") and "@" in text and "://" not in text:
            text = f"http://{text}"
        if "://" in text:
            address = Address.of(text)
            for secret in address.secrets:
                if len(secret) >= _SHORTEST:
                    found.add(secret)
                elif address.userinfo:
                    # Too short to be replaced wherever it occurs, but not in front of an @.
                    found.add(f"{secret}@")
            found.add(address.userinfo)
        elif _SECRET_VARIABLE.search(name) and len(text) >= _SHORTEST_VALUE:
            found.add(text)

    # However short it is, this one is known to be a password.
    password = environment.get("MLFLOW_TRACKING_PASSWORD")
    if password:
        found.add(password)
        found.add(f"{environment.get('MLFLOW_TRACKING_USERNAME', '')}:{password}")

    # Percent-encoded or not, and as HTTP's basic authentication sends them.
    found |= {unquote(each) for each in found}
    wholly = {quote(each, safe="") for each in found}
    partly = {quote(each) for each in found}
    found |= wholly | partly
    pairs = [each for each in found if ":" in each]
    found |= {base64.b64encode(each.encode()).decode() for each in pairs}
    return found - {""}


def scrubbed(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without the secrets of addresses in it and of the environment (default: this process's)."""
    values = _values(os.environ if environment is None else environment)
    # Longest first, as one may be a part of another.
    for value in sorted(values, key=len, reverse=True):
        if value in text:
            text = text.replace(value, f"{MARK}@" if value.endswith("@") else MARK)
    text = _USERINFO.sub(rf"\1{MARK}@", text)
    return _NAMED.sub(rf"\1{MARK}", text)


def scrub_all(value: Any) -> Any:
    """`value` with every text in its lists and mappings `scrubbed`; names of keys stay."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, Mapping):
        return {name: scrub_all(item) for name, item in value.items()}
    # Not subclasses, such as named tuples, which are made in other ways.
    if type(value) in (list, tuple):
        return type(value)(map(scrub_all, value))
    return value
