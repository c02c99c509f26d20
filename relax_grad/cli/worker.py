"""``relax-grad worker`` lends this machine to a controller of
``relax_grad.distributed.session``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import _arguments
from ._text import EXIT_CODES, print_json, version_table

_DESCRIPTION = """\
Connects to the controller of a session over several machines, and runs its workers until the
session ends; after a restart, also the workers of the next session. Both sides prove that they know
the secret, which is the content of --secret-file or of the variable RELAX_GRAD_SECRET. Bytes
between workers are not encrypted: use a network that you
trust."""

_EPILOG = """\
example:
  relax-grad worker --controller 192.168.1.5:5000 --secret-file secret

""" + EXIT_CODES.format(
    success="the controller has ended the session",
    problem="the controller refuses this machine or cannot be reached, or a worker has failed",
)


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "worker",
        help="run workers of a training session whose controller is on another machine",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--controller", required=True, metavar="HOST:PORT", help="the address of the controller"
    )
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help="a file with the secret (default: the variable)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="the wait for the controller, at first and after each restart (default 300)",
    )
    _arguments.add_json(parser)
    # The messages of the workers are shown as they come.
    parser.set_defaults(run=run, error=parser.error, verbose=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0 after a session, 1 if the controller refuses or a worker has
    failed, 130 if interrupted."""
    start = time.monotonic()
    code, reason = _serve(args)
    if reason:
        print(f"relax-grad worker: {reason}", file=sys.stderr)
    if args.json:
        print_json(
            {
                "versions": version_table(),
                "controller": args.controller,
                "error": reason,
                "interrupted": code == 130,
                "code": code,
                "seconds": time.monotonic() - start,
            }
        )
    return code


def _serve(args: argparse.Namespace) -> tuple[int, str | None]:
    """Run the workers; return the exit code, and the reason if the controller cannot be reached or
    refuses."""
    from ..distributed.node import serve

    try:
        if args.secret_file:
            secret = args.secret_file.read_text().strip()
        else:
            secret = os.environ.get("RELAX_GRAD_SECRET", "")
        return serve(args.controller, secret, args.timeout), None
    except (TypeError, ValueError) as error:
        args.error(str(error))
        raise AssertionError("the parser exits") from error
    except OSError as error:
        return 1, str(error)
    except KeyboardInterrupt:
        return 130, None
