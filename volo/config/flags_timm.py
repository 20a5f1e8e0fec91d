"""The flags of timm's train.py (1.0.31) that this project doesn't have, and what it has instead. Each text ends the
message that refuses the flag, and is a row of docs/parity.md; a test compares the two."""

ROWS = {
    "--color-jitter-prob --grayscale-prob --gaussian-blur-prob": "missing: --color-jitter, --aa",
    "--train-crop-mode": "missing: random resized crops alone",
    "--jsd-loss": "missing, as AugMix splits are",
    "--task --target-format --multilabel-threshold": "missing: an image has one class",
    "--loss": "cross-entropy, or --bce-loss",
    "--train-num-samples --val-num-samples": "not needed: images are counted",
    "--dataset-download --dataset-trust-remote-code": "not wanted: --dataset hfds/NAME alone is fetched, without code",
    "--input-img-mode": "--in-chans 1 for grey, 3 for RGB",
    "--input-key --target-key": "not needed: found by the types of columns",
    "--epoch-repeats --train-batches-per-epoch --train-steps-per-epoch": "not wanted: an epoch has each image once",
    "--worker-seeding": "not needed: --seed gives each image its augmentation",
    "--naflex-loader --naflex-train-seq-lens --naflex-max-seq-len --naflex-patch-sizes --naflex-patch-size-probs "
    "--naflex-loss-scale --naflex-patchify-channels-first": "missing: --train-img-sizes, of square images",
    "--layer-decay-min-scale --layer-decay-no-opt-scale": "missing: --layer-decay alone, or --freeze",
    "--lr-cycle-decay": "--decay-rate, as published",
    "--kd-loss-type": "not needed: kl, as timm's only one",
    "--kd-token-distill-type": "missing, as DeiT's distillation token is",
    "--task-loss-weight": "1; --kd-loss-weight weighs the teacher's",
    "--kd-student-feature-dim --kd-teacher-feature-dim": "not needed: the models tell",
    "--fuser": "of TorchScript; --torchcompile",
    "--fast-norm": "not wanted: norms stay in float32",
    "--no-ddp-bb": "not needed: steps send no buffers (--dist-bn)",
    "--synchronize-step": "not wanted: steps don't wait",
    "--device-modules": "missing: --device takes torch's own",
    "--wandb-resume-id": "not needed: --resume finds it",
}
TIMM_FLAGS = {flag: reason for flags, reason in ROWS.items() for flag in flags.split()}
