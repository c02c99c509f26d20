"""``relax-grad doctor`` reports the installation, its known problems, and whether gradients are right."""

from __future__ import annotations

import argparse

from ._text import count_of, versions

_DESCRIPTION = """\
Reports the installed versions and their conflicts, the vector extensions of the processor and the number of threads,
and checks some gradients and a compiled training step. Include the output in bug reports."""

_EPILOG = """\
exit codes:
  0  no problems
  1  problems: each line that begins with "!" names one, and the next line its remedy
"""


def add_parser(commands) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="report versions and problems of the installation, and check some gradients",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--no-check",
        action="store_true",
        help="leave out the checks that compile and run functions",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there is a problem, else 0."""
    from ._diagnosis import facts, find_problems, run_checks

    print(versions())
    for name, value in facts():
        print(f"{name + ':':<12}{value}")
    problems = list(find_problems())
    if not args.no_check:
        print("\nchecks:")
        problems += run_checks()
    print()
    for problem in problems:
        print(f"! {problem.what}\n    {problem.remedy}")
    print("no problems" if not problems else count_of(len(problems), "problem"))
    return 1 if problems else 0
