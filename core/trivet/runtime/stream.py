"""Tokens of one request as they come, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

from trivet.runtime.handle import Request, TokenReader
from trivet.runtime.output import RequestOutput
from trivet.runtime.results import Token


class TokenStream(Iterator[Token]):
    """Yields one `Token` per new token. Closing or dropping it cancels the request.

    Raises, from ``next``, the request's error if it ends with one.
    """

    def __init__(
        self, request: Request, output: RequestOutput, reader: TokenReader, drive: Callable[[], object] | None
    ) -> None:
        self.request = request
        self._output = output
        self._reader = reader
        self._drive = drive
        self._read = 0
        self._closed = False

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Token:
        if self._closed:
            raise StopIteration
        try:
            while self._output.count <= self._read and not self._output.done:
                if self._drive is not None:
                    self._drive()
                else:
                    self._output.wait_for_token(self._read)
        except BaseException:
            self.close()
            raise
        if self._output.count > self._read:
            produced = self._output.entry(self._read)
            self._read += 1
            return self._reader.read(produced)
        self._closed = True
        if self._output.finish_reason == "error" and self._output.error is not None:
            raise self._output.error
        raise StopIteration

    def close(self) -> None:
        """Stop reading; the request is cancelled if it is still open."""
        if not self._closed:
            self._closed = True
            self.request.cancel()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class Arrivals:
    """Lets a coroutine wait for what another thread puts into a `RequestOutput`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Called from the thread that steps."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        """Wait for the next arrival since the last `wait`."""
        await self._event.wait()
        self._event.clear()


class AsyncTokenStream(AsyncIterator[Token]):
    """As `TokenStream`, for coroutines. Closing, dropping or cancelling its reader cancels the request."""

    def __init__(
        self,
        request: Request,
        output: RequestOutput,
        reader: TokenReader,
        arrivals: Arrivals,
        drive: Callable[[], object] | None,
    ) -> None:
        self.request = request
        self._output = output
        self._reader = reader
        self._arrivals = arrivals
        self._drive = drive
        self._read = 0
        self._closed = False

    def __aiter__(self) -> AsyncTokenStream:
        return self

    async def __anext__(self) -> Token:
        if self._closed:
            raise StopAsyncIteration
        try:
            while self._output.count <= self._read and not self._output.done:
                if self._drive is not None:
                    await asyncio.to_thread(self._drive)
                else:
                    await self._arrivals.wait()
        except BaseException:
            await self.aclose()
            raise
        if self._output.count > self._read:
            produced = self._output.entry(self._read)
            self._read += 1
            return self._reader.read(produced)
        self._closed = True
        if self._output.finish_reason == "error" and self._output.error is not None:
            raise self._output.error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop reading; the request is cancelled if it is still open."""
        if not self._closed:
            self._closed = True
            self.request.cancel()

    def __del__(self) -> None:
        if not self._closed:
            self._closed = True
            self.request.cancel()
