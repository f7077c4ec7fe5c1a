"""Records the environment when it is imported, as frameworks do."""

import os
import sys

ENVIRON = dict(os.environ)
CPUS = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
