# SPDX-License-Identifier: Apache-2.0
"""Data the tests and the demo read, and the scripts that made it."""
