import asyncio
import logging
from typing import Any

import pytest

from unstuck import Observer
from unstuck.events import MassStall, Observers

STALL = MassStall("jobs", 500)


class Plain(Observer):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_mass_stall(self, stall: MassStall) -> None:
        self.told.append(stall)


class Async(Observer):
    def __init__(self) -> None:
        self.told: list[Any] = []

    async def on_mass_stall(self, stall: MassStall) -> None:
        await asyncio.sleep(0)
        self.told.append(stall)


class Duck:
    """Knows nothing of `Observer`, and listens to one thing only."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_status_changed(self, *arguments: Any) -> None:
        self.told.append(arguments)


class Broken(Observer):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def on_mass_stall(self, stall: MassStall) -> None:
        raise self.error


@pytest.mark.parametrize("kind", [Plain, Async])
async def test_plain_and_async_observers_are_told(kind: type[Plain] | type[Async]) -> None:
    observer = kind()
    await Observers([observer]).tell("on_mass_stall", STALL)
    assert observer.told == [STALL]


async def test_an_observer_needs_no_base_class_and_not_every_method() -> None:
    duck = Duck()
    observers = Observers([duck])
    await observers.tell("on_mass_stall", STALL)
    await observers.tell("on_status_changed", "jobs", "1", "old", "new")
    assert duck.told == [("jobs", "1", "old", "new")]


async def test_a_method_may_be_put_on_the_object_itself() -> None:
    told: list[Any] = []
    observer = Observer()
    vars(observer)["on_mass_stall"] = told.append
    await Observers([observer]).tell("on_mass_stall", STALL)
    assert told == [STALL]


async def test_observers_are_told_in_order() -> None:
    order: list[int] = []

    class Numbered:
        def __init__(self, number: int) -> None:
            self.number = number

        def on_mass_stall(self, stall: MassStall) -> None:
            order.append(self.number)

    await Observers([Numbered(1), Numbered(2), Numbered(3)]).tell("on_mass_stall", STALL)
    assert order == [1, 2, 3]


async def test_one_that_raises_is_logged_and_the_next_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    after = Plain()
    observers = Observers([Broken(ZeroDivisionError("by design")), after])
    with caplog.at_level(logging.ERROR, "unstuck"):
        await observers.tell("on_mass_stall", STALL)
    assert after.told == [STALL]
    (record,) = caplog.records
    assert "Broken.on_mass_stall" in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)


async def test_a_cancellation_is_not_an_observers_failure() -> None:
    class Waiting:
        reached = asyncio.Event()

        async def on_mass_stall(self, stall: MassStall) -> None:
            self.reached.set()
            await asyncio.Event().wait()

    telling = asyncio.create_task(Observers([Waiting()]).tell("on_mass_stall", STALL))
    await Waiting.reached.wait()
    telling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await telling


async def test_what_an_observer_awaited_being_cancelled_is_its_own_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard = Plain()
    await Observers([Broken(asyncio.CancelledError()), heard]).tell("on_mass_stall", STALL)
    assert "failed in on_mass_stall" in caplog.text
    assert heard.told == [STALL]


async def test_an_observer_that_never_answers_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Silent:
        async def on_mass_stall(self, stall: MassStall) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr("unstuck.events._PATIENCE", 0.01)
    await Observers([Silent()]).tell("on_mass_stall", STALL)
    assert "failed in on_mass_stall" in caplog.text
