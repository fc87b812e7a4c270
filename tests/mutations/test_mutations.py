"""Each covered row has a mutation; each still fits the code, and is caught by a test that its rows name."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests.mutations.missing import without_mutation
from tests.mutations.mutation import ROOT, Mutation, listed
from tests.mutations.run import Verdict, copied_tree, judge
from tests.test_coverage import rows


def _title(mutation: Mutation) -> str:
    return f"{mutation.rows.replace(' ', '+')}-{mutation.file}"


def test_every_covered_row_has_a_mutation() -> None:
    assert [row.id for row in without_mutation()] == [], "python -m tests.mutations --missing"


@pytest.mark.parametrize("mutation", listed(), ids=_title)
def test_a_mutation_replaces_one_place_and_stays_python(mutation: Mutation) -> None:
    text = (ROOT / mutation.path).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.old != mutation.new
    ast.parse(mutation.applied(text))


@pytest.mark.parametrize("mutation", listed(), ids=_title)
def test_the_rows_of_a_mutation_name_its_test(mutation: Mutation) -> None:
    known = {row.id: row for row in rows()}
    for row in mutation.rows.split():
        assert mutation.function in known[row].tests, row


def test_every_named_test_is_there_with_its_case() -> None:
    named = dict.fromkeys(mutation.test for mutation in listed())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider", *named]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-2000:]


@pytest.mark.long
def test_the_script_tells_faults_that_are_caught_from_others() -> None:
    caught = Mutation("", "layout/hosts.py", "import", "raise ImportError\nimport", "tests/test_coverage.py")
    harmless = Mutation("", "layout/hosts.py", '"""', '"""', "tests/test_coverage.py")
    with copied_tree() as tree:
        (tree / "tests/test_coverage.py").write_text("def test() -> None:\n    import fsdp_compile.layout.hosts\n")
        assert judge(caught, tree) is Verdict.CAUGHT
        assert judge(harmless, tree) is Verdict.MISSED
