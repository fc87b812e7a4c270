"""What a rule says about a graph."""

from __future__ import annotations

import dataclasses

from torch import fx


@dataclasses.dataclass(frozen=True)
class Complaint:
    """One place where a graph breaks one rule.

    Attributes:
        rule: Name of the rule.
        node: Where; the graph's output node if it is about the graph as a whole.
        what: What is wrong there, in one sentence.
        hint: What to look at, or what the right graph would have.
    """

    rule: str
    node: fx.Node
    what: str
    hint: str
