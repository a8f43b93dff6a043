# SPDX-License-Identifier: Apache-2.0
"""The tests; a directory here tests the package directory of the same name."""
