# SPDX-License-Identifier: Apache-2.0
"""Tests of the allocator behind sizing and placing."""
