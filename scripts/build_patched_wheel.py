# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build a vLLM wheel that knows the ternary quantization method.

--build repack (minutes) takes the official wheel, applies the patch series to its files
and adds the overlay and the compiled extension. --build source (hours) runs vLLM's own
build on the patched source tree. Either way the result in dist/ is vLLM with the local
version +ternary.<n>.
"""

import argparse
import json
import sys
from pathlib import Path

from lib.errors import BUILD_PYTHON, BuildError, missing_module

try:
    from lib import build, cli, extension, install, source_build
    from lib.project import Project
except ModuleNotFoundError as error:
    sys.exit(missing_module(error, BUILD_PYTHON))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--build", choices=("repack", "source"), default="repack")
    parser.add_argument(
        "--cuda-archs",
        default=" ".join(extension.DEFAULT_CUDA_ARCHS),
        metavar="LIST",
        help="architectures to compile for, default: %(default)s",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        metavar="FILE",
        help="repack: a local copy of the pinned wheel, instead of the cache's",
    )
    parser.add_argument(
        "--source",
        default="",
        metavar="SOURCE",
        help="source: instead of the pinned sdist, an sdist file, a folder, a tag of "
        "vLLM's repository, or URL@TAG",
    )
    parser.add_argument(
        "--only-extension",
        action="store_true",
        help="source: configure vLLM's CMake build and compile only _ternary_C with it",
    )
    parser.add_argument("--jobs", help="compilers at once, default: as fits")
    parser.add_argument(
        "--torch-cpu-index",
        default=install.TORCH_CPU_INDEX,
        metavar="URL",
        help="index to ask for torch's CPU build when pip's configured ones lack it "
        "(default: $TORCH_CPU_INDEX, here %(default)s)",
    )
    parser.add_argument(
        "--offline", action="store_true", help="use the cache only, download nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    project = Project()
    options = build.Options(
        arguments.device,
        extension.parse_archs(arguments.cuda_archs),
        arguments.wheel,
        arguments.offline,
        extension.parse_jobs(arguments.jobs),
        arguments.torch_cpu_index,
    )
    if arguments.build == "repack":
        if arguments.source or arguments.only_extension:
            raise BuildError(
                "--source and --only-extension go with --build source; a repack starts "
                "from the pinned wheel"
            )
        path = build.repack(project, options)
    else:
        path = source_build.build(
            project,
            options,
            arguments.source,
            only_extension=arguments.only_extension,
        )
    if arguments.json:
        print(json.dumps({"path": str(path), "bytes": path.stat().st_size}))
    else:
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    cli.run(main)
