"""Workers that are told to end amid a batch, as every deploy does: nothing stays in Processing."""

from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import text

from tests.conftest import POSTGRES
from tests.database import Database
from tests.interleaving import until
from tests.jobs import Status
from tests.lookup import count_claims, recall
from tests.looping import run
from tests.serving import eventually, serve
from tests.workers.aftermath import (
    prepare,
    read_effects,
    read_statuses,
    read_story,
    read_strikes,
)
from tests.workers.functions import FUNCTIONS
from tests.workers.launching import launch
from tests.workers.orders import CLAIM, CLOSING, END, START, WORK, Act, Life, Moment, Orders, Step
from unstuck import Unstuck

everywhere = pytest.mark.parametrize("database", [POSTGRES[-1], "sqlite"], indirect=True)
on_postgres = pytest.mark.parametrize("postgres", POSTGRES[-1:], indirect=True)
in_any_life = pytest.mark.parametrize("life", ["task", "scheduler", "application"])
in_some_life = pytest.mark.parametrize("life", ["task", "application"])

Story = list[tuple[str, str | None, str | None]]

GIVEN_BACK: Story = [("returned", "shutdown", "requeued")]
STOPPED: Story = [("attempt", "shutdown", "requeued")]
HELD: Story = [("attempt", "shutdown", "held")]

CLEAN_EXITS = (0, -15)  # newer versions of uvicorn pass the signal on after an orderly end
IF_IDEMPOTENT = {"reapable": "idempotent", "held": "Held"}
QUEUED, DONE = Status.Queued, Status.Completed

# (function, step, where the jobs of a batch of three are once the loop was cancelled there)
LIVES = [
    ("leave_the_commit", Step("before commit", CLAIM), QUEUED, QUEUED, QUEUED),
    ("leave_the_commit", Step("after commit", CLAIM), QUEUED, QUEUED, QUEUED),
    ("leave_the_commit", Step("before statement", START, 2), DONE, QUEUED, QUEUED),
    ("leave_the_commit", Step("after commit", START, 2), DONE, QUEUED, QUEUED),
    ("leave_the_commit", Step("before statement", WORK, 2), DONE, QUEUED, QUEUED),
    ("leave_the_commit", Step("before commit", END, 2), DONE, DONE, QUEUED),
    ("leave_the_commit", Step("after commit", END, 2), DONE, DONE, QUEUED),
    ("complete_by_itself", Step("after commit", WORK, 2), DONE, DONE, QUEUED),
]


async def check_that_the_next_worker_does_the_rest(database: Database, unstuck: Unstuck) -> None:
    await run(unstuck, FUNCTIONS["leave_the_commit"])
    jobs = await read_statuses(database)
    assert set(jobs.values()) == {Status.Completed}
    assert await read_effects(database) == sorted(jobs)


@pytest.mark.parametrize(
    ("database", "act"), [(POSTGRES[-1], "cancel all"), ("sqlite", "cancel")], indirect=["database"]
)
@pytest.mark.parametrize(
    ("function", "step", "one", "two", "three"),
    LIVES,
    ids=[f"{life[0]}, {life[1]}" for life in LIVES],
)
async def test_wherever_a_loop_is_cancelled_nothing_stays_in_processing(
    database: Database,
    tmp_path: Path,
    act: Act,
    function: str,
    step: Step,
    one: Status,
    two: Status,
    three: Status,
) -> None:
    unstuck = await prepare(database, 3)
    async with launch(Orders(database.url, function, step, act), tmp_path) as worker:
        assert await worker.exit() == 0
    assert await read_statuses(database) == {1: one, 2: two, 3: three}
    for job in (1, 2, 3):
        for kind, cause, _ in await read_story(database, job):
            assert (kind, cause) in [("attempt", None), ("attempt", "shutdown"), GIVEN_BACK[0][:2]]
    assert await count_claims(database) == 0
    assert await read_strikes(database) == {}
    await check_that_the_next_worker_does_the_rest(database, unstuck)


@everywhere
@pytest.mark.parametrize("moment", ["before statement", "before commit"])
async def test_what_was_cancelled_before_it_began_is_queued_even_if_it_may_not_run_twice(
    database: Database, tmp_path: Path, moment: Moment
) -> None:
    unstuck = await prepare(database, 3, **IF_IDEMPOTENT)
    step = Step(moment, START, 2)
    orders = Orders(database.url, "leave_the_commit", step, "cancel", policy=IF_IDEMPOTENT)
    async with launch(orders, tmp_path) as worker:
        assert await worker.exit() == 0
    assert await read_statuses(database) == {1: DONE, 2: QUEUED, 3: QUEUED}
    await check_that_the_next_worker_does_the_rest(database, unstuck)


@everywhere
async def test_an_end_that_is_being_written_is_not_cut_off(
    database: Database, tmp_path: Path
) -> None:
    await prepare(database, 3)
    step = Step("before statement", END, 2)
    orders = Orders(database.url, "leave_the_commit", step, "cancel")
    async with launch(orders, tmp_path) as worker:
        assert await worker.exit() == 0
    assert await read_statuses(database) == {1: DONE, 2: DONE, 3: QUEUED}
    assert await read_effects(database) == [1, 2]
    assert await read_story(database, 2) == [("attempt", None, "completed")]


@everywhere
@in_any_life
async def test_sigterm_gives_back_what_waits_and_stops_what_runs(
    database: Database, tmp_path: Path, life: Life
) -> None:
    unstuck = await prepare(database, 10, **IF_IDEMPOTENT)
    orders = Orders(
        database.url,
        "stay_from_the_second",
        life=life,
        policy=IF_IDEMPOTENT,
        call={"concurrency": 2},
    )
    async with launch(orders, tmp_path) as worker:
        assert {(await worker.hear())["at"], (await worker.hear())["at"]} == {2, 3}
        assert await worker.end() == 0
        for word in ("ERROR:unstuck", "was never", "was destroyed"):
            assert word not in worker.log
    waiting = dict.fromkeys(range(4, 11), QUEUED)
    assert await read_statuses(database) == {1: DONE, 2: Status.Held, 3: QUEUED, **waiting}
    assert [await read_story(database, job) for job in (2, 3)] == [HELD, STOPPED]
    for job in waiting:
        assert await read_story(database, job) == GIVEN_BACK
    assert await count_claims(database) == 0
    assert await read_strikes(database) == {2: 0}
    await unstuck.release("jobs", 2, by="ann", why="nothing was sent")
    await check_that_the_next_worker_does_the_rest(database, unstuck)


async def somebody_waits(database: Database) -> bool:
    waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    return bool(await database.execute(waiting))


@on_postgres
@in_some_life
async def test_a_worker_that_was_told_to_end_waits_for_a_database_that_is_slow(
    postgres: Database, tmp_path: Path, life: Life
) -> None:
    await prepare(postgres, 5)
    orders = Orders(postgres.url, "stay_from_the_second", life=life)
    async with launch(orders, tmp_path) as worker:
        assert await worker.hear() == {"at": 2}
        async with postgres.engine.begin() as connection:
            await connection.execute(text("SELECT id FROM jobs FOR UPDATE"))
            worker.tell_to_end()
            await until(lambda: somebody_waits(postgres))
            assert not await worker.ends_within(CLOSING + 1)
        assert await worker.exit() == 0
    waiting = dict.fromkeys(range(3, 6), QUEUED)
    assert await read_statuses(postgres) == {1: DONE, 2: QUEUED, **waiting}
    assert await count_claims(postgres) == 0


@on_postgres
@in_some_life
async def test_an_end_that_is_slow_is_written_whole_or_not_at_all(
    postgres: Database, tmp_path: Path, life: Life
) -> None:
    """The function has returned, and the end of its record waits, when the worker has to go."""
    unstuck = await prepare(postgres, 3)
    async with launch(Orders(postgres.url, "leave_the_commit", life=life), tmp_path) as worker:
        async with postgres.engine.begin() as connection:
            await connection.execute(text("LOCK TABLE zombie_events IN SHARE MODE"))
            await until(lambda: somebody_waits(postgres))
            worker.tell_to_end()
            assert not await worker.ends_within(CLOSING + 1)
        assert await worker.exit() == 0
    jobs = await read_statuses(postgres)
    assert jobs in [{1: one, 2: QUEUED, 3: QUEUED} for one in (QUEUED, DONE)]
    assert await read_effects(postgres) == [job for job in jobs if jobs[job] is DONE]
    assert await count_claims(postgres) == 0
    await check_that_the_next_worker_does_the_rest(postgres, unstuck)
    assert not [entry for entry in await read_story(postgres, 1) if "late" in entry[0]]


@everywhere
@in_some_life
async def test_sigterm_leaves_nothing_behind_when_the_pool_is_exhausted(
    database: Database, tmp_path: Path, life: Life
) -> None:
    """One job has the only connection, two wait for it, and two for their turn."""
    unstuck = await prepare(database, 5)
    orders = Orders(
        database.url,
        "stay_in_a_transaction",
        life=life,
        engine={"pool_size": 1, "max_overflow": 0},
        call={"concurrency": 3},
    )
    async with launch(orders, tmp_path) as worker:
        assert await worker.hear() == {"at": 1}
        assert await worker.end() == 0
    assert await read_statuses(database) == dict.fromkeys(range(1, 6), QUEUED)
    assert await count_claims(database) == 0
    assert await read_effects(database) == []
    await check_that_the_next_worker_does_the_rest(database, unstuck)


@everywhere
@in_some_life
async def test_sigterm_in_a_side_effect_holds_the_record_with_the_evidence(
    database: Database, tmp_path: Path, life: Life
) -> None:
    await prepare(database, 2)
    async with launch(Orders(database.url, "charge_a_card", life=life), tmp_path) as worker:
        assert await worker.hear() == {"at": 1}
        assert await worker.end() == 0
    assert await read_statuses(database) == {1: Status.Processing, 2: QUEUED}
    assert await read_story(database, 1) == HELD
    first = await recall(database, 1)
    assert first is not None
    assert first.held_at is not None
    assert "the side effect 'charge card' had begun and was not seen to end" in first.held_reason


# (how long a page takes, how many are done when the application is told to end)
PACES = [(0.05, 3), (60.0, 0)]


async def count_pages(database: Database, column: str) -> Counter[str | None]:
    rows = await database.execute(f"SELECT {column} FROM pages")
    return Counter(row[0] for row in rows)


def pace(seconds: float) -> dict[str, str]:
    return {"PAGE_INTERVAL_SECONDS": "0.2", "PAGE_FETCH_SECONDS": str(seconds)}


async def until_amid(database: Database, done: int) -> None:
    """Some pages are done, and some are in work."""

    async def is_amid() -> bool:
        pages = await count_pages(database, "page_processing_status")
        return pages["Complete"] >= done and pages["Processing"] > 0

    await eventually(is_amid)


@everywhere
@pytest.mark.parametrize(("seconds", "done"), PACES)
async def test_sigterm_to_the_application_leaves_no_page_in_processing(
    database: Database, tmp_path: Path, seconds: float, done: int
) -> None:
    async with serve(database.url, tmp_path / "log", pace(seconds)) as app:
        for n in range(12):
            (await app.client.post("/pages", params={"url": f"page {n}"})).raise_for_status()
        await until_amid(database, done)
        assert await app.terminate() in CLEAN_EXITS
        assert "ERROR:unstuck" not in app.log
    pages = await count_pages(database, "page_processing_status")
    assert pages["Complete"] + pages["Queued"] == 12
    assert (pages["Complete"] >= done, pages["Queued"] > 0) == (True, True)
    assert await count_claims(database) == 0


@on_postgres
async def test_deploy_after_deploy_each_page_is_done_and_none_is_struck(
    postgres: Database, tmp_path: Path
) -> None:
    """However a deploy hits, there is nothing for the sweep to find."""
    async with serve(postgres.url, tmp_path / "first") as app:
        for n in range(20):
            (await app.client.post("/pages", params={"url": f"page {n}"})).raise_for_status()
    for deploy in (1, 2):
        async with serve(postgres.url, tmp_path / f"log {deploy}", pace(0.05)) as app:
            await until_amid(postgres, deploy * 4)
            assert await app.terminate() in CLEAN_EXITS
        assert (await count_pages(postgres, "page_processing_status"))["Processing"] == 0
    async with serve(postgres.url, tmp_path / "last", pace(0)):

        async def all_are_done() -> bool:
            return await count_pages(postgres, "page_processing_status") == {"Complete": 20}

        await eventually(all_are_done)
    assert await count_pages(postgres, "content_status") == {"Queued": 20}
    rows = await postgres.execute("SELECT id FROM zombie_events WHERE kind = 'zombie'")
    assert rows == []
    attempts = "SELECT count(*), count(DISTINCT record_id) FROM zombie_events"
    completed = await postgres.execute(f"{attempts} WHERE outcome = 'completed'")
    assert completed == [(20, 20)]
