"""``relax-grad doctor`` reports the installation, its known problems, and whether gradients are right."""

from __future__ import annotations

import argparse

from ._text import count_of, versions

_DESCRIPTION = """\
Says which versions are installed and which of them do not go together, what the processor offers, how many threads
run, and whether some gradients, and a compiled training step, are right. The output is fit for a bug report."""

_EPILOG = """\
exit codes:
  0  all is well
  1  something is wrong: the lines that begin with "!" say what, and what to do
"""


def add_parser(commands) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, what is wrong with it, and check some gradients",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-check", action="store_true", help="do not compile and run anything")
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
    print("all is well" if not problems else count_of(len(problems), "problem"))
    return 1 if problems else 0
