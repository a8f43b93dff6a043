# SPDX-License-Identifier: Apache-2.0
"""Every error this library raises on purpose.

Each class is also the built-in exception a Python user would expect, so both
``except cupyinfer.CupyInferError`` and ``except ValueError`` work.
"""

from __future__ import annotations


class CupyInferError(Exception):
    """Base of all errors raised on purpose by cupyinfer."""


class ArgumentError(CupyInferError, ValueError):
    """An argument has the right kind but a wrong value, shape, stride or combination."""


class ArgumentTypeError(CupyInferError, TypeError):
    """An argument is of the wrong kind, or an array has the wrong element type."""


class UnsupportedError(ArgumentError, NotImplementedError):
    """The request is well formed, but nothing here can serve it; the message lists what can."""


class WorkspaceError(ArgumentError):
    """A workspace buffer is missing, unaligned or too small. Nothing was copied, launched or changed."""


class StateError(CupyInferError, RuntimeError):
    """A call came in the wrong order, such as ``run`` before ``plan``, or with arrays of another batch."""


class BackendUnavailable(CupyInferError, RuntimeError):
    """The backend asked for cannot run on this machine."""


class CompileError(CupyInferError, RuntimeError):
    """NVRTC refused a kernel, or no usable NVRTC was found; the message holds its log."""
