# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Downloads: pip's configuration, resume, hashes, cache. The index is on localhost."""

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from small_project import sha256

from lib import index, sources
from lib.errors import BuildError

NAME = "vllm-1.2.3.tar.gz"
DATA = bytes(range(256)) * 4096  # 1 MiB
SOURCE = sources.Source("sdist", "Vllm", NAME, len(DATA), sha256(DATA))


class Index(ThreadingHTTPServer):
    """A package index of one file; `break_after` bytes each connection ends."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.data = DATA
        self.listed: str | None = sha256(DATA)
        self.json = False
        self.ranges = True
        self.break_after = len(DATA)
        self.requests: list[tuple[str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"

    def downloads(self) -> list[str | None]:
        return [range_ for path, range_ in self.requests if path.endswith(NAME)]


class Handler(BaseHTTPRequestHandler):
    server: Index

    def do_GET(self) -> None:
        range_ = self.headers["Range"]
        self.server.requests.append((self.path, range_))
        if self.path == "/simple/vllm/":
            self.page()
        elif self.path == f"/files/{NAME}":
            self.file(range_)
        else:
            self.send_error(404)

    def page(self) -> None:
        listed = self.server.listed
        if self.server.json:
            hashes = {"sha256": listed} if listed else {}
            file = {"filename": NAME, "url": f"/files/{NAME}", "hashes": hashes}
            body = json.dumps({"name": "vllm", "files": [file]})
            kind = "application/vnd.pypi.simple.v1+json"
        else:
            fragment = f"#sha256={listed}" if listed else ""
            body = f'<a href="/files/{NAME}{fragment}">{NAME}</a>'
            kind = "text/html"
        self.answer(200, body.encode(), {"Content-Type": kind})

    def file(self, range_: str | None) -> None:
        data, status, headers = self.server.data, 200, {}
        if range_ and self.server.ranges:
            start = int(range_.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        self.answer(status, data, headers, self.server.break_after)

    def answer(
        self, status: int, data: bytes, headers: dict[str, str], limit: int = 1 << 30
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data[:limit])
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """A local index that pip is configured for, and nothing else."""
    with Index() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        configure(monkeypatch, PIP_INDEX_URL=running.url)
        monkeypatch.setattr("time.sleep", lambda seconds: None)
        yield running
        running.shutdown()


def configure(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Set pip's variables, and hide the machine's own configuration from it."""
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CERT"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("json_api", [False, True])
def test_download(server: Index, cache: Path, json_api: bool):
    server.json = json_api
    path = sources.fetch(SOURCE)
    assert path == cache / NAME
    assert path.read_bytes() == DATA
    assert list(cache.iterdir()) == [path]
    assert server.downloads() == [None]
    sources.fetch(SOURCE)  # from the cache
    sources.fetch(SOURCE, offline=True)
    assert server.downloads() == [None]


def test_resume_after_an_earlier_run(server: Index, cache: Path):
    cache.mkdir(parents=True)
    (cache / f"{NAME}.part").write_bytes(DATA[:300_000])
    assert sources.fetch(SOURCE).read_bytes() == DATA
    assert server.downloads() == ["bytes=300000-"]


def test_resume_within_a_run(server: Index):
    server.break_after = 400_000
    assert sources.fetch(SOURCE).read_bytes() == DATA
    ranges = server.downloads()
    assert len(ranges) == 3 and ranges[0] is None and None not in ranges[1:]


def test_server_without_ranges(server: Index, cache: Path):
    """It answers with the whole file: begin anew, do not append."""
    server.ranges = False
    cache.mkdir(parents=True)
    (cache / f"{NAME}.part").write_bytes(b"x" * 1000)
    assert sources.fetch(SOURCE).read_bytes() == DATA


def test_connection_that_breaks_again_and_again(server: Index, cache: Path):
    server.break_after = 1000
    with pytest.raises(BuildError) as caught:
        sources.fetch(SOURCE)
    assert "the next run goes on from there" in str(caught.value)
    assert (cache / f"{NAME}.part").stat().st_size == 1000 * index.ATTEMPTS
    server.break_after = len(DATA)
    assert sources.fetch(SOURCE).read_bytes() == DATA


def test_wrong_hash_of_a_download(server: Index, cache: Path):
    server.listed = None
    server.data = DATA[:-1] + b"x"
    with pytest.raises(BuildError) as caught:
        sources.fetch(SOURCE)
    message = str(caught.value)
    assert SOURCE.sha256 in message and sha256(server.data) in message
    assert not (cache / NAME).exists()
    (kept,) = cache.iterdir()
    assert kept.name.endswith(".wrong") and kept.read_bytes() == server.data
    server.data = DATA
    assert sources.fetch(SOURCE).read_bytes() == DATA


def test_wrong_hash_in_the_cache(server: Index, cache: Path):
    cache.mkdir(parents=True)
    (cache / NAME).write_bytes(b"mine")
    with pytest.raises(BuildError) as caught:
        sources.fetch(SOURCE)
    message = str(caught.value)
    assert f"expected {SOURCE.sha256} (1048576 bytes)" in message
    assert f"found    {sha256(b'mine')} (4 bytes)" in message
    assert (cache / NAME).read_bytes() == b"mine"
    assert not server.requests


def test_index_lists_another_hash(server: Index):
    server.listed = "0" * 64
    with pytest.raises(BuildError) as caught:
        sources.fetch(SOURCE)
    assert f"listed with SHA-256 {'0' * 64}, expected {SOURCE.sha256}" in str(
        caught.value
    )
    assert not server.downloads()


def test_offline(server: Index, cache: Path):
    with pytest.raises(BuildError, match="--offline forbids"):
        sources.fetch(SOURCE, offline=True)
    assert not server.requests
    assert not cache.exists()


def test_extra_index_and_find_links(
    server: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
):
    configure(
        monkeypatch,
        PIP_INDEX_URL=f"{server.url}/empty",
        PIP_EXTRA_INDEX_URL=f"file://{tmp_path}/missing {server.url}",
    )
    assert sources.fetch(SOURCE).read_bytes() == DATA
    (cache / NAME).unlink()
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / NAME).write_bytes(DATA)
    configure(monkeypatch, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(folder))
    server.requests.clear()
    assert sources.fetch(SOURCE).read_bytes() == DATA
    assert not server.requests


def test_not_found(server: Index, monkeypatch: pytest.MonkeyPatch):
    url = server.url.replace("http://", "http://user:secret@") + "/empty"
    configure(monkeypatch, PIP_INDEX_URL=url)
    with pytest.raises(BuildError) as caught:
        sources.fetch(SOURCE)
    assert f"{NAME} (project Vllm) was not found" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_pip_configuration():
    """Sections override one another as in pip; the output is of `pip config list`."""
    config = index.parse_pip_config(
        ":env:.find-links='/wheels'\n"
        ":env:.timeout='7'\n"
        "download.index-url='https://second.example.org/simple'\n"
        "global.cert='/ca.pem'\n"
        "global.extra-index-url='https://a.example.org/simple\\nfile:///b'\n"
        "global.find-links='/other'\n"
        "global.index-url='https://first.example.org/simple'\n"
        "global.trusted-host='a.example.org'\n"
        "install.no-binary=':all:'\n"
    )
    assert config.index_urls == (
        "https://second.example.org/simple",
        "https://a.example.org/simple",
        "file:///b",
    )
    assert config.find_links == ("/wheels",)
    assert config.trusted_hosts == ("a.example.org",)
    assert (config.cert, config.timeout) == ("/ca.pem", 7.0)


def test_default_is_that_of_pip():
    """Without configuration there is one index, which this project does not name."""
    assert len(index.parse_pip_config("").index_urls) == 1
    assert index.parse_pip_config("global.no-index='true'\n").index_urls == ()


def test_no_index_host_in_the_project():
    """Of all hosts, only the index of torch's CPU builds is written anywhere."""
    root = Path(__file__).parents[2]
    names = subprocess.run(
        [
            "git",
            "-C",
            root,
            "grep",
            "-lIE",
            r"(files\.)?pyth(on)?hosted\.org|pypi\.org",
        ],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert names == [] or names == ["tests/build/test_sources.py"]


def test_pip_is_asked(monkeypatch: pytest.MonkeyPatch):
    configure(monkeypatch, PIP_INDEX_URL="https://mirror.example.org/simple")
    assert index.read_pip_config().index_urls == ("https://mirror.example.org/simple",)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BuildError, match="pip config list"):
        index.read_pip_config()
