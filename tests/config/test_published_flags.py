"""The flags of the published programs, and those named as timm names them."""

import pytest

from volo.config.settings_evaluate import GENERATE_LABEL, VALIDATE
from volo.config.train import TRAIN


def switches(names: str) -> str:
    """Rows of switches that are off, and have the flag of their name."""
    return "".join(f"{name} | False | --{name.replace('_', '-')} | True\n" for name in names.split())


def texts(names: str) -> str:
    """Rows of texts that are empty, and have the flag of their name."""
    return "".join(f"{name} | '' | --{name.replace('_', '-')} x | 'x'\n" for name in names.split())


# The published program, one flag a line: destination | default | on a command line | what that gives.
# It was written down from the published program, not from ours.
PUBLISHED = """
config | '' | -c f.yaml | 'f.yaml'
data_dir | None | /data | '/data'
dataset | '' | -d x | 'x'
train_split | 'train' | --train-split x | 'x'
val_split | 'validation' | --val-split x | 'x'
model | 'volo_d1' | --model x | 'x'
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
scale | [0.08, 1.0] | --scale 0.2 1 | [0.2, 1.0]
ratio | [0.75, 1.3333333333333333] | --ratio 1 1 | [1.0, 1.0]
hflip | 0.5 | --hflip 0 | 0.0
vflip | 0.0 | --vflip 0.5 | 0.5
color_jitter | 0.4 | --color-jitter 0.3 | 0.3
aa | 'rand-m9-mstd0.5-inc1' | --aa rand-n3-m9-mstd0.5-inc1 | 'rand-n3-m9-mstd0.5-inc1'
aug_splits | 0 | --aug-splits 3 | 3
reprob | 0.25 | --reprob 0.1 | 0.1
remode | 'pixel' | --remode const | 'const'
recount | 1 | --recount 2 | 2
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
drop_path | None | --drop-connect 0.1 | 0.1
drop_path | None | --drop-path 0.75 | 0.75
drop_block | None | --drop-block 0.1 | 0.1
bn_momentum | None | --bn-momentum 0.01 | 0.01
bn_eps | None | --bn-eps 1e-3 | 1e-3
dist_bn | '' | --dist-bn reduce | 'reduce'
model_ema_decay | 0.99992 | --model-ema-decay 0.9998 | 0.9998
seed | 42 | --seed 0 | 0
log_interval | 50 | --log-interval 10 | 10
recovery_interval | 0 | --recovery-interval 100 | 100
checkpoint_hist | 10 | --checkpoint-hist 2 | 2
workers | 8 | -j 0 | 0
amp | False | --apex-amp | True
amp | False | --native-amp | True
eval_metric | 'top1' | --eval-metric loss | 'loss'
tta | 0 | --tta 1 | 1
local_rank | 0 | --local_rank 3 | 3
token_label_size | 1 | --token-label-size 14 | 14
dense_weight | 0.5 | --dense-weight 1.0 | 1.0
cls_weight | 1.0 | --cls-weight 0.5 | 0.5
"""
PUBLISHED += switches("pretrained no_resume_opt no_aug jsd resplit bn_tf sync_bn split_bn model_ema")
PUBLISHED += switches("model_ema_force_cpu save_images amp channels_last pin_mem no_prefetcher use_multi_epochs_loader")
PUBLISHED += switches("torchscript token_label ground_truth")
PUBLISHED += texts("initial_checkpoint resume output token_label_data finetune")

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
gp | None | --gp avg | 'avg'
log_freq | 50 | --log-freq 1 | 1
num_gpu | 1 | --num-gpu 2 | 2
amp | False | --apex-amp | True
amp | False | --native-amp | True
"""
PUBLISHED_VALIDATE += switches("pretrained no_test_pool no_prefetcher pin_mem channels_last amp tf_preprocessing")
PUBLISHED_VALIDATE += switches("use_ema torchscript legacy_jit")
PUBLISHED_VALIDATE += texts("class_map checkpoint results_file real_labels valid_labels")
# validate.py and train.py call their defaults by other names than the published programs where absence says more.
CHANGED = {"lr": None, "token_label_size": None, "validate model": None, "workers": None, "validate workers": None}
LONG = {"-c": "--config", "-d": "--dataset", "-b": "--batch-size", "-j": "--workers", "--dr": "--decay-rate"}
LONG |= {"-vb": "--validation-batch-size-multiplier", "--local_rank": "--local-rank"}


@pytest.mark.parametrize(("program", "table", "flags"), [(TRAIN, PUBLISHED, 103), (VALIDATE, PUBLISHED_VALIDATE, 33)])
def test_published_flags_keep_name_type_default_and_meaning(program, table, flags):
    rows = [[cell.strip() for cell in line.split(" | ")] for line in table.strip().splitlines()]
    assert len({line.split()[0] for _, _, line, _ in rows}) == flags
    parser = program.parser()
    before = program.settings().values()
    for dest, default, line, value in rows:
        expected = CHANGED.get(dest if program is TRAIN else f"validate {dest}", eval(default))
        assert before[dest] == expected and type(before[dest]) is type(expected), dest
        words = line.split()
        for first in {words[0], LONG.get(words[0], words[0])}:
            after = parser.explicit([first, *words[1:]])[dest]
            assert after == eval(value) and type(after) is type(eval(value)), line


def test_published_commands_are_taken():
    line = "--local_rank=3 /imagenet --model volo_d1 --img-size 224 -b 128 --lr 1.6e-3 --drop-path 0.1 --apex-amp "
    train = TRAIN.parse(f"{line} --token-label --token-label-size 14 --token-label-data /labels".split())
    assert train.precision.mixed.amp and train.labels.token_label
    assert (train.images.data_dir, train.distributed.local_rank) == ("/imagenet", 3)
    line = "/i --model volo_d1 --checkpoint /c --no-test-pool --apex-amp -b 128"
    assert VALIDATE.parse(line.split()).notes == ()
    args = VALIDATE.parse(["/d", "--model", "volo_d1"])
    assert args.network.pretrained and "published weights" in args.notes[0]
    line = "/imagenet out --model dm_nfnet_f6 --pretrained --img-size 576 -b 32 --crop-pct 1.0 --transfer"
    label = GENERATE_LABEL.parse(line.split())
    assert (label.images.data, label.written.out, label.images.split) == ("/imagenet", "out", "train")
    assert label.written.transfer and label.written.top_k == 5
    assert label.images.pixels.crop_pct == 1.0 and label.images.batch_size == 32
