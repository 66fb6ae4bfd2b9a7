from __future__ import annotations

import re

import pytest
from tests.report.accounts import signed

from nextstate.report.charts import as_json, as_svg, satisfaction_chart
from nextstate.report.satisfaction import Mark, satisfaction

BINS = satisfaction(signed(*[False] * 10, *[True] * 5, *[False] * 5))


def test_a_share_stands_where_it_belongs():
    svg = as_svg(satisfaction_chart(BINS, [Mark(version=7, after=10)]))
    # From 44 to 748 for 20 verdicts, so their middles 5 and 15 are at 220 and 572; 0 % is at 212 and 100 % at 22.
    assert re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg) == [("220.0", "212.0"), ("572.0", "117.0")]
    assert 'class="mark" x1="396.0"' in svg
    assert ">v7</text>" in svg
    assert "5 of 10, 50% (24% to 76%) good" in svg
    assert "First: 0 of 10, 0% (0% to 28%). Last: 5 of 10" in svg


def test_versions_that_follow_close_upon_one_another_get_a_tick_and_no_name():
    svg = as_svg(satisfaction_chart(BINS, [Mark(version=version, after=3) for version in range(5)]))
    assert re.findall(r">v(\d)<", svg) == ["0"]
    assert svg.count('class="mark"') == 5
    assert svg.count('y2="28.0"') == 4


def test_without_a_verdict_the_chart_says_so():
    svg = as_svg(satisfaction_chart((), ()))
    assert "no good or bad verdict yet" in svg
    assert "polygon" not in svg


@pytest.mark.parametrize("bins", [BINS, BINS[:1], ()])
def test_the_page_gets_the_same_as_the_file(bins):
    chart = satisfaction_chart(bins, ())

    def written(node):
        attributes = "".join(f' {name}="{value}"' for name, value in node["attributes"].items())
        inside = (node["text"] or "") + "".join(map(written, node["children"]))
        return f"<{node['name']}{attributes}>{inside}</{node['name']}>" if inside else f"<{node['name']}{attributes} />"

    assert written(as_json(chart)) == as_svg(chart)
