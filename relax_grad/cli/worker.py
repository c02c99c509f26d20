"""``relax-grad worker`` lends this machine to a controller of ``relax_grad.distributed.session``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_DESCRIPTION = """\
Connects to the controller of a session over several machines, and runs its workers until the session ends. Both sides prove
that they know the secret, which is the content of --secret-file or of the variable RELAX_GRAD_SECRET. Bytes between workers
are not encrypted: use a network that you trust."""


def add_parser(commands) -> None:
    """Add the command to the parser's subcommands."""
    parser = commands.add_parser(
        "worker",
        help="run workers of a training session whose controller is on another machine",
        description=_DESCRIPTION,
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
        help="the wait for the controller (default 300)",
    )
    # The messages of the workers are shown as they come.
    parser.set_defaults(run=run, error=parser.error, verbose=True)


def run(args: argparse.Namespace) -> int:
    """Run the command; return 0 after a session, 1 if the controller refuses or a worker has failed."""
    from ..distributed.node import serve

    try:
        if args.secret_file:
            secret = args.secret_file.read_text().strip()
        else:
            secret = os.environ.get("RELAX_GRAD_SECRET", "")
        return serve(args.controller, secret, args.timeout)
    except (TypeError, ValueError) as error:
        args.error(str(error))
    except OSError as error:
        print(f"relax-grad worker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
