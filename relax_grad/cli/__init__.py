"""The command line: ``relax-grad COMMAND``, which is ``python -m relax_grad COMMAND`` too.

The modules of the commands import nothing but the standard library until they run: help is there at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from .. import _entry
from . import check, coverage, doctor, fuzz
from ._text import versions


class _Version(argparse.Action):
    """Print the versions, which are looked up only then, and exit."""

    def __call__(self, parser, namespace, values, option_string=None):
        print(versions())
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : Sequence[str], optional
        The arguments without the program's name; by default those of the process.

    Returns
    -------
    code : int
        The exit code of the command: 0 if all is well, 1 if something was found, 130 if interrupted. A
        wrong command line exits with code 2, as argparse does.
    """
    parser = argparse.ArgumentParser(
        prog="relax-grad",
        description="Checks and lists the gradients that the installed TVM has through relax_grad.",
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show program's version number and exit"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (check, coverage, doctor, fuzz):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    _entry.register()
    try:
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
