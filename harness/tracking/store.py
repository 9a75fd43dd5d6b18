"""Where a run's figures go: the destination is a server or database of MLflow.

The run folder keeps it in `store.json`, so that a resume, and `harness sync` from another folder, deliver to the same
place. Passwords and tokens are not kept. In their place the file has the names of the environment variables that must
bring them back.
"""

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
# An absolute path in the address of a database in a file, or of a folder.
_FILE = re.compile(r"(?:sqlite(?:\+\w+)?:///|file://)(/[^?]*)(?:\?.*)?")


@dataclass(frozen=True)
class Destination:
    """Where a run's figures go, as its folder keeps it.

    uri: the address without secrets; an absolute path for a file.
    needs: environment variables that must be set to reach it, because they held credentials.
    """

    uri: str
    needs: tuple[str, ...] = ()

    @classmethod
    def of(cls, uri: str, environment: Mapping[str, str] = os.environ) -> Destination:
        """`uri` without its secrets, with the names of the variables that must supply them.

        A user and password in a server's address make MLflow's two variables needed. Any other secret in an address
        makes the whole address needed again.
        """
        address = Address.of(_absolute(uri))
        web = address.bare.startswith(("http://", "https://"))

        # Credentials that the environment holds beside the address of a server.
        needs: list[str] = []
        if web:
            needs = [name for name in (_USERNAME, _PASSWORD, _TOKEN) if environment.get(name)]

        # Secrets in the address itself replace them: MLflow takes a user and a password from variables as well.
        if web and ":" in address.userinfo and not address.settings:
            needs = [_USERNAME, _PASSWORD]
        elif address.secrets:
            needs = [URI]
        return cls(address.bare, tuple(needs))

    @classmethod
    def load(cls, run_dir: Path) -> Destination | None:
        """The destination that the run folder keeps; None if it keeps none, or none that can be read."""
        stored = read_mapping(run_dir / STORE)
        uri, needs = stored.get("uri"), stored.get("needs")
        if not isinstance(uri, str) or not 0 < len(uri) <= _LONGEST or not uri.isprintable():
            return None

        # Only variables of MLflow: the file may be damaged, and their names are shown.
        secrets = {URI, _USERNAME, _PASSWORD, _TOKEN}
        named: set[str] = set()
        if isinstance(needs, list):
            named = secrets.intersection(map(str, needs))
        return cls(Address.of(uri).bare, tuple(sorted(named)))

    def save(self, run_dir: Path) -> None:
        """Write it into the run folder, atomically."""
        write_json(run_dir / STORE, asdict(self))

    def lost_folder(self) -> Path | None:
        """The folder of the file that this is, if that folder is not there, as after the project moved; else None."""
        found = _FILE.fullmatch(self.uri)
        if found is None:
            return None
        folder = Path(found[1]).parent
        # Unlike Path.is_dir, it raises nothing for a folder of another user.
        return None if os.path.isdir(folder) else folder

    def missing(self, environment: Mapping[str, str] = os.environ) -> list[str]:
        """Variables of `needs` that are not set."""
        # A token, or a user and a password, open a server: they stand in for each other.
        if environment.get(_TOKEN) or (environment.get(_USERNAME) and environment.get(_PASSWORD)):
            return [name for name in self.needs if name == URI]
        return [name for name in self.needs if not environment.get(name)]


def _absolute(uri: str) -> str:
    """`uri` with an absolute path, if it is a file with a path relative to the working folder."""
    # sqlite:///mlflow.db, sqlite+pysqlite:///mlflow.db?settings
    sqlite = re.fullmatch(r"(sqlite(?:\+\w+)?:///)([^/:?][^:?]*)(\?.*)?", uri)
    if sqlite is not None:
        scheme, path, settings = sqlite.groups()
        return f"{scheme}{_here(path)}{settings or ''}"
    if uri.startswith("file:") and not uri.startswith("file:/"):
        return f"file://{_here(uri.removeprefix('file:'))}"
    if ":" not in uri and not uri.startswith("databricks"):
        return f"file://{_here(uri)}"
    return uri


def _here(path: str) -> Path:
    return Path.cwd().resolve() / path


@dataclass(frozen=True)
class Choice:
    """Where to deliver now.

    uri: the address with its secrets; pass it to MLflow only, never print it.
    destination: what the run keeps of it.
    was: the former address, if the run moves to another one; else empty.
    """

    uri: str
    destination: Destination
    was: str = ""

    @property
    def unsent(self) -> str:
        """Why MLflow's client cannot use this address; empty if it can.

        The client appends its paths after a setting (?...), and ignores a token before the host.
        """
        address = Address.of(self.uri)
        if not address.bare.startswith(("http://", "https://")):
            return ""
        if address.settings:
            return f"MLflow's client cannot use an address with settings (?...): set {_TOKEN} for a token"
        if address.userinfo and ":" not in address.userinfo:
            why = "MLflow's client does not send a token that stands before the host"
            return f"{why}: set {_TOKEN}"
        return ""

    @property
    def announcement(self) -> str:
        """Where figures go, in a line without secrets; printed when a run starts."""
        line = f"figures go to MLflow at {self.destination.uri}"
        if self.was:
            line += f" from now on, the run's earlier ones too; until now they went to {self.was}"
        if self.unsent:
            line += f"; {self.unsent}"

        # An address without secrets of its own gets them from the environment.
        missing: list[str] = []
        if self.uri == self.destination.uri:
            missing = self.destination.missing()
        if missing:
            line += f"; it was reached with credentials: set {' and '.join(missing)}"
        return line


def choose(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Choice:
    """Where a run that starts or resumes delivers.

    To MLFLOW_TRACKING_URI if it is set; else where it delivered before; else to mlflow.db in the working folder.
    """
    kept = Destination.load(run_dir)
    given = environment.get(URI)
    # If the project moved, MLflow would make its old folder again, and begin an empty database there.
    if kept is not None and not given and kept.lost_folder() is None:
        return Choice(kept.uri, kept)

    # The environment names it, or this is the run's first delivery, here.
    uri = _absolute(tracking_uri(environment))
    destination = Destination.of(uri, environment)
    was = ""
    if kept is not None and kept.uri != destination.uri:
        was = kept.uri
    return Choice(uri, destination, was)


def choose_for_sync(
    run_dir: Path, elsewhere: bool, environment: Mapping[str, str] = os.environ
) -> Choice:
    """Where `harness sync` delivers: to the run's own destination.

    elsewhere: deliver to the destination that the environment names, and move the run there.

    Raises ConfigError if the environment names another destination and `elsewhere` is not set, if credentials are
    missing, or if the run's destination is not known.
    """
    kept = Destination.load(run_dir)
    given = environment.get(URI)
    here = Destination.of(tracking_uri(environment), environment)

    # The run moves, or keeps no destination: the environment decides.
    if elsewhere or kept is None:
        return _choose_here(run_dir, elsewhere, kept, here, environment)

    # The environment gives an address. It must be the run's, and one that MLflow's client can use.
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

    # Only the run folder says where. A folder that is not there must not be made again.
    if folder := kept.lost_folder():
        what = f"{folder}, where the run's figures are, is not there: the project moved, or a disk is not mounted"
        fix = f"set {URI}=sqlite:////FOLDER/mlflow.db, or call it in that folder, with --elsewhere: {_ELSEWHERE}"
        raise ConfigError(Problem(what, str(run_dir), fix=fix))

    # The credentials must come from the environment.
    if missing := kept.missing(environment):
        what = f"{kept.uri} was reached with credentials, which a run does not keep"
        fix = f"set {' and '.join(missing)}"
        if URI not in missing:
            fix += f" (or {URI} with them)"
        raise ConfigError(Problem(what, str(run_dir), fix=fix))
    return Choice(kept.uri, kept)


_ELSEWHERE = "--elsewhere delivers the whole run there, and the run belongs there from then on"


def _choose_here(
    run_dir: Path,
    elsewhere: bool,
    kept: Destination | None,
    here: Destination,
    environment: Mapping[str, str],
) -> Choice:
    """The destination that the environment names. Raises ConfigError."""
    # Without --elsewhere this is a first delivery. If rows were delivered before, store.json is gone, and nobody knows
    # where the run is: the user must say so.
    delivered = Position.load(run_dir).run_id is not None
    if delivered and not elsewhere and not environment.get(URI):
        what = f"the run has been delivered, but {STORE}, which knows where, is gone or damaged"
        fix = f"set {URI} as it was in the run; {_ELSEWHERE}"
        raise ConfigError(Problem(what, str(run_dir), fix=fix))

    # Without an address it is mlflow.db in the working folder, which must be allowed there.
    if why := misplaced(environment):
        fix = f"call it from another folder, or set {URI}"
        what = "MLflow's database would not be in this folder"
        raise ConfigError(Problem(what, str(Path.cwd()), why, fix))

    was = kept.uri if kept is not None and kept.uri != here.uri else ""
    return Choice(_absolute(tracking_uri(environment)), here, was)
