"""Tokens of one request as they come, for threads and for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from trivet.runtime.handle import Request, TokenReader
from trivet.runtime.output import RequestOutput, as_raised
from trivet.runtime.results import Token


class _Reading:
    """How far a request's tokens have been read, and when that ends."""

    def __init__(
        self, request: Request, output: RequestOutput, reader: TokenReader, drive: Callable[[], object] | None
    ) -> None:
        self.request = request
        self._output = output
        self._reader = reader
        self._drive = drive
        self._check_steps = request._check_steps
        self._read = 0
        self._closed = False

    @property
    def _waits(self) -> bool:
        """Whether there is neither a token to read nor an end; raises where there never will be."""
        waits = self._output.count <= self._read and not self._output.done
        if waits:
            self._check_steps()
        return waits

    def _take(self) -> Token | None:
        """The next token; None at the end. Raises the request's error if it ended with one."""
        if self._output.count > self._read:
            produced = self._output.entry(self._read)
            self._read += 1
            return self._reader.read(produced)
        self._closed = True
        if self._output.finish_reason == "error" and self._output.error is not None:
            raise as_raised(self._output.error)
        return None

    def _stop(self) -> None:
        if not self._closed:
            self._closed = True
            self.request.cancel()

    def __del__(self) -> None:
        self._stop()


class TokenStream(_Reading, Iterator[Token]):
    """Yields one `Token` per new token. Closing or dropping it cancels the request.

    Raises, from ``next``, the request's error if it ends with one.
    """

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Token:
        if self._closed:
            raise StopIteration
        try:
            while self._waits:
                if self._drive is not None:
                    self._drive()
                else:
                    self._output.wait_for_token(self._read)
        except BaseException:
            self.close()
            raise
        token = self._take()
        if token is None:
            raise StopIteration
        return token

    def close(self) -> None:
        """Stop reading; the request is cancelled if it is still open."""
        self._stop()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Arrivals:
    """Lets a coroutine wait for what another thread puts into a `RequestOutput`."""

    def __init__(self) -> None:
        self._reader: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def notify(self) -> None:
        """Called from the thread that steps."""
        if self._reader is not None:
            loop, event = self._reader
            # A loop may be closed at any time, and then nobody waits any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    async def wait(self) -> None:
        """Wait for the next arrival since the last `wait`; the first one in a loop returns at once."""
        loop = asyncio.get_running_loop()
        if self._reader is None or self._reader[0] is not loop:
            self._reader = loop, asyncio.Event()
            return  # what came before went unannounced: look again
        event = self._reader[1]
        await event.wait()
        event.clear()


class AsyncTokenStream(_Reading, AsyncIterator[Token]):
    """As `TokenStream`, for coroutines. Closing, dropping or cancelling its reader cancels the request."""

    def __init__(
        self,
        request: Request,
        output: RequestOutput,
        reader: TokenReader,
        arrivals: Arrivals,
        drive: Callable[[], object] | None,
    ) -> None:
        super().__init__(request, output, reader, drive)
        self._arrivals = arrivals

    def __aiter__(self) -> AsyncTokenStream:
        return self

    async def __anext__(self) -> Token:
        if self._closed:
            raise StopAsyncIteration
        try:
            while self._waits:
                if self._drive is not None:
                    await asyncio.to_thread(self._drive)
                else:
                    await self._arrivals.wait()
        except BaseException:
            await self.aclose()
            raise
        token = self._take()
        if token is None:
            raise StopAsyncIteration
        return token

    async def aclose(self) -> None:
        """Stop reading; the request is cancelled if it is still open."""
        self._stop()
