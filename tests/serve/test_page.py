from __future__ import annotations

import re

import pytest
from tests.conftest import RunningServer, ServerFactory

from nextstate.serve.page import FILES

SCRIPTS = {path: content.decode() for path, (content, _) in FILES.items() if path.endswith(".js")}


@pytest.mark.parametrize("path", FILES)
async def test_every_file_comes_with_the_policy_that_lets_nothing_else_in(server: RunningServer, path: str):
    answer = await server.http.get(path)
    assert answer.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    again = await server.http.get(path, headers={"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_the_page_opens_without_a_key_and_nothing_else_does(start_server: ServerFactory):
    async with start_server(serve={"api_key": "s3cret"}) as server:
        for path in FILES:
            assert (await server.http.get(path)).status_code == 200
        assert (await server.http.get("/page/../api/me")).status_code == 401
        assert (await server.http.get("/page/nothing.js")).status_code == 404


def test_whatever_the_files_name_is_among_them():
    html = FILES["/"][0].decode()
    named = set(re.findall(r'(?:href|src)="(/[^"]*)"', html))
    for content in SCRIPTS.values():
        named |= {f"/page/{name}" for name in re.findall(r'from "\./([^"]*)"', content)}
    assert named == set(FILES) - {"/"}


def test_nothing_comes_from_another_host():
    for path, (content, _) in FILES.items():
        assert set(re.findall(r"(?:https?:)?//[a-z][\w.-]*\.[\w./-]+", content.decode())) <= {
            "http://www.w3.org/2000/svg"
        }, path


def test_every_part_that_the_scripts_look_for_is_on_the_page():
    ids = set(re.findall(r'id="([\w-]+)"', FILES["/"][0].decode()))
    for path, content in SCRIPTS.items():
        assert set(re.findall(r'\$\("([\w-]+)"\)', content)) <= ids | {"token-title"}, path


def test_no_text_is_read_as_markup():
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "DOMParser", "srcdoc", "eval("):
        assert not any(sink in content for content in SCRIPTS.values()), sink
