"""Lines of a streamed HTTP response."""

from collections.abc import AsyncIterator

import httpx


async def response_lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield lines as they arrive, without their line ends; the last one may be incomplete.

    ``httpx.Response.aiter_lines`` also splits where ``str.splitlines`` does, for instance at U+2028. JSON may contain
    such characters unescaped (RFC 8259, section 7), and completions do.
    """
    begun: list[bytes] = []
    async for chunk in answer.aiter_bytes():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*begun, end])
            begun = []
        begun.append(rest)
    if last := b"".join(begun):
        yield last
