"""Which MLflow store a run's figures go to. The run keeps its address in `store.json`, without passwords and tokens."""

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
_USERNAME = "MLFLOW_TRACKING_USERNAME"
_PASSWORD = "MLFLOW_TRACKING_PASSWORD"
_TOKEN = "MLFLOW_TRACKING_TOKEN"
_LONGEST = 4000


@dataclass(frozen=True)
class Store:
    """What a run keeps of a store.

    uri: the address without secrets; a file has its whole path.
    needs: environment variables that had secrets when the store was reached.
    """

    uri: str
    needs: tuple[str, ...] = ()

    @classmethod
    def of(cls, uri: str, environment: Mapping[str, str] = os.environ) -> Store:
        """What a run may keep of `uri`."""
        address = Address.of(_absolute(uri))
        web = address.bare.startswith(("http://", "https://"))
        needs: list[str] = []
        if web:
            needs = [name for name in (_USERNAME, _PASSWORD, _TOKEN) if environment.get(name)]

        # Secrets in the address itself. MLflow takes a user and a password from variables as well.
        if web and ":" in address.userinfo and not address.settings:
            needs = [_USERNAME, _PASSWORD]
        elif address.secrets:
            needs = [URI]
        return cls(address.bare, tuple(needs))

    @classmethod
    def load(cls, run_dir: Path) -> Store | None:
        """What the run keeps; None if there is nothing, or nothing that can be read."""
        stored = read_mapping(run_dir / STORE)
        uri, needs = stored.get("uri"), stored.get("needs")
        if not isinstance(uri, str) or not 0 < len(uri) <= _LONGEST or not uri.isprintable():
            return None
        named = set(map(str, needs)) if isinstance(needs, list) else set[str]()
        secrets = {URI, _USERNAME, _PASSWORD, _TOKEN}
        return cls(Address.of(uri).bare, tuple(sorted(secrets & named)))

    def save(self, run_dir: Path) -> None:
        """Write it, atomically."""
        write_json(run_dir / STORE, asdict(self))

    def missing(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Variables that must be set before the store can be reached by what the run keeps."""
        # A token, or user and password, open a server, whichever of them was used before.
        if environment.get(_TOKEN) or (environment.get(_USERNAME) and environment.get(_PASSWORD)):
            return [name for name in self.needs if name == URI]
        return [name for name in self.needs if not environment.get(name)]


def _absolute(uri: str) -> str:
    """The address with an absolute path in place of one that is relative to the working folder."""
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
    """Where to deliver.

    uri: the address with the secrets of the environment; for MLflow alone.
    store: the same, without secrets.
    was: address that figures went to until now; empty if it is the same.
    """

    uri: str
    store: Store
    was: str = ""

    @property
    def unsent(self) -> str:
        """Why MLflow's client cannot deliver to such an address; empty if it can.

        It appends its own path behind a setting (?...), and does not send a token that stands before the host.
        """
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
    def announcement(self) -> str:
        """Where figures go, in a line without secrets; printed when a run starts."""
        line = f"figures go to MLflow at {self.store.uri}"
        if self.was:
            line += f" from now on, the run's earlier ones too; until now they went to {self.was}"
        if self.unsent:
            line += f"; {self.unsent}"
        missing = self.store.missing() if self.uri == self.store.uri else []
        if missing:
            line += f"; it was reached with credentials: set {' and '.join(missing)}"
        return line


def choose(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Choice:
    """Where a run that starts or resumes delivers.

    To MLFLOW_TRACKING_URI if it is set; else where it delivered before; else to mlflow.db in the working folder.
    """
    kept, given = Store.load(run_dir), environment.get(URI)
    if kept is not None and not given:
        return Choice(kept.uri, kept)
    uri = _absolute(tracking_uri(environment))
    store = Store.of(uri, environment)
    was = ""
    if kept is not None and kept.uri != store.uri:
        was = kept.uri
    return Choice(uri, store, was)


def choose_for_sync(
    run_dir: Path, elsewhere: bool, environment: Mapping[str, str] = os.environ
) -> Choice:
    """Where `harness sync` delivers: to the store of the run.

    elsewhere: deliver to the store that the environment names instead.

    Raises ConfigError if the environment names another store and `elsewhere` is not set, if credentials are missing, or
    if the run's store is not known.
    """
    kept, given = Store.load(run_dir), environment.get(URI)
    here = Store.of(tracking_uri(environment), environment)
    if elsewhere or kept is None:
        return _choose_here(run_dir, elsewhere, kept, here, environment)

    # The run's store, reached by the address that the environment gives for it.
    if given:
        if here.uri != kept.uri:
            what = f"the run's figures are in {kept.uri}, and {URI} names {here.uri}"
            fix = f"unset {URI}, or set it to the former; {_ELSEWHERE}"
            raise ConfigError(Problem(what, str(run_dir), fix=fix))
        if here.uri.startswith("http") and Address.of(given).settings:
            why = Choice(given, here).unsent
            fix = f"set {URI}={here.uri}"
            raise ConfigError(Problem(f"{URI} has settings (?...)", here.uri, why, fix))
        return Choice(_absolute(given), here)

    # The run's store, reached by what the run keeps.
    if missing := kept.missing(environment):
        what = f"{kept.uri} was reached with credentials, which a run does not keep"
        fix = f"set {' and '.join(missing)}"
        if URI not in missing:
            fix += f" (or {URI} with them)"
        raise ConfigError(Problem(what, str(run_dir), fix=fix))
    return Choice(kept.uri, kept)


_ELSEWHERE = "--elsewhere delivers the whole run there, and the run belongs there from then on"


def _choose_here(
    run_dir: Path, elsewhere: bool, kept: Store | None, here: Store, environment: Mapping[str, str]
) -> Choice:
    """The store that the environment names. Raises ConfigError."""
    # Without --elsewhere this is a first delivery, unless store.json is gone: then nobody knows where the run is.
    delivered = Position.load(run_dir).run_id is not None
    if delivered and not elsewhere and not environment.get(URI):
        what = f"the run has been delivered, but {STORE}, which knows where, is gone or damaged"
        fix = f"set {URI} as it was in the run; {_ELSEWHERE}"
        raise ConfigError(Problem(what, str(run_dir), fix=fix))

    if why := misplaced(environment):
        fix = f"call it from another folder, or set {URI}"
        what = "MLflow's database would not be in this folder"
        raise ConfigError(Problem(what, str(Path.cwd()), why, fix))

    was = kept.uri if kept is not None and kept.uri != here.uri else ""
    return Choice(_absolute(tracking_uri(environment)), here, was)
