"""Clients of the Prefect API for this program."""

import ssl
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import SyncClientContext
from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY

_Row = TypeVar("_Row")


def api_client() -> SyncPrefectClient:
    """Client for a ``with`` block: the one of the flow in which this is called, if there is one, otherwise a new one.

    A new one does not read the certificate authorities again: Prefect reads them for each client, which takes far
    longer than a request.
    """
    if SyncClientContext.get() is not None or PREFECT_API_TLS_INSECURE_SKIP_VERIFY.value():
        return get_client(sync_client=True)
    trust = _trusting(PREFECT_API_SSL_CERT_FILE.value())
    return get_client(httpx_settings={"verify": trust}, sync_client=True)


@cache
def _trusting(authorities: str | None) -> ssl.SSLContext:
    if authorities:
        return ssl.create_default_context(cafile=authorities)
    return httpx.create_ssl_context(trust_env=False)


def rows_of_pages(read: Callable[[int], Sequence[_Row]], size: int, step: int | None = None) -> Iterator[_Row]:
    """All rows of a list that the API returns in pages.

    Args:
        read: reads a page; receives the offset of its first row.
        size: number of rows of a page that is not the last one.
        step: rows between the beginnings of two pages; None for ``size``.
    """
    offset = 0
    while True:
        page = read(offset)
        yield from page
        if len(page) < size:
            return
        offset += step or size
