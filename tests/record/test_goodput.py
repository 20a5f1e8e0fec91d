"""Where a run's time went: what was done to made-up runs is what their account says, and all parts are all of it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from volo.record import goodput
from volo.record.goodput import PARTS, Stopwatch, account_of
from volo.record.history import read_records

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
STARTING = {"imports": 4.0, "listing": 6.0}


def life(begun: float, *updates: int, pid: int = 1, end: int | None = None, **more: Any) -> list[dict[str, Any]]:
    """The events of a process that takes 10 s to start, and for each update 2 s, of which it waits 0.5 for data. It has
    resumed what `first` says, and spent more on what is named; an `old` version tells nothing of it."""
    spent = STARTING | {name: more[name] for name in ("compiling", "validation", "saving", "away") if name in more}
    first, events = more.get("first"), list[dict[str, Any]]()

    def event(kind: str, update: int | None, spent: dict[str, float], **fields: Any) -> None:
        known = {"rank": 0, "node": "n", "pid": pid, "kind": kind} | ({} if update is None else {"update": update})
        time = BEGAN + timedelta(seconds=begun + sum(spent.values()))
        events.append(known | {"time": time.isoformat()} | ({} if more.get("old") else {"spent": spent}) | fields)

    event("start", None, STARTING, job=more.get("job"))
    if first is not None:
        event("resume", first, STARTING)
    for update in updates:
        done = update - (first or 0)
        event("time", update, spent | {"step": 1.5 * done, "data": 0.5 * done})
    if hung := more.get("hung"):
        event("checkpoint", update, spent | {"step": 1.5 * done, "data": 0.5 * done})
        event("fault", update, spent | {"step": 1.5 * done + hung, "data": 0.5 * done})
    if end is not None:
        events.append(events[-1] | {"kind": "end", "exit_code": end, "reason": "done"})
    return events


# What a run went through, the seconds of each part but training, waiting and starting, what its restarts cost, and its
# sentence. Each killed start has trained 10 updates, 20 s, and each last one goes on to 30.
LIVES: dict[str, tuple[list[dict[str, Any]], dict[str, float], str]] = {
    "never disturbed": (life(0, 0, 30, end=0, validation=10.0), {"validation": 10}, "56 % of 1.3 min trained"),
    "requeued": (
        life(0, 0, 10, end=85, job="7.0") + life(130, 10, 30, first=10, end=0, job="7.1"),
        {"away": 100},
        "25 % of 3.0 min trained; 1 restart cost 1.8 min, of which 1.7 min in the queue",
    ),
    "killed within an epoch": (
        life(0, 0, 10) + life(40, 6, 30, first=6, end=0),
        {"away": 10, "done twice": 8},
        "46 % of 1.6 min trained; 1 restart cost 28 s",
    ),
    "killed before its first save, and while it started": (
        life(0, 0, 10) + life(40) + life(60, 0, 30, end=0, compiling=20.0),
        {"away": 20, "done twice": 20, "compiling, capturing": 20},
        "30 % of 2.5 min trained; 2 restarts cost 1.3 min",
    ),
    "the newest checkpoint was damaged, and then an older one": (
        life(0, 0, 10) + life(30, 8, 10, first=8) + life(44, 4, 30, first=4, end=0),
        {"done twice": 16},
        "42 % of 1.8 min trained; 2 restarts cost 36 s",
    ),
    "it hung for a minute after a save": (
        life(0, 0, 10, hung=60.0, end=5) + life(90, 10, 30, first=10, end=0),
        {"done twice": 60},
        "32 % of 2.3 min trained; 1 restart cost 1.2 min",
    ),
    "the clock was set back by 5 s": (
        life(0, 0, 10) + life(25, 10, 30, first=10, end=0),
        {},
        "56 % of 1.3 min trained; 1 restart cost 10 s",
    ),
    "a second job was kept out": (
        life(0, 0, 2) + life(12, pid=2, end=2) + life(0, 0, 10)[2:] + life(40, 10, 30, first=10, end=0),
        {"away": 10},
        "50 % of 1.5 min trained; 1 restart cost 20 s",
    ),
    "it had ended, and went on to more epochs": (
        life(0, 0, 10, end=0) + life(3630, 10, 30, first=10, end=0),
        {"away": 3600},
        "1 % of 1.0 h trained; 1 restart cost 10 s; 1.0 h passed after it had ended",
    ),
    "the machine slept": (life(0, 0, 30, away=30.0), {"away": 30}, "45 % of 1.7 min trained"),
    "the same job started its processes again": (
        life(0, 0, 10, job="7.0") + life(34, 10, 30, first=10, job="7.0"),
        {"away": 4},
        "54 % of 1.4 min trained; 1 restart cost 14 s",
    ),
}


@pytest.mark.parametrize("name", LIVES)
def test_what_was_done_to_a_run_is_what_its_account_says(name, tmp_path):
    events, told, sentence = LIVES[name]
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (tmp_path / "events.jsonl").write_text(lines + '{"kind": "time", "rank": 0, "sp')  # torn by a power cut
    account = account_of(read_records(tmp_path))
    starting = 10.0 * sum(event["kind"] == "start" and event["pid"] == 1 for event in events)
    rest = {part: account.parts[part] for part in PARTS if part not in ("training", "waiting for data", "starting")}
    assert rest == pytest.approx(dict.fromkeys(rest, 0.0) | told)
    assert account.parts["training"] == pytest.approx(45) and account.parts["waiting for data"] == pytest.approx(15)
    assert account.parts["starting"] == starting and str(account) == sentence
    bar = account.bar()
    assert len(bar) == 79
    for part, (mark, _) in PARTS.items():
        assert abs(bar.count(mark) - 79 * account.parts[part] / account.total) <= 1


def test_an_older_version_tells_less(tmp_path):
    old, new = life(0, 0, 10, old=True), life(130, 10, 30, first=10)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in old + new))
    account = account_of(read_records(tmp_path))
    told = {part: seconds for part, seconds in account.parts.items() if seconds}
    assert told == {"training": 30.0, "waiting for data": 10.0, "starting": 10.0, "not told": 20.0, "away": 100.0}
    assert str(account) == (
        "18 % of 2.8 min trained; 1 restart cost 1.8 min; an older version has not told where 20 s went"
    )


def test_a_stopwatch_counts_parts_and_when_time_stood_still(monkeypatch):
    now, processor = [100.0], [0.0]
    monkeypatch.setattr(goodput, "clock", lambda: now[0])
    monkeypatch.setattr(goodput.time, "process_time", lambda: processor[0])

    def passes(seconds: float, busy: float = 0.0) -> None:
        now[0] += seconds
        processor[0] += busy

    watch = Stopwatch()
    passes(2.0)
    assert watch.enter("step") == "imports"
    passes(10.0, busy=9.0)  # nobody looked, but it worked
    assert watch.enter("data") == "step"
    passes(600.0, busy=0.1)  # SIGSTOP
    watch.enter()
    passes(1.0)
    assert watch.spent() == {"imports": 2.0, "step": 10.0, "away": 600.0, "data": 1.0}


def test_what_torch_compiles_is_counted_wherever_it_does(monkeypatch):
    import torch

    watch = Stopwatch()
    watch.enter("validation")
    with watch.compiling_counted():
        torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(3))
    assert watch.enter("step") == "validation" and watch.spent()["compiling"] > 0
    callbacks = torch._dynamo.callback.callback_handler
    assert not callbacks.start_callbacks and not callbacks.end_callbacks
