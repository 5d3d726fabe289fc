"""Try the quick start of the README as a new user: a fresh clone, a venv of its own, and the three commands.

``python -m service_soak.quick_start FOLDER`` runs the commands of the README in FOLDER, which must not exist, and
prints after how many seconds the model predicted. The clone is of this repository. It needs the network for packages.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import orjson
from support.processes import process

_ROOT: Final = Path(__file__).parents[2]
_LIMIT_S: Final = 180.0
# The service commits a last checkpoint.
_END_S: Final = 60.0


def quick_start() -> list[str]:
    """Return the commands of the README."""
    block = re.search(
        r"^## Quick start\n.*?^```sh\n(.*?)^```", (_ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert block is not None
    return block[1].splitlines()


def main(folder: Path) -> None:
    """Run the commands; raise AssertionError if there is no prediction in time."""
    clone, serve, ask = quick_start()
    folder.mkdir(parents=True)
    began_s = time.monotonic()
    cloned = re.sub(r"https://\S+", f"{_ROOT} streamiter", clone)
    subprocess.run(cloned, shell=True, cwd=folder, timeout=_LIMIT_S, check=True)
    print(f"{time.monotonic() - began_s:6.1f} s  cloned", flush=True)
    command = ["/bin/sh", "-c", serve]
    with process(command, limit_s=_LIMIT_S + _END_S, cwd=folder / "streamiter") as service:
        seen = set[int]()
        while len(seen) < 2:
            assert time.monotonic() < began_s + _LIMIT_S, f"no two versions have predicted after {_LIMIT_S:g} s"
            assert service.poll() is None, f"{serve} has ended"
            asked = subprocess.run(
                f"{ask} --silent", shell=True, cwd=folder, capture_output=True, timeout=_LIMIT_S, check=False
            )
            if b'"probability"' in asked.stdout:
                version = orjson.loads(asked.stdout)["version"]
                print(f"{time.monotonic() - began_s:6.1f} s  {asked.stdout.decode()}", flush=True)
                seen.add(version)
            time.sleep(0.5)
        os.killpg(service.pid, signal.SIGINT)
        code = service.wait(_END_S)
    print(f"{time.monotonic() - began_s:6.1f} s  ended with {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
