# SPDX-License-Identifier: Apache-2.0
"""Everything the command line writes: reports to standard output, errors and progress bars to standard error."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """The result of a command.

    Attributes:
        data: what --json prints.
        text: what is printed otherwise.
        exit_code: 0 for done, 1 when a check failed.
    """

    data: dict[str, Any]
    text: str
    exit_code: int = 0


def show(report: Report, as_json: bool) -> None:
    """Print a report."""
    print(json.dumps(report.data, indent=2) if as_json else report.text)


def report_error(message: str) -> None:
    """Print an error as one line on standard error, whatever line breaks the message has."""
    print("cupyinfer: error: " + " ".join(message.split()), file=sys.stderr)


@contextmanager
def progress(total: int, description: str, unit: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error, shown only on a terminal.

    Yields:
        A function that advances the bar by a number of units.
    """
    if not sys.stderr.isatty():
        yield lambda amount: None
        return
    from tqdm import tqdm

    # Some terminals claim to have no columns and no lines, which the bar would believe.
    columns, lines = shutil.get_terminal_size()
    with tqdm(total=total, desc=description, unit=unit, file=sys.stderr, ncols=columns, nrows=lines, unit_scale=total >= 10_000) as bar:
        yield bar.update


def format_bytes(num_bytes: int) -> str:
    """Exact bytes, and a rounded binary unit from 1 KiB on."""
    exact = f"{num_bytes:,} B"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{exact} ({num_bytes / size:.2f} {unit})"
    return exact


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]], indent: str = "  ") -> str:
    """Columns with two spaces between; numbers and byte counts to the right, the rest to the left."""
    cells = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(header, *cells, strict=True)]
    right = [all(isinstance(row[column], int) or str(row[column])[:1].isdigit() for row in rows) for column in range(len(header))]
    lines = []
    for row in (list(header), *cells):
        padded = (cell.rjust(width) if at_right else cell.ljust(width) for cell, width, at_right in zip(row, widths, right, strict=True))
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun in the right form."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
