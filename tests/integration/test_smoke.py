from tests.database import Database
from tests.jobs import Status, add_job, get_job, start


async def test_a_stuck_job_comes_back(database: Database) -> None:
    unstuck = await start(database)
    stuck = await add_job(database)
    report = await unstuck.sweep()
    assert report.errors == []
    assert report.left_processing == 1
    assert (await get_job(database, stuck)).status is Status.Queued
