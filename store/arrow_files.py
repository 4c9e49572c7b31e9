"""Arrow's own file systems: what reads Parquet from a disk or a bucket, range by range."""

import os
from datetime import timedelta
from functools import lru_cache
from typing import Any

import pyarrow.fs as pafs

ATTEMPTS = 9
"""Of a read from S3, which waits longer before each one: a minute and a half in all."""


@lru_cache(maxsize=32)
def files_of(root: str) -> tuple[pafs.FileSystem, str]:
    """Arrow's own file system for a root, and the path of the root there. It is Arrow's own because
    one that is written in Python makes all threads wait, and can abort the interpreter at exit.
    """
    scheme, found, path = root.partition("://")
    if not found:
        return pafs.LocalFileSystem(), root
    if scheme == "s3":
        return _s3(path.partition("/")[0]), path
    if scheme == "gs":
        return pafs.GcsFileSystem(retry_time_limit=timedelta(seconds=60)), path
    return _azure(), path


def _s3(bucket: str) -> pafs.FileSystem:
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "").partition("://")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return pafs.S3FileSystem(
        endpoint_override=endpoint[2] or None,
        scheme=endpoint[0] or "https",
        region=region or pafs.resolve_s3_region(bucket),
        retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
    )


def _azure() -> pafs.FileSystem:
    """With a key, else with the identity that the machine is given, as obstore has it."""
    endpoint = os.environ.get("AZURE_STORAGE_ENDPOINT", "")
    where: dict[str, Any] = {}
    if endpoint:
        scheme, _, rest = endpoint.partition("://")
        host = rest.partition("/")[0]
        where = {f"{kind}_storage_authority": host for kind in ("blob", "dfs")}
        where |= {f"{kind}_storage_scheme": scheme for kind in ("blob", "dfs")}
    return pafs.AzureFileSystem(
        azure_account(),
        account_key=os.environ.get("AZURE_STORAGE_ACCOUNT_KEY"),
        **where,
    )


def azure_account() -> str:
    """The storage account of az:// places. Raises ValueError if the environment names none."""
    name = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME")
    if not name:
        raise ValueError("az:// needs the environment variable AZURE_STORAGE_ACCOUNT_NAME: set it")
    return name
