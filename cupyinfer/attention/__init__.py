# SPDX-License-Identifier: Apache-2.0
"""What users call: batch wrappers, single-request functions, module getters, page and cascade operations."""
