"""benchmark.py scaling: the model against simulations that don't know its formulas, and the program."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.scaling import (
    MIB,
    Gradient,
    Link,
    Machine,
    all_reduce_seconds,
    computing,
    even_gradients,
    gradients_of,
    in_buckets,
    machine_of,
    overlapped_seconds,
    predict,
    ring_seconds,
    step_seconds,
)
from volo import cli

ROOT = Path(__file__).parents[2]
Send = Callable[[float], float]


def simulated(backward: float, buckets: Sequence[Gradient], send: Send) -> float:
    """From event to event: a bucket becomes ready, a transfer ends, the backward pass ends."""
    now = work = left = 0.0  # `left`: seconds of the transfer under way
    coming, queue = list(buckets), []
    while coming or queue or left > 0 or work < backward:
        while coming and work >= coming[0].ready * backward - 1e-12:
            queue.append(coming.pop(0))
        if left <= 0 and queue:
            left = send(queue.pop(0).size)
            continue
        goal = coming[0].ready * backward if coming else backward
        events = [goal - work] * (work < backward) + [left] * (left > 0)
        passed = min(events)
        now, left = now + passed, left - passed if left > passed + 1e-15 else 0.0
        work = goal if work < backward and passed == events[0] else work + passed * (work < backward)
    return now


def random_buckets(rng: np.random.Generator) -> list[Gradient]:
    ready = np.sort(rng.random(rng.integers(1, 9)))
    if rng.random() < 0.5:
        ready[-1] = 1.0
    return [Gradient(float(size), float(at)) for size, at in zip(rng.random(len(ready)), ready, strict=True)]


@pytest.mark.parametrize("rate", [0.01, 0.5, 4.0])
def test_overlap_is_that_of_a_simulation(rate: float) -> None:
    rng = np.random.default_rng(0)
    for pause in (0.0, 0.05) * 40:
        buckets, backward = random_buckets(rng), float(rng.uniform(0.1, 3))

        def send(size: float, pause: float = pause) -> float:
            return pause + rate * size

        expected = simulated(backward, buckets, send)
        assert overlapped_seconds(backward, buckets, send) == pytest.approx(expected, rel=1e-9)


def passed_around(size: float, ranks: int, link: Link) -> float:
    """An all-reduce that sends real numbers around a ring, each rank with a clock of its own; checks the sums."""
    rng = np.random.default_rng(ranks)
    values = rng.integers(0, 100, (ranks, ranks)).astype(float)  # a row per rank, a column per piece
    wanted, clocks = values.sum(0), np.zeros(ranks)
    for turn in range(2 * (ranks - 1)):
        messages = []
        for rank in range(ranks):
            piece = (rank - turn) % ranks if turn < ranks - 1 else (rank + 1 - (turn - ranks + 1)) % ranks
            messages.append(((rank + 1) % ranks, piece, values[rank, piece], clocks[rank]))
        for receiver, piece, value, began in messages:
            arrived = began + link.latency + size / ranks / link.bandwidth
            clocks[receiver] = max(clocks[receiver], arrived)
            values[receiver, piece] = values[receiver, piece] + value if turn < ranks - 1 else value
    assert (values == wanted).all()
    return float(clocks.max())


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 17])
def test_a_ring_takes_as_long_as_messages_passed_around_it(ranks: int) -> None:
    link = Link(3e-6, 5e9)
    assert ring_seconds(7e6, ranks, link) == pytest.approx(passed_around(7e6, ranks, link), abs=1e-15)


def test_nodes_reduce_inside_first_and_share_their_cards_outside() -> None:
    machine = Machine(4, Link(2e-6, 1e11), Link(9e-6, 8e9))
    size = 3e7
    # In a node: half of an all-reduce, then the other half. Between: each GPU a fourth, over a fourth of the cards.
    inside = passed_around(size, 4, machine.intra)
    between = passed_around(size / 4, 3, Link(9e-6, 8e9 / 4))
    assert all_reduce_seconds(size, 12, machine) == pytest.approx(inside + between)
    assert all_reduce_seconds(size, 4, machine) == pytest.approx(inside)
    assert all_reduce_seconds(size, 1, machine) == 0


@pytest.mark.parametrize("bucket_mb", [1.0, 5.0, 25.0])
def test_buckets_are_those_of_ddp(bucket_mb: float) -> None:
    tensors = [torch.empty(n, device="meta") for n in (10, 300_000, 7, 2**20, 2**18, 5_000_000, 3, 2**21, 11)]
    indices, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty(t.shape) for t in tensors], [MIB, int(bucket_mb * MIB)]
    )
    gradients = even_gradients([4.0 * t.numel() for t in tensors])
    expected = [sum(gradients[i].size for i in bucket) for bucket in indices]
    buckets = in_buckets(gradients, bucket_mb)
    assert [bucket.size for bucket in buckets] == expected
    assert [bucket.ready for bucket in buckets] == [gradients[bucket[-1]].ready for bucket in indices]


def test_what_a_step_waits_for() -> None:
    work = computing(0.9, 10, [Gradient(2e6, 0.5), Gradient(4e6, 1.0)])
    machine = Machine(2, Link(0.0, 1e9), Link(0.0, 1e7))

    def step(compression: float) -> float:
        def send(size: float) -> float:
            return all_reduce_seconds(compression * size, 4, machine)

        return 0.3 + simulated(0.6, work.gradients, send)

    assert step_seconds(work, 1, machine) == pytest.approx(0.9)
    assert step_seconds(work, 4, machine, compression=0.5) == pytest.approx(step(0.5))
    overlapped = predict(work, 4, machine)
    assert overlapped.step == pytest.approx(step(1.0))
    assert overlapped.exposed == pytest.approx(overlapped.step - 0.9)
    assert overlapped.efficiency == pytest.approx(overlapped.images_per_second / 4 / (10 / 0.9))


def test_published_throughputs_beside_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", ["scaling", "--published", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["published"]
    one, five, *infiniband, first, second = rows
    assert [row["images_per_second"] for row in rows] == [500, 2100, 1507, 2980, 634, 1686]
    assert one["predicted"] == pytest.approx(500, rel=1e-3) and one["gbits"] is None
    assert five["predicted"] > 2450 and five["efficiency"] == 0.84  # the links of the machine don't explain it
    # One node computes as long as its step takes, but for the last bucket; so do five, and then send to each other.
    gradients = in_buckets(gradients_of("volo_d5"), 25)
    assert sum(gradient.size for gradient in gradients) / 4 == pytest.approx(296e6, rel=0.01)  # published: 296 M
    machine = machine_of("dgx-a100")
    computed = 352 / 500 - all_reduce_seconds(gradients[-1].size, 8, machine)
    slow = Machine(8, machine.intra, Link(machine.inter.latency, five["gbits"] / 8 * 1e9))
    step = computed / 3 + simulated(2 / 3 * computed, gradients, lambda size: all_reduce_seconds(size, 40, slow))
    assert 40 * 44 / step == pytest.approx(2100, rel=1e-3)
    assert [row["predicted"] for row in infiniband] == pytest.approx([1507, 2980], rel=0.02)
    assert first["gbits"] < 0.7 * second["gbits"]  # no one bandwidth explains both rows
    assert cli.run("benchmark", ["scaling", "--published"]) == 0
    assert re.search(r"VOLO-D5, DGX A100 +44 +40 +2100 +84.0% +2499 +26.0", capsys.readouterr().out)


def test_a_prediction_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    line = "scaling --model volo_d5 -b 44 --machine dgx-a100 --images-per-second 62.5 --gpus 8 40 --node-gbits 26"
    line += " --latency-us 7 --gpus-per-node 4 --link-efficiency 0.5 --grad-compression bf16 --bucket-mb 10"
    assert cli.run("benchmark", [*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    machine = Machine(4, Link(3e-6, 150e9), Link(7e-6, 26e9 / 8))
    work = computing(44 / 62.5, 44, gradients_of("volo_d5"))
    assert found["predicted"] == [asdict(predict(work, gpus, machine, 10, 0.5)) for gpus in (8, 40)]
    assert cli.run("benchmark", line.split()) == 0
    assert "volo_d5, 44 images per GPU, 1181.8 MB of gradients" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "--published --node-gbits 9",
            "--node-gbits 9.0 has no effect without a model to predict",
        ),
        ("--link-efficiency 0.5", "give --images-per-second, what one GPU alone does, or --published"),
        ("--images-per-second 3 --machine dgx-2 --model volo_d9", "volo_d9: no such model; did you mean volo_d5"),
        ("--images-per-second 3 --model nothing", "nothing: no such model"),
        ("--link-efficiency 2", "--link-efficiency: 2 is out of range"),
    ],
)
def test_mistakes_are_told_in_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", ["scaling", *line.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
