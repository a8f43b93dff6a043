# SPDX-License-Identifier: Apache-2.0
"""Covering sets: few rows in which every legal combination of any few axes occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Row = dict[str, str]
Axes = Mapping[str, Sequence[str]]
Combination = tuple[tuple[str, str], ...]

#: Rows tried for every row taken; more make the set a little smaller.
_CANDIDATES = 24


@dataclass(frozen=True)
class Rule:
    """What values may meet.

    Attributes:
        axes: names of the axes it looks at.
        holds: called with their values.
        reason: why other values never meet.
    """

    axes: tuple[str, ...]
    holds: Callable[..., bool]
    reason: str

    def broken_by(self, row: Row) -> bool:
        """Whether the values chosen so far already break it."""
        return all(axis in row for axis in self.axes) and not self.holds(*(row[axis] for axis in self.axes))


def complete(row: Row, axes: Axes, rules: Sequence[Rule], rng: np.random.Generator) -> Row | None:
    """Choose a value at random for every axis `row` lacks, or None where no choice is legal."""
    if any(rule.broken_by(row) for rule in rules):
        return None
    # Axes that rules look at come first, in the order of the rules, so that a dead end is found before the free axes multiply it.
    ruled = (axis for rule in rules for axis in rule.axes if axis in axes)
    axis = next((axis for axis in (*ruled, *axes) if axis not in row), None)
    if axis is None:
        return {name: row[name] for name in axes}
    for at in rng.permutation(len(axes[axis])):
        found = complete({**row, axis: axes[axis][at]}, axes, rules, rng)
        if found is not None:
            return found
    return None


def combinations_of(row: Row, strength: int) -> set[Combination]:
    """Every choice of `strength` axes of a row with their values."""
    return set(itertools.combinations(sorted(row.items()), strength))


def legal_combinations(axes: Axes, rules: Sequence[Rule], strength: int) -> set[Combination]:
    """Every choice of values of `strength` axes that some legal row has."""
    rng = np.random.default_rng(0)
    found: set[Combination] = set()
    for names in itertools.combinations(sorted(axes), strength):
        for values in itertools.product(*(axes[name] for name in names)):
            combination = tuple(zip(names, values, strict=True))
            if combination not in found:
                row = complete(dict(combination), axes, rules, rng)
                found |= combinations_of(row, strength) if row is not None else set()
    return found


def cover(axes: Axes, rules: Sequence[Rule], strength: int, seed: int = 0) -> list[Row]:
    """Rows that together have every legal combination of any `strength` axes; the same rows for the same arguments."""
    rng = np.random.default_rng(seed)
    missing = dict.fromkeys(sorted(legal_combinations(axes, rules, strength)))
    rows = []
    while missing:
        start = dict(next(iter(missing)))
        candidates = [row for row in (complete(start, axes, rules, rng) for _ in range(_CANDIDATES)) if row is not None]
        found = [combinations_of(row, strength) & missing.keys() for row in candidates]
        best = max(range(len(candidates)), key=lambda at: len(found[at]))
        rows.append(candidates[best])
        for combination in found[best]:
            del missing[combination]
    return rows


def product(axes: Axes, rules: Sequence[Rule]) -> list[Row]:
    """Every legal row."""
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [row for row in rows if not any(rule.broken_by(row) for rule in rules)]


def rules_of_table(axes: Axes, rules: Sequence[Rule], serves: Callable[[Row], bool], reason: str) -> tuple[Rule, ...]:
    """Rules that keep rows to those that `serves` says yes to.

    Besides the rule of all the axes there are those of single values and of pairs that no served row has: they end a search early.

    Args:
        axes: what `serves` looks at.
        rules: rows that break these are not asked about.
        serves: called once for every row of `axes`.
        reason: of every rule.
    """
    served = [row for row in product(axes, rules) if serves(row)]

    def rule(names: tuple[str, ...]) -> Rule:
        allowed = frozenset(tuple(row[name] for name in names) for row in served)
        return Rule(names, lambda *values: values in allowed, reason)

    return tuple(rule(names) for size in (1, 2, len(axes)) for names in itertools.combinations(axes, size))
