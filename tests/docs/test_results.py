from pathlib import Path

from benchmarks.results_page import FLAWS, PAGE, PEOPLE, page_with_tables

from nextstate.people import results


def test_the_tables_of_the_results_page_are_what_the_records_say():
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_tables(page, results.read(PEOPLE), results.read(FLAWS)) == page
    assert PAGE.is_relative_to(Path("docs"))


def test_every_record_says_how_it_was_made():
    for record in [*results.read(PEOPLE), *results.read(FLAWS)]:
        assert {"personas", "method", "seed", "sessions", "settings", "first_answers", "turns"} <= record.keys()
        for found in record["first_answers"].values():
            assert len(found["met"]) == len(found["cut"]) == record["sessions"]
