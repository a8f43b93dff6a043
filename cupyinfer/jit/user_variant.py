# SPDX-License-Identifier: Apache-2.0
"""Attention variants given as CUDA source: their parameters and hooks, checked, and the text that goes in front of a kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cupyinfer.errors import ArgumentError, ArgumentTypeError

#: Types a scalar parameter may have, and their code in a packed record.
SCALAR_TYPES = {"float": "f", "int": "i"}
#: Element types a tensor parameter may have, and what hooks read.
TENSOR_TYPES = {
    "float32": "float",
    "float16": "Float16",
    "bfloat16": "Bfloat16",
    "bool": "bool",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int32": "int",
    "int64": "long long",
}
#: Most parameters of one variant; they travel with every launch, whose arguments are limited to 4 KiB.
MAX_PARAMETERS = 64

_ROW = ("request", "q_token", "q_position", "q_index", "qo_head", "kv_head", "qo_len", "kv_len")
#: Per hook: the type of its result, the variables it has in front of those of its row, and its flag in the kernels.
_HOOKS = {
    "query_transform": ("float", ("float query", "int dim"), "kUserQuery", "query_hook"),
    "logit_transform": ("float", ("float logit", "int kv_token"), "kUserLogit", "logit_hook"),
    "mask": ("bool", ("int kv_token",), "kUserMask", "mask_hook"),
    "output_transform": ("float", ("float output", "int dim"), "kUserOutput", "output_hook"),
}
_RUN_ARGUMENTS = ("self", "plan", "q", "k", "v", "kv", "out", "lse", "return_lse", "q_scale", "k_scale", "v_scale")
_KEYWORD = re.compile(
    r"alignas|alignof|and|and_eq|asm|auto|bitand|bitor|bool|break|case|catch|char|char16_t|char32_t|class|compl|const|"
    r"const_cast|constexpr|continue|decltype|default|delete|do|double|dynamic_cast|else|enum|explicit|export|extern|false|"
    r"float|for|friend|goto|if|inline|int|long|mutable|namespace|new|noexcept|not|not_eq|nullptr|operator|or|or_eq|private|"
    r"protected|public|register|reinterpret_cast|return|short|signed|sizeof|static|static_assert|static_cast|struct|switch|"
    r"template|this|thread_local|throw|true|try|typedef|typeid|typename|union|unsigned|using|virtual|void|volatile|wchar_t|"
    r"while|xor|xor_eq"
)
_TAKEN = (
    frozenset(_ROW)
    | frozenset(_RUN_ARGUMENTS)
    | {variable.split()[-1] for _, variables, _, _ in _HOOKS.values() for variable in variables}
    | {hook for *_, hook in _HOOKS.values()}
    | {"UserParams", *(text for text in TENSOR_TYPES.values() if text[0].isupper())}
)
_IDENTIFIER = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)

Parameters = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class UserVariant:
    """Attention changed by CUDA source. `docs/USER_VARIANTS.md` says what hooks may use and when they are called.

    A hook is a C++ expression, or statements that return a value. Parameters are in scope by name: scalars as values, tensors
    as pointers to const elements.

    Attributes:
        name: a C identifier, part of kernel names.
        scalars: (name, "float" or "int") of scalar parameters.
        tensors: (name, element type of TENSOR_TYPES) of tensor parameters.
        query_transform: new value of one element of a query; has `query` and `dim`.
        logit_transform: new value of a logit; has `logit` and `kv_token`.
        mask: whether a row sees a key; has `kv_token`.
        output_transform: new value of one element of the output; has `output` and `dim`.
        declarations: functions and constants that hooks share.

    Raises:
        ArgumentError: a name that is no identifier, is taken or is given twice, an unknown type, no hook at all, or an empty one.
        ArgumentTypeError: a field of another kind than stated.
    """

    name: str
    scalars: Parameters = ()
    tensors: Parameters = ()
    query_transform: str | None = None
    logit_transform: str | None = None
    mask: str | None = None
    output_transform: str | None = None
    declarations: str | None = None

    def __post_init__(self) -> None:
        _check_identifier(self.name, "name")
        for field, types in (("scalars", SCALAR_TYPES), ("tensors", TENSOR_TYPES)):
            object.__setattr__(self, field, _checked_parameters(getattr(self, field), field, types))
        names = [name for name, _ in (*self.scalars, *self.tensors)]
        for name in names:
            if names.count(name) > 1:
                raise ArgumentError(f"variant {self.name}: two parameters are named {name!r}")
        if len(names) > MAX_PARAMETERS:
            raise ArgumentError(f"variant {self.name}: has {len(names)} parameters, at most {MAX_PARAMETERS} are possible")
        for field in (*_HOOKS, "declarations"):
            source = getattr(self, field)
            if source is not None and not isinstance(source, str):
                raise ArgumentTypeError(f"{field}: got {type(source).__name__}, expected CUDA source as a string")
            if source is not None and not _COMMENT.sub("", source).strip():
                raise ArgumentError(f"{field}: is empty; leave out hooks that are not needed")
        if all(getattr(self, field) is None for field in _HOOKS):
            raise ArgumentError(f"variant {self.name}: changes nothing, give at least one of {', '.join(_HOOKS)}")

    @property
    def struct_format(self) -> str:
        """Layout of the parameters behind the kernel's own, for `struct.pack`: tensors' addresses first, a multiple of 8 bytes."""
        codes = "Q" * len(self.tensors) + "".join(SCALAR_TYPES[kind] for _, kind in self.scalars)
        # An empty struct takes space too, and the parameters that it ends are a multiple of 8 bytes.
        return f"<{codes}" + ("8x" if not codes else "4x" if len(self.scalars) % 2 else "")

    def source(self) -> str:
        """CUDA text that kernels of this variant begin with; `kernels_cu/tile/user_element.cuh` stands before it."""
        members = [f"  const {TENSOR_TYPES[dtype]}* {name};" for name, dtype in self.tensors]
        members += [f"  {kind} {name};" for name, kind in self.scalars]
        hooks = [_hook_source(self.name, field, getattr(self, field)) for field in _HOOKS if getattr(self, field) is not None]
        flags = ", ".join(f"{flag} = {str(getattr(self, field) is not None).lower()}" for field, (_, _, flag, _) in _HOOKS.items())
        lines = ["#define CUPYINFER_USER_VARIANT", f"constexpr bool {flags};"]
        # In a namespace, whatever the source declares cannot clash with what the kernels declare.
        lines.append("namespace user_source {")
        if self.declarations is not None:
            lines += [f'#line 1 "declarations of {self.name}"', self.declarations]
        lines += [f'#line 1 "parameters of {self.name}"', "struct UserParams {", *members, *hooks, "};", "}"]
        lines.append("using user_source::UserParams;")
        return "\n".join(lines) + "\n"


def _hook_source(variant: str, field: str, source: str) -> str:
    result, variables, _, function = _HOOKS[field]
    arguments = ", ".join((*variables, *(f"int {name}" for name in _ROW)))
    is_body = re.search(r"\breturn\b", _COMMENT.sub("", source)) is not None
    # Messages of the compiler count the hook's own lines, and a comment at its end must not swallow what closes it.
    before, after = ("", "") if is_body else ("  return (\n", "  );\n")
    return (
        f"  __device__ __forceinline__ {result} {function}({arguments}) const {{\n{before}"
        f'#line 1 "{field} of {variant}"\n{source}\n{after}  }}\n#line 1 "parameters of {variant}"'
    )


def _checked_parameters(given: object, field: str, types: dict[str, str]) -> Parameters:
    """The (name, type) pairs as tuples, so that a variant can be hashed whatever sequence it was given."""
    if not isinstance(given, (tuple, list)) or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in given):
        raise ArgumentTypeError(f"{field}: got {given!r}, expected pairs (name, type)")
    for name, kind in given:
        _check_identifier(name, field)
        if name in _TAKEN:
            raise ArgumentError(f"{field}: {name!r} is taken; hooks and `run` use {', '.join(sorted(_TAKEN))}")
        if not isinstance(kind, str) or kind not in types:
            raise ArgumentError(f"{field}: {name} has type {kind!r}, expected one of {', '.join(types)}")
    return tuple((name, kind) for name, kind in given)


def _check_identifier(name: object, argument: str) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError(f"{argument}: got {name!r}, expected a string")
    if not _IDENTIFIER.fullmatch(name) or "__" in name or _KEYWORD.fullmatch(name):
        raise ArgumentError(
            f"{argument}: got {name!r}, expected an identifier of C++: letters, digits and single underscores, beginning with a letter"
        )
