"""The results page says what the committed files say."""

from __future__ import annotations

from benchmarks import readme_table, results_page
from benchmarks.results_page import PAGE, SECTIONS, documents


def test_the_page_is_the_one_of_the_committed_results() -> None:
    found = documents()
    assert "step_time" in found
    text = PAGE.read_text(encoding="utf-8")
    assert results_page.replaced(text, found) == text
    assert results_page.page(found) in text


def test_the_table_of_the_readme_is_the_one_of_the_committed_results() -> None:
    text = readme_table.README.read_text(encoding="utf-8")
    assert "peak memory of a step" in text
    assert readme_table.replaced(text, documents()) == text


def test_every_picture_of_the_page_is_there() -> None:
    shown = [section.picture for section in SECTIONS if f"({section.picture.name})" in PAGE.read_text(encoding="utf-8")]
    assert shown
    assert all(picture.exists() for picture in shown)


def test_no_share_is_above_all_of_it() -> None:
    """Below 100 % also for those that keep what they gathered; a share of `3 P (N-1)/N` would not be."""
    found = documents()
    rows = [row for section in found["step_time"]["results"] for row in section["contenders"] if "error" not in row]
    rows += [row for row in found["scaling"]["results"] if "ranks" in row]
    assert len(rows) > 20
    assert all(0 < row["share_of_bound"] <= 1 and 0 < row["share_of_busy"] <= 1 for row in rows)
    sent = [row for row in found["sent_bytes"]["results"] if "error" not in row]
    assert all(0 < row["least_share"] <= 1 for row in sent)


def test_what_did_not_run_says_so() -> None:
    environment = documents()["step_time"]["environment"]
    rows = [{"contender": "a", "total_sent_bytes": 2**20, "padding": None}, {"contender": "b", "error": "no"}]
    document = {"benchmark": "sent_bytes", "environment": environment, "settings": {"ranks": 8}, "results": rows}
    section = next(section for section in SECTIONS if section.benchmark == "sent_bytes")
    assert "| `a` | 1.0 MiB |\n| `b` | does not run |" in section.text(document)
    assert environment["commit"][:10] in section.text(document)
