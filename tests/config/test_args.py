"""The command lines: published flags, recipes under flags, contradictions, help."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from tlt.errors import UserError
from tlt.upstream.rows import ROWS as ROWS_OF_COMPAT
from volo.config.args import parse_train, train_parser
from volo.config.flags_eval import (
    generate_label_parser,
    parse_generate_label,
    parse_validate,
    predict_parser,
    validate_parser,
)

ROOT = Path(__file__).parents[2]
LABELS = "--token-label --token-label-data l"

# The published program, one flag a line: destination | default | on a command line | what that gives.
# It was written down from the published program, not from ours.
PUBLISHED = """
config | '' | -c f.yaml | 'f.yaml'
data_dir | None | /data | '/data'
dataset | '' | -d x | 'x'
train_split | 'train' | --train-split x | 'x'
val_split | 'validation' | --val-split x | 'x'
model | 'volo_d1' | --model x | 'x'
pretrained | False | --pretrained | True
initial_checkpoint | '' | --initial-checkpoint x | 'x'
resume | '' | --resume x | 'x'
no_resume_opt | False | --no-resume-opt | True
num_classes | None | --num-classes 10 | 10
gp | None | --gp avg | 'avg'
img_size | None | --img-size 384 | 384
input_size | None | --input-size 3 256 192 | [3, 256, 192]
crop_pct | None | --crop-pct 1.15 | 1.15
mean | None | --mean 0.5 0.5 0.5 | [0.5, 0.5, 0.5]
std | None | --std 0.5 0.5 0.5 | [0.5, 0.5, 0.5]
interpolation | '' | --interpolation bicubic | 'bicubic'
batch_size | 128 | -b 44 | 44
validation_batch_size_multiplier | 1 | -vb 2 | 2
opt | 'adamw' | --opt lamb | 'lamb'
opt_eps | None | --opt-eps 1e-6 | 1e-6
opt_betas | None | --opt-betas 0.9 0.95 | [0.9, 0.95]
momentum | 0.9 | --momentum 0.8 | 0.8
weight_decay | 0.05 | --weight-decay 1.0e-8 | 1e-8
clip_grad | None | --clip-grad 1 | 1.0
clip_mode | 'norm' | --clip-mode agc | 'agc'
sched | 'cosine' | --sched step | 'step'
lr | 0.0016 | --lr 8.0e-6 | 8e-6
lr_noise | None | --lr-noise 0.4 0.9 | [0.4, 0.9]
lr_noise_pct | 0.67 | --lr-noise-pct 0.5 | 0.5
lr_noise_std | 1.0 | --lr-noise-std 0.5 | 0.5
lr_cycle_mul | 1.0 | --lr-cycle-mul 2 | 2.0
lr_cycle_limit | 1 | --lr-cycle-limit 3 | 3
warmup_lr | 1e-6 | --warmup-lr 0 | 0.0
min_lr | 1e-5 | --min-lr 4.0e-6 | 4e-6
epochs | 300 | --epochs 30 | 30
start_epoch | None | --start-epoch 3 | 3
decay_epochs | 30.0 | --decay-epochs 2.4 | 2.4
warmup_epochs | 20 | --warmup-epochs 5 | 5
cooldown_epochs | 10 | --cooldown-epochs 0 | 0
patience_epochs | 10 | --patience-epochs 5 | 5
decay_rate | 0.1 | --dr 0.97 | 0.97
no_aug | False | --no-aug | True
scale | [0.08, 1.0] | --scale 0.2 1 | [0.2, 1.0]
ratio | [0.75, 1.3333333333333333] | --ratio 1 1 | [1.0, 1.0]
hflip | 0.5 | --hflip 0 | 0.0
vflip | 0.0 | --vflip 0.5 | 0.5
color_jitter | 0.4 | --color-jitter 0.3 | 0.3
aa | 'rand-m9-mstd0.5-inc1' | --aa rand-n3-m9-mstd0.5-inc1 | 'rand-n3-m9-mstd0.5-inc1'
aug_splits | 0 | --aug-splits 3 | 3
jsd | False | --jsd | True
reprob | 0.25 | --reprob 0.1 | 0.1
remode | 'pixel' | --remode const | 'const'
recount | 1 | --recount 2 | 2
resplit | False | --resplit | True
mixup | 0.0 | --mixup 0.8 | 0.8
cutmix | 0.0 | --cutmix 1.0 | 1.0
cutmix_minmax | None | --cutmix-minmax 0.2 0.8 | [0.2, 0.8]
mixup_prob | 1.0 | --mixup-prob 0.5 | 0.5
mixup_switch_prob | 0.5 | --mixup-switch-prob 0.3 | 0.3
mixup_mode | 'batch' | --mixup-mode elem | 'elem'
mixup_off_epoch | 0 | --mixup-off-epoch 9 | 9
smoothing | 0.1 | --smoothing 0 | 0.0
train_interpolation | 'random' | --train-interpolation bilinear | 'bilinear'
drop | 0.0 | --drop 0.1 | 0.1
drop_connect | None | --drop-connect 0.1 | 0.1
drop_path | None | --drop-path 0.75 | 0.75
drop_block | None | --drop-block 0.1 | 0.1
bn_tf | False | --bn-tf | True
bn_momentum | None | --bn-momentum 0.01 | 0.01
bn_eps | None | --bn-eps 1e-3 | 1e-3
sync_bn | False | --sync-bn | True
dist_bn | '' | --dist-bn reduce | 'reduce'
split_bn | False | --split-bn | True
model_ema | False | --model-ema | True
model_ema_force_cpu | False | --model-ema-force-cpu | True
model_ema_decay | 0.99992 | --model-ema-decay 0.9998 | 0.9998
seed | 42 | --seed 0 | 0
log_interval | 50 | --log-interval 10 | 10
recovery_interval | 0 | --recovery-interval 100 | 100
checkpoint_hist | 10 | --checkpoint-hist 2 | 2
workers | 8 | -j 0 | 0
save_images | False | --save-images | True
amp | False | --amp | True
apex_amp | False | --apex-amp | True
native_amp | False | --native-amp | True
channels_last | False | --channels-last | True
pin_mem | False | --pin-mem | True
no_prefetcher | False | --no-prefetcher | True
output | '' | --output x | 'x'
eval_metric | 'top1' | --eval-metric loss | 'loss'
tta | 0 | --tta 1 | 1
local_rank | 0 | --local_rank 3 | 3
use_multi_epochs_loader | False | --use-multi-epochs-loader | True
torchscript | False | --torchscript | True
token_label | False | --token-label | True
token_label_data | '' | --token-label-data x | 'x'
token_label_size | 1 | --token-label-size 14 | 14
dense_weight | 0.5 | --dense-weight 1.0 | 1.0
cls_weight | 1.0 | --cls-weight 0.5 | 0.5
ground_truth | False | --ground-truth | True
finetune | '' | --finetune x | 'x'
"""
ROWS = [[cell.strip() for cell in line.split(" | ")] for line in PUBLISHED.strip().splitlines()]
# Absent, these two now mean "from the batch" and "from the model".
CHANGED = {"lr": None, "token_label_size": None}
LONG = {
    "-c": "--config",
    "-d": "--dataset",
    "-b": "--batch-size",
    "-vb": "--validation-batch-size-multiplier",
    "-j": "--workers",
    "--dr": "--decay-rate",
    "--local_rank": "--local-rank",
}


def test_the_table_holds_all_103_published_flags() -> None:
    assert len({row[0] for row in ROWS}) == 103


@pytest.mark.parametrize(("dest", "default", "line", "value"), ROWS, ids=[row[0] for row in ROWS])
def test_published_flag(dest: str, default: str, line: str, value: str) -> None:
    parser = train_parser()
    before = getattr(parser.parse_args([]), dest)
    expected = CHANGED.get(dest, eval(default))
    assert before == expected and type(before) is type(expected)
    words = line.split()
    for first in {words[0], LONG.get(words[0], words[0])}:
        after = getattr(parser.parse_args([first, *words[1:]]), dest)
        assert after == eval(value) and type(after) is type(eval(value))


@pytest.mark.parametrize(
    ("dest", "default", "line", "value"),
    [
        ("grad_accum_steps", 1, "--grad-accum-steps 4", 4),
        ("grad_checkpointing", False, "--grad-checkpointing", True),
        ("torchcompile", None, "--torchcompile", "inductor"),
        ("torchcompile", None, "--torchcompile eager", "eager"),
        ("torchcompile_mode", None, "--torchcompile-mode max-autotune", "max-autotune"),
        ("amp_dtype", None, "--amp-dtype bfloat16", "bfloat16"),
        ("layer_decay", None, "--layer-decay 0.75", 0.75),
        ("model_ema_warmup", False, "--model-ema-warmup", True),
        ("lr_base", 1.6e-3, "--lr-base 1e-3", 1e-3),
        ("lr_base_size", 1024, "--lr-base-size 256", 256),
        ("lr_base_scale", "linear", "--lr-base-scale sqrt", "sqrt"),
        ("val_interval", 1, "--val-interval 5", 5),
        ("experiment", "", "--experiment x", "x"),
        ("device", None, "--device cpu", "cpu"),
        ("sched_on_updates", False, "--sched-on-updates", True),
        ("warmup_prefix", False, "--warmup-prefix", True),
        ("model_kwargs", {}, "--model-kwargs a=1 b=x c=0.5 d=(2,3)", {"a": 1, "b": "x", "c": 0.5, "d": (2, 3)}),
        ("head_init_scale", None, "--head-init-scale 0.001", 0.001),
        ("head_init_bias", None, "--head-init-bias -6.9", -6.9),
        ("validation_batch_size", None, "--validation-batch-size 64", 64),
    ],
)
def test_newer_flags_have_timms_names(dest: str, default: object, line: str, value: object) -> None:
    assert getattr(train_parser().parse_args([]), dest) == default
    assert getattr(train_parser().parse_args(line.split()), dest) == value


D1 = (
    "/imagenet --model volo_d1 --img-size 224 -b 128 --lr 1.6e-3 --drop-path 0.1 --apex-amp "
    "--token-label --token-label-size 14 --token-label-data /labels"
)
D5 = (
    "/imagenet --model volo_d5 --img-size 512 -b 4 --lr 2.3e-5 --drop-path 0.5 --epochs 30 --apex-amp "
    "--weight-decay 1.0e-8 --warmup-epochs 5 --ground-truth --token-label --token-label-size 32 "
    "--token-label-data /labels --finetune /d5.pth.tar"
)
TRANSFER = (
    "/data --model lvvit_s -b 64 --apex-amp --img-size 224 --drop-path 0.1 --token-label "
    "--token-label-size 14 --dense-weight 0.0 --num-classes 10 --finetune /ckpt"
)


@pytest.mark.parametrize("prefix", ["", "--local_rank=3 ", "--local-rank=3 "])
@pytest.mark.parametrize("command", [D1, D5, TRANSFER], ids=["d1", "d5", "transfer"])
def test_published_command_lines_are_taken(command: str, prefix: str) -> None:
    args = parse_train((prefix + command).split())
    assert args.amp and args.token_label and args.data_dir.startswith("/")
    assert args.local_rank == (3 if prefix else 0)
    assert any("--apex-amp" in note for note in args.notes)


def test_data_dir_as_a_flag() -> None:
    assert parse_train(["--data-dir", "/data", "--lr", "1"]).data_dir == "/data"
    assert parse_train(["--lr", "1", "/data", "--epochs", "3"]).data_dir == "/data"
    with pytest.raises(UserError, match="given twice: /a and --data-dir /b"):
        parse_train(["/a", "--data-dir", "/b"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # unknown, misspelt, wrong
        ("--epocs 3", "unknown flag --epocs, did you mean --epochs"),
        ("--helpp", "unknown flag --helpp, did you mean --help?"),
        ("--token-labels", "unknown flag --token-labels, did you mean --token-label"),
        ("--token-label-s 14", "unknown flag --token-label-s"),
        ("--ema-decay 0.9", "unknown flag --ema-decay, did you mean --model-ema-decay? "),
        ("--imgsize 64", "unknown flag --imgsize, did you mean --img-size? "),
        ("--log-comet", "unknown flag --log-comet (see"),  # not --local-rank
        ("--learning-rate 1", "unknown flag --learning-rate (see"),
        ("--tracker-project mine", "--tracker-project mine has no effect without --log-wandb, --log-mlflow or --log-t"),
        ("--wandb-tags a", "--wandb-tags a has no effect without --log-wandb"),
        ("second_dir", "one argument too many: second_dir"),
        ("--epochs 1.5", "--epochs: invalid int value: '1.5'"),
        ("--epochs 0", "--epochs: 0 is out of range: at least 1"),
        ("--hflip 1.5", "--hflip: 1.5 is out of range: 0 to 1"),
        ("--lr nan", "--lr: nan is not a finite number"),
        ("--crop-pct 0", "--crop-pct: 0 is out of range: it must be above 0"),
        ("--std 0", "--std: 0 is out of range: it must be above 0"),
        ("--bn-eps 0", "--bn-eps: 0 is out of range: it must be above 0"),
        (f"--seed {2**63}", "is out of range"),
        ("--mixup-mode bogus", "--mixup-mode: invalid choice: 'bogus'"),
        ("--model-kwargs depth", "'depth' is not KEY=VALUE"),
        ("--sched plateau", "function of the update number"),
        ("--sched cosin", "did you mean cosine"),
        ("--scale 1.0 0.08", "the smaller first"),
        ("--scale 0.5 2", "larger than the image"),
        ("--mean 0.5 0.5", "--mean takes one number, or three"),
        ("--lr-noise 0.9 0.1", "--lr-noise"),
        ("--cutmix-minmax 0.5", "two numbers"),
        # nothing here can honour these
        ("--drop-block 0.1", "no VOLO or LV-ViT has DropBlock"),
        ("--torchscript", "use --torchcompile"),
        ("--jsd", "--jsd: AugMix"),
        ("--aug-splits 3", "--aug-splits 3: AugMix"),
        ("--resplit", "--resplit: AugMix"),
        ("--split-bn", "--split-bn"),
        ("--tta 2", "--tta 2"),
        ("--gp gem", "--gp: invalid choice"),
        ("--patience-epochs 3", "plateau"),
        ("--dataset hfds", "hfds/NAME"),
        ("--dataset torch/cifar10 --data-backend synthetic", "no effect with --data-backend synthetic"),
        ("--input-size 1 28 28", "RGB"),
        # contradictions
        ("--finetune a --resume b", "--finetune has no effect with --resume b"),
        ("--finetune a --initial-checkpoint b", "--initial-checkpoint and --finetune name different weights"),
        ("--pretrained --finetune a", "--pretrained and --finetune name different weights"),
        ("--lr 1e-3 --lr-base 1e-3", "keep one"),
        ("--img-size 224 --input-size 3 256 192", "differ"),
        ("-vb 2 --validation-batch-size 8", "keep one"),
        ("--drop-connect 0.1 --drop-path 0.2", "keep --drop-path"),
        # flags without effect
        ("--token-label-data /l", "--token-label-data /l has no effect without --token-label"),
        ("--token-label-size 14", "--token-label-size 14 has no effect without --token-label"),
        ("--ground-truth", "--ground-truth has no effect without --token-label"),
        ("--dense-weight 1", "--dense-weight 1.0 has no effect without --token-label"),
        ("--cls-weight 0.5", "--cls-weight 0.5 has no effect without --token-label"),
        ("--no-mix-token", "--no-mix-token has no effect without --token-label"),
        ("--token-label --ground-truth", "--ground-truth has no effect without dense targets"),
        ("--token-label --token-label-data l --token-label-size 1 --dense-weight 1", "without dense targets"),
        ("--token-label --uncovered uniform", "--uncovered uniform has no effect without --token-label-data"),
        ("--compat label-corp", "--compat label-corp: unknown row, did you mean label-crop"),
        ("--compat zzzz", "unknown row, there are upstream, label-crop"),
        ("--compat no-label-crop", "--compat no-label-crop takes a row out of upstream"),
        ("--compat upstream label-crop no-label-crop", "keep one of them"),
        ("--compat label-crop", "--compat label-crop has no effect without --token-label-data"),
        ("--amp --model-dtype bfloat16", "--amp and --model-dtype bfloat16 both set the precision: keep one of them"),
        ("--model-dtype bfloat16 --amp-dtype bfloat16", "--amp-dtype bfloat16 has no effect without --amp"),
        (f"{LABELS} --smoothing 0 --compat target-sum", "--compat target-sum has no effect without --smoothing"),
        (f"{LABELS} --compat half-ids", "--compat half-ids: unknown row, there are upstream, label-crop"),
        (f"{LABELS} --uncovered ignore --compat uncovered", "--uncovered ignore contradicts --compat uncovered"),
        ("--token-label --compat upstream", "--compat upstream has no effect without --token-label-data"),
        ("--token-label --bad-label skip", "--bad-label skip has no effect without --token-label-data"),
        ("--token-label --token-label-data l --gt-weight-agree 0.7", "without --ground-truth"),
        ("--token-label --cls-weight 0", "--cls-weight 0 leaves nothing to train"),
        (
            "--token-label --token-label-data l --cls-weight 0 --dense-weight 0",
            "--cls-weight 0 leaves nothing to train",
        ),
        ("--no-aug --hflip 0.3", "--hflip 0.3 has no effect without augmentation (--no-aug)"),
        ("--outlooker-drop-path", "without --drop-path above 0"),
        ("--drop-path-mode subset", "--drop-path-mode subset has no effect without --drop-path above 0"),
        ("--drop-path-mode subset --drop-path 0.75 -b 1", "drops nothing at --drop-path 0.75 with --batch-size 1"),
        ("--drop-path-mode subset --drop-path 0.1 -b 4", "drops nothing at --drop-path 0.1 with --batch-size 4"),
        ("--torchcompile eager --torchcompile-mode reduce-overhead", "without --torchcompile inductor"),
        ("--mixup-prob 0.5", "without --mixup or --cutmix"),
        ("--mixup 0.2 --mixup-switch-prob 0.1", "without --mixup and --cutmix"),
        ("--model-ema-decay 0.9", "without --model-ema"),
        ("--model-ema-force-cpu", "without --model-ema"),
        ("--clip-mode agc", "without --clip-grad"),
        ("--amp-dtype bfloat16", "without --amp"),
        ("--torchcompile-mode default", "without --torchcompile"),
        ("--lr-noise-std 0.1", "without --lr-noise"),
        ("--no-resume-opt", "without --resume"),
        ("--warmup-epochs 0 --warmup-lr 1e-4", "without --warmup-epochs"),
        ("--decay-epochs 5", "without --sched step"),
        ("--decay-rate 0.5", "without --sched step, poly"),
        ("--sched step --cooldown-epochs 5", "--cooldown-epochs 5 has no effect without --sched cosine"),
        ("--sched step --min-lr 0", "--min-lr 0.0 has no effect without --sched cosine"),
        ("--lr-cycle-mul 2", "without --lr-cycle-limit above 1"),
        ("--reprob 0 --recount 2", "without --reprob"),
        ("--full-decode --data-backend pil", "--full-decode has no effect without --data-backend torchvision"),
    ],
)
def test_refused_in_one_line(line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_train(["/data", *line.split()])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_compat_is_resolved_to_the_rows_that_change_something() -> None:
    args = parse_train(["/data", *LABELS.split(), "--compat", "upstream"])
    assert (args.compat, args.uncovered) == (list(ROWS_OF_COMPAT), "uniform")
    args = parse_train(["/data", *LABELS.split(), "--smoothing", "0", "--compat", "upstream", "no-label-crop"])
    assert args.compat == ["label-scale", "label-area", "uncovered"]
    for row in ROWS_OF_COMPAT:
        one = parse_train(["/data", *LABELS.split(), "--compat", row])
        assert (one.compat, one.uncovered) == ([row], "uniform" if row == "uncovered" else "ignore")
    assert parse_train(["/data"]).compat is None


def test_data_dir_is_needed_but_for_synthetic_data() -> None:
    with pytest.raises(UserError, match="DATA_DIR is missing"):
        parse_train([])
    assert parse_train(["--data-backend", "synthetic"]).data_dir is None


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--native-amp", "--native-amp: torch's mixed precision"),
        ("--drop-connect 0.1", "old name of --drop-path, which is now 0.1"),
        ("--token-label", "trains class targets alone"),
        ("--token-label --token-label-size 14", "trains every token on its image's class"),
        ("--color-jitter 0.3", "--color-jitter 0.3 is not used beside --aa"),
        ("--epochs 1 --warmup-epochs 20", "--warmup-epochs 20 covers all of --epochs 1"),
        ("--lr 8e-6", "--lr 8e-06 is below --min-lr 1e-05"),
    ],
)
def test_what_is_honoured_but_may_surprise_is_noted(line: str, note: str) -> None:
    assert parse_train(["/data"]).notes == []
    notes = parse_train(["/data", *line.split()]).notes
    assert len(notes) == 1 and note in notes[0]


def test_what_says_what_happens_anyway_is_taken() -> None:
    flags = "/data --sched step --cooldown-epochs 0 --no-aug --outlooker-drop-path --drop-path 0.1"
    args = parse_train(flags.split())
    assert args.cooldown_epochs == 0 and args.no_aug and args.outlooker_drop_path
    args = parse_train(["/data", "--drop-path", "0.75", "--drop-path-mode", "subset", "-b", "2"])
    assert args.drop_path_mode == "subset"


def test_aliases_set_what_they_stand_for() -> None:
    assert parse_train(["/data", "--apex-amp"]).amp is True
    assert parse_train(["/data", "--drop-connect", "0.1"]).drop_path == 0.1


def test_token_label_size_is_1_without_label_data_and_open_with_it() -> None:
    assert parse_train(["/data", "--token-label"]).token_label_size == 1
    assert parse_train(["/data", "--token-label", "--token-label-data", "l"]).token_label_size is None
    assert parse_train(["/data"]).token_label_size is None


def test_a_job_that_is_started_again_may_name_finetune_and_resume_auto() -> None:
    assert parse_train(["/data", "--finetune", "a", "--resume", "auto"]).resume == "auto"


LABELLED: dict[str, object] = {"token_label": True, "token_label_data": "l"}


def recipe(tmp_path: Path, **values: object) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_command_line_wins_over_recipe_and_recipe_over_defaults(tmp_path: Path) -> None:
    path = recipe(tmp_path, epochs=30, batch_size=64, amp=True, model_ema=True)
    args = parse_train(["-c", path, "/data", "--epochs", "3", "--no-amp"])
    assert (args.epochs, args.batch_size, args.workers) == (3, 64, 8)
    assert args.amp is False and args.model_ema is True
    # A flag at its default value is a flag all the same.
    assert parse_train(["-c", path, "/data", "--batch-size", "128"]).batch_size == 128


@pytest.mark.parametrize(
    ("in_recipe", "line", "expected"),
    [
        ({"lr_base": 1e-3, "lr_base_size": 352}, "--lr 5e-4", {"lr": 5e-4, "lr_base": 1.6e-3, "lr_base_size": 1024}),
        ({"lr": 8e-6}, "--lr-base 1e-3", {"lr": None, "lr_base": 1e-3}),
        ({"lr_base": 1e-3, "lr_base_size": 352}, "--lr-base 2e-3", {"lr_base": 2e-3, "lr_base_size": 352}),
        ({"img_size": 224}, "--input-size 3 64 32", {"img_size": None, "input_size": [3, 64, 32]}),
        (LABELLED | {"token_label_size": 14}, "--img-size 384", {"img_size": 384, "token_label_size": None}),
        (LABELLED | {"token_label_size": 14}, "--epochs 3", {"token_label_size": 14}),
        (LABELLED | {"token_label_size": 1}, "--img-size 384", {"token_label_size": 1}),
        ({"validation_batch_size_multiplier": 2}, "--validation-batch-size 8", {"validation_batch_size_multiplier": 1}),
        ({"drop_path": 0.5}, "--drop-connect 0.1", {"drop_path": 0.1}),
        ({"aa": "rand-m5", "reprob": 0.1}, "--no-aug", {"no_aug": True, "aa": "rand-m9-mstd0.5-inc1", "reprob": 0.25}),
        ({"pretrained": True}, "--finetune f", {"pretrained": False, "finetune": "f"}),
        ({"drop_connect": 0.1}, "--drop-path 0", {"drop_path": 0.0}),
        # What is switched off is no alternative.
        ({"finetune": "f"}, "--no-pretrained", {"pretrained": False, "finetune": "f"}),
        ({"initial_checkpoint": "f"}, "--no-pretrained", {"initial_checkpoint": "f"}),
        ({"pretrained": True}, "--finetune= --initial-checkpoint=", {"pretrained": True}),
        ({"token_label": True, "token_label_teacher": "t"}, "--token-label-data=", {"token_label_teacher": "t"}),
        (
            {"token_label": True, "token_label_data": "l", "dense_weight": 1.0, "ground_truth": True},
            "--no-token-label",
            {"token_label": False, "token_label_data": "", "dense_weight": 0.5, "ground_truth": False},
        ),
    ],
)
def test_command_line_voids_the_recipes_alternative(
    tmp_path: Path, in_recipe: dict[str, object], line: str, expected: dict[str, object]
) -> None:
    args = parse_train(["-c", recipe(tmp_path, **in_recipe), "/data", *line.split()])
    assert {name: getattr(args, name) for name in expected} == expected


def test_resolved_arguments_are_a_recipe_that_repeats_them(tmp_path: Path) -> None:
    line = f"{D1} --drop-connect 0.1 --torchcompile --model-kwargs depth=3 --min-lr 0 --bn-tf --mean 0.5"
    first = parse_train(line.split())
    settings = {name: value for name, value in vars(first).items() if name not in ("config", "notes")}
    second = parse_train(["-c", recipe(tmp_path, **settings)])
    assert {**vars(second), "config": ""} == vars(first)


def test_a_contradiction_inside_a_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="keep one"):
        parse_train(["-c", recipe(tmp_path, lr=1e-3, lr_base=1e-3), "/data"])


@pytest.mark.parametrize("program", ["train", "validate", "generate_label"])
def test_help_is_grouped_and_imports_nothing_heavy(program: str) -> None:
    code = (
        "import sys\n"
        f"sys.argv = [__file__ := '{program}.py', '--help']\n"
        f"from volo.config.{'args' if program == 'train' else 'flags_eval'} import {program}_parser\n"
        f"text = {program}_parser().format_help()\n"
        "print(text)\n"
        "print('HEAVY', sorted({'torch', 'timm', 'numpy', 'torchvision'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    if program == "train":
        titles = [line[:-1] for line in done.stdout.splitlines() if line.endswith(":") and line[0].isalpha()]
        expected = ["Run", "Data", "Model", "Token labels", "Optimizer", "Schedule", "Augmentation", "Regularisation"]
        expected += ["BatchNorm", "EMA", "Precision and speed", "Checkpoints and logging", "Trackers", "Distributed"]
        assert titles == ["options", *expected]


def test_every_flag_has_a_help_line() -> None:
    for parser in (train_parser(), validate_parser(), generate_label_parser(), predict_parser()):
        assert all(len(row.help) > 3 for row in parser.flags.values())


# validate.py as published: destination | default | on a command line | value
PUBLISHED_VALIDATE = """
data | None | /data | '/data'
dataset | '' | -d x | 'x'
split | 'validation' | --split x | 'x'
model | 'dpn92' | -m x | 'x'
workers | 4 | -j 2 | 2
batch_size | 256 | -b 32 | 32
img_size | None | --img-size 512 | 512
input_size | None | --input-size 3 256 192 | [3, 256, 192]
crop_pct | None | --crop-pct 1 | 1.0
mean | None | --mean 0.5 | [0.5]
std | None | --std 0.5 | [0.5]
interpolation | '' | --interpolation bilinear | 'bilinear'
num_classes | None | --num-classes 10 | 10
class_map | '' | --class-map x | 'x'
gp | None | --gp avg | 'avg'
log_freq | 50 | --log-freq 1 | 1
checkpoint | '' | --checkpoint x | 'x'
pretrained | False | --pretrained | True
num_gpu | 1 | --num-gpu 2 | 2
no_test_pool | False | --no-test-pool | True
no_prefetcher | False | --no-prefetcher | True
pin_mem | False | --pin-mem | True
channels_last | False | --channels-last | True
amp | False | --amp | True
apex_amp | False | --apex-amp | True
native_amp | False | --native-amp | True
tf_preprocessing | False | --tf-preprocessing | True
use_ema | False | --use-ema | True
torchscript | False | --torchscript | True
legacy_jit | False | --legacy-jit | True
results_file | '' | --results-file x | 'x'
real_labels | '' | --real-labels x | 'x'
valid_labels | '' | --valid-labels x | 'x'
"""
VALIDATE_ROWS = [[cell.strip() for cell in line.split(" | ")] for line in PUBLISHED_VALIDATE.strip().splitlines()]


def test_validate_has_the_33_published_flags() -> None:
    assert len(VALIDATE_ROWS) == 33
    parser = validate_parser()
    for dest, default, line, value in VALIDATE_ROWS:
        # The checkpoint says what model it is; there is no other default.
        expected = None if dest == "model" else eval(default)
        assert getattr(parser.parse_args([]), dest) == expected, dest
        assert getattr(parser.parse_args(line.split()), dest) == eval(value), dest


def test_published_validation_command() -> None:
    line = "/imagenet --model volo_d1 --checkpoint /c --no-test-pool --apex-amp --img-size 224 -b 128"
    args = parse_validate(line.split())
    assert (args.data, args.model, args.checkpoint, args.amp, args.batch_size) == (
        "/imagenet",
        "volo_d1",
        "/c",
        True,
        128,
    )
    assert parse_validate(["--data-dir", "/d", "--checkpoint", "/c"]).data == "/d"


def test_validate_without_checkpoint_takes_the_published_weights() -> None:
    args = parse_validate(["/d", "--model", "volo_d1"])
    assert args.pretrained and "published weights" in args.notes[0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "DATA is missing"),
        ("/d", "--model is missing"),
        ("/d --checkpoint c --torchscript", "use --torchcompile"),
        ("/d --checkpoint c --legacy-jit", "use --torchcompile"),
        ("/d --checkpoint c --tf-preprocessing", "TensorFlow"),
        ("/d --checkpoint c --num-gpu 2", "torchrun"),
        ("/d --checkpoint c --pretrained", "keep one"),
        ("/d --model m --use-ema", "--use-ema has no effect without --checkpoint"),
        ("/d --checkpoint c --use-ema --no-use-ema", "--use-ema and --no-use-ema contradict"),
        ("/d --checkpoint c --results-format json", "without --results-file"),
        ("/d --checkpoint c --dataset hfids/x", "hfds/x reads the same"),
        ("/d --checkpoint c --input-size 4 8 8", "RGB"),
        ("/d --checkpoint c --img-sise 8", "did you mean --img-size"),
    ],
)
def test_validate_refuses_in_one_line(line: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_validate(shlex.split(line))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_published_label_command() -> None:
    line = "/imagenet out --model dm_nfnet_f6 --pretrained --img-size 576 -b 32 --crop-pct 1.0 --transfer"
    args: Namespace = parse_generate_label(line.split())
    assert (args.data, args.token_label_root, args.top_k, args.split) == ("/imagenet", "out", 5, "train")
    assert args.transfer and args.crop_pct == 1.0 and args.batch_size == 32


def test_label_command_needs_both_folders_and_an_annotator() -> None:
    with pytest.raises(UserError, match="OUT"):
        parse_generate_label(["/imagenet", "--model", "m", "--pretrained"])
    with pytest.raises(UserError, match="--model is missing"):
        parse_generate_label(["/imagenet", "out"])


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # such as the ./wandb that W&B writes: no package
    told = re.escape(f"--log-{name} needs {name}: pip install 'volo-tlt[{name}]'")
    with pytest.raises(UserError, match=f"^{told}$"):
        parse_train(["/d", f"--log-{name}"])
    (tmp_path / name / "__init__.py").touch()
    importlib.invalidate_caches()
    assert getattr(parse_train(["/d", f"--log-{name}"]), f"log_{name}") is True
    assert re.search(rf'^{name} = \["{name}>', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
