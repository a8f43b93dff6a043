# SPDX-License-Identifier: Apache-2.0
"""From an argument list to an exit code: 0 done, 1 something found wrong, 2 bad arguments or a machine that cannot serve them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import cupyinfer
from cupyinfer.cli import compile_command, info_command, size_command
from cupyinfer.cli.arguments import Parser
from cupyinfer.cli.output import report_error, show
from cupyinfer.cli.replay import command as replay_command
from cupyinfer.errors import CupyInferError

_DESCRIPTION = """\
LLM-serving attention with workspaces sized to the byte beforehand.

  cupyinfer info                          what is installed, which GPU, which kernel cache
  cupyinfer size --kv-lens 8192x64        bytes of both workspaces for a batch, on a named GPU, without one
  cupyinfer replay TRACE                  serve a request trace, every step sized exactly, sampled steps checked
  cupyinfer compile --arch sm_90a         fill the kernel cache, with no GPU

`cupyinfer COMMAND --help` explains a command. Results go to standard output, progress and errors to standard error.
Exit codes: 0 done, 1 a check failed, 2 bad arguments or a machine that cannot serve them.
"""
_COMMANDS = (size_command, replay_command, compile_command, info_command)


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = Parser(prog="cupyinfer", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"cupyinfer {cupyinfer.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        added = command.add_parser(commands)
        added.add_argument("--json", action="store_true", help="print the result as one JSON object")
        added.set_defaults(command=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name, by default those of the process.

    Returns:
        The exit code.
    """
    try:
        args = build_parser().parse_args(argv)
        report = args.command(args)
        show(report, args.json)
        sys.stdout.flush()
    except CupyInferError as error:
        report_error(str(error))
        return 2
    except OverflowError as error:  # of NumPy, for a number on the command line that 64 bits cannot hold
        report_error(f"a number is too large: {error}")
        return 2
    except MemoryError as error:  # of NumPy, or of CuPy for GPU memory
        report_error(f"out of memory: {error}; a smaller cache, chunk or batch needs less")
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, has what it wanted. Python would complain when it flushes on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        report_error("interrupted")
        return 130
    except SystemExit as stop:  # argparse, after --help and --version
        return int(stop.code or 0)
    return int(report.exit_code)
