"""Running tasks: from an accepted request to a terminal response, whoever is still listening.

A run belongs to the server, not to the connection that asked for it: a client that leaves takes
nothing with it (Streaming section 5). Every event is kept before the response is terminal, so a
stream can be taken up again, also after the process that ran the task is gone. A terminal state is
told to nobody before it is kept: what a client has seen stays true (Lifecycle section 3).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from app import audit, telemetry
from app.errors import NotFound, Refusal, Unavailable
from app.harness.base import BudgetSpent, HarnessFailed, HarnessUnavailable, Task
from app.harness.workspace import Found, Turn, Unreadable
from app.http.metrics import Metrics
from app.uhp.feeds import Feeds
from app.uhp.life_signs import LifeSigns
from app.uhp.relays import Relays
from app.uhp.runs import Outcome, Run, Work, failed
from app.uhp.shapes import download_url
from app.uhp.streaming import Citation, Event, Transcript, condensed
from app.uhp.troubles import reported

if TYPE_CHECKING:
    from app.harness.workspace import Workspace, Workspaces
    from app.settings import Settings
    from app.store.content import ContentStore
    from app.store.files import FileRecord
    from app.store.responses import ResponseRecord, Unfinished

log = logging.getLogger("consignee.tasks")

HEARTBEAT_SECONDS = 1.0
"""How often running tasks show that their process lives, and hear of wishes to cancel them that
reached another one."""

POLL_SECONDS = 0.3
"""How often a task of another process is looked at by whoever waits for it here."""

GATHER_SECONDS = 0.05
"""Events are kept in batches of this span; followers see them when they are kept."""

CANCEL_ANSWER_SECONDS = 0.9
"""A cancel is answered after this at the latest (Sessions section 4 asks for a second)."""

STOP_SECONDS = 10.0
"""So long the end of another process's task is waited for before its session goes all the same."""

BUNCH_FILES = 32
BUNCH_BYTES = 4 * 1024 * 1024
"""What is kept of a workspace at once: each file costs a descriptor, a buffer and, alone, a durable
commit of its own."""

RETRY_SECONDS = 0.5
"""Pause before a response's end is handed to the store once more."""


@dataclass(eq=False, slots=True)
class Place:
    """Room for one task; see `Engine.place`.

    With `response_id` it is that of a task which the store has accepted, and which lives.
    """

    response_id: str | None = None


class Engine:
    """All running tasks of this process."""

    def __init__(
        self,
        settings: Settings,
        store: ContentStore,
        workspaces: Workspaces,
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self.owner = store.owner
        self._base_url = settings.base_url
        self._max_tasks = settings.max_tasks
        self._lost_seconds = settings.task_lost_seconds
        self._store = store
        self._workspaces = workspaces
        self._runs: dict[str, Run] = {}
        self._places: set[Place] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._feeds = Feeds()
        self._relays = Relays(store.responses, self.owner, self._feeds)
        self._signs = LifeSigns()
        self._left = asyncio.Event()
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Give the tasks of dead processes their end, then watch over those that run."""
        with reported("tasks of an earlier process are not looked after"):
            await self._bury_abandoned()
        self._watch = asyncio.create_task(self._watch_over())

    async def drain(self) -> None:
        """Wait until every task has come to its own end; feeds, which have none, end at once.

        What is accepted meanwhile is still begun.
        """
        self._feeds.close()
        while self._places or self._tasks:
            self._left.clear()
            await self._left.wait()

    def stop(self) -> None:
        """Begin to end: no new task, and every running one and every feed is told to end."""
        self._stopping.set()
        self._feeds.close()
        for run in self._runs.values():
            run.interrupt()

    async def close(self) -> None:
        """End every task; what each has said and written so far is kept."""
        self.stop()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def running(self) -> int:
        """How many tasks run here."""
        return len(self._runs)

    @contextmanager
    def place(self) -> Iterator[Place]:
        """Room for one more task, for as long as the block lasts or for the task that begins in it.

        Raises Unavailable (`harness_unavailable`) when as many run as may.
        """
        if self._stopping.is_set():
            raise Unavailable("harness_unavailable", "This server is about to stop; try again.")
        if len(self._runs) + len(self._places) >= self._max_tasks:
            raise Unavailable("harness_unavailable", "Too many tasks are running; try again.")
        place = Place()
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.discard(place)
            self._left.set()

    def begin(self, work: Work, place: Place) -> Run:
        """Start a task that the store has accepted, in its place."""
        self._places.discard(place)
        run = self._runs[work.response.id] = Run(work, self._publish)
        if self._stopping.is_set():
            run.interrupt()
        task = asyncio.create_task(self._perform(run))
        self._tasks.add(task)
        task.add_done_callback(self._landed)
        return run

    async def cancel(
        self, scope: str, response_id: str, *, also_deleted: bool = False
    ) -> ResponseRecord:
        """Ask a task to end, and wait for its end for a moment; the response as it stands.

        One that another process runs hears of it at its next heartbeat.
        """
        responses = self._store.responses
        record = await responses.request_cancel(scope, response_id, also_deleted=also_deleted)
        run = self._runs.get(response_id)
        if run is not None:
            run.cancel()
        elif record.is_terminal:
            return record
        with suppress(TimeoutError):
            ended = self._elsewhere_ended(record) if run is None else run.finished.wait()
            await asyncio.wait_for(ended, CANCEL_ANSWER_SECONDS)
        return await responses.get(scope, response_id, also_hidden=True)

    async def stop_session(self, scope: str, session_id: str) -> None:
        """End what runs in a session that is about to be deleted, and wait for its end (UHP-34)."""
        responses = self._store.responses
        record = await responses.running(scope, session_id)
        if record is None:
            return
        await responses.request_cancel(scope, record.id, also_deleted=True)
        run = self._runs.get(record.id)
        if run is not None:
            run.abandon()
            await run.finished.wait()
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self.wait(record), STOP_SECONDS)

    async def wait(self, record: ResponseRecord) -> dict[str, Any]:
        """The response object once it is terminal, wherever it runs."""
        run = self._runs.get(record.id)
        if run is not None:
            await run.finished.wait()
            return run.response
        return (await self._elsewhere_ended(record)).response

    async def follow(self, record: ResponseRecord, after: int) -> AsyncGenerator[Event, None]:
        """The events of a task behind `after`, to the terminal one, wherever it runs."""
        run = self._runs.get(record.id)
        if run is None:
            events = self._follow_stored(record, after)
        else:
            events = run.follow(after, partial(self._kept_events, record.id))
        async with aclosing(events):
            async for event in events:
                yield event

    async def feed(self, scope: str, harness_id: str) -> AsyncGenerator[Event, None]:
        """Every event of the scope's tasks on a harness from now on, numbered anew."""
        key = (scope, harness_id)
        async with self._relays.reading(key), aclosing(self._feeds.listen(key)) as events:
            async for event in events:
                yield event

    async def _elsewhere_ended(self, record: ResponseRecord) -> ResponseRecord:
        """The record of a task that another process runs, once it is terminal."""
        while not record.is_terminal:
            await asyncio.sleep(POLL_SECONDS)
            record = await self._store.responses.get(record.scope, record.id, also_hidden=True)
        return record

    def _publish(self, work: Work, payload: str) -> None:
        self._feeds.publish((work.session.scope, work.harness.description.id), payload)

    async def _kept_events(self, response_id: str, after: int) -> list[Event]:
        return await self._store.responses.events(response_id, after=after)

    async def _follow_stored(
        self, record: ResponseRecord, after: int
    ) -> AsyncGenerator[Event, None]:
        place = after
        while True:
            events = await self._kept_events(record.id, place)
            for event in events:
                yield event
                place = event[0]
            if events:
                continue
            if record.is_terminal:
                break
            await asyncio.sleep(POLL_SECONDS)
            record = await self._store.responses.get(record.scope, record.id, also_hidden=True)
        if place == after and not await self._kept_events(record.id, -1):
            for event in condensed(record.response, after):
                yield event

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._left.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task has no end; it is given one soon", exc_info=error)

    async def _perform(self, run: Run) -> None:
        keeper = asyncio.create_task(self._keep_events(run))
        began = time.perf_counter()
        self._metrics.tasks_running.inc()
        try:
            run.add(run.transcript.begin())
            outcome = await self._outcome(run)
            run.close()
            await keeper
            await self._conclude(run, outcome)
        finally:
            keeper.cancel()
            self._metrics.tasks_running.dec()
            status = run.transcript.response["status"]
            self._metrics.count_task(status, time.perf_counter() - began)
            del self._runs[run.id]
            run.finish()
            if run.is_abandoned:
                await self._clear_up(run)

    async def _clear_up(self, run: Run) -> None:
        """Leave no workspace behind that this run may have made anew for a session that is gone."""
        session_id = run.work.session.id
        with reported("a workspace is left for later"):
            if not await self._store.sessions.exists(session_id):
                await self._workspaces.destroy(session_id)

    async def _outcome(self, run: Run) -> Outcome:
        try:
            with telemetry.span("task"):
                outcome = await self._run_harness(run)
            if run.workspace is not None:
                await self._collect(run, run.workspace)
        except Refusal as refusal:
            outcome = failed("harness_error", refusal.message)
        except Exception:
            log.exception("a task broke", extra={"ref": run.id})
            outcome = failed("harness_error", "The task broke on this server.")
        return Outcome("cancelled") if run.is_cancelled else outcome

    async def _run_harness(self, run: Run) -> Outcome:
        work = asyncio.create_task(self._work(run))
        try:
            await run.drive(work)
        finally:
            await _ended(work)
        if run.is_interrupted and (work.cancelled() or work.exception() is not None):
            return failed("harness_error", "The server ended while the task ran.")
        if work.cancelled():
            return failed("harness_error", "The harness broke off.")
        return _judged(run, work.exception())

    async def _work(self, run: Run) -> None:
        """Make the workspace ready and let the harness work there: all that can be cut short."""
        await self._heed_early_wish(run)
        workspace = run.workspace = await self._workspace(run.work)
        async with aclosing(run.work.harness.harness.run(_task(run.work, workspace))) as events:
            async for event in events:
                run.add(run.transcript.take(event))
                await run.log.room()

    async def _heed_early_wish(self, run: Run) -> None:
        """A cancel can come between the acceptance of a task and its start."""
        record = run.work.response
        current = await self._store.responses.get(record.scope, record.id, also_hidden=True)
        if current.cancel_requested:
            run.cancel()
            await asyncio.sleep(0)

    async def _workspace(self, work: Work) -> Workspace:
        artifacts = await self._store.files.of_session(work.session.scope, work.session.id)
        current = [record for record in artifacts if record.current]
        return await self._workspaces.prepare(
            work.session.id,
            current,
            work.inputs,
            self._store.files.open,
            Turn(work.response.id, work.session.newest_task),
        )

    async def _collect(self, run: Run, workspace: Workspace) -> None:
        """Keep what the task made; several small files share one durable commit."""
        async with (
            aclosing(workspace.collect()) as collected,
            aclosing(_bunches(collected)) as bunches,
        ):
            async for bunch in bunches:
                if run.is_abandoned:
                    return
                async with asyncio.TaskGroup() as group:
                    keeping = [group.create_task(self._keep(run, found)) for found in bunch]
                for task in keeping:
                    self._note(run, task.result())

    def _note(self, run: Run, kept: FileRecord | Unreadable) -> None:
        if isinstance(kept, Unreadable):
            message = f"{kept.path} is not an artifact: {kept.reason}."
            run.add([run.transcript.notice("consignee_artifact_skipped", message)])
        else:
            run.citations.append(self._citation(kept))

    async def _keep(self, run: Run, found: Found | Unreadable) -> FileRecord | Unreadable:
        if isinstance(found, Unreadable):
            return found
        session = run.work.session

        async def keep(content: AsyncIterator[bytes]) -> FileRecord:
            async with self._store.stage(content) as sealed:
                record = await self._store.files.add_artifact(
                    sealed,
                    scope=session.scope,
                    principal=session.principal,
                    session=session,
                    response_id=run.id,
                    path=found.path,
                    media_type=found.media_type,
                )
            audit.record("artifact.store", principal=record.principal, **record.audited)
            return record

        try:
            return await found.read(keep)
        except Refusal as refusal:
            return Unreadable(found.path, refusal.message.rstrip("."))

    def _citation(self, record: FileRecord) -> Citation:
        return Citation(
            str(record.container_id),
            record.id,
            record.filename,
            download_url(self._base_url, record),
        )

    async def _conclude(self, run: Run, outcome: Outcome) -> None:
        # In a thread: a long text is written out several times over.
        ending = await asyncio.to_thread(
            run.transcript.end,
            outcome.status,
            run.citations,
            error=outcome.error,
            incomplete_reason=outcome.reason,
        )
        if not await self._finish(run, ending):
            ending = await self._ended_elsewhere(run, ending)
        run.is_kept = True
        run.add(ending)

    async def _finish(self, run: Run, ending: list[Event]) -> bool:
        """Keep the end, however long the store takes to be able to; whether it was still open."""
        while True:
            try:
                return await self._store.responses.finish(
                    run.id, run.transcript.response, [*run.log.unkept(), *ending]
                )
            except Refusal as refusal:
                if self._stopping.is_set():
                    raise
                log.warning("a response's end is kept later: %s", refusal.code)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), RETRY_SECONDS)

    async def _ended_elsewhere(self, run: Run, ending: list[Event]) -> list[Event]:
        """What to tell when the response went with its session, or was taken for abandoned."""
        record = run.work.response
        with suppress(NotFound):
            stored = await self._store.responses.get(record.scope, record.id, also_hidden=True)
            return [*ending[:-1], run.transcript.ended_as(ending[-1], stored.response)]
        return ending

    async def _keep_events(self, run: Run) -> None:
        """Keep what has come, in batches, until the run closes; its end keeps the rest."""
        while not run.closing.is_set():
            await run.stirred.wait()
            run.stirred.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(run.closing.wait(), GATHER_SECONDS)
            if not run.closing.is_set() and (batch := run.log.unkept()):
                await self._keep_batch(run, batch)

    async def _keep_batch(self, run: Run, batch: list[Event]) -> None:
        try:
            await self._store.responses.append_events(run.id, batch)
        except NotFound:
            run.abandon()
        except Refusal as refusal:
            log.warning("events are kept later: %s", refusal.code, extra={"ref": run.id})
            run.stirred.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(run.closing.wait(), RETRY_SECONDS)
        else:
            run.log.keep(batch)

    async def _watch_over(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            with reported("tasks are not watched over"):
                await self._heed()

    async def _heed(self) -> None:
        """Show life, hear of cancels, and give tasks without a living owner their end."""
        if living := [*self._runs, *(p.response_id for p in self._places if p.response_id)]:
            await self._store.responses.show_life(living)
            for response_id in await self._store.responses.cancelled(self.owner):
                if (run := self._runs.get(response_id)) is not None:
                    run.cancel()
        await self._bury_abandoned()

    async def _bury_abandoned(self) -> None:
        tasks = [t for t in await self._store.responses.unfinished() if t.id not in self._runs]
        silences = self._signs.silences(tasks)
        alive = {owner: await self._is_alive(owner) for owner in {task.owner for task in tasks}}
        for task in tasks:
            known = alive[task.owner]
            if known is False or (known is None and silences[task.id] >= self._lost_seconds):
                await self._bury(task)

    async def _is_alive(self, owner: str) -> bool | None:
        """Whether a process lives; None where only its tasks can tell, as those that it lost."""
        return None if owner == self.owner else await self._store.is_alive(owner)

    async def _bury(self, task: Unfinished) -> None:
        """Give the task of a process that is gone its end, with what was kept of it."""
        try:
            record = await self._store.responses.get(task.scope, task.id, also_hidden=True)
            artifacts = await self._store.files.of_session(record.scope, record.session_id)
        except NotFound:
            return
        transcript = await self._resumed(record)
        outcome = failed("harness_error", "The server that ran this task ended before it did.")
        if record.cancel_requested:
            outcome = Outcome("cancelled")
        started = [] if transcript.has_begun else transcript.begin()
        citations = [self._citation(file) for file in artifacts if file.response_id == task.id]
        ending = transcript.end(outcome.status, citations, error=outcome.error)
        if await self._store.responses.finish(task.id, transcript.response, [*started, *ending]):
            log.warning("a task of a dead process has its end now", extra={"ref": task.id})

    async def _resumed(self, record: ResponseRecord) -> Transcript:
        transcript = Transcript(record.response)
        place = -1
        while events := await self._kept_events(record.id, place):
            transcript.replay(payload for _, payload in events)
            place = events[-1][0]
        return transcript


def _task(work: Work, workspace: Workspace) -> Task:
    return Task(
        response_id=work.response.id,
        session_id=work.session.id,
        model=work.initial["model"],
        prompt=work.prompt,
        workspace=workspace.path,
        instructions=work.instructions,
        history=work.history,
        inputs=workspace.inputs,
        max_step=work.max_step,
        max_output_tokens=work.max_output_tokens,
        timeout_seconds=work.timeout_seconds,
    )


def _judged(run: Run, error: BaseException | None) -> Outcome:
    match error:
        case None:
            return Outcome("completed")
        case BudgetSpent():
            return Outcome("incomplete", reason=error.reason)
        case HarnessFailed():
            return failed(error.code, error.message)
        case HarnessUnavailable():
            return failed("harness_unavailable", error.message)
        case Refusal():
            return failed("harness_error", error.message)
    log.error("a harness broke", exc_info=error, extra={"ref": run.id})
    return failed("harness_error", "The harness broke.")


async def _bunches(
    collected: AsyncIterator[Found | Unreadable],
) -> AsyncGenerator[list[Found | Unreadable], None]:
    """Files that are kept at once: many small ones, large ones one by one."""
    bunch: list[Found | Unreadable] = []
    size = 0
    async for found in collected:
        size += found.size if isinstance(found, Found) else 0
        if bunch and (size > BUNCH_BYTES or len(bunch) >= BUNCH_FILES):
            yield bunch
            bunch, size = [], found.size if isinstance(found, Found) else 0
        bunch.append(found)
    if bunch:
        yield bunch


async def _ended(task: asyncio.Task[None]) -> None:
    """See a task to its end, whatever that is."""
    task.cancel()
    await asyncio.wait([task])
