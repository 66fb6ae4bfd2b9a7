"""Charts as SVG: drawn here once, for files that are read without a server and for the page alike.

Colours come from the classes `band`, `line`, `dot`, `grid` and `mark` of whatever shows them, so that they follow its
light and dark.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from nextstate.report.satisfaction import Bin, Mark

_WIDTH, _HEIGHT = 760, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 22, 28
_LABEL_ROOM = 34
"""Between two names of versions, so that they can be read; those between them get no more than a tick."""


def satisfaction_chart(bins: Sequence[Bin], marks: Sequence[Mark]) -> Element:
    """Share of good verdicts with its 95 % band, verdict by verdict from left to right, and where versions began."""
    total = bins[-1].end if bins else 0
    svg = Element(
        "svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "class": "chart", "role": "img", "aria-label": _in_words(bins)}
    )
    for percent in (0, 25, 50, 75, 100):
        y = _y(percent / 100)
        _line(svg, "grid", _LEFT, y, _WIDTH - _RIGHT, y)
        _text(svg, f"{percent}%", _LEFT - 6, y + 4, "end")
    if not bins:
        _text(svg, "no good or bad verdict yet", _WIDTH / 2, _HEIGHT / 2, "middle")
        return svg
    label_from = float(_LEFT)
    for mark in marks:
        x = _x(mark.after, total)
        named = x >= label_from
        _line(svg, "mark", x, _TOP, x, _HEIGHT - _BOTTOM if named else _TOP + 6)
        if named:
            _text(svg, f"v{mark.version}", x, _TOP - 8, "middle")
            label_from = x + _LABEL_ROOM
    middles = [_x((one.start + one.end) / 2, total) for one in bins]
    upper = [(x, _y(one.rate.interval[1])) for x, one in zip(middles, bins, strict=True)]
    lower = [(x, _y(one.rate.interval[0])) for x, one in zip(middles, bins, strict=True)]
    if len(bins) == 1:  # a band needs two sides
        (x, top), (_, bottom) = upper[0], lower[0]
        upper, lower = [(x - 6, top), (x + 6, top)], [(x - 6, bottom), (x + 6, bottom)]
    SubElement(svg, "polygon", {"class": "band", "points": _points([*upper, *reversed(lower)])})
    shares = [(x, _y(one.rate.share or 0.0)) for x, one in zip(middles, bins, strict=True)]
    SubElement(svg, "polyline", {"class": "line", "points": _points(shares)})
    for (x, y), one in zip(shares, bins, strict=True):
        dot = SubElement(svg, "circle", {"class": "dot", "cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": "3.5"})
        SubElement(dot, "title").text = f"{one.rate} good; {_when(one.first_at)} to {_when(one.last_at)}"
    _text(svg, _when(bins[0].first_at), _LEFT, _HEIGHT - 8, "start")
    _text(svg, f"{total} verdicts, one after another", _WIDTH / 2, _HEIGHT - 8, "middle")
    _text(svg, _when(bins[-1].last_at), _WIDTH - _RIGHT, _HEIGHT - 8, "end")
    return svg


def as_svg(element: Element) -> str:
    """As it stands in an HTML file."""
    return ElementTree.tostring(element, encoding="unicode")


def as_json(element: Element) -> dict[str, Any]:
    """As the page builds it, node by node: no text is ever read as markup there."""
    return {
        "name": element.tag,
        "attributes": dict(element.attrib),
        "text": element.text,
        "children": [as_json(child) for child in element],
    }


def _in_words(bins: Sequence[Bin]) -> str:
    if not bins:
        return "No good or bad verdict yet."
    return f"Share of good verdicts. First: {bins[0].rate}. Last: {bins[-1].rate}."


def _x(verdicts: float, total: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * verdicts / total


def _y(share: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(svg: Element, name: str, x1: float, y1: float, x2: float, y2: float) -> None:
    ends = {"x1": f"{x1:.1f}", "y1": f"{y1:.1f}", "x2": f"{x2:.1f}", "y2": f"{y2:.1f}"}
    SubElement(svg, "line", {"class": name, **ends})


def _text(svg: Element, text: str, x: float, y: float, anchor: str) -> None:
    SubElement(svg, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor}).text = text


def _when(at: float) -> str:
    return f"{datetime.fromtimestamp(at):%d %b %H:%M}"
