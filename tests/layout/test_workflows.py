"""The hosted workflows parse, call existing targets, and give each job minimal permissions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.release_notes import notes

yaml = pytest.importorskip("yaml", reason="the workflows are YAML")

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {
    path.name: yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]


def job_of(workflow: str, job: str) -> dict[str, Any]:
    found: dict[str, Any] = WORKFLOWS[workflow]["jobs"][job]
    return found


def uses(job: dict[str, Any]) -> list[str]:
    return [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_the_two_workflows():
    """There is a workflow for changes and one for releases."""
    assert set(WORKFLOWS) == {"ci.yml", "release.yml"}


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_job_is_sound(workflow: str, name: str):
    """A job has a timeout, and the jobs, make targets and scripts that it names exist."""
    job = job_of(workflow, name)
    assert isinstance(job["timeout-minutes"], int)
    needs = job.get("needs", [])
    assert set([needs] if isinstance(needs, str) else needs) <= set(WORKFLOWS[workflow]["jobs"])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    for command in commands(job):
        for words in map(str.split, command.splitlines()):
            if words[0] == "make":
                assert next(word for word in words[1:] if word[0] != "-") in targets, command
            elif words[0] == "bash":
                assert (ROOT / words[1]).is_file(), command
    if any(command.startswith(("make", "bash")) for command in commands(job)):
        assert "actions/checkout" in uses(job)


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_comments_name_sections_that_exist(workflow: str):
    """A comment such as ``README.md, "Install"`` names a heading of that page."""
    text = (ROOT / ".github" / "workflows" / workflow).read_text(encoding="utf-8")
    for page, title in re.findall(r'([\w/]+\.md), "([^"]+)"', text):
        assert f"# {title}\n" in (ROOT / page).read_text(encoding="utf-8")


def test_commands_have_no_expressions():
    """Commands contain no expressions, because the author of a pull request can choose their
    text."""
    for workflow, name in JOBS:
        assert not [one for one in commands(job_of(workflow, name)) if "${{" in one]


def test_every_python_is_tried():
    """The matrix on Linux has each Python of the classifiers, and none may fail."""
    job = job_of("ci.yml", "linux")
    named = set(re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT))
    assert named <= set(job["strategy"]["matrix"]["python"])
    assert "continue-on-error" not in job


@pytest.mark.parametrize("name", ["macos", "windows"])
def test_untested_systems_may_fail(name: str):
    """Jobs on untested systems may fail."""
    job = job_of("ci.yml", name)
    assert name in job["runs-on"] and job["continue-on-error"] is True
    assert f":: {name}".lower() not in PROJECT.lower()


def test_a_release_is_built_once():
    """A version's tag starts a release; one job builds, and the others use its files."""
    release = WORKFLOWS["release.yml"]
    trigger = release[True]  # YAML 1.1 reads the key ``on`` as true.
    assert trigger == {"push": {"tags": ["v*"]}}
    builds = [name for name in release["jobs"] if "make dist" in commands(release["jobs"][name])]
    assert builds == ["build"]
    for name in set(release["jobs"]) - {"build"}:
        assert "actions/checkout" not in uses(release["jobs"][name])
        assert "actions/download-artifact" in uses(release["jobs"][name])


def test_only_the_publisher_may_publish():
    """One job has the index's token and an environment, attests, and runs no command."""
    release = WORKFLOWS["release.yml"]
    assert release["permissions"] == {}
    rights = {name: job.get("permissions", {}) for name, job in release["jobs"].items()}
    assert [name for name in rights if "id-token" in rights[name]] == ["publish"]
    publish = release["jobs"]["publish"]
    assert rights["publish"] == {"id-token": "write"} and publish["environment"] == "pypi"
    assert not commands(publish) and "secrets." not in str(release)
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert publish["steps"][-1]["with"] == {"attestations": True}
    assert set(publish["needs"]) == {"build", "try"}


CHANGELOG = """# Changelog

## [1.2.0] - 2030-01-01

### Added

- A thing.

## [1.1.0]

- Older.
"""


def test_notes_are_the_section_of_the_version():
    """The text of a release is its section of the changelog."""
    assert notes("v1.2.0", 'version = "1.2.0"', CHANGELOG) == "### Added\n\n- A thing."
    assert notes("v1.1.0", 'version = "1.1.0"', CHANGELOG) == "- Older."


@pytest.mark.parametrize(
    ("tag", "version", "says"),
    [("v1.2.0", "1.3.0", "has version '1.3.0'"), ("v1.3.0", "1.3.0", "has no section of 1.3.0")],
)
def test_notes_refuse_another_version(tag: str, version: str, says: str):
    """A tag of another version or without a section stops the release."""
    with pytest.raises(SystemExit, match=says):
        notes(tag, f'version = "{version}"', CHANGELOG)
