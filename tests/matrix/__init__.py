# SPDX-License-Identifier: Apache-2.0
"""The matrix: every legal combination of what selects code, sized, planned, run, replayed and compared."""
