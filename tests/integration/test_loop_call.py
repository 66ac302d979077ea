"""Call-compatible with the loop that applications already have, and clear about what is wrong."""

import enum
import inspect
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Enum, String, asc, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import unstuck as library
from tests.database import Database
from tests.jobs import Job, Status, ago, change, get_job, start
from tests.lookup import remember
from tests.looping import CALL, age_claims, queue_job, queue_jobs, run
from unstuck import Claim, RegistrationError, Registry, Unstuck, ZombieSettings, metadata
from unstuck.defaults import configure


class Base(DeclarativeBase):
    pass


class PageStatus(enum.Enum):
    Queued = "Queued"
    Processing = "Processing"
    Complete = "Complete"
    Error = "Error"


class Page(Base):
    """Registered by nobody, and without an updated_at."""

    __tablename__ = "pages"

    id: Mapped[int] = mapped_column(primary_key=True)
    page_status: Mapped[PageStatus] = mapped_column(Enum(PageStatus), default=PageStatus.Queued)
    page_error: Mapped[str | None] = mapped_column(String(20))


async def nothing(item_id: int, session: AsyncSession) -> None:
    """The least that a processing function can do."""


async def start_pages(database: Database, pages: int = 1) -> Unstuck:
    await database.create(Base.metadata)
    await database.create(metadata)
    async with database.sessions.begin() as session:
        session.add_all([Page() for _ in range(pages)])
    return Unstuck(database.sessions, ZombieSettings(), Registry())


PAGE_CALL: dict[str, Any] = {
    "model": Page,
    "status_enum": PageStatus,
    "queued_status": PageStatus.Queued,
    "processing_status": PageStatus.Processing,
    "completed_status": PageStatus.Complete,
    "failed_status": PageStatus.Error,
    "batch_size": 5,
    "status_field_name": "page_status",
    "error_field_name": "page_error",
}


def test_the_signature_is_the_one_that_applications_know() -> None:
    parameters = inspect.signature(library.run_job_loop).parameters
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "model",
        "status_enum",
        "queued_status",
        "processing_status",
        "completed_status",
        "failed_status",
        "processing_function",
        "batch_size",
        "order_by_column",
        "status_field_name",
        "error_field_name",
    ]
    defaults = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    assert defaults == {
        "order_by_column": None,
        "status_field_name": "status",
        "error_field_name": "error",
        "session_factory": None,
        "additional_filters": None,
        "concurrency": 1,
        "timeout": None,
        "name": None,
        "drain": False,
    }


async def test_it_can_be_called_by_position(database: Database) -> None:
    prepared = await start(database)
    job = await queue_job(database)
    configure(database.sessions, registry=prepared.registry)
    await library.run_job_loop(
        Job,
        Status,
        Status.Queued,
        Status.Processing,
        Status.Completed,
        Status.Failed,
        nothing,
        10,
        asc(Job.updated_at),
        "status",
        "error",
    )
    assert (await get_job(database, job)).status is Status.Completed


@pytest.mark.parametrize("order", ["updated_at", Job.updated_at, [asc(Job.updated_at), Job.id]])
async def test_an_order_may_be_a_name_a_column_or_several(database: Database, order: Any) -> None:
    unstuck = await start(database)
    late, early = [await queue_job(database, updated_at=ago(age)) for age in (10, 20)]
    seen: list[int] = []

    async def work(item_id: int, session: AsyncSession) -> None:
        seen.append(item_id)

    await run(unstuck, work, order_by_column=order)
    assert seen == [early, late]


async def test_filters_say_what_may_be_claimed(database: Database) -> None:
    unstuck = await start(database)
    due, not_due = [await queue_job(database, zombie_count=n) for n in (0, 1)]
    assert (await run(unstuck, nothing, additional_filters=Job.zombie_count == 0)).claimed == 1
    assert (await get_job(database, due)).status is Status.Completed
    assert (await get_job(database, not_due)).status is Status.Queued
    several = [Job.zombie_count == 1, Job.id == due]
    assert (await run(unstuck, nothing, additional_filters=several)).claimed == 0
    asked = 0

    def anew() -> Any:
        nonlocal asked
        asked += 1
        return Job.zombie_count == asked

    assert (await run(unstuck, nothing, additional_filters=anew, drain=True)).claimed == 1
    assert asked == 2


async def test_one_batch_a_call_or_all_that_there_is(database: Database) -> None:
    unstuck = await start(database)
    await queue_jobs(database, 7)
    assert (await run(unstuck, nothing, batch_size=3)).claimed == 3
    result = await run(unstuck, nothing, batch_size=3, drain=True)
    assert (result.claimed, result.completed) == (4, 4)
    assert str(result) == "jobs: claimed 4: 4 completed"
    assert str(await run(unstuck, nothing)) == "jobs: claimed 0: nothing to do"


async def test_without_a_registration_the_loop_makes_one_that_the_sweep_uses(
    database: Database,
) -> None:
    unstuck = await start_pages(database)

    async def die(item_id: int, session: AsyncSession) -> None:
        await age_claims(database)
        report = await unstuck.sweep()
        assert report.found == 1

    result = await unstuck.run_job_loop(**PAGE_CALL, processing_function=die)
    (workflow,) = unstuck.registry
    assert (workflow.name, result.lost) == ("Page.page_status", 1)
    assert workflow.error is not None
    assert workflow.error.name == "page_error"


async def test_the_name_of_the_loop_is_that_of_the_workflow_it_makes(database: Database) -> None:
    unstuck = await start_pages(database)
    workers: list[str] = []

    async def work(item_id: int, session: AsyncSession, claim: Claim) -> None:
        workers.append(claim.worker_id)

    await unstuck.run_job_loop(**PAGE_CALL, processing_function=work, name="pages")
    assert "pages" in unstuck.registry
    assert workers[0].endswith(":pages")


@pytest.mark.parametrize("kind", ["queued", "processing", "completed", "failed"])
async def test_where_registration_and_call_disagree_it_says_so_and_claims_nothing(
    database: Database, kind: str
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    with pytest.raises(RegistrationError) as refused:
        await run(unstuck, nothing, **{f"{kind}_status": Status.Waiting})
    registered = Status[kind.capitalize()]
    assert str(refused.value) == (
        f"Job: run_job_loop says {kind}_status=Status.Waiting, but jobs is registered with "
        f"{kind}={registered}; make them agree."
    )
    assert (await get_job(database, job)).status is Status.Queued


async def test_what_the_registration_left_open_the_call_may_say(database: Database) -> None:
    unstuck = await start(database, completed=None)
    job = await queue_job(database)
    await run(unstuck, nothing)
    assert (await get_job(database, job)).status is Status.Completed
    assert unstuck.registry.get("jobs").completed is Status.Completed


@pytest.mark.parametrize("form", ["member", "name", "value"])
async def test_a_status_may_be_given_as_member_name_or_value(database: Database, form: str) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    said = {
        key: {"member": value, "name": value.name, "value": value.value}[form]
        for key, value in CALL.items()
        if isinstance(value, Status)
    }
    await run(unstuck, nothing, **said)
    assert (await get_job(database, job)).status is Status.Completed


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1."),
        ({"concurrency": 1.5}, "concurrency=1.5 must be a whole number of at least 1."),
        ({"timeout": 0}, "timeout=0 must be more than 0 seconds, or None for no limit."),
        ({"timeout": timedelta(seconds=-1)}, "must be more than 0 seconds"),
        ({"status_field_name": "state"}, "Job: status='state' is not one of its columns: did you"),
        ({"failed_status": "Faild"}, "Job: failed_status='Faild' is not a value of status: did"),
        ({"order_by_column": "update"}, "did you mean 'updated_at'?"),
        ({"processing_function": lambda: None}, "it must take (item_id, session), or (item_id, "),
    ],
)
async def test_what_cannot_work_is_refused_in_a_sentence(
    database: Database, wrong: dict[str, Any], sentence: str
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    with pytest.raises((ValueError, RegistrationError)) as refused:
        await run(unstuck, **{"function": nothing, **wrong})
    assert sentence in str(refused.value)
    assert (await get_job(database, job)).status is Status.Queued


async def test_a_wrong_error_column_is_refused(database: Database) -> None:
    unstuck = await start_pages(database)
    with pytest.raises(RegistrationError, match="did you mean 'page_error'"):
        await unstuck.run_job_loop(
            **{**PAGE_CALL, "error_field_name": "pageerror"}, processing_function=nothing
        )


async def test_missing_tables_are_told(database: Database) -> None:
    await database.create(Base.metadata)
    unstuck = Unstuck(database.sessions, ZombieSettings(), Registry())
    with pytest.raises(library.UnstuckError, match="create_tables=True"):
        await unstuck.run_job_loop(**PAGE_CALL, processing_function=nothing)


class Legacy:
    """Functions written for an older loop, which know nothing of this one."""

    @staticmethod
    async def own_transaction(item_id: int, session: AsyncSession) -> bool:
        async with session.begin():
            job = (await session.execute(select(Job).where(Job.id == item_id))).scalar_one()
            job.status = Status.Completed
        return True

    @staticmethod
    async def several_commits(item_id: int, session: AsyncSession) -> None:
        job = await session.get(Job, item_id)
        assert job is not None
        for count in (1, 2):
            job.zombie_count = count
            await session.commit()
        job.status = Status.Completed
        await session.commit()

    @staticmethod
    async def extra_parameter(item_id: int, session: AsyncSession, verbose: bool = False) -> bool:
        assert verbose is False
        return True

    @staticmethod
    def not_a_coroutine(item_id: int, session: AsyncSession) -> bool:
        return True

    async def method(self, item_id: int, session: AsyncSession) -> bool:
        return True


@pytest.mark.parametrize(
    "function",
    [
        Legacy.own_transaction,
        Legacy.several_commits,
        Legacy.extra_parameter,
        Legacy.not_a_coroutine,
        Legacy().method,
    ],
)
async def test_a_function_for_an_older_loop_works_unchanged(
    database: Database, function: Any
) -> None:
    unstuck = await start(database)
    job = await queue_job(database)
    result = await run(unstuck, function)
    assert (result.claimed, result.completed) == (1, 1)
    assert (await get_job(database, job)).status is Status.Completed


async def test_a_function_that_returns_false_and_sets_nothing_leaves_its_record_failed(
    database: Database,
) -> None:
    unstuck = await start(database)
    silent, telling = await queue_jobs(database, 2)

    async def work(item_id: int, session: AsyncSession) -> bool:
        if item_id == telling:
            job = await session.get(Job, item_id)
            assert job is not None
            job.error = "404"
        return False

    assert (await run(unstuck, work)).failed == 2
    errors = {job: (await get_job(database, job)).error for job in (silent, telling)}
    assert errors == {silent: "The processing function returned False", telling: "404"}
    assert (await get_job(database, silent)).status is Status.Failed


async def test_a_record_that_is_not_due_or_held_is_not_claimed(database: Database) -> None:
    unstuck = await start(database, retry_at="retry_at")
    due, waits_in_row, waits_in_memory, held, free = await queue_jobs(database, 5)
    await change(database, due, retry_at=ago(1))
    await change(database, waits_in_row, retry_at=ago(-600))
    for job, column, when in (
        (waits_in_memory, "retry_at", ago(-600)),
        (held, "held_at", ago(1)),
    ):
        await remember(database, job, **{column: when})
    claimed: set[int] = set()

    async def work(item_id: int, session: AsyncSession) -> None:
        claimed.add(item_id)

    await run(unstuck, work, drain=True)
    assert claimed == {due, free}
