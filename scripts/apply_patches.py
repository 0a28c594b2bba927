# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make the patched source tree, or check that the patches apply.

build/vllm-<version>/ becomes a git repository: the pristine source, one commit per
patch, the overlay, csrc. A second run does nothing; after a change it rebuilds from the
first changed patch on. With --verify nothing is written: series and patch files are
compared, every patch is applied strictly to the sdist and to the wheels in the cache,
and the pinned hashes are checked.
"""

import argparse
import json
import sys

from lib.errors import BUILD_PYTHON, BuildError, missing_module

try:
    from lib import cli, tree
    from lib.project import Project
    from lib.verify import verify
except ModuleNotFoundError as error:
    sys.exit(missing_module(error, BUILD_PYTHON))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verify", action="store_true", help="check, change nothing")
    parser.add_argument(
        "--source",
        default="",
        metavar="SOURCE",
        help="instead of the pinned sdist: an sdist file, a folder, a tag of vLLM's "
        "repository, or URL@TAG",
    )
    parser.add_argument(
        "--offline", action="store_true", help="use the cache only, download nothing"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    project = Project()
    if arguments.verify:
        if arguments.source:
            raise BuildError("--verify checks the pinned files; leave --source away")
        lines = verify(project, offline=arguments.offline)
        print(json.dumps({"checked": lines}) if arguments.json else "\n".join(lines))
        return 0
    result = tree.update(project, arguments.source, offline=arguments.offline)
    if arguments.json:
        values = {"commits": result.commits, "made": result.made}
        print(json.dumps({"path": str(result.path), **values}))
    elif result.made:
        print(f"{result.path}: {result.made} of {result.commits} commits made")
    else:
        print(f"{result.path}: up to date ({result.commits} commits)")
    return 0


if __name__ == "__main__":
    cli.run(main)
