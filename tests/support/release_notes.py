"""Print the changelog's section for a tag; refuse a tag that does not match the version."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def notes(tag: str, project: str, changelog: str) -> str:
    """Return the section of the version ``tag`` (``"v1.2.3"``), without its title.

    ``project`` and ``changelog`` are the texts of pyproject.toml and CHANGELOG.md. Raises
    `SystemExit` if the project has another version, or the changelog has no section for it.
    """
    found = re.search(r'^version = "(.+)"$', project, re.M)
    version = found[1] if found else ""
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag!r}, and pyproject.toml has version {version!r}")
    section = re.search(
        rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S
    )
    if section is None or not section[1].strip():
        raise SystemExit(f"CHANGELOG.md has no section of {version}")
    return section[1].strip()


if __name__ == "__main__":
    files = (ROOT / name for name in ("pyproject.toml", "CHANGELOG.md"))
    print(notes(sys.argv[1], *(path.read_text(encoding="utf-8") for path in files)))
