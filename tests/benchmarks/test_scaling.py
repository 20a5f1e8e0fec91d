"""benchmark.py scaling: the model against simulations that don't know its formulas, fits against scipy, the program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from benchmarks.scaling import published
from benchmarks.scaling.fit import MeasuredStep, Transfer, fit, fit_link, where
from benchmarks.scaling.machines import MACHINES, machine_of
from benchmarks.scaling.model import (
    MIB,
    Conditions,
    Gradient,
    Link,
    Machine,
    all_reduce_seconds,
    in_buckets,
    overlapped_seconds,
    predict,
    ring_seconds,
    slowest_factor,
    step_seconds,
)
from benchmarks.scaling.work import computing, even_gradients, gradients_of
from tests.conftest import LIMIT
from volo import cli

ROOT = Path(__file__).parents[2]
Send = Callable[[float], float]


def simulated(backward: float, buckets: Sequence[Gradient], send: Send, contention: float) -> float:
    """From event to event: a bucket becomes ready, a transfer ends, the backward pass ends."""
    now = work = left = 0.0  # `left`: seconds of the transfer under way
    coming, queue = list(buckets), []
    while coming or queue or left > 0 or work < backward:
        while coming and work >= coming[0].ready * backward - 1e-12:
            queue.append(coming.pop(0))
        if left <= 0 and queue:
            left = send(queue.pop(0).size)
            continue
        speed = 1 - contention if left > 0 else 1.0
        goal = coming[0].ready * backward if coming else backward
        events = [(goal - work) / speed] * (work < backward) + [left] * (left > 0)
        passed = min(events)
        now, left = now + passed, left - passed if left > passed + 1e-15 else 0.0
        work = goal if work < backward and passed == events[0] else work + speed * passed * (work < backward)
    return now


def random_buckets(rng: np.random.Generator) -> list[Gradient]:
    ready = np.sort(rng.random(rng.integers(1, 9)))
    if rng.random() < 0.5:
        ready[-1] = 1.0
    return [Gradient(float(size), float(at)) for size, at in zip(rng.random(len(ready)), ready, strict=True)]


@pytest.mark.parametrize("contention", [0.0, 0.3, 0.8])
@pytest.mark.parametrize("rate", [0.01, 0.5, 4.0])
def test_overlap_is_that_of_a_simulation(contention: float, rate: float) -> None:
    rng = np.random.default_rng(0)
    for pause in (0.0, 0.05) * 40:
        buckets, backward = random_buckets(rng), float(rng.uniform(0.1, 3))

        def send(size: float, pause: float = pause) -> float:
            return pause + rate * size

        expected = simulated(backward, buckets, send, contention)
        assert overlapped_seconds(backward, buckets, send, contention) == pytest.approx(expected, rel=1e-9)


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
    assert all_reduce_seconds(size, 12, machine, "ring") == pytest.approx(passed_around(size, 12, machine.inter))
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


@pytest.mark.parametrize("ranks", [1, 2, 8, 40, 640])
def test_the_slowest_of_many_is_as_slow_as_their_largest(ranks: int) -> None:
    largest = np.random.default_rng(0).standard_normal((4000, ranks)).max(1).mean()
    assert slowest_factor(ranks, 0.1) == pytest.approx(1 + 0.1 * largest, abs=0.004)


def test_what_a_step_waits_for() -> None:
    work = computing(0.9, 10, [Gradient(2e6, 0.5), Gradient(4e6, 1.0)])
    machine = Machine(2, Link(0.0, 1e9), Link(0.0, 1e7))

    def send(size: float) -> float:
        return all_reduce_seconds(size, 4, machine)

    def step(gpus: int, **conditions: Any) -> float:
        return step_seconds(work, gpus, machine, Conditions(**conditions))

    assert step(1) == pytest.approx(0.9)
    assert step(1, input_rate=5.0) == pytest.approx(2.0) and step(4, input_rate=5.0) == pytest.approx(8.0)
    assert step(4, overlap=False) == pytest.approx(0.9 + send(2e6) + send(4e6))
    assert step(4, overlap=False, compression=0.5) == pytest.approx(0.9 + send(1e6) + send(2e6))
    overlapped = predict(work, 4, machine, Conditions())
    assert overlapped.step == pytest.approx(0.3 + simulated(0.6, work.gradients, send, 0))
    assert overlapped.exposed == pytest.approx(overlapped.step - 0.9)
    assert overlapped.efficiency == pytest.approx(overlapped.images_per_second / 4 / (10 / 0.9))


def measured(link: Link, noise: float, sizes: Sequence[float], ranks: Sequence[int]) -> list[Transfer]:
    rng = np.random.default_rng(1)
    pairs = [(size, count) for size in sizes for count in ranks]
    return [Transfer(s, p, ring_seconds(s, p, link) * (1 + noise * rng.standard_normal())) for s, p in pairs]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("latency", [40e-6, 0.0])
def test_the_fitted_link_is_the_nonnegative_least_squares_one(noise: float, latency: float) -> None:
    transfers = measured(Link(latency, 2e9), noise, [1e5, 1e6, 1e7], [2, 4])
    rows = np.array([[2 * (p - 1), 2 * (p - 1) / p * size * 1e-9] for size, p, _ in transfers])
    expected, _ = nnls(rows / np.array([[t.seconds] for t in transfers]), np.ones(len(transfers)))
    found = fit_link(transfers)
    assert [found.latency, 1e9 / found.bandwidth] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    if not noise:
        assert found.bandwidth == pytest.approx(2e9) and found.latency == pytest.approx(latency, abs=1e-9)


def test_a_latency_below_zero_is_none() -> None:
    transfers = [Transfer(1e5, 2, 1e-5), Transfer(1e7, 2, 2e-3)]  # the small one is quicker than in proportion
    found = fit_link(transfers)
    rows = np.array([[2, 1e5 * 1e-9], [2, 1e7 * 1e-9]]) / [[1e-5], [2e-3]]
    assert [found.latency, 1e9 / found.bandwidth] == pytest.approx(nnls(rows, np.ones(2))[0])


def test_a_fit_finds_the_contention_that_made_the_steps() -> None:
    link, conditions = Link(20e-6, 1e9), Conditions()
    work = computing(0.5, 4, even_gradients([4e6] * 30))
    true = Conditions(contention=0.37)
    steps = [MeasuredStep(work, p, step_seconds(work, p, Machine(p, link, link), true)) for p in (2, 4)]
    found = fit(measured(link, 0.0, [1e4, 1e6], [2]), steps, conditions)
    assert found.contention == pytest.approx(0.37)
    assert found.step_residuals == pytest.approx([0, 0], abs=1e-9)


def test_where_a_model_meets_a_number() -> None:
    grid = np.linspace(0.1, 4, 400)
    assert where(lambda x: x * x, 2.0, grid) == pytest.approx(2**0.5, rel=1e-4)
    assert where(lambda x: -x, -2.0, grid) == pytest.approx(2.0)
    assert np.isnan(where(lambda x: x, 9.0, grid))


def test_each_explanation_of_the_published_point_gives_it() -> None:
    gradients = in_buckets(gradients_of("volo_d5"), 25)
    assert sum(gradient.size for gradient in gradients) / 4 == pytest.approx(296e6, rel=0.01)  # published: 296 M
    machine = machine_of(MACHINES["dgx-a100"])
    found = published.explain(*published.VOLO_D5, 44, gradients, machine, Conditions())
    # One node computes as long as its step takes, but for the last bucket; so do five, and then send to each other.
    step = 352 / 500
    computed = step - all_reduce_seconds(gradients[-1].size, 8, machine)
    slow = published.between_nodes(machine, found.gbits)
    five = computed / 3 + simulated(2 / 3 * computed, gradients, lambda size: all_reduce_seconds(size, 40, slow), 0)
    assert 40 * 44 / five == pytest.approx(2100, rel=1e-3)
    slow = published.between_nodes(machine, found.gbits_without_overlap)
    more = sum(all_reduce_seconds(g.size, 40, slow) - all_reduce_seconds(g.size, 8, slow) for g in gradients)
    assert 40 * 44 / (step + more) == pytest.approx(2100, rel=1e-3)
    slowest = [slowest_factor(n, found.jitter) for n in (8, 40)]
    assert 40 * 44 / (step * slowest[1] / slowest[0]) == pytest.approx(2100, rel=2e-3)
    assert found.nominal > 2450  # the links of the machine don't explain it


def test_no_ethernet_explains_both_rows() -> None:
    least = published.least_misfit(published.VIT_B_ETHERNET)
    assert least == pytest.approx((1686 / 634 / 2) ** 0.5)
    gradients = in_buckets(gradients_of("vit_base_patch16_224"), 25)
    for images in (32, 128):
        found = published.fit_ethernet(gradients, images)
        off = np.abs(np.log(np.array(found.residuals) + 1))
        assert off.max() > 0.98 * np.log(least)
        assert found.residuals[0] > 0.1 and found.residuals[1] < -0.1
        assert found.needed[0] < found.gbits < found.needed[1]  # between what the rows need, near neither


def test_published_with_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", ["scaling", "--published", "--plot", str(tmp_path / "p.png")]) == 0
    out = capsys.readouterr().out
    assert "500 images/s, 40 GPUs 2100 images/s published, 84.0%" in out
    assert "16 GPUs 634 images/s, 32 GPUs 1686 images/s" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_prediction_is_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    line = "scaling --model volo_d5 -b 44 --machine dgx-a100 --images-per-second 62.5 --gpus 8 40 --node-gbits 26"
    line += (
        " --latency-us 7 --gpus-per-node 4 --link-efficiency 0.5 --grad-compression bf16 --bucket-mb 10 --jitter 0.01"
    )
    line += " --contention 0.1 --input-rate 1900 --algorithm ring"
    assert cli.run("benchmark", [*line.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    machine = Machine(4, Link(3e-6, 150e9), Link(7e-6, 26e9 / 8))
    conditions = Conditions(10, 0.5, "ring", contention=0.1, jitter=0.01, input_rate=1900)
    work = computing(44 / 62.5, 44, gradients_of("volo_d5"))
    assert found["predicted"] == [asdict(predict(work, gpus, machine, conditions)) for gpus in (8, 40)]
    assert cli.run("benchmark", line.split()) == 0
    assert "volo_d5, 44 images per GPU, 1181.8 MB of gradients" in capsys.readouterr().out


def test_ranks_are_measured_fitted_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "scaling --model volo_test -b 2 --ranks 1 2 --device cpu --rounds 1 --threads 1 --settings --json --plot"
    assert cli.run("benchmark", [*line.split(), str(tmp_path / "x.svg")]) == 0
    found = json.loads(capsys.readouterr().out)
    one, two = found["measured"]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    sizes = gradients_of("volo_test")
    assert one["gradient_bytes"] == two["gradient_bytes"] == sum(g.size for g in sizes)
    for name in ("forward", "backward", "step", "no bucket view", "static graph", "bf16 gradients"):
        assert one[name] > 0 and two[name] > 0
    assert found["fit"]["link"]["bandwidth"] > 0 and 0 <= found["fit"]["contention"] < 1
    assert len(found["fit"]["transfer_residuals"]) == len(two["all_reduce"]) == 5
    assert found["machine"]["inter"] == found["machine"]["intra"] == found["fit"]["link"]
    assert found["predicted"][0]["gpus"] == 1 and found["predicted"][-1]["gpus"] == 640
    assert (tmp_path / "x.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--published --jitter 0.1", "--jitter 0.1 has no effect without a model to predict: leave out --published"),
        ("--images-per-second 3", "--images-per-second 3.0 has no effect without a --machine"),
        ("--images-per-second 3 --machine dgx-2 --ranks 2", "--ranks 2 has no effect without measuring"),
        ("--link-efficiency 0.5", "--link-efficiency 0.5 has no effect without a --machine"),
        ("--images-per-second 3 --machine dgx-2 --model volo_d9", "volo_d9: no such model; did you mean volo_d5"),
        ("--model volo_d9", "volo_d9: no such model"),
        ("--published --plot nowhere/x.png", "--plot nowhere/x.png can't be written"),
        ("--contention 1", "--contention: 1 is out of range"),
    ],
)
def test_mistakes_are_told_in_one_line(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run("benchmark", ["scaling", *line.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_program_measures_a_model_of_this_project() -> None:
    """As a user starts it: the ranks are processes of their own, which have to know the model, too."""
    line = "scaling --model volo_test --ranks 1 2 --rounds 2 -b 1 --device cpu --json"
    ended = subprocess.run(
        [sys.executable, str(ROOT / "benchmark.py"), *line.split()], capture_output=True, text=True, timeout=LIMIT
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout[ended.stdout.index("{") :])  # gloo of torch 2.9 has its say first
