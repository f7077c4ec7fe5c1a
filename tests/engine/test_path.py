"""The length of a call's path through the parent's code."""

import json

import pytest
from support import scripts

MEASURE = """
import json
from bench.path import measure_apply

path = measure_apply()
print(json.dumps([path.functions, path.files]))
"""


@pytest.mark.starts
def test_path_of_an_apply():
    """One `apply` runs through at most 41 functions in 14 files."""
    # In a fresh process: each library that is imported there has settings, which are read too.
    functions, files = json.loads(scripts.run_ok(["-c", MEASURE]))
    assert len(functions) <= 41, functions
    assert len(files) <= 14, files
