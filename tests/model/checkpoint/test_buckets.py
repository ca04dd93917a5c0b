"""Errors of buckets: what a store refuses, and what its client lacks."""

from __future__ import annotations

import pytest

from millrace.model.checkpoint.ranged_files import BucketFiles, open_files
from millrace.model.errors import DownloadError


def test_an_error_of_a_filesystem_is_said_with_its_address() -> None:
    class Broken:
        def find(self, path: str) -> list[str]:
            raise ValueError("no credentials")

    with pytest.raises(DownloadError, match="s3://b/m/: ValueError: no credentials, 5 times; start again"):
        BucketFiles("s3://b/m", Broken(), "b/m", lambda _: None).names()


class NoCredentialsError(Exception):
    """As botocore's, of s3fs."""


class ClientAuthenticationError(Exception):
    """As azure-core's, of adlfs."""


@pytest.mark.parametrize(
    ("url", "error", "words"),
    [
        (
            "s3://b/m",
            NoCredentialsError("Unable to locate"),
            "not allowed: Unable to locate; set AWS_PROFILE, or AWS_A",
        ),
        ("s3://b/m", PermissionError("Access Denied"), "not allowed: Access Denied; set AWS_PROFILE"),
        (
            "gs://b/m",
            OSError("Forbidden: b/m\nmore"),
            "not allowed: Forbidden: b/m; run gcloud auth application-default",
        ),
        ("az://b/m", ClientAuthenticationError("no token"), "not allowed: no token; set AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_a_store_that_refuses_is_asked_once_and_credentials_are_named(url: str, error: Exception, words: str) -> None:
    asked = []

    class Refusing:
        def find(self, path: str) -> list[str]:
            asked.append(path)
            raise error

    with pytest.raises(DownloadError, match=f"^{url}/: {words}"):
        BucketFiles(url, Refusing(), "b/m", lambda _: pytest.fail("it was asked again")).names()
    assert asked == ["b/m"]


def test_a_client_that_cannot_be_made_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(url: str) -> None:
        raise ValueError("Must provide account_name")

    monkeypatch.setattr("fsspec.core.url_to_fs", broken)
    with pytest.raises(DownloadError, match="az://b/m: adlfs cannot open it: Must provide account_name; set AZURE_STO"):
        open_files("az://b/m")


def test_a_file_that_may_not_be_read_counts_as_missing_once_others_were_read() -> None:
    class Partly:
        def find(self, path: str) -> list[str]:
            return []

        def invalidate_cache(self) -> None:
            pass

        def info(self, path: str) -> None:
            raise PermissionError("Forbidden")

    files = BucketFiles("s3://b/m", Partly(), "b/m")
    with pytest.raises(DownloadError, match="s3://b/m/config.json: not allowed: Forbidden"):
        files.pin("config.json")
    files.names()
    assert files.pin("config.json") is None
