# SPDX-License-Identifier: Apache-2.0
"""From a batch to a plan, in NumPy alone: geometry, tiles, every CTA's share, and where it all lies."""
