# SPDX-License-Identifier: Apache-2.0
"""`python -m cupyinfer`, the same as the `cupyinfer` command."""

from __future__ import annotations

import sys

from cupyinfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
