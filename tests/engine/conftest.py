# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import sys
from pathlib import Path

# The tests' own helpers (models.py, server.py) lie beside them.
sys.path.insert(0, str(Path(__file__).parent))
