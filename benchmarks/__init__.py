# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of cupyinfer against the kernels people use today, and against what the hardware allows."""
