"""Every commit rule by name, found in the files beside this one. A new rule needs only a file here."""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import tiered.decoding.rules
from tiered.core.checks import unknown_name
from tiered.decoding.rules.base import CommitRule


def _found() -> Iterator[type[CommitRule]]:
    for file in pkgutil.iter_modules(tiered.decoding.rules.__path__):
        module = importlib.import_module(f"{tiered.decoding.rules.__name__}.{file.name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, CommitRule) and value.__module__ == module.__name__:
                yield value


def in_order(rules: Iterable[type[CommitRule]]) -> list[type[CommitRule]]:
    """Plain rules by rank and number of options, then rewriting rules, so that a new rule does not replace a
    default."""
    return sorted(rules, key=lambda rule: (rule.rewrites, rule.rank, len(fields(rule)), rule.name))


# Abstract rules have no name.
COMMIT_RULES: dict[str, type[CommitRule]] = {
    rule.name: rule for rule in in_order(rule for rule in _found() if "name" in vars(rule))
}
# The type of each option of a rule, by name.
COMMIT_OPTIONS: dict[str, Any] = {
    field.name: get_type_hints(rule)[field.name] for rule in COMMIT_RULES.values() for field in fields(rule)
}


def make_commit_rule(commit: str | CommitRule | None, **options: float) -> CommitRule:
    """The rule named `commit`; None for the first rule that `options` fit, `static` without any.

    Raises:
        TypeError: `commit` is not a name, a rule or None.
        ValueError: an unknown name, or options that do not fit.
    """
    if isinstance(commit, CommitRule):
        if options:
            raise ValueError(f"options {options} beside a commit rule object; set them in the object: {commit}")
        return commit
    if commit is None:
        fitting = [name for name, rule in COMMIT_RULES.items() if _fits(rule, options)]
        if not fitting:
            raise ValueError(_why_none_fits(options))
        commit = fitting[0]
    if not isinstance(commit, str):
        raise TypeError(f"commit is the name of a rule or a CommitRule, not {commit!r}")
    if commit not in COMMIT_RULES:
        raise unknown_name("commit rule", commit, COMMIT_RULES)
    if not _fits(COMMIT_RULES[commit], options):
        known = sorted(field.name for field in fields(COMMIT_RULES[commit]))
        raise ValueError(
            f"the commit rule {commit!r} takes {', '.join(known) or 'no option of its own'}; "
            f"given: {', '.join(sorted(options)) or 'none'}"
        )
    return COMMIT_RULES[commit](**options)


def fitting_rules(noise: str, *, rewriting: bool = True) -> list[str]:
    """The rules for models of this noise process, plain ones first; those that rewrite tokens only if `rewriting`."""
    return [name for name, rule in COMMIT_RULES.items() if noise in rule.noise and (rewriting or not rule.rewrites)]


def _why_none_fits(options: Mapping[str, float]) -> str:
    given = " and ".join(sorted(options))
    for name, rule in COMMIT_RULES.items():
        if options.keys() <= {field.name for field in fields(rule)}:
            lacking = (field.name for field in fields(rule) if field.default is MISSING and field.name not in options)
            return f"the commit rule {name!r}, which takes {given}, also needs {' and '.join(lacking)}"
    return f"no commit rule has {given} together; give one of them"


def _fits(rule: type[CommitRule], options: Mapping[str, float]) -> bool:
    needed = {field.name for field in fields(rule) if field.default is MISSING}
    return needed <= set(options) <= {field.name for field in fields(rule)}
