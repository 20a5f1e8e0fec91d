"""Reports what happened to a run, from the records in its directory: `volo report RUN`.

It prints accuracy, data and model, command, where the time went, starts, speed, checkpoints and faults. `--html` writes
RUN/report.html, one page with these, the curves, the settings and the first batch, for any screen width, light and
dark. Runs may be unfinished or killed, and files may be damaged.
"""

import base64
import csv
import html
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import yaml

from tlt.errors import UserError
from tlt.io.files import os_errors_as
from tlt.io.text import table
from tlt.io.weights import peek_checkpoint, read_checkpoint
from volo.config.settings_tools import ReportSettings
from volo.config.train import changed_flags
from volo.record.confusion import CLASSES, CONFUSION, MISTAKES, WORST
from volo.record.goodput import PARTS, Account, account_of
from volo.record.history import EVENTS, Record, Records, Start, number, read_records, starts_in
from volo.record.records import duration

PAGE = "report.html"
_ORDINARY = {"start", "resume", "time", "checkpoint", "verdict", "end"}  # kinds of events of a run without faults
_SHOWN_FILES = 20
_OF_LOG = ("model", "data")  # first words of the lines of log.txt that the report quotes
_STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--faint:#585858;--paper:#ffffff;--box:#f2f2f2}
@media(prefers-color-scheme:dark){:root{--ink:#e6e6e6;--faint:#a9adb5;--paper:#17191d;--box:#24272d}}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:auto;padding:.5rem 1rem;color:var(--ink)}
html{background:var(--paper)}h1{font-size:1.5rem;overflow-wrap:anywhere}h2{font-size:1.15rem;margin-top:2rem}
dl{display:grid;grid-template-columns:auto 1fr;gap:.3rem 1rem}dt{color:var(--faint)}dd{margin:0;overflow-wrap:anywhere}
dd:first-of-type{font-size:1.25rem;font-weight:600}img{max-width:100%;height:auto;background:#fff}
.bar{display:flex;height:1.6rem}.bar i{min-width:1px}.key{display:flex;flex-wrap:wrap;gap:.3rem 1rem;margin:.3rem 0}
.key i{display:inline-block;width:.8rem;height:.8rem}.p0{background:#009e73}.p1{background:#e69f00}
.p2{background:#56b4e9}.p3{background:#0072b2}.p4{background:#cc79a7}.p5{background:#d55e00}.p6{background:#f0e442}
.p7{background:#999}.p8{background:#555}
div{overflow-x:auto}div img{max-width:max(100%,36rem)}
pre{font:14px/1.45 ui-monospace,monospace;background:var(--box);padding:.7rem;overflow-x:auto}summary{cursor:pointer}
"""


def run(settings: ReportSettings) -> int:
    """Print the report, and with `--html` write it as a page."""
    folder = Path(settings.run)
    records = read_records(folder)
    starts = starts_in(records.events)
    account = account_of(records)
    head = _head(folder, records, account)
    sections = {
        "Settings other than the defaults": _settings(folder),
        "Classes, the least accurate first": _classes(folder),
        "Time": _time(account),
        "Starts": table([_HEADS, *(_row(number, start) for number, start in enumerate(starts, 1))]) if starts else [],
        "Speed": _speed(records),
        "Checkpoints": _checkpoints(folder, verify=not settings.quick),
        "Faults": [f"{count} x {kind}" for kind, count in sorted(faults(records.events).items())],
        "Files that could not be used": _skipped(records.events),
    }
    print(*(f"{term:<9}{text}" for term, text in head.items()), sep="\n")
    for title, lines in sections.items():
        print(f"\n{title}", *(lines or ["none recorded"]), sep="\n")
    if settings.html:
        with os_errors_as(lambda error: f"--html: {folder / PAGE} can't be written ({error.strerror})"):
            (folder / PAGE).write_text(_page(folder, head, sections, account), "utf-8")
        print(f"\nwritten: {folder / PAGE}")
    return 0


def faults(events: Sequence[Record]) -> Counter[str]:
    """Count the recorded faults by kind, and the damaged checkpoints that a resume skipped."""
    counts = Counter(kind for event in events if (kind := str(event.get("kind"))) not in _ORDINARY)
    skipped = sum(len(event["skipped"]) for event in events if isinstance(event.get("skipped"), list))
    return counts + Counter({"damaged checkpoint skipped": skipped})


def _head(folder: Path, records: Records, account: Account) -> dict[str, str]:
    """Return the most important facts by name: accuracy, how far the run came, data and model, and the command. Facts
    that are not recorded are left out."""
    last = records.reports[-1] if records.reports else {}
    loss = f", loss {number(last, 'loss', math.nan):.4f}" if last else ""
    run = [f"{int(number(last, 'update'))} updates reported, {len(records.epochs)} epochs finished{loss}"]
    run += [f"{count} damaged lines of {name} are left out" for name, count in records.damaged.items() if count]
    verdicts = [event.get("text") for event in records.events if event.get("kind") == "verdict"]
    summary = {"verdict": str(verdicts[-1] or "") if verdicts else ""}
    summary |= {"top-1": _accuracy(records.epochs), "run": "; ".join(run)}
    begun = [event for event in records.events if event.get("kind") in ("start", "resume")][:2]
    if begun and begun[-1]["kind"] == "resume" and begun[-1].get("path"):
        summary["branch"] = f"of {begun[-1]['path']}, with {int(number(begun[-1], 'update'))} updates done"
    with suppress(OSError):
        for line in (folder / "log.txt").read_text("utf-8", "replace").splitlines():
            word, _, text_after = line[20:].partition(" ")  # the first 20 characters are the time
            if word.rstrip(":") in _OF_LOG:
                summary[word.rstrip(":")] = text_after
    if account.total:
        summary["time"] = f"from the first start to the last record {duration(account.total)}"
        summary["goodput"] = str(account)
    commands = [event["command"] for event in records.events if isinstance(event.get("command"), list)]
    if words := [str(word) for word in commands[-1]] if commands else []:
        script = Path(words[0]).name
        program = "volo" if script == "__main__.py" else f"python {script}" if script.endswith(".py") else script
        summary["command"] = f"{program} {shlex.join(words[1:])}"
    return {term: text for term, text in summary.items() if text}


def _accuracy(epochs: list[Record]) -> str:
    """Return the best and the last top-1 of the weights that rank the epochs; "" if none was measured."""
    for name, weights in (("eval_top1_ema", " of the averaged weights"), ("eval_top1", "")):
        if scored := [record for record in epochs if number(record, name, -1.0) >= 0]:
            best, last = (
                f"{number(record, name):.2f} % (epoch {int(number(record, 'epoch')) + 1})"
                for record in (max(scored, key=lambda record: number(record, name)), scored[-1])
            )
            return f"best {best}, last {last}{weights}, {int(number(scored[-1], 'eval_images'))} validation images"
    return ""


_HEADS = ("#", "started (UTC)", "node", "ranks", "updates", "for", "ended")


def _row(number: int, start: Start) -> tuple[str, ...]:
    ended = start.end or f"not recorded, last event {_clock(start.last_event)}"
    seconds = (start.last_event - start.time).total_seconds() if start.last_event and start.time else 0.0
    ranks = str(start.ranks or "?")
    span = f"{start.first or 0} -> {start.last}"
    return str(number), _clock(start.time), start.node, ranks, span, duration(seconds), ended


def _time(account: Account) -> list[str]:
    """Return a bar of where the time went, and a row for each part; of an unfinished run until its last record."""
    total = account.total
    if not total:
        return []
    rows = [
        (mark, part, f"{duration(seconds)}.{int(10 * seconds) % 10}", f"{100 * seconds / total:.1f} %")
        for mark, part, seconds in (
            *((PARTS[part][0], part, seconds) for part, seconds in account.parts.items() if seconds),
            ("", "all", total),
        )
    ]
    return [account.bar(), *table(rows)]


def _drawn(account: Account) -> str:
    """Return the same bar as a drawing, whose colours have their names in its text and below."""
    shares = [(part, 100 * seconds / max(account.total, 1e-9)) for part, seconds in account.parts.items() if seconds]
    spans = "".join(f'<i class="{_class(part)}" style="flex:{share:.3f}" title="{part}"></i>' for part, share in shares)
    names = " ".join(f'<span><i class="{_class(part)}"></i> {part} {share:.1f} %</span>' for part, share in shares)
    return f'<p class="bar" role="img" aria-label="{account}">{spans}</p><p class="key">{names}</p>' if shares else ""


def _class(part: str) -> str:
    return f"p{list(PARTS).index(part)}"


def _speed(records: Records) -> list[str]:
    keys = ("seconds", "wait_seconds", "images", "updates")
    seconds, waited, images, updates = (sum(number(r, key) for r in records.reports) for key in keys)
    if not seconds:
        return []
    return [
        f"training {duration(seconds)} for {updates:.0f} updates, {images / seconds:.1f} images/s",
        f"of that waiting for data {duration(waited)} ({100 * waited / seconds:.0f} %)",
    ]


def _checkpoints(folder: Path, verify: bool) -> list[str]:
    """Return a row per file, newest first. A file that has several names is read once."""
    rows = [("file", "epochs", "updates", "MiB", "state")]
    name_of: dict[int, str] = {}
    files = []
    for path in folder.glob("*.pth.tar"):
        with suppress(FileNotFoundError):  # the run may still be going on and remove files
            files.append((path, path.stat()))
    for path, status in sorted(files, key=lambda item: (-item[1].st_mtime, item[0].name)):
        if status.st_ino in name_of:
            rows.append((path.name, "", "", "", f"the same file as {name_of[status.st_ino]}"))
            continue
        name_of[status.st_ino] = path.name
        epoch = ""
        update = ""
        state = "verified" if verify else "not verified"
        try:
            content = peek_checkpoint(path)
            if isinstance(content.get("epoch"), int):
                epoch = str(content["epoch"] + 1)  # number of finished epochs
            update = str(content.get("update", ""))
            if verify:
                read_checkpoint(path)
        except UserError as error:
            state = f"BAD: {str(error).removeprefix(f'{path} ')}"
        rows.append((path.name, epoch, update, f"{status.st_size / 2**20:.1f}", state))
    return table(rows) if len(rows) > 1 else []


def _skipped(events: Sequence[Record]) -> list[str]:
    kinds = ("skipped-image", "bad-label")
    files = {str(e.get("path")): str(e.get("reason")) for e in events if e.get("kind") in kinds}
    lines = [f"{path}: {reason}" for path, reason in list(files.items())[:_SHOWN_FILES]]
    return lines + ([f"and {len(files) - _SHOWN_FILES} more, in {EVENTS}"] if len(files) > _SHOWN_FILES else [])


def _settings(folder: Path) -> list[str]:
    settings = None
    with suppress(OSError, yaml.YAMLError):
        settings = yaml.safe_load((folder / "args.yaml").read_bytes())
    return [*map(shlex.join, changed_flags(settings).values())] if isinstance(settings, dict) else []


def _classes(folder: Path) -> list[str]:
    """Return the accuracy of the worst classes, and where that of the others is."""
    with suppress(OSError, ValueError, csv.Error):
        heading, *rows = csv.reader((folder / CLASSES).read_text("utf-8").splitlines())
        more = [f"and {len(rows) - WORST} more, in {CLASSES}"] if len(rows) > WORST else []
        return table([heading, *rows[:WORST]]) + more
    return []


def _page(folder: Path, head: dict[str, str], sections: dict[str, list[str]], account: Account) -> str:
    name = html.escape(folder.resolve().name)
    facts = "".join(f"<dt>{term}</dt><dd>{html.escape(text)}</dd>" for term, text in head.items())
    settings, classes, *others = (
        f"<h2>{title}</h2><pre>{html.escape(chr(10).join(lines or ['none recorded']))}</pre>"
        for title, lines in sections.items()
    )
    files = {"curve.png": "Loss and accuracy", CONFUSION: "What is taken for what", MISTAKES: "The surest mistakes"}
    files |= {"first_batch.png": "First images"}
    files |= {"args.yaml": "All settings", "run.json": "Starts, with versions"}
    curve, confusion, mistakes, images, flags, starts = (_shown(folder / file, title) for file, title in files.items())
    listed, link = f"more, in {CLASSES}", f'more, in <a href="{CLASSES}">{CLASSES}</a>'
    body = (
        f"<h1>{name}</h1><dl>{facts}</dl>{_drawn(account)}{curve}<div>{confusion}</div>{classes.replace(listed, link)}"
    )
    body += f"{mistakes}{settings}{flags}<div>{images}</div>{''.join(others)}{starts}"
    tags = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    tags += f"<title>{name}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{tags}</head><body>{body}</body></html>\n'


def _shown(file: Path, title: str) -> str:
    """Return a picture, or a text that is folded; "" if the file is missing."""
    content = file.read_bytes() if file.is_file() else b""
    if content and file.suffix == ".png":
        data = base64.b64encode(content).decode()
        return f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">'
    text = html.escape(content.decode("utf-8", "replace"))
    return f"<details><summary>{title}</summary><pre>{text}</pre></details>" if content else ""


def _clock(time: datetime | None) -> str:
    return "?" if time is None else f"{time:%Y-%m-%d %H:%M:%S}"
