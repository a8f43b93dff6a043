# SPDX-License-Identifier: Apache-2.0
"""Tests of the project itself: its rules, its README tree and its wheel."""
