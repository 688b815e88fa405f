"""What a runtime owes the process that it lives in: a clean end, and no waiting for a thread that is elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import trivet

LIMITS = trivet.Limits(max_requests=4, max_step_tokens=16, max_context=1024, page_size=16)

UNCLOSED = """
import atexit, sys, threading
atexit.register(lambda: print([t.name for t in threading.enumerate()]))  # the last thing before the interpreter ends
import trivet
runtime = trivet.Runtime.load(sys.argv[1], device="cpu")
stream = runtime.stream([1], trivet.Sampling(max_new_tokens=None))
next(stream)
"""


FIRST_TOKEN = """
import os, sys, trivet
before = dict(os.environ)
with trivet.Runtime.load(sys.argv[1], device="cpu") as runtime:
    runtime.generate([[1]], trivet.Sampling(max_new_tokens=2))
assert "torch._dynamo" not in sys.modules, "torch's compiler was imported"
assert dict(os.environ) == before
"""


def test_serving_imports_no_compiler_and_leaves_the_environment_alone(family_checkpoint: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FIRST_TOKEN, str(family_checkpoint)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_a_process_may_end_with_its_runtime_at_work(family_checkpoint: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", UNCLOSED, str(family_checkpoint)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.strip() == "['MainThread']"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_fork_is_told_at_once_that_the_thread_stayed_behind(family_checkpoint: Path) -> None:
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS) as runtime:
        before = runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=4))[0].token_ids
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(30)  # rather than wait for ever
            try:
                runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=4))
            except trivet.RuntimeDown as error:
                os.write(writable, str(error).encode())
            finally:
                runtime.close()
                os._exit(0)
        os.close(writable)
        with os.fdopen(readable) as told:
            assert "forked" in told.read()
        os.waitpid(child, 0)
        assert runtime.generate([[1, 2, 3]], trivet.Sampling(max_new_tokens=4))[0].token_ids == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("reader", ["wait", "stream", "astream"])
def test_whoever_waits_in_a_fork_is_told_that_nobody_steps_there(family_checkpoint: Path, reader: str) -> None:
    async def first(tokens: trivet.AsyncTokenStream) -> None:
        await anext(tokens)

    sampling = trivet.Sampling(max_new_tokens=400, ignore_eos=True)
    with trivet.Runtime.load(family_checkpoint, device="cpu", limits=LIMITS) as runtime:
        tokens = runtime.astream([1, 2], sampling)
        reads = {
            "wait": runtime.submit([1, 2], sampling).wait,
            "stream": partial(next, runtime.stream([1, 2], sampling)),
            "astream": lambda: asyncio.run(first(tokens)),
        }
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(30)
            try:
                while True:  # tokens that were there at the fork may be read
                    reads[reader]()
            except trivet.RuntimeDown as error:
                os.write(writable, str(error).encode())
            finally:
                os._exit(0)
        os.close(writable)
        with os.fdopen(readable) as told:
            assert "forked" in told.read()
        os.waitpid(child, 0)
