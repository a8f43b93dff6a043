# SPDX-License-Identifier: Apache-2.0
"""Unknown and missing arguments of public calls as typed errors that speak of the call, at no cost to calls that fit."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast

from cupyinfer.errors import ArgumentTypeError, CupyInferError

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: Arguments of the request functions that a wrapper supplies.
_SUPPLIED = ("kv_layout", "copy_pages")


def misfit(signature: Signature, where: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> ArgumentTypeError | None:
    """What is wrong with a call of that signature as an error naming the argument, None where the arguments fit."""
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        parameters = signature.parameters.values()
        places = [one for one in parameters if one.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
        open_names = {one.name for one in places[len(args) :]} | {one.name for one in parameters if one.kind is Parameter.KEYWORD_ONLY}
        any_name = any(one.kind is Parameter.VAR_KEYWORD for one in parameters)
        taken = {one.name for one in places[: len(args)]}
        for name in options:
            if name in taken or not (any_name or name in open_names):
                return ArgumentTypeError(f"{name}: {where} takes no such argument, or took it already")
        required = [one.name for one in parameters if one.default is Parameter.empty and one.name in open_names]
        if missing := [name for name in required if name not in options]:
            return ArgumentTypeError(f"{where}: missing {', '.join(map(repr, missing))}")
        return ArgumentTypeError(f"{where}: {error}")
    return None


def checked_call(function: _Function, signature: Signature | None = None) -> _Function:
    """Make a public function raise ArgumentTypeError for arguments that it does not take, and for missing ones.

    Args:
        function: what to check; errors name it as its `__qualname__` does.
        signature: what it takes, by default what `inspect.signature` says; shown as its signature.
    """
    shown = inspect.signature(function) if signature is None else signature

    @functools.wraps(function)
    def checked(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError as error:
            if isinstance(error, CupyInferError):
                raise
            wrong = misfit(shown, function.__qualname__, args, options)
            if wrong is None:
                raise  # from within: nothing is wrong with the call
            raise wrong from None

    checked.__signature__ = shown  # type: ignore[attr-defined]
    return cast("_Function", checked)


def arguments_of(request: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Give a method that passes its arguments on to `request` that function's signature, and errors that speak of the method."""

    def decorate(method: _Function) -> _Function:
        own = inspect.signature(method)
        return checked_call(method, own.replace(parameters=[own.parameters["self"], *_taken(request, _SUPPLIED)]))

    return decorate


def options_of(*functions: Callable[..., Any], supplied: Iterable[str] = ()) -> Callable[[_Function], _Function]:
    """Let a function that passes its ``**options`` on show the keyword-only parameters of `functions`, but not those it supplies."""

    def decorate(function: _Function) -> _Function:
        function.__signature__ = with_options(function, *functions, supplied=supplied)  # type: ignore[attr-defined]
        return function

    return decorate


def with_options(function: Callable[..., Any], *functions: Callable[..., Any], supplied: Iterable[str] = ()) -> Signature:
    """The signature of `function` with its ``**options`` spelled out, as `options_of` shows it."""
    own = inspect.signature(function)
    named = {name: one for name, one in own.parameters.items() if one.kind is not Parameter.VAR_KEYWORD}
    for passed_to in functions:
        for one in _taken(passed_to, supplied):
            if one.kind is Parameter.KEYWORD_ONLY:
                named.setdefault(one.name, one)
    return own.replace(parameters=list(named.values()))


def _taken(function: Callable[..., Any], supplied: Iterable[str]) -> list[Parameter]:
    left_out = frozenset(supplied)
    parameters = inspect.signature(function).parameters.values()
    return [one for one in parameters if one.name not in left_out and one.kind is not Parameter.VAR_KEYWORD]
