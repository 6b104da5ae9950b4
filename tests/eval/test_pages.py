"""eval/pages: the pages have the figures of the records."""

import pytest

from eval import pages


def test_pages_and_records_agree():
    """Every table between marks is the table of the records today."""
    pages.main(["--check"])


def record(method: str, seed: int, answers: list, text: str = "a, 700 tokens", task: str = "facts") -> dict:
    run = {"task": task, "data": "texts", "window": 256, "seed": seed, "text": text, "method": method}
    return {"run": run, "result": {"answers": answers}}


@pytest.fixture
def records(monkeypatch):
    """Two texts of two questions each; plain retrieval has not answered the second yet."""

    def said(*right: int) -> list:
        return [["begun", "x", "y", x] for x in right]

    found = [
        record("passages", 0, said(1, 1)), record("passages", 1, said(1, 0)), record("passages", 2, said(0, 0)),
        record("retrieved", 0, said(1, 0)), record("retrieved", 1, said(0, 0)), record("window", 0, said(0, 1)),
    ]  # fmt: skip
    monkeypatch.setattr(pages, "load", lambda name: found)
    return {"facts": pages.column("facts", "texts", ("begun",))}


def test_a_share_is_of_the_questions_that_the_compared_methods_have_answered(records):
    """1 and 1/2 of two texts are 75 per cent ± 12.7 * 35.4 / sqrt(2); a method with fewer texts says so."""
    table = pages.of_methods(records, "Facts")
    assert table.startswith("Facts, per cent ± 95 % interval; n = 4 (window alone 2):\n\n")
    assert "| `remember` | 75 ± 318 |" in table and "| plain retrieval, passage | 25 ± 318 |" in table
    assert "| window alone | 50 |" in table and "full attention" not in table


def test_differences_are_paired(records):
    """50 points more in each of two texts, though the shares differ, has no interval."""
    assert "| plain retrieval, passage | +50 |" in pages.differences(records)


def test_a_page_that_differs_is_named(tmp_path, monkeypatch):
    """A figure changed by hand fails the check and is put right by the command; text outside of marks stays; a table
    that is not known is an error."""
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    monkeypatch.setattr(pages, "CHARTS", {})
    monkeypatch.setattr(pages, "TABLES", {"one": lambda: "| 1 |"})
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "a.md"
    (tmp_path / "README.md").write_text("No table.")
    page.write_text("Before\n<!-- table one -->\n| 2 |\n<!-- end -->\nafter")
    with pytest.raises(SystemExit):
        pages.run_command(lambda: pages.main(["--check"]))
    assert "| 2 |" in page.read_text()
    pages.main([])
    assert page.read_text() == "Before\n<!-- table one -->\n| 1 |\n<!-- end -->\nafter"
    pages.main(["--check"])
    page.write_text("<!-- table two -->\n<!-- end -->")
    with pytest.raises(ValueError, match="must be one of one"):
        pages.main([])
