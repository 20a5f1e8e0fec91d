"""Mistakes in the flags of `volo train` or `volo validate` are one line that names the flag or file, exit code 2."""

import pytest

from tests.commands.conftest import QUICK

TEACHER = "--kd-model-name {run} --kd-distill-type token"
TRAIN = [
    ("--model volo_d9 --train-split nowhere", "timm knows no such model; did you mean volo_d"),  # before a long search
    ("--model volo_dO", "did you mean volo_d0?"),
    ("--model timm/VOLO-dl.sail_in1k", "did you mean volo_d1?"),
    ("--model microsoft/resnet-50", "did you mean resnet50?"),
    ("--model d1", "did you mean volo_d1,"),
    ("--token-label --model levit_128s --img-size 224", "dense head"),
    ("--token-label --model densenet121 --img-size 64", "--no-mix-token"),
    ("--num-classes 3", "4 class folders"),
    ("-b 64", "64"),
    ("--amp --amp-dtype float16", "bfloat16"),
    ("--device cuda:99", "--device"),
    ("--finetune nowhere.pth", "nowhere.pth"),
    ("--val-split nowhere", "(--val-split validation); --val-fraction 0.1"),
    ("--start-epoch 9", "--start-epoch 9"),
    ("--model cs3darknet_s --pretrained", "published weights can't be fetched"),  # there are none
    ("--model-kwargs bogus=1", "bogus"),
    ("--model-kwargs num_heads=(3,4,4,4)", "32 channels can't be divided among 3 heads"),
    ("--model-kwargs features_only=True", "FeatureGetterNet is no classifier"),
    ("--model test_resnet --model-kwargs in_chans=5", "images of 5 channels: they have 3 (RGB), or 1"),
    ("--model test_resnet --model-kwargs drop_path_rate=2", "does not run on images of 3 x 32 x 32"),
    ("--model test_vit --img-size 8", "does not run on images of 3 x 8 x 8 (--img-size)"),
    ("--model convit_tiny --grad-checkpointing", "--grad-checkpointing: --model convit_tiny can't"),
    ("--num-classes 100000000000", "--num-classes"),
    ("--local-rank 3", "--local-rank 3"),
    ("--model vit_tiny_patch16_224 --model-kwargs depth=1 --freeze-bn", "has no BatchNorm layer: remove --freeze-bn"),
    ("--output /dev/null/run", "--output /dev/null/run"),
    # Image sizes.
    ("--train-img-sizes 4 32", "does not run on images of 3 x 4 x 4 (--train-img-sizes, "),
    ("--model test_vit --drop-path 0 --val-img-size 8", "3 x 8 x 8 (--train-img-sizes, --val-img-size)"),
    ("--model mixer_s32_224 --img-size 224 --train-img-sizes 192 224", "does not run on images of 3 x 192 x 192"),
    ("--train-img-sizes 32 48 --train-batch-sizes 4", "one for each of --train-img-sizes) [4]: give 2 numbers"),
    (
        "--train-img-sizes 32 48 --train-batch-sizes auto 4",
        "--train-batch-sizes (auto alone, or one for each of --train-img-sizes) ['auto', 4]: give 2 numbers",
    ),
    ("--train-img-sizes 32 48 --train-size-probs 0 0", "--train-size-probs must have a positive sum"),
    ("--train-img-sizes 32 48 --train-size-probs 1", "--train-size-probs and the sizes must have the same length"),
    ("--train-img-sizes 16 32 --train-batch-sizes 500 4", "one global batch of 500: lower --train-batch-sizes, or"),
    ("--train-img-sizes 32 --train-size-schedule progressive", "requires at least two choices"),
    # Teachers.
    (f"{TEACHER} --kd-model-name crossvit_9_240 --kd-size 240", "CrossVit has no spatial features"),
    (f"{TEACHER} --kd-model-name resnet14t", "its published weights can't be fetched (no network)"),
    (f"{TEACHER} --kd-model-name resnet10x", "timm knows no such model; did you mean"),
    (f"{TEACHER} --kd-model-name nowhere/last.pth.tar", "nowhere/last.pth.tar: no such checkpoint"),
    (f"{TEACHER} --model crossvit_9_240 --img-size 240", "--model crossvit_9_240 can't learn tokens: CrossVit has no"),
    (f"{TEACHER} --kd-size 32 32 32", "--kd-size has 3 values for 1 teacher"),
    (f"{TEACHER} --in-chans 1", "channels"),
    ("--kd-model-name resnet10t", "has 1000 classes, --model volo_test has 4"),
    (f"{TEACHER} --kd-only --token-label", "--kd-only has no labels"),
    (f"{TEACHER} --kd-only", "leave out --num-classes"),
    (f"{TEACHER} --mixup 0.8 --kd-size 48", "the teacher must see what the student sees"),
    (f"{TEACHER} --freeze", "frozen features learn nothing"),
    # Annotators.
    ("--token-label --token-label-teacher resnet10x", "--token-label-teacher resnet10x: --model resnet10x: timm knows"),
    ("--token-label --token-label-teacher resnet18", "resnet18: it has 1000 classes, --model volo_test has 4"),
    ("--token-label --token-label-teacher resnet10t --token-label-teacher-checkpoint no.pth", "no.pth"),
    (
        "--token-label --token-label-teacher resnet18 --token-label-teacher-checkpoint {run}/last.pth.tar",
        "--token-label-teacher resnet18: ",
    ),
    ("--token-label --token-label-teacher mobilenetv3_small_050 --num-classes 1000", "can't annotate: the mean of"),
]
VALIDATE = [
    ("--checkpoint nowhere.pth", "nowhere.pth"),
    ("--split nowhere", "(--split validation)"),
    ("--results-file /dev/null/a.csv", "--results-file /dev/null"),
    ("--model volo_d1", "volo_d1"),
    ("--class-map nowhere.txt", "nowhere.txt"),
    ("--real-labels nowhere.json", "nowhere.json"),
    ("--token-label-data nowhere", "--token-label-data: "),
    ("--bad-label skip", "no effect without --token-label-data"),
    ("--token-label-data {run} --valid-labels x", "no --valid-labels"),
]
ROWS = [("train", *row) for row in TRAIN] + [("validate", *row) for row in VALIDATE]


@pytest.mark.usefixtures("unpublished")
@pytest.mark.parametrize(("program", "flags", "message"), ROWS, ids=[" ".join(row[:2]) for row in ROWS])
def test_refused(call, trained_run, tmp_path, program, flags, message):
    data, run = trained_run
    valid = {
        "train": f"{QUICK} --epochs 1 --output {tmp_path} --dry-run",
        "validate": f"-j 0 --checkpoint {run}/last.pth.tar",
    }
    assert (ended := call(program, f"{data} {valid[program]} {flags.format(run=run)}")).refused(message), ended
