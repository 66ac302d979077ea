"""What is remembered of records is looked up a part at a time."""

from tests.database import Database
from tests.jobs import Status, add_job, change, start
from unstuck import Unstuck

SMALL = {"batch_size": 2, "max_per_sweep": 2, "backoff_base_seconds": 0}


async def strikes(database: Database) -> int:
    [(count,)] = await database.execute("SELECT count(*) FROM zombie_records")
    return int(count)


async def start_with_strikes(database: Database, jobs: int) -> Unstuck:
    unstuck = await start(database, settings=SMALL)
    ids = [await add_job(database) for _ in range(jobs)]
    while (await unstuck.sweep()).found:
        pass
    for job in ids:
        await change(database, job, status=Status.Completed)
    return unstuck


async def test_a_sweep_settles_no_more_than_it_may_take(database: Database) -> None:
    unstuck = await start_with_strikes(database, 5)
    assert await strikes(database) == 5
    await unstuck.sweep()
    assert 0 < await strikes(database) < 5


async def test_the_next_sweep_goes_on_where_the_last_one_stopped(database: Database) -> None:
    unstuck = await start_with_strikes(database, 5)
    for _ in range(4):
        await unstuck.sweep()
    assert await strikes(database) == 0
