# SPDX-License-Identifier: Apache-2.0
"""The `cupyinfer` command: `size`, `replay`, `compile` and `info`."""

from cupyinfer.cli.entry import main

__all__ = ["main"]
