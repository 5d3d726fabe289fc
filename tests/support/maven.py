"""Maven fetches files once, into the user's cache folder."""

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Artifact", "cache_folder", "fetched"]

# The first run fetches about 60 files and 120 MB for Kafka, and one file of 140 MB for a schema registry.
_FETCH_TIMEOUT_S = 600.0

_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>streamiter.test</groupId>
  <artifactId>fetched</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""

_DEPENDENCY = """\
    <dependency>
      <groupId>{group}</groupId>
      <artifactId>{name}</artifactId>
      <version>{version}</version>
{more}
    </dependency>"""

_ALONE = """\
      <exclusions>
        <exclusion>
          <groupId>*</groupId>
          <artifactId>*</artifactId>
        </exclusion>
      </exclusions>"""


class Artifact(NamedTuple):
    """Jars that Maven knows, with all that they need; or an archive, which is unpacked."""

    group: str
    name: str
    version: str
    archive: str = ""
    """The classifier of the archive (tar.gz)."""

    def dependency(self) -> str:
        """Return the text for Maven."""
        more = f"      <type>tar.gz</type>\n      <classifier>{self.archive}</classifier>\n{_ALONE}"
        return _DEPENDENCY.format(**self._asdict(), more=more if self.archive else "")


def cache_folder() -> Path:
    """Return the folder for fetched files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "streamiter"


def fetched(folder: Path, artifacts: Sequence[Artifact]) -> Path:
    """Return the folder with the files of the artifacts; download them if they are missing."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="fetching-") as working:
                # The rename is atomic: a process without the lock never sees an incomplete folder.
                _run_maven(Path(working), artifacts).rename(folder)
    return folder


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let only one process enter: two Maven processes would damage the repository that they fill.

    If a process ends, its lock ends too.
    """
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run_maven(working: Path, artifacts: Sequence[Artifact]) -> Path:
    pom = _POM.format(dependencies="\n".join(each.dependency() for each in artifacts))
    (working / "pom.xml").write_text(pom)
    goal = "unpack-dependencies" if artifacts[0].archive else "copy-dependencies"
    command = ["mvn", "-q", "-B", f"dependency:{goal}", "-DoutputDirectory=jars"]
    done = subprocess.run(command, cwd=working, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"Maven could not fetch {artifacts[0].name}:\n{done.stdout}{done.stderr}")
    return working / "jars"
