"""Runs the made-up grid in children of a process that has imported everything, so that kills hit the work, not the start.

Every line on standard input starts one child; its number is printed, and, when it has ended, how (0, or minus the signal).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))
from fake_grid import HashEngine, make_config

from revisit.eval.run import run

out, data = Path(sys.argv[1]), Path(sys.argv[2])
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(make_config(out / line.strip(), data), engine_for=lambda model: HashEngine(model, 0.02))
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
