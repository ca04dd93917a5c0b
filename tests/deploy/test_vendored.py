"""What is vendored is what was published, and every file of the pages is packaged and served."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import tomllib
from pathlib import Path

from tests.deploy.running import ROOT, RunningServer

STATIC = ROOT / "deploy" / "static"
VENDOR = STATIC / "vendor"
PUBLISHED = {  # sha256 of the files in the tarballs that npm serves for these versions
    "htm 3.1.1 preact/standalone.module.js": "72284e8e9079c87817145df1110f74e8a2aa040b2fc384922e18dfcb46fc1fd7",
    "htm 3.1.1 LICENSE": "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    "preact 10.5.13 LICENSE": "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    "uplot 1.6.32 dist/uPlot.esm.js": "5dd9b3281aa64b461b42d9945f6adb2649d346502b12281a9ae0d46599a80eba",
    "uplot 1.6.32 dist/uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "@scalar/api-reference 1.46.4 dist/browser/standalone.js": (
        "81b8d2bdab4a42ab81465386441b9a0f928b68631364360f00e8cce620cc1efb"
    ),
    # the tarball lacks it
    "github.com/scalar/scalar 1.46.4 LICENSE": "380cd0a6ad700e1f821f2a509f0dd9ff835041cee2d43daf5dedc1adb2bcc620",
    "uplot 1.6.32 LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
TYPES = {"js": "text/javascript", "css": "text/css", "html": "text/html", "svg": "image/svg+xml"}


def files() -> list[Path]:
    return [path for path in sorted(STATIC.rglob("*")) if path.is_file()]


def published(path: Path) -> bytes:
    """The content of a file, which may be packaged compressed."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def test_vendored_files_are_those_of_the_versions_that_they_name():
    versions = json.loads((VENDOR / "versions.json").read_text())
    assert {path.name for path in VENDOR.iterdir()} == {*versions, "versions.json"}
    for name, told in versions.items():
        digest = hashlib.sha256(published(VENDOR / name)).hexdigest()
        assert digest == told["sha256"] == PUBLISHED[f"{told['package']} {told['version']} {told['path']}"], name


def test_every_file_of_the_pages_is_packaged_and_served(server: RunningServer):
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packaged = {path for pattern in patterns["millrace.deploy"] for path in (ROOT / "deploy").glob(pattern)}
    assert set(files()) <= packaged
    for path in files():
        name = path.relative_to(STATIC).as_posix().removesuffix(".gz")
        answer = server.get(f"/static/{name}")
        assert answer.body == published(path)
        assert answer.headers["content-type"].startswith(TYPES.get(name.rpartition(".")[2], ""))
    assert server.get("/dashboard").body == (STATIC / "dashboard.html").read_bytes()


def test_a_file_goes_compressed_to_browsers_and_not_twice(server: RunningServer):
    path = "/static/vendor/scalar.standalone.js"
    answer = server.get(path, {"Accept-Encoding": "br, gzip"})
    assert answer.headers["content-encoding"] == "gzip" and len(answer.body) < 1_000_000
    assert answer.body == (VENDOR / "scalar.standalone.js.gz").read_bytes()
    for name in (path, "/docs", "/static/dashboard.html"):
        etag = server.get(name).headers["etag"]
        again = server.get(name, {"If-None-Match": f'"other", {etag}'})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", etag)
        assert server.get(name, {"If-None-Match": '"other"'}).status == 200


def test_our_files_name_no_other_place():
    for path in files():
        if path.parent != VENDOR:
            links = re.findall(r"https?://[^\"'\s]+", path.read_text())
            assert set(links) <= {"http://www.w3.org/2000/svg"}, path  # a namespace, which is not fetched


def test_the_page_may_load_and_reach_nothing_but_its_server(server: RunningServer):
    policy = dict(
        part.split(" ", 1) for part in server.get("/dashboard").headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}


def test_the_pictures_of_the_page_on_the_dashboard_are_there_and_small():
    docs = ROOT / "deploy" / "docs"
    named = re.findall(r"!\[[^]]+\]\(([^)]+\.png)\)", (docs / "dashboard.md").read_text())
    assert named and all((docs / name).stat().st_size < 150_000 for name in named)
