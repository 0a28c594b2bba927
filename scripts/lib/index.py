# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find and download a file of a package index as the user's pip is configured.

Index, extra indexes, find-links, certificates, proxy and trusted hosts come from
`pip config list`, that is, from pip's configuration files and `PIP_*` variables. No
index is named here: without a configured one, the finder's default (pip's) is used.
"""

import ast
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from packaging.utils import canonicalize_name
from unearth import Link, PackageFinder
from unearth.auth import MultiDomainBasicAuth
from unearth.fetchers.sync import PyPIClient

from lib.errors import BuildError
from lib.status import progress

ATTEMPTS = 8


@dataclass(frozen=True)
class PipConfig:
    """What pip is told about indexes, merged as pip merges it."""

    index_urls: tuple[str, ...]
    find_links: tuple[str, ...]
    trusted_hosts: tuple[str, ...]
    cert: str | None
    proxy: str | None
    timeout: float

    @property
    def places(self) -> str:
        """The places searched, without the credentials a URL may hold."""
        urls = [Link(url).redacted if "://" in url else url for url in self.all()]
        return ", ".join(urls)

    def all(self) -> tuple[str, ...]:
        return self.index_urls + self.find_links


def read_pip_config() -> PipConfig:
    """Read the configuration of the running interpreter's pip."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(
            f"`{' '.join(command)}` failed; the project asks pip which package index "
            f"to use:\n{done.stderr.strip()}"
        )
    return parse_pip_config(done.stdout)


def parse_pip_config(text: str) -> PipConfig:
    """`text` is the output of `pip config list`: lines `section.key='value'`.

    As in pip, `[download]` overrides `[global]`, and the environment overrides both.
    """
    values: dict[str, str] = {}
    lines = [line.partition("=") for line in text.splitlines() if "=" in line]
    for section in ("global.", "download.", ":env:."):
        for key, _, value in lines:
            if key.startswith(section):
                values[key.removeprefix(section)] = str(ast.literal_eval(value))
    index_urls: list[str] = []
    if values.get("no-index", "").lower() not in ("1", "true", "yes", "on"):
        index_urls = values.get("index-url", "").split() or _default_index()
        index_urls += values.get("extra-index-url", "").split()
    return PipConfig(
        tuple(index_urls),
        tuple(
            os.path.expanduser(link) for link in values.get("find-links", "").split()
        ),
        tuple(values.get("trusted-host", "").split()),
        values.get("cert") or None,
        values.get("proxy") or None,
        float(values.get("timeout") or values.get("default-timeout") or 30),
    )


def _default_index() -> list[str]:
    return [source["url"] for source in PackageFinder().sources]


@contextmanager
def open_session(config: PipConfig) -> Iterator[PyPIClient]:
    options: dict[str, Any] = {"timeout": config.timeout, "follow_redirects": True}
    if config.cert:
        options["verify"] = ssl.create_default_context(cafile=config.cert)
    if config.proxy:
        options["proxy"] = config.proxy
    with PyPIClient(trusted_hosts=config.trusted_hosts, **options) as session:
        session.auth = MultiDomainBasicAuth(index_urls=list(config.index_urls))
        yield session


def find_file(
    session: PyPIClient, config: PipConfig, project: str, filename: str, sha256: str
) -> Link:
    """The link of the file in the first place that has it with the expected hash.

    Raises BuildError naming the places searched when there is none.
    """
    notes = []
    for place in config.all():
        is_index = place in config.index_urls
        finder = PackageFinder(
            cast(Any, session),
            index_urls=[place] if is_index else [],
            find_links=[] if is_index else [place],
            trusted_hosts=config.trusted_hosts,
            ignore_compatibility=True,
        )
        try:
            packages = finder.find_all_packages(
                canonicalize_name(project), allow_yanked=True
            )
            links = [p.link for p in packages if p.link.filename == filename]
        except Exception as error:  # whatever the network raises: try the next place
            notes.append(f"{place}: {type(error).__name__}: {error}")
            continue
        for link in links:
            (listed,) = (link.hash_option or {}).get("sha256", [sha256])
            if listed == sha256:
                return link
            notes.append(
                f"{link.redacted}: listed with SHA-256 {listed}, expected {sha256}"
            )
    raise BuildError(
        f"{filename} (project {project}) was not found. Searched, as pip is "
        f"configured: {config.places or 'nothing'}.\n"
        + "".join(f"  {note}\n" for note in notes)
        + "Check `pip config list`, or put the file into the cache yourself."
    )


def download(session: PyPIClient, link: Link, part: Path, size: int) -> None:
    """Download `link` into `part`, going on where an earlier attempt stopped.

    `size` is the expected size in bytes, for the progress bar. Raises BuildError when
    the connection fails again and again; what has arrived is kept.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _attempt(session, link, part, size)
        except BuildError:
            raise
        except Exception as error:  # connection lost: resume
            if attempt == ATTEMPTS:
                have = part.stat().st_size if part.exists() else 0
                raise BuildError(
                    f"{link.filename}: the download failed {ATTEMPTS} times, last with "
                    f"{type(error).__name__}: {error}. {have} of {size} bytes are in "
                    f"{part}; the next run goes on from there."
                ) from error
            time.sleep(min(2 ** (attempt - 1), 8) * 0.5)


def _attempt(session: PyPIClient, link: Link, part: Path, size: int) -> None:
    have = part.stat().st_size if part.exists() else 0
    if have >= size:
        return
    headers = {"Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    with session.get_stream(link.normalized, headers=headers) as response:
        if response.status_code >= 400:
            raise OSError(f"{link.redacted}: HTTP status {response.status_code}")
        resumed = response.status_code == 206
        have = have if resumed else 0
        bar = progress(
            total=size,
            initial=have,
            unit="B",
            unit_scale=True,
            desc=link.filename,
        )
        with bar, part.open("ab" if resumed else "wb") as out:
            for chunk in response.iter_bytes():  # as it arrives
                out.write(chunk)
                bar.update(len(chunk))
    if part.stat().st_size < size:
        raise OSError("the connection ended before the file did")
