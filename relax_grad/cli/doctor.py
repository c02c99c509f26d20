"""``relax-grad doctor`` reports the installation, its known problems, and whether gradients are
right."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from . import _arguments
from ._text import EXIT_CODES, count_of, print_json, version_table, versions

if TYPE_CHECKING:
    import tvm

_DESCRIPTION = """\
Reports the installed versions and their conflicts, the vector extensions of the processor and the
number of threads, and checks some gradients and a compiled training step. Include the output in bug
reports.

With --plan, it prints only the plan of a kernel: the way to compute it, its tiles, tasks and
copies. A kernel is ROWSxCOLUMNSxSTEPS for a matrix product, with :NT for a transposed second
factor, or a kind with shapes, and options that may be left out:

  128x768x3072:NT
  conv:8x64x56x56,64x64x3x3,stride=1,padding=1,dilation=1,of=weight
  pool:8x64x112x112,3x3,stride=2,padding=1,dilation=1
  sum:512x768                 a sum over the rows
  norm:512x768                the gradients of gamma and beta of a layer_norm of rows
  softmax:8x21x64x64,axis=1   also the gradient of the cross entropy
  recurrent:35x20x512,layer=lstm,of=data
                              the steps, sequences and units

A line that begins with "!" names a problem, and a line that begins with "*" a setting that wastes
cores or vector extensions; the line after it names the remedy."""

_EPILOG = EXIT_CODES.format(success="no problems", problem="problems")


def add_parser(commands: argparse._SubParsersAction) -> None:
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
    parser.add_argument(
        "--target",
        default="host",
        help="the target that your programs are compiled for, as a name or in JSON: the report "
        "names what it wastes (default: host, the processor of this machine)",
    )
    parser.add_argument(
        "--plan",
        metavar="KERNEL",
        help="print only the plan of a kernel for the target, in float32, such as 128x768x3072 or "
        "conv:8x64x56x56,64x64x3x3,padding=1",
    )
    _arguments.add_json(parser)
    _arguments.add_verbose(parser)
    parser.set_defaults(run=run, error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 1 if there is a problem, else 0."""
    from . import _diagnosis

    try:
        target = _arguments.target_of(args.target)
    except ValueError as error:
        args.error(str(error))
    if args.plan is not None:
        return _print_plan(args, target)
    shown = (lambda *_: None) if args.json else (lambda text: print(text, flush=True))
    shown(versions())
    facts = dict(_diagnosis.facts())
    for name, value in facts.items():
        shown(f"{name + ':':<12}{value}")
    problems = list(_diagnosis.find_problems())
    advice = list(_diagnosis.find_waste(target))
    checks = []
    if not args.no_check:
        shown("\nchecks:")
        for check in _diagnosis.run_checks():
            checks.append(check)
            verdict = "FAILED" if check.problem else "ok"
            shown(f"  {check.name:<45} {check.seconds:5.1f} s  {verdict}")
    problems += [check.problem for check in checks if check.problem]
    shown("")
    for sign, items in (("*", advice), ("!", problems)):
        for item in items:
            shown(f"{sign} {item.symptom}\n    {item.remedy}")
    shown("no problems" if not problems else count_of(len(problems), "problem"))
    if args.json:
        print_json(
            {
                "versions": version_table(),
                "facts": facts,
                "checks": [
                    {"name": check.name, "seconds": check.seconds, "ok": check.problem is None}
                    for check in checks
                ],
                "advice": [vars(item) for item in advice],
                "problems": [vars(item) for item in problems],
            }
        )
    return 1 if problems else 0


def _print_plan(args: argparse.Namespace, target: tvm.target.Target) -> int:
    from ..cpu.kernel.language.plans import text_of
    from . import _plan

    try:
        lines = _plan.lines_of(args.plan, target)
    except ValueError as error:
        args.error(str(error))
    if args.json:
        print_json({"versions": version_table(), "plan": lines})
        return 0
    print(text_of(lines))
    return 0
