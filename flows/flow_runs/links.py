"""Addresses of pages of Prefect's UI, for a browser."""

from uuid import UUID

from prefect.settings import PREFECT_UI_URL

from flows.server.proxies import status_of
from rlhf_core.config.site import Site


def page(site: Site, kind: str, id: UUID) -> str:
    """Address of a page of the UI, for a browser."""
    address = site.prefect.url or PREFECT_UI_URL.value() or ""
    return f"{address.rstrip('/')}/{kind}/{id}"


def has_pages(site: Site) -> bool:
    """False for a server without a UI, like a temporary one."""
    # A page may require a password.
    return bool(site.prefect.url) or status_of(PREFECT_UI_URL.value() or "", 2.0) in (200, 401, 403)
