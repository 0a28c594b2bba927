# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Types of command line arguments, for argparse."""

import argparse
import math
from collections.abc import Callable, Collection


def positive_int(text: str) -> int:
    """A whole number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positive_float(text: str) -> float:
    """A finite number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def some_of(choices: Collection[str]) -> Callable[[str], list[str]]:
    """A list of some of `choices`, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in choices:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is none of {', '.join(choices)}"
                )
        return names

    return parse
