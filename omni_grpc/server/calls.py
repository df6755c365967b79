"""What every call has, whatever stack brings it: a caller, an answer for each error, a line in the log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from omni_grpc.config.command_line import meant
from omni_grpc.gate import Gate
from omni_grpc.telemetry.span import Attributes
from omni_grpc.telemetry.tracing import CallSpan, Tracing
from omni_grpc.types.caller import Caller
from omni_grpc.types.errors import Code, Failure, OmniError, Unimplemented
from omni_grpc.types.log_lines import Within, within
from omni_grpc.types.trace import TraceContext

logger = logging.getLogger(__name__)

T = TypeVar("T")

Observer = Callable[[str, str, str, str, float], None]
"""Is told of a call that has ended: its stack, the method without package ("" for one that is not there), the code, the
reason of a refusal or "", and seconds.
"""

PACKAGE = "/omni_grpc.v1."
OK = "OK"
GONE = "GONE"
"""Where other calls have a code: the client has left this one."""
FAULTS = (Code.INTERNAL, Code.UNAVAILABLE)
"""Codes of errors that their callers cannot help."""


class Gone(Exception):
    """The client has left the call."""


class Call:
    """A call that is open. `trace` is its span, None where it belongs to no trace."""

    def __init__(self, span: CallSpan) -> None:
        self._span = span
        self.trace = span.trace
        self.log = Within(trace_id="" if span.trace is None else span.trace.trace_id)

    @property
    def headers(self) -> Sequence[tuple[str, str]]:
        """What tells the client which trace it belongs to: headers of an answer, or initial metadata."""
        return () if self.trace is None else self.trace.headers[:1]

    def note(self, name: str, value: str | int) -> None:
        """Adds an attribute to the span."""
        self._span.attributes[name] = value

    def by(self, caller: Caller) -> Caller:
        """The caller, who knows of the trace from now on."""
        if caller.tenant:
            self.log.tenant = caller.tenant
            self.note("omni_grpc.tenant", caller.tenant)
        return caller if self.trace is None else dataclasses.replace(caller, trace=self.trace)

    def told(self, failure: Failure) -> Failure:
        """A failure that names the trace."""
        if self.trace is None:
            return failure
        return dataclasses.replace(failure, metadata={**failure.metadata, "trace_id": self.trace.trace_id})


class Calls:
    """The open calls of a server, over all of its stacks.

    `served` and `unserved` name the methods ("/package.Service/Method") of the API, by whether this version has them.
    """

    def __init__(
        self, gate: Gate, served: Collection[str], unserved: Collection[str], tracing: Tracing | None = None
    ) -> None:
        self._gate = gate
        self._tracing = tracing or Tracing()
        self.served, self.unserved = served, unserved
        self.observers: list[Observer] = []
        """Called on the loop when a call has ended."""
        self.open_streams = 0
        """Server-streaming calls that have not ended."""
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._admitting = asyncio.Event()
        self._admitting.set()
        self.leaving = False
        """Whether connections are to be closed, since another server has taken over."""

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Calls that come meanwhile wait for the end of the block."""
        self._admitting.clear()
        try:
            yield
        finally:
            self._admitting.set()

    @property
    def open(self) -> int:
        """Calls that have not ended."""
        return self._open

    async def idle(self, timeout: float) -> None:
        """Returns when no call is open, or after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout)

    async def caller(
        self, method: str, *, authorization: list[str | bytes], certificate: str | None, peer: str
    ) -> Caller:
        """Who makes a call. Raises Unauthenticated."""
        await self._admitting.wait()
        return await self._gate.caller(
            self._known(method),
            authorization=authorization,
            certificate=certificate,
            peer=peer,
        )

    @contextlib.asynccontextmanager
    async def answering(
        self,
        method: str,
        abort: Callable[[Failure], Awaitable[None]],
        *,
        stack: str,
        rpc: str | None = None,
        trace: TraceContext | None = None,
        span: str = "",
        kind: Attributes,
    ) -> AsyncIterator[Call]:
        """Around the handling of a call: an error ends it by `abort`, which always raises. `stack` is what brought it,
        `rpc` the method that it comes nearest to, where `method` is none. `trace` is what it came with; `span` and
        `kind` are name and attributes of its span, whose name is else that of the method.
        """
        began = time.monotonic()
        code, reason, incident = OK, "", ""
        spanned = self._tracing.begin(span or method.removeprefix("/"), trace, kind)
        call = Call(spanned)
        within.set(call.log)
        self._open += 1
        self._idle.clear()
        try:
            yield call
        except OmniError as error:
            code, reason = error.failure.code, error.failure.reason
            await abort(call.told(error.failure))
        except Gone:
            code = GONE
            raise asyncio.CancelledError from None
        except GeneratorExit:
            code = GONE
            raise
        except (Exception, asyncio.CancelledError) as error:  # the one place that answers for what nobody expected
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                code = GONE
                raise
            incident = secrets.token_hex(4)
            code, reason = Code.INTERNAL, "INTERNAL"
            logger.exception("%s: incident %s", method, incident)
            message = f"an unexpected error in {method.removeprefix(PACKAGE)}; the server's log has incident {incident}"
            await abort(call.told(Failure(code=Code.INTERNAL, reason="INTERNAL", message=message)))
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
            seconds = time.monotonic() - began
            _log(method, code, f"incident {incident}" if incident else reason, seconds)
            call.log.over = True
            self._tracing.end(spanned, Code.CANCELLED if code == GONE else code, reason)
            self._tell(stack, self._known(method if rpc is None else rpc), code, reason, seconds)

    def _known(self, method: str) -> str:
        """The method without its package; "" for what is not there: whoever calls that may have written anything."""
        return method.removeprefix(PACKAGE) if method in self.served or method in self.unserved else ""

    def _tell(self, stack: str, method: str, code: str, reason: str, seconds: float) -> None:
        for observer in self.observers:
            try:
                observer(stack, method, code, reason, seconds)
            except Exception:
                # the call has had its answer
                logger.exception("unexpected error while telling of a call")

    async def streamed(self, messages: AsyncGenerator[T]) -> AsyncGenerator[T]:
        """The messages of a server-streaming call, counted while it is open."""
        self.open_streams += 1
        try:
            async with aclosing(messages):
                async for message in messages:
                    yield message
        finally:
            self.open_streams -= 1

    def unavailable(self, method: str) -> OmniError:
        """Why a method that this stack has no handler of is not there."""
        if method in self.unserved:
            name = method.removeprefix(PACKAGE)
            return Unimplemented(f"{name} is not yet served", metadata={"method": name})
        if method in self.served:
            message = f"{method.removeprefix(PACKAGE)} is served at the admin address of this server alone"
            return Unimplemented(message, reason="METHOD_ELSEWHERE", metadata={"method": method})
        hint = meant(method, self.served, quoted=False) or "; reflection lists what it has"
        message = f"this server has no method {method}{hint}"
        return Unimplemented(message, reason="METHOD_UNKNOWN", metadata={"method": method})


def _log(method: str, code: str, reason: str, seconds: float) -> None:
    """The line of a call: for those who look into something, unless it failed."""
    level = logging.INFO
    if code in (OK, GONE):
        level = logging.DEBUG
    elif code in FAULTS:
        level = logging.WARNING
    if logger.isEnabledFor(level):
        outcome = code.lower() if code == GONE else f"{code} {reason}".rstrip()
        logger.log(level, "%s %s in %.3f s", method, outcome, seconds)


def _is_cancelled() -> bool:
    """Whether the call itself is cancelled. If only something inside it was, the call goes on: its client awaits an
    answer.
    """
    task: asyncio.Task[Any] | None = asyncio.current_task()
    return task is not None and task.cancelling() > 0
