"""The command line: ``relax-grad COMMAND`` or ``python -m relax_grad COMMAND``.

The modules of the commands import only the standard library until they run, so that help appears at
once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from .. import _entry
from .._packages import load
from . import cache, check, coverage, doctor, fuzz, worker
from ._stderr import folded
from ._text import EXIT_CODES, versions

_EPILOG = EXIT_CODES.format(success="no problems", problem="problems; see the help of the command")


class _Version(argparse.Action):
    """Prints the versions, which are looked up only here, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence | None,
        option_string: str | None = None,
    ) -> None:
        print(versions())
        parser.exit()


class _Completion(argparse.Action):
    """Prints the completion script of a shell, and exits."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence | None,
        option_string: str | None = None,
    ) -> None:
        try:
            shtab = load("shtab", str(option_string))
        except ImportError as error:
            parser.error(str(error))
        assert isinstance(values, str)  # the option has one argument
        print(shtab.complete(parser, values))
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : Sequence[str], optional
        The arguments without the program's name; by default the process's.

    Returns
    -------
    code : int
        The exit code of the command: 0 without problems, 1 with problems, 130 if interrupted. An
        invalid command line exits with code 2, the code of argparse.
    """
    parser = argparse.ArgumentParser(
        prog="relax-grad",
        description="Checks and lists the gradients of Relax operators in the installed TVM.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show program's version number and exit"
    )
    parser.add_argument(
        "--print-completion",
        action=_Completion,
        choices=("bash", "zsh"),
        help="print a script that completes command lines in this shell, and exit",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (check, coverage, doctor, fuzz, cache, worker):
        command.add_parser(commands)
    args = parser.parse_args(argv)
    # Callers in another process keep its standard error as it is.
    with folded() if argv is None and not args.verbose else nullcontext():
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        if getattr(args, "needs_tvm", True):
            _entry.register()
        code = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return code
