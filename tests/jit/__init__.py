# SPDX-License-Identifier: Apache-2.0
"""Tests of source assembly, compiling, the cubin cache and loading."""
