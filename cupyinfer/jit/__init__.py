# SPDX-License-Identifier: Apache-2.0
"""From a variant to a loaded kernel; nothing else in this library calls NVRTC or loads a kernel."""
