import pytest

from unstuck.errors import describe


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("cannot reach postgresql://app:s3cret@db/app", "cannot reach postgresql://app:***@db/app"),
        ("postgresql://app:s3/cr@et@db/app", "postgresql://app:***@db/app"),
        ("host=db password=s3cret user=app", "host=db password=*** user=app"),
        ("postgresql://db/app?password=s3cret&x=1", "postgresql://db/app?password=***&x=1"),
        ("{'password': 's3cret'}", "{'password': '***'}"),
        ("password authentication failed for user app",) * 2,
        ("<class 'asyncpg.exceptions.LockError'>: lock timeout", "lock timeout"),
        ("first line\nSELECT everything", "first line"),
        ("", "ValueError"),
    ],
)
def test_an_error_is_told_in_one_line_without_its_secrets(said: str, told: str) -> None:
    assert describe(ValueError(said)) == told
