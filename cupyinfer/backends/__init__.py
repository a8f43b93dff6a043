# SPDX-License-Identifier: Apache-2.0
"""From a plan to a launch: `host` in NumPy, `fa2` on a GPU, `fa3` for prefill on Hopper."""
