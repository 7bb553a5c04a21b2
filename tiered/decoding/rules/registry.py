"""Every commit rule by name."""

from collections.abc import Mapping
from dataclasses import MISSING, fields

from tiered.core.checks import unknown_name
from tiered.decoding.rules.adaptive import Adaptive
from tiered.decoding.rules.ancestral import Ancestral
from tiered.decoding.rules.base import CommitRule
from tiered.decoding.rules.drift_aware import DriftAware
from tiered.decoding.rules.factor import Factor
from tiered.decoding.rules.origin import Origin
from tiered.decoding.rules.static import Static
from tiered.decoding.rules.threshold import Threshold
from tiered.decoding.rules.timestep import Timestep

# A new rule is one file and one entry here. Of rules that the same options fit, the first is meant: plain ones stand
# in front of those that add to them.
COMMIT_RULES: dict[str, type[CommitRule]] = {
    rule.name: rule for rule in (Static, Threshold, Factor, DriftAware, Origin, Timestep, Adaptive, Ancestral)
}


def make_commit_rule(commit: str | CommitRule | None, **options: float) -> CommitRule:
    """The rule of that name; None: the first rule that `options` are enough for and not too many, `static` without any.

    Raises:
        TypeError: neither name, rule nor None.
        ValueError: no such rule, an option that the rule lacks or needs, or options of two rules.
    """
    if isinstance(commit, CommitRule):
        if options:
            raise ValueError(f"options {options} beside a commit rule object; set them in the object: {commit}")
        return commit
    if commit is None:
        fitting = [name for name, rule in COMMIT_RULES.items() if _fits(rule, options)]
        if not fitting:
            raise ValueError(f"{' and '.join(options)} belong to different commit rules; give one of them")
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


def _fits(rule: type[CommitRule], options: Mapping[str, float]) -> bool:
    """Whether `rule` knows all of `options`, and they have every one that it cannot do without."""
    needed = {field.name for field in fields(rule) if field.default is MISSING}
    return needed <= set(options) <= {field.name for field in fields(rule)}
