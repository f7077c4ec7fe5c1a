"""Print other Pythons from 3.10 on that are found here, oldest first: one for each version."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST, NEWEST = 10, 19  # of these versions 3.x; those that do not exist yet are not found
PRINTS = "import sys; print(sys.version_info[1], sys.version_info[2])"


def candidates() -> list[str]:
    """Return paths that may be interpreters: those on the path, and those of pyenv."""
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
    """Return the newest of each version but this one's, by version."""
    best: dict[int, tuple[int, str]] = {}
    for path in candidates():
        # A shim of pyenv's is there for versions that are not chosen, too: it fails.
        asked = subprocess.run([path, "-c", PRINTS], capture_output=True, text=True, check=False)
        if asked.returncode == 0:
            minor, patch = map(int, asked.stdout.split())
            if OLDEST <= minor != sys.version_info[1]:
                best[minor] = max(best.get(minor, (-1, "")), (patch, path))
    return [path for _, (_, path) in sorted(best.items())]


if __name__ == "__main__":
    print(*others())
