"""Where in MLflow a run's figures go. A run remembers it in `store.json`, without passwords and tokens."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core.errors import ConfigError, Problem
from harness.core.files import read_mapping, write_json
from harness.core.secrets import Address
from harness.tracking.journal import Position, misplaced, tracking_uri

STORE = "store.json"
URI = "MLFLOW_TRACKING_URI"
_USERNAME, _PASSWORD, _TOKEN = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
)
_LONGEST = 4000


@dataclass(frozen=True)
class Store:
    """uri: the address without secrets; a file has its whole path. needs: the variables that had secrets."""

    uri: str
    needs: tuple[str, ...] = ()

    @classmethod
    def of(cls, uri: str, environment: Mapping[str, str] = os.environ) -> Store:
        """What a run may remember of `uri`."""
        address = Address.of(_absolute(uri))
        web = address.bare.startswith(("http://", "https://"))
        needs = [name for name in (_USERNAME, _PASSWORD, _TOKEN) if web and environment.get(name)]
        if web and ":" in address.userinfo and not address.settings:
            needs = [_USERNAME, _PASSWORD]
        elif address.secrets:
            needs = [URI]
        return cls(address.bare, tuple(needs))

    @classmethod
    def load(cls, run_dir: Path) -> Store | None:
        """What the run remembers; None if nothing, or nothing that can be read."""
        stored = read_mapping(run_dir / STORE)
        uri, needs = stored.get("uri"), stored.get("needs")
        if not isinstance(uri, str) or not 0 < len(uri) <= _LONGEST or not uri.isprintable():
            return None
        known = {URI, _USERNAME, _PASSWORD, _TOKEN}
        return cls(
            Address.of(uri).bare,
            tuple(sorted(known & set(map(str, needs)))) if isinstance(needs, list) else (),
        )

    def save(self, run_dir: Path) -> None:
        """Write it, atomically."""
        write_json(run_dir / STORE, asdict(self))

    def missing(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Variables that are to be set before the store can be reached, if it is reached by what the run remembers."""
        if environment.get(_TOKEN) or (environment.get(_USERNAME) and environment.get(_PASSWORD)):
            return [name for name in self.needs if name == URI]
        return [name for name in self.needs if not environment.get(name)]


def _absolute(uri: str) -> str:
    """A relative path means one in the working folder of whoever said it."""
    sqlite = re.fullmatch(r"(sqlite(?:\+\w+)?:///)([^/:?][^:?]*)(\?.*)?", uri)
    if sqlite is not None:
        scheme, path, settings = sqlite.groups()
        return f"{scheme}{Path.cwd().resolve() / path}{settings or ''}"
    if uri.startswith("file:") and not uri.startswith("file:/"):
        return f"file://{Path.cwd().resolve() / uri.removeprefix('file:')}"
    if ":" not in uri and not uri.startswith("databricks"):
        return f"file://{Path.cwd().resolve() / uri}"
    return uri


@dataclass(frozen=True)
class Choice:
    """uri: with the secrets that the environment has, for MLflow alone. was: where figures went until now, if that was
    elsewhere, else empty."""

    uri: str
    store: Store
    was: str = ""

    @property
    def unsent(self) -> str:
        """Why MLflow's client cannot deliver with such an address; empty if it can. It writes its own path behind a
        setting, and sends a token before the host not at all."""
        address = Address.of(self.uri)
        if not address.bare.startswith(("http://", "https://")):
            return ""
        if address.settings:
            return f"MLflow's client cannot use an address with settings (?...): set {_TOKEN} for a token"
        if address.userinfo and ":" not in address.userinfo:
            return (
                f"MLflow's client does not send a token that stands before the host: set {_TOKEN}"
            )
        return ""

    @property
    def told(self) -> str:
        """Where figures go, in a line without secrets."""
        line = f"figures go to MLflow at {self.store.uri}"
        if self.was:
            line += (
                f" from now on, and the run's earlier ones too; until now they went to {self.was}"
            )
        if self.unsent:
            line += f"; {self.unsent}"
        missing = self.store.missing() if self.uri == self.store.uri else []
        if missing:
            line += f"; it was reached with credentials: set {' and '.join(missing)}"
        return line


def choose(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Choice:
    """Where a run that starts or resumes delivers: to MLFLOW_TRACKING_URI if it is set, else where it did before, else
    to mlflow.db in the working folder."""
    known, given = Store.load(run_dir), environment.get(URI)
    if known is not None and not given:
        return Choice(known.uri, known)
    uri = _absolute(tracking_uri(environment))
    store = Store.of(uri, environment)
    moved = known is not None and known.uri != store.uri
    return Choice(uri, store, known.uri if moved and known is not None else "")


def choose_for_sync(
    run_dir: Path, elsewhere: bool, environment: Mapping[str, str] = os.environ
) -> Choice:
    """Where `harness sync` delivers: to the store of the run. Raises ConfigError if the environment names another one
    and `elsewhere` does not allow it, if credentials are missing, or if the store is not known."""
    known, given = Store.load(run_dir), environment.get(URI)
    allow = "--elsewhere delivers the whole run there, and the run belongs there from then on"
    here = Store.of(tracking_uri(environment), environment)
    if elsewhere or known is None:
        if not given and not elsewhere and Position.load(run_dir).run_id is not None:
            what = f"the run has been delivered, but {STORE}, which knows where, is gone or damaged"
            raise ConfigError(
                Problem(what, str(run_dir), fix=f"set {URI} as it was in the run; {allow}")
            )
        if why := misplaced(environment):
            fix = f"call it from another folder, or set {URI}"
            raise ConfigError(
                Problem("MLflow's database would not be in this folder", str(Path.cwd()), why, fix)
            )
        moved = known.uri if known is not None and known.uri != here.uri else ""
        return Choice(_absolute(tracking_uri(environment)), here, moved)
    if given and here.uri != known.uri:
        what = f"the run's figures are in {known.uri}, and {URI} names {here.uri}"
        raise ConfigError(
            Problem(what, str(run_dir), fix=f"unset {URI}, or set it to the former; {allow}")
        )
    if given and here.uri.startswith("http") and Address.of(given).settings:
        why = Choice(given, here).unsent
        raise ConfigError(
            Problem(f"{URI} has settings (?...)", here.uri, why, f"set {URI}={here.uri}")
        )
    if given:
        return Choice(_absolute(given), here)
    if missing := known.missing(environment):
        what = f"{known.uri} was reached with credentials, which a run does not keep"
        fix = f"set {' and '.join(missing)}" + (
            f" (or {URI} with them)" if URI not in missing else ""
        )
        raise ConfigError(Problem(what, str(run_dir), fix=fix))
    return Choice(known.uri, known)
