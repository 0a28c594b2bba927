# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Install a patched CPU wheel and its requirements into the running Python.

For the tests, and for whoever serves on a CPU. It is `pip install WHEEL` but for two
things: torch's CPU build may come from another index, and torchvision, torchaudio and
torchcodec are left away, which only multimodal models need and whose builds on a
package index are for CUDA. Does nothing if the same file is installed already. Needs
pip, and no other package.
"""

import argparse
import sys
from pathlib import Path

from lib.errors import INSTALL_PYTHON, BuildError, missing_module

try:
    from lib import install, status
    from lib.project import Project
    from lib.pypa import Requirement
except ModuleNotFoundError as error:
    sys.exit(missing_module(error, INSTALL_PYTHON))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, metavar="WHEEL", nargs="?")
    parser.add_argument(
        "--only-torch",
        action="store_true",
        help="install the torch that the pinned wheels require, and no wheel: building "
        "one with its headers then needs no second torch",
    )
    parser.add_argument(
        "--torch-cpu-index",
        default=install.TORCH_CPU_INDEX,
        metavar="URL",
        help="index to ask for torch's CPU build when pip's configured ones lack it "
        "(default: $TORCH_CPU_INDEX, here %(default)s)",
    )
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    if arguments.only_torch:
        torch = Requirement(f"torch=={Project().sources.torch}+cpu")
        install.install_torch(torch, arguments.torch_cpu_index)
        return 0
    if arguments.wheel is None:
        raise BuildError("name a wheel, like dist/vllm_cpu-*.whl")
    new = install.install(arguments.wheel, torch_cpu_index=arguments.torch_cpu_index)
    print(f"{arguments.wheel.name}: {'installed' if new else 'already installed'}")
    return 0


if __name__ == "__main__":
    status.run(main)
