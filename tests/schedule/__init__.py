# SPDX-License-Identifier: Apache-2.0
"""Tests of planning: geometry, schedules, layouts, bounds and plan values, all without a GPU."""
