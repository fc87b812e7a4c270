"""`python -m tests.mutations [--row R ...]`: whether tests catch the faults that `listed.toml` names, as a table.

With `--missing`, the covered rows that it names no fault for.
"""

from __future__ import annotations

import argparse
import sys

from tests.mutations.missing import without_mutation
from tests.mutations.mutation import listed
from tests.mutations.run import Verdict, copied_tree, judge, passes


def main() -> int:
    """Prints a line per mutation; the exit status is 1 if a test missed one, or if a covered row is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", action="append", default=[], help="an id of docs/coverage.md; may be given repeatedly")
    parser.add_argument("--missing", action="store_true", help="list covered rows without a mutation, and run nothing")
    arguments = parser.parse_args()
    if arguments.missing:
        missing = without_mutation()
        for row in missing:
            print(f"| {row.id} | {row.text} | {', '.join(row.tests)} |")
        print(f"{len(missing)} covered rows have no mutation")
        return 1 if missing else 0
    rows = set(arguments.row)
    chosen = [each for each in listed() if not rows or rows & set(each.rows.split())]
    missed = 0
    with copied_tree() as tree:
        tests = list(dict.fromkeys(each.test for each in chosen))
        if not passes(tests, tree):
            print("these tests fail without a mutation: see pytest", *tests)
            return 1
        for each in chosen:
            verdict = judge(each, tree)
            missed += verdict is Verdict.MISSED
            print(f"| {each.rows} | {verdict.value} | {each.file} | {each.test} |", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
