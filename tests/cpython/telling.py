"""Reports of CPython's tests: a line of JSON on stdout for each test."""

from __future__ import annotations

import json
import os
import unittest
from typing import Any

__all__ = ["Told", "tell"]

_answers = -1


def tell(cls: str, test: str, outcome: str, reason: str = "") -> None:
    """Report the outcome of one test; from now on other output goes to stderr."""
    global _answers
    if _answers < 0:
        _answers = os.dup(1)
        os.dup2(2, 1)
    os.write(_answers, json.dumps([cls, test, outcome, reason]).encode() + b"\n")


class Told(unittest.TestResult):
    """Reports the outcome of each test in a line."""

    def _tell(self, test: unittest.TestCase, outcome: str, reason: str = "") -> None:
        tell(type(test).__name__, test.id().rpartition(".")[2], outcome, reason)

    def addSuccess(self, test: Any) -> None:
        self._tell(test, "ok")

    def addSkip(self, test: Any, reason: str) -> None:
        self._tell(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:
        self._tell(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addError = addFailure
