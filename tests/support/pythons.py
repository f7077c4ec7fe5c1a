"""Print the other Pythons from 3.10 on that this machine has, oldest first, one for each
version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = 10, 19  # minor versions; the newest do not exist yet
PRINTS = "import sys; print(sys.version_info[1], sys.version_info[2])"


def candidates() -> list[str]:
    """Return possible interpreters of PATH and of pyenv."""
    found = [shutil.which(f"python3.{minor}") for minor in range(OLDEST, NEWEST + 1)]
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    if shutil.which("pyenv"):
        asked = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False)
        root = Path(asked.stdout.strip() or root)
    installed = [
        str(folder / "bin/python")
        for folder in root.glob("versions/3.*")
        if re.fullmatch(r"3\.\d+\.\d+", folder.name)
    ]
    return [*installed, *filter(None, found)]


def others() -> list[str]:
    """Return the newest interpreter of each version except this one's."""
    best: dict[int, tuple[int, str]] = {}
    for path in candidates():
        # A shim of pyenv also exists for an unselected version, and fails.
        asked = subprocess.run([path, "-c", PRINTS], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            minor, patch = map(int, asked.stdout.split())
            if OLDEST <= minor != sys.version_info[1]:
                best[minor] = max(best.get(minor, (-1, "")), (patch, path))
    return [path for _, (_, path) in sorted(best.items())]


if __name__ == "__main__":
    print(*others())
