# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a script holds at most, beyond what its imports take."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import importlib, re, sys
main = importlib.import_module(sys.argv[1]).main
import torch
def status(key):
    text = open("/proc/self/status").read()
    return 1024 * int(re.search(key + r":\\s+(\\d+)", text)[1])
torch.set_num_threads(1)
torch.rand(9).sort()
open("/proc/self/clear_refs", "w").write("5")  # forgets the peak so far
before = status("VmRSS")
code = main(sys.argv[2:])
print(status("VmHWM") - before, file=sys.stderr)
sys.exit(code)
"""


def peak_memory(script: Path, *arguments: object) -> int:
    """Bytes that ``script``'s main function added to the process at its peak, mapped
    files included."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, script.stem, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(script.parent)},
    )
    assert result.returncode == 0, result.stderr
    return int(result.stderr.split()[-1])
