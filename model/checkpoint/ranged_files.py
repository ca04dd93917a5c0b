"""Files elsewhere, read by ranges of bytes: over HTTP, or of a bucket through fsspec. Each is pinned when first seen.

A file whose size or version is another than before ends the load: its parts would be those of two models.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, urljoin, urlsplit

from ..errors import DownloadError, shown

T = TypeVar("T")

log = logging.getLogger("millrace.model")

TRIES = 5  # of a first request: the address may be wrong
PATIENCE_S = 180.0  # of waiting between the tries of later requests: a server may restart
LONGEST_WAIT_S = 15.0  # between two tries, unless the server asks for more
LONGEST_ASKED_S = 60.0
TOLD_S = 1.0  # waits of this length have a log line
TIMEOUT_S = 30.0  # of one answer
LOOPBACK = ("127.0.0.1", "localhost", "::1")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}  # scheme -> what fsspec needs for it
CREDENTIALS = {  # package -> how one gives it credentials
    "s3fs": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gcsfs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS",
    "adlfs": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
REFUSALS = re.compile(
    r"(No|Partial|Default)?Credential\w*Error|ClientAuthenticationError|RefreshError"
)  # of the packages
REFUSED = re.compile(r"forbidden|unauthorized|access denied|invalid credentials|anonymous caller", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file as it was first seen."""

    size: int
    version: str  # its ETag, its Last-Modified, or what the store has in place of them; empty: none


class RangedFiles(Protocol):
    """The files of one folder elsewhere. All methods are thread-safe, and raise DownloadError."""

    url: str

    def pin(self, name: str) -> PinnedFile | None:
        """The file as it is now; None if there is none."""

    def names(self) -> list[str] | None:
        """The files of the folder; None where they cannot be listed."""

    def read(self, name: str, pinned: PinnedFile, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of the file, which must be as it was pinned."""


class _NotAllowedError(DownloadError):
    """A file that is not there, or may not be read: stores answer 403 to both where a listing is not allowed."""


def open_files(url: str, query: str = "") -> RangedFiles:
    """The folder at `url`; `query` goes behind each file's address, as a signature does.

    Raises DownloadError for a scheme that cannot be read here.
    """
    scheme, host = urlsplit(url).scheme, urlsplit(url).hostname
    if scheme == "https" or (scheme == "http" and host in LOOPBACK):
        return HttpFiles(url, query=query)
    if scheme == "http":
        raise DownloadError(f"{url}: weights over http:// could be changed on their way; use https://")
    if scheme not in PACKAGES:
        raise DownloadError(
            f"{url}: {scheme}:// is not read; read are a folder, a .gguf file, owner/name of the Hub, hf://, https://, "
            "s3://, gs:// and az://"
        )
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]

        filesystem, path = url_to_fs(url)
    except ImportError:
        raise DownloadError(f"{url}: {scheme}:// needs a package: pip install {PACKAGES[scheme]}") from None
    except Exception as error:  # each package has errors of its own
        problem = f"{PACKAGES[scheme]} cannot open it: {_first_line(error)}"
        raise DownloadError(f"{url}: {problem}; {CREDENTIALS[PACKAGES[scheme]]}") from None
    return BucketFiles(url, filesystem, path)


class HttpFiles:
    """Files below a URL, of a server that answers ranges."""

    def __init__(self, url: str, sleep: Callable[[float], object] | None = None, query: str = "") -> None:
        self.url = url if url.endswith("/") else f"{url}/"
        self._sleep = sleep or time.sleep
        self._query = f"?{query}" if query else ""  # in no message and no name, as it may be a secret
        self._was_read = False

    def names(self) -> list[str] | None:
        return None

    def pin(self, name: str) -> PinnedFile | None:
        try:
            answer, _ = self._try(name, lambda: self._get(name, 0, 1))
        except FileNotFoundError:
            return None
        except _NotAllowedError:
            if not self._was_read:
                raise
            return None
        self._was_read = True
        return answer

    def read(self, name: str, pinned: PinnedFile, begin: int, end: int) -> bytes:
        def once() -> bytes:
            found, content = self._get(name, begin, end)
            _check_same(self.url, name, pinned, found)
            if len(content) != end - begin:
                raise OSError(f"{len(content)} of {end - begin} bytes came")
            return content

        try:
            return self._try(name, once)
        except FileNotFoundError:
            raise DownloadError(f"{self.url}{name}: is gone, while it was read; start again") from None

    def _get(self, name: str, begin: int, end: int) -> tuple[PinnedFile, bytes]:
        request = urllib.request.Request(urljoin(self.url, quote(name)) + self._query)
        request.add_header("Range", f"bytes={begin}-{end - 1}")
        try:
            with _OPENER.open(request, timeout=TIMEOUT_S) as answer:
                total = answer.headers.get("Content-Range", "").rpartition("/")[2]
                if answer.status != 206 or not (total.isascii() and total.isdigit()):
                    raise DownloadError(
                        f"{self.url}{name}: the server answers {answer.status} to a range of bytes, and must answer "
                        "206; download the files, and serve their folder"
                    )
                return PinnedFile(int(total), _version(answer.headers)), answer.read(end - begin + 1)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                raise FileNotFoundError(name) from None
            if error.code == 416:  # of an empty file
                return PinnedFile(0, _version(error.headers)), b""
            if error.code in (401, 403):
                problem = f"{self.url}{name}: not allowed (status {error.code}); use a signed URL"
                raise _NotAllowedError(problem) from None
            if error.code < 500 and error.code not in (408, 429):
                raise DownloadError(f"{self.url}{name}: the server answers {error.code}; check the address") from None
            raise

    def _try(self, name: str, once: Callable[[], T]) -> T:
        return _with_retries(f"{self.url}{name}", once, self._sleep, is_patient=self._was_read)


def _version(headers: Any) -> str:
    return headers.get("ETag") or headers.get("Last-Modified") or ""


def check_redirect(first: str, last: str, target: str) -> None:
    """Raises DownloadError for a redirect to what the first address did not stand for.

    Allowed is https, or http from loopback to loopback; and a private or link-local host only if the first was one.
    """
    to, named = urlsplit(target), first.partition("?")[0]
    if to.scheme != "https" and (to.scheme != "http" or {to.hostname, urlsplit(last).hostname} - {*LOOPBACK}):
        raise DownloadError(f"{named}: redirects to {to.scheme}://{to.hostname}; only https:// is followed")
    if _is_private(to.hostname) and not _is_private(urlsplit(first).hostname):
        raise DownloadError(f"{named}: redirects to {to.hostname}, a private address; name that address itself")


def _is_private(host: str | None) -> bool:
    """Whether any address of the host is not a public one. A name that is unknown here, behind a proxy, is public."""
    try:
        found = socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):
        return False
    return not all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global for *_, address in found)


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        first = getattr(req, "first_url", req.full_url)
        check_redirect(first, req.full_url, newurl)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None:
            request.first_url = first  # type: ignore[attr-defined]
        return request


_OPENER = urllib.request.build_opener(_CheckedRedirects)


class BucketFiles:
    """Files of a bucket, through an fsspec filesystem."""

    def __init__(self, url: str, filesystem: Any, path: str, sleep: Callable[[float], object] | None = None) -> None:
        self.url = url if url.endswith("/") else f"{url}/"
        self._files, self._path, self._sleep = filesystem, path.rstrip("/"), sleep or time.sleep
        self._was_read = False

    def names(self) -> list[str] | None:
        try:
            found = self._try(self.url, lambda: self._files.find(self._path))
        except FileNotFoundError:
            return []
        return [path.removeprefix(f"{self._path}/") for path in found]

    def pin(self, name: str) -> PinnedFile | None:
        try:
            return self._try(f"{self.url}{name}", lambda: self._info(name))
        except FileNotFoundError:
            return None
        except _NotAllowedError:
            if not self._was_read:
                raise
            return None

    def read(self, name: str, pinned: PinnedFile, begin: int, end: int) -> bytes:
        def once() -> bytes:
            content: bytes = self._files.cat_file(f"{self._path}/{name}", start=begin, end=end)
            _check_same(self.url, name, pinned, self._info(name))
            if len(content) != end - begin:
                raise OSError(f"{len(content)} of {end - begin} bytes came")
            return content

        try:
            return self._try(f"{self.url}{name}", once)
        except FileNotFoundError:
            raise DownloadError(f"{self.url}{name}: is gone, while it was read; start again") from None

    def _try(self, what: str, once: Callable[[], T]) -> T:
        def checked() -> T:
            try:
                return once()
            except (FileNotFoundError, DownloadError):
                raise
            except Exception as error:  # each filesystem has errors of its own
                if _is_refusal(error):
                    package = PACKAGES.get(urlsplit(self.url).scheme, "")
                    advice = CREDENTIALS.get(package, "give its client credentials")
                    raise _NotAllowedError(f"{what}: not allowed: {_first_line(error)}; {advice}") from None
                if isinstance(error, OSError):
                    raise
                raise OSError(f"{type(error).__name__}: {error}") from error

        found = _with_retries(what, checked, self._sleep, is_patient=self._was_read)
        self._was_read = True
        return found

    def _info(self, name: str) -> PinnedFile:
        self._files.invalidate_cache()
        info = self._files.info(f"{self._path}/{name}")
        keys = ("ETag", "etag", "generation", "md5Hash", "LastModified", "mtime", "created")
        return PinnedFile(int(info["size"]), next((str(info[key]) for key in keys if info.get(key)), ""))


def _is_refusal(error: Exception) -> bool:
    """Whether a store refuses who asks, so that asking again is of no use."""
    names = (kind.__name__ for kind in type(error).__mro__)
    return isinstance(error, PermissionError) or any(map(REFUSALS.fullmatch, names)) or bool(REFUSED.search(str(error)))


def _first_line(error: Exception) -> str:
    return shown((str(error).strip().splitlines() or [type(error).__name__])[0])[:200]


def _with_retries(what: str, once: Callable[[], T], sleep: Callable[[float], object], *, is_patient: bool) -> T:
    """The result of `once`, which may fail for a while: 0.1, 0.2, 0.4, ... s lie between the tries.

    There are `TRIES`; with `is_patient` as many as fit `PATIENCE_S` of waiting. A server that names the time to wait,
    by Retry-After, is asked again after that.
    """
    number, waited_s = 0, 0.0
    while True:
        try:
            return once()
        except FileNotFoundError:
            raise
        except (OSError, HTTPException) as error:  # a broken connection, a status of 500, too few bytes
            number += 1
            wait_s = max(min(0.1 * 2.0 ** (number - 1), LONGEST_WAIT_S), _asked_s(error))
            is_over = waited_s + wait_s > PATIENCE_S if is_patient else number == TRIES
            problem = shown(str(error))[:200]
        if is_over:
            raise DownloadError(f"{what}: {problem}, {number} times; start again once the server answers")
        if wait_s >= TOLD_S:
            log.warning("%s: %s; the next try is in %.0f s", what, problem, wait_s)
        sleep(wait_s)
        waited_s += wait_s


def _asked_s(error: Exception) -> float:
    """The seconds for which a server asks to wait, within bounds; 0 where it does not."""
    asked = error.headers.get("Retry-After", "") if isinstance(error, urllib.error.HTTPError) else ""
    return min(float(asked), LONGEST_ASKED_S) if asked.isascii() and asked.isdigit() else 0.0


def _check_same(url: str, name: str, pinned: PinnedFile, found: PinnedFile) -> None:
    if found != pinned:
        what = (
            f"{pinned.size} bytes, and is {found.size}"
            if pinned.size != found.size
            else f"version {pinned.version}, and is {found.version}"
        )
        raise DownloadError(f"{url}{name}: changed while it was read: it was {what}; start again")
