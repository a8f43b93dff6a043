# SPDX-License-Identifier: Apache-2.0
"""Argument types and groups that several commands share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from cupyinfer.attention.options import AttentionOptions, make_options
from cupyinfer.errors import ArgumentError
from cupyinfer.schedule.profile import ARCHS, PROFILES, DeviceProfile, named_profile, profile_for_arch


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, keeps the line breaks of its help, and raises instead of exiting."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter, **kwargs})

    def error(self, message: str) -> NoReturn:
        """Raise ArgumentError."""
        raise ArgumentError(f"{message} ({self.prog} --help explains)")


def at_least(low: int) -> Callable[[str], int]:
    """An argument type: an integer of at least `low`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"got {value}, must be at least {low}")
        return value

    return convert


def lengths(text: str) -> list[int]:
    """An argument type: ``1024,2048x3`` is one length of 1024 and three of 2048."""
    values: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:x(\d+))?\s*", item)
        if match is None:
            raise argparse.ArgumentTypeError(f"got {item!r}, expected lengths such as 1024 or 2048x3, separated by commas")
        repeats = int(match[2] or 1)
        if len(values) + repeats > 2**20:
            raise argparse.ArgumentTypeError(f"got more than {2**20:,} requests at {item!r}")
        values += [int(match[1])] * repeats
    return values


@dataclass(frozen=True)
class ModelShape:
    """The heads, widths and element types of one attention layer.

    Attributes:
        num_qo_heads: query heads.
        num_kv_heads: KV heads.
        head_dim: width of a head.
        dtype: element type of queries and cache.
        page_size: keys per page.
        head_dim_vo: width of values and outputs, None for head_dim.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    page_size: int
    head_dim_vo: int | None = None

    def options(self, decode: bool, **further: Any) -> AttentionOptions:
        """Checked plan options; `further` as for `make_options`."""
        return make_options(
            decode=decode,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=self.head_dim,
            head_dim_vo=self.head_dim_vo,
            q_data_type=self.dtype,
            page_size=self.page_size,
            **{"paged": True, **further},
        )

    def __str__(self) -> str:
        return (
            f"{self.num_qo_heads} query heads, {self.num_kv_heads} KV heads, head_dim {self.head_dim}"
            f"{'' if self.head_dim_vo in (None, self.head_dim) else f' (values {self.head_dim_vo})'}, "
            f"{self.dtype}, page size {self.page_size}"
        )


#: An 8-billion-parameter model's attention layer.
REAL_MODEL = ModelShape(32, 8, 128, "bfloat16", 16)


def add_model_arguments(parser: argparse.ArgumentParser, default_text: str = "", wide_values: bool = False) -> None:
    """Add the options `model_shape` reads; with `wide_values` also the width of values, where it may be another."""
    group = parser.add_argument_group("model", default_text or None)
    shown = "" if default_text else " (default: %s)"
    for name, field, text in (
        ("--num-qo-heads", "num_qo_heads", "query heads"),
        ("--num-kv-heads", "num_kv_heads", "KV heads"),
        ("--head-dim", "head_dim", "width of a head: 64, 96, 128, 256" + (", or 192 with --head-dim-vo 128" if wide_values else "")),
        ("--page-size", "page_size", "keys per page of the cache"),
    ):
        default = shown % getattr(REAL_MODEL, field) if shown else ""
        group.add_argument(name, type=at_least(1), metavar="N", help=text + default)
    if wide_values:
        group.add_argument("--head-dim-vo", type=at_least(1), metavar="N", help="width of values and outputs (default: --head-dim)")
    group.add_argument("--dtype", help="float16 or bfloat16, of queries and cache" + (shown % REAL_MODEL.dtype if shown else ""))


def model_shape(args: argparse.Namespace, default: ModelShape = REAL_MODEL) -> ModelShape:
    """The shape the arguments ask for, `default` where they do not say.

    Raises:
        ArgumentError, ArgumentTypeError: a shape that no kernel serves.
    """
    fields = ("num_qo_heads", "num_kv_heads", "head_dim", "dtype", "page_size", "head_dim_vo")
    shape = replace(default, **{field: getattr(args, field) for field in fields if getattr(args, field, None) is not None})
    return replace(shape, dtype=shape.options(decode=True).q_dtype)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options `device_profile` reads."""
    group = parser.add_argument_group("GPU", "sizes depend on the number of SMs and their shared memory; no GPU is needed to ask")
    group.add_argument("--profile", metavar="NAME", help=f"one of {', '.join(PROFILES)}, or host (default: h200)")
    group.add_argument("--num-sms", type=at_least(1), metavar="N", help="another GPU: its streaming multiprocessors")
    group.add_argument("--arch", metavar="ARCH", help=f"another GPU: its architecture, one of {', '.join(ARCHS)}")


def device_profile(args: argparse.Namespace) -> DeviceProfile:
    """The GPU the arguments name.

    Raises:
        ArgumentError: an unknown name, or half of a custom GPU.
    """
    if args.num_sms is None and args.arch is None:
        return named_profile(args.profile or "h200")
    if args.profile is not None:
        raise ArgumentError("--profile: names a GPU, and --num-sms with --arch describes one; give one or the other")
    if args.num_sms is None or args.arch is None:
        raise ArgumentError("--num-sms, --arch: describe a GPU together, one of them is missing")
    return replace(profile_for_arch(args.arch), name="custom", num_sms=args.num_sms)
