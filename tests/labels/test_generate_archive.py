"""generate_label.py straight into an archive: what `tlt pack` makes of the tree, by one process or several."""

from __future__ import annotations

import filecmp
import itertools
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess as Process
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch import Tensor, nn

from tests.commands.conftest import ROOT
from tests.conftest import LIMIT, free_port
from tlt.data.sources.folder import scan_folder
from tlt.label_map import LabelMap
from tlt.labels import annotate
from tlt.labels.annotate import Annotator
from tlt.labels.archive_format import Manifest, file_places
from tlt.labels.metadata import TreeMetadata
from tlt.labels.store import open_labels
from tlt.tools.check import check
from tlt.tools.pack import pack, unpack
from volo import cli
from volo.train.label_job import ArchiveJob

SIZE = 64
ARCHIVE = ["--format", "archive"]


@pytest.fixture
def command(make_dataset: Callable[..., Path], tmp_path: Path) -> list[str]:
    """A command that labels 16 images with a small ConvNet, whose last bits depend on the batch."""
    torch.manual_seed(0)
    weights = tmp_path / "resnet10t.pth"
    torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), weights)
    return [str(make_dataset()), str(tmp_path / "out"), "--model", "resnet10t", "--checkpoint", str(weights)] + (
        f"--num-classes 4 --img-size {SIZE} -b 3 -j 0 --device cpu --top-k 3".split()
    )


def into(command: list[str], name: str, *more: str) -> list[str]:
    return [command[0], str(Path(command[1]).with_name(name)), *command[2:], *more]


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, False) for name in names[0])


def start(command: list[str], ranks: int = 1, writes: int | None = None) -> list[Process]:
    """The command in forked processes, which together are `ranks` ranks; what they say goes to OUT.log.

    Args:
        writes: Each process kills itself half-way through its write of this number.
    """
    port, context = free_port(), multiprocessing.get_context("fork")

    def rank(number: int) -> None:
        for descriptor in (1, 2):
            os.dup2(os.open(f"{command[1]}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        if ranks > 1:
            place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ |= {key: str(value) for key, value in place.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # not pytest's
        if writes is not None:
            die_after(writes)
        os._exit(cli.run("label", command))

    processes = [context.Process(target=rank, args=(number,)) for number in range(ranks)]
    for process in processes:
        process.start()
    return list(processes)


def die_after(writes: int) -> None:
    """Let this process kill itself half-way through a write: of a tensor of an archive's row, or of a label file."""
    countdown, pwrite, save = itertools.count(writes, -1), os.pwrite, torch.save

    def dying_pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if next(countdown):
            return pwrite(descriptor, data, offset)
        pwrite(descriptor, data[: len(data) // 2], offset)
        return os.kill(os.getpid(), signal.SIGKILL) or 0

    def dying_save(content: object, path: Path) -> None:
        if not next(countdown):
            path.write_bytes(b"PK")
            os.kill(os.getpid(), signal.SIGKILL)
        save(content, path)

    os.pwrite, torch.save = dying_pwrite, dying_save  # type: ignore[assignment]


def end(processes: Sequence[Process]) -> list[int | None]:
    for process in processes:
        process.join()
    return [process.exitcode for process in processes]


def kill(processes: Sequence[Process]) -> bool:
    """kill -9; returns whether it ended any of them."""
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
    return -signal.SIGKILL in end(processes)


def test_the_archive_is_what_pack_makes_of_the_tree(command: list[str], tmp_path: Path) -> None:
    assert cli.run("label", into(command, "tree")) == 0
    assert cli.run("label", into(command, "direct", *ARCHIVE, "--no-log-sum-exp")) == 0
    pack(str(tmp_path / "tree"), str(tmp_path / "packed"), images=str(Path(command[0])))
    assert same_files(tmp_path / "packed", tmp_path / "direct")
    assert cli.run("label", into(command, "whole", *ARCHIVE)) == 0
    unpack(str(tmp_path / "whole"), str(tmp_path / "back"))
    assert same_files(tmp_path / "tree", tmp_path / "back")
    folder = scan_folder(Path(command[0]) / "train")
    whole, packed = (open_labels(tmp_path / name, folder.paths) for name in ("whole", "packed"))
    for name in ("values", "ids", "size", "area", "form"):
        np.testing.assert_array_equal(whole.reader.rows.column(name), packed.reader.rows.column(name))
    assert (
        whole.reader.manifest.accuracy == packed.reader.manifest.accuracy
        and whole.reader.manifest.accuracy["images"] == 16
    )
    assert whole.metadata is not None and whole.metadata.annotator["model"] == "resnet10t"
    assert (whole.reader.rows.column("size") == (40, 36)).all() and packed.reader.record(0).log_sum_exp is None
    assert check(command[0], str(tmp_path / "whole")).usable


def test_log_sum_exp_is_that_of_all_logits(command: list[str], tmp_path: Path) -> None:
    assert cli.run("label", into(command, "whole", *ARCHIVE)) == 0
    model = timm.create_model("resnet10t", num_classes=4, checkpoint_path=command[5]).eval().double()
    transform = create_transform((3, SIZE, SIZE), interpolation="bicubic", crop_pct=1.0, crop_mode="squash")
    folder = scan_folder(Path(command[0]) / "train")
    store = open_labels(tmp_path / "whole", folder.paths)
    for index in (0, 9):
        with torch.no_grad():
            features = model.forward_features(transform(Image.open(folder.path(index)))[None].double())[0]
            dense = torch.einsum("chw,kc->khw", features, model.fc.weight) + model.fc.bias[:, None, None]
        found = store.reader.record(index).log_sum_exp
        assert found is not None and found.dtype == np.float32
        # One grey level of the resize, and the rounding of the listed values.
        assert np.abs(found - dense.logsumexp(0).numpy()).max() < 0.02 * float(dense.std())


@pytest.mark.parametrize("ranks,form", [(1, "archive"), (2, "archive"), (2, "tree")])
def test_killed_in_the_middle_of_a_write_it_goes_on_to_the_same_result(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, form: str
) -> None:
    label = Annotator.__call__

    def telling(self: Annotator, images: Tensor) -> annotate.Annotation:
        """As the last bits of many networks do, the values depend on the whole batch; but visibly so."""
        found = label(self, images)
        return found._replace(values=found.values + images.mean().half())

    monkeypatch.setattr(Annotator, "__call__", telling)
    arguments = into(command, "killed", "--format", form)
    assert end(start(into(command, "whole", "--format", form))) == [0]
    draw = random.Random(ranks)
    for _ in range(3):
        processes = start(arguments, ranks, draw.randrange(20 if form == "archive" else 4))
        multiprocessing.connection.wait([process.sentinel for process in processes])
        assert kill(processes)
    assert end(start(arguments, ranks)) == [0] * ranks
    assert same_files(tmp_path / "whole", tmp_path / "killed")


def test_torn_rows_are_made_again(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run("label", into(command, "whole", *ARCHIVE)) == 0
    writes, real = iter(range(40)), os.pwrite

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if next(writes, None) is None:
            raise OSError(28, "No space left on device")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert cli.run("label", into(command, "torn", *ARCHIVE)) == 2
    monkeypatch.undo()
    error = capsys.readouterr().err
    assert "torn can't be written (No space left on device); make room" in error and error.count("\n") == 1
    assert not (tmp_path / "torn" / "manifest.json").exists()
    header = Manifest.read(tmp_path / "torn" / "manifest.partial.json").header
    shard = bytearray((tmp_path / "torn" / "00000.safetensors").read_bytes())
    shard[file_places(header.shard_fields(0))[0]["values"]] ^= 1  # of the first row: as if half of it had been written
    (tmp_path / "torn" / "00000.safetensors").write_bytes(shard)
    assert cli.run("label", into(command, "torn", *ARCHIVE)) == 0
    # 40 writes are 5 rows of 7 tensors and a part of the sixth; the first was spoilt.
    said = capsys.readouterr().out
    assert "4 of 16 images are labelled already" in said and "12 label maps" in said
    assert same_files(tmp_path / "whole", tmp_path / "torn")


def test_the_other_form_the_other_annotator_and_a_complete_archive(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def said(code: int, *arguments: str) -> str:
        assert cli.run("label", list(arguments)) == code
        captured = capsys.readouterr()
        assert code == 0 or captured.err.count("\n") == 1
        return captured.err if code else captured.out

    assert "label maps" in said(0, *into(command, "tree"))
    assert "tree is a tree of label files: leave out" in said(2, *into(command, "tree", *ARCHIVE, "--overwrite"))
    assert "16 label maps" in said(0, *into(command, "archive", *ARCHIVE))
    assert "archive is a label archive: add --format archive" in said(2, *into(command, "archive"))
    assert "was complete already" in said(0, *into(command, "archive", *ARCHIVE))
    other = into(command, "archive", *ARCHIVE, "--img-size", "96")
    assert "labels made with grid (2, 2), this command says (3, 3): choose another OUT" in said(2, *other)
    assert "or another form of one" in said(2, *into(command, "archive", *ARCHIVE, "--no-log-sum-exp"))
    assert "16 label maps of 3 classes on 3 x 3" in said(0, *other, "--overwrite")
    assert "--no-log-sum-exp has no effect without --format archive" in said(2, *into(command, "x", "--no-log-sum-exp"))


def test_broken_images_have_no_label(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Path(command[0]) / "train" / "blue" / "blue4.jpg"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    assert cli.run("label", into(command, "out", *ARCHIVE, "--max-bad-images", "0")) == 2
    assert "1 of 16 images can't be read, more than --max-bad-images 0" in capsys.readouterr().err
    assert cli.run("label", into(command, "out", *ARCHIVE, "-b", "1")) == 0
    folder = scan_folder(Path(command[0]) / "train")
    store = open_labels(tmp_path / "out", folder.paths)
    assert (
        store.metadata is not None
        and store.metadata.skipped == ["blue/blue4.jpg"]
        and store.reader.manifest.absent == 1
    )
    assert (
        store.missing() == [folder.paths.index("blue/blue4.jpg")]
        and store.warnings == []
        and store.reader.extra() == []
    )
    assert cli.run("label", into(command, "tree", "-b", "1")) == 0
    unpack(str(tmp_path / "out"), str(tmp_path / "back"))
    assert same_files(tmp_path / "tree", tmp_path / "back")
    assert cli.run("label", into(command, "tree", "-b", "1")) == 0  # nothing left but what can't be read


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "distributed_generate_label.sh"), "2", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)


def test_an_error_on_one_rank_ends_all_and_is_told_once(command: list[str], tmp_path: Path) -> None:
    (Path(command[0]) / "train" / "blue" / "blue12.jpg").write_bytes(b"nothing")  # in rank 1's first batch
    assert end(start(into(command, "out", *ARCHIVE, "--max-bad-images", "0"), 2)) == [5, 2]
    said = (tmp_path / "out.log").read_text()
    assert said.count("1 of 16 images") == said.count("[rank 1] error: 1 of 16 images") == 1
    assert said.count("error:") == 2 and "[rank 0] error: another rank has ended" in said and "Traceback" not in said
    assert not (tmp_path / "out" / "manifest.json").exists()
    done = launched(*into(command, "other", "--model", "resnet10x"))
    assert done.returncode == 2 and done.stderr.count("error:") == done.stderr.count("error: --model resnet10x") == 1


def test_launched_processes_make_the_same_archive(command: list[str], tmp_path: Path) -> None:
    assert cli.run("label", into(command, "one", *ARCHIVE)) == 0
    said = launched(*into(command, "two", *ARCHIVE))
    assert said.returncode == 0, said.stderr
    assert said.stdout.count("labelling: 16/16 images") == said.stdout.count("16 label maps") == 1
    assert "cells" in said.stdout.splitlines()[-1]
    assert same_files(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("flags", ["--amp --amp-dtype bfloat16", "--channels-last", "--transfer"])
def test_other_ways_to_run(command: list[str], tmp_path: Path, flags: str) -> None:
    assert cli.run("label", into(command, "exact", *ARCHIVE)) == 0
    assert cli.run("label", into(command, "other", *ARCHIVE, *flags.split())) == 0
    names = scan_folder(Path(command[0]) / "train").paths
    exact, other = (open_labels(tmp_path / name, names) for name in ("exact", "other"))
    apart = [np.abs(exact.load(i).values - other.load(i).values.astype(np.float32)).max() for i in range(16)]
    assert max(apart) < 0.05 and (max(apart) > 1e-3) == ("bfloat16" in flags)
    assert bool(other.reader.manifest.accuracy) == (flags != "--transfer")


class ManyClasses(nn.Module):
    """The least that timm's interface asks for: 4 features a place, averaged, and a linear head."""

    global_pool, num_prefix_tokens, output_fmt = "avg", 0, "NCHW"

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes, self.fc = num_classes, nn.Linear(4, num_classes)

    def forward_features(self, x: Tensor) -> Tensor:
        return x

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("classes,dtype", [(21_841, np.uint16), (70_000, np.int32)])
def test_many_classes_are_exact_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, classes: int, dtype: type
) -> None:
    torch.manual_seed(0)
    model, images, sizes = ManyClasses(classes).eval(), torch.randn(7, 4, 5, 6), []
    real = annotate._annotation
    monkeypatch.setattr(annotate, "_annotation", lambda dense, k: (sizes.append(dense.numel()), real(dense, k))[1])
    found = Annotator(model, 5)(images)
    assert sizes == [5 * 6 * classes] * 7  # one image at a time, although a batch of 7
    weight, bias = model.fc.weight.detach().double().numpy(), model.fc.bias.detach().double().numpy()
    dense = np.einsum("bchw,kc->bkhw", images.double().numpy(), weight) + bias[:, None, None]
    order = np.argsort(-dense, axis=1)[:, :5]
    np.testing.assert_array_equal(found.ids, order)
    np.testing.assert_allclose(found.log_sum_exp, np.log(np.exp(dense).sum(1)), atol=2e-3)
    np.testing.assert_array_equal(found.named, dense.mean((2, 3)).argmax(1))

    (tmp_path / "images" / "a").mkdir(parents=True)
    for name in range(7):
        (tmp_path / "images" / "a" / f"{name}.jpg").touch()
    folder = scan_folder(tmp_path / "images")
    job = ArchiveJob(tmp_path / "out", folder, TreeMetadata(5, (5, 6), classes))
    for row in range(7):
        label_map = LabelMap(found.values[row].numpy(), found.ids[row].numpy())
        job.write(row, label_map, found.log_sum_exp[row].numpy(), (10, 8))
    job.finish([])
    store = open_labels(tmp_path / "out", folder.paths, num_classes=classes)
    np.testing.assert_array_equal([store.read(row).ids for row in range(7)], order)
    assert store.reader.rows.column("ids").dtype == dtype and store.reader.rows.column("ids").max() > 2**14
