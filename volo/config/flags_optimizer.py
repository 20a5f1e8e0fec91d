"""The flags of `train.py` that say how weights are stepped: optimizer, learning rate and its schedule."""

from __future__ import annotations

from volo.config.flag_table import (
    ABOVE_ZERO,
    AMOUNT,
    COUNT,
    FLOAT,
    NAME,
    POSITIVE,
    SHARE,
    Group,
    Need,
    flag,
    key_value,
    switch,
)

SCHEDULES = ("cosine", "tanh", "poly", "step", "constant")
CYCLIC_SCHEDULES = ("cosine", "tanh", "poly")
CLIPPED = Need("--clip-grad", lambda a: a.clip_grad is not None)
NOISY = Need("--lr-noise", lambda a: a.lr_noise is not None)
WARMED_UP = Need("--warmup-epochs", lambda a: a.warmup_epochs > 0)
STEPPED = Need("--sched step", lambda a: a.sched == "step")
DECAYING = Need(
    "--sched step, poly or several cosine cycles",
    lambda a: a.sched in ("step", "poly") or (a.sched == "cosine" and a.lr_cycle_limit > 1),
)
CYCLIC = Need("--sched cosine, tanh or poly", lambda a: a.sched in CYCLIC_SCHEDULES)
K_DECAYING = Need("--sched cosine or poly", lambda a: a.sched in ("cosine", "poly"))
# 0 says what happens.
COOLED_DOWN = Need(CYCLIC.of, lambda a: CYCLIC.met(a) or a.cooldown_epochs == 0)
SEVERAL_CYCLES = Need("--lr-cycle-limit above 1", lambda a: a.lr_cycle_limit > 1)

OPTIMIZER = Group(
    "Optimizer",
    flag("--opt", NAME, "adamw", "any of timm's; fused... from apex where it is installed"),
    flag("--opt-eps", AMOUNT, None, "epsilon (the optimizer's own)"),
    flag("--opt-betas", FLOAT, None, "betas (the optimizer's own)", nargs="+"),
    flag("--momentum", SHARE, 0.9, "momentum, where the optimizer has one"),
    flag("--weight-decay", AMOUNT, 0.05, "weight decay"),
    flag("--layer-decay", SHARE, None, "learning rate factor from layer to layer"),
    flag("--clip-grad", ABOVE_ZERO, None, "gradient clipping threshold (none)"),
    flag("--clip-mode", ("norm", "value", "agc"), "norm", "what is clipped; agc: not the heads", needs=(CLIPPED,)),
    flag("--opt-kwargs", key_value, {}, "more arguments for it", nargs="*", metavar="K=V"),
    flag("--grad-accum-steps", POSITIVE, 1, "batches per update"),
)

SCHEDULE = Group(
    "Schedule",
    flag(
        "--lr",
        AMOUNT,
        None,
        "learning rate, absolute (else from --lr-base)",
        metavar="LR",
        excludes=("lr_base", "lr_base_size", "lr_base_scale"),
    ),
    flag("--lr-base", AMOUNT, 1.6e-3, "learning rate at --lr-base-size images", metavar="LR"),
    flag("--lr-base-size", POSITIVE, 1024, "global batch that --lr-base is meant for"),
    flag("--lr-base-scale", ("linear", "sqrt"), "linear", "how it grows with the global batch"),
    flag("--sched", SCHEDULES, "cosine", "course of the learning rate"),
    switch("--sched-on-updates", "change the learning rate at every update, not every epoch"),
    flag("--epochs", POSITIVE, 300, "epochs without the cool-down"),
    flag("--warmup-epochs", COUNT, 20, "epochs of linear warm-up; at most a fifth of --epochs"),
    flag("--warmup-lr", AMOUNT, 1e-6, "learning rate at the start of the warm-up", metavar="LR", needs=(WARMED_UP,)),
    switch("--warmup-prefix", "put the warm-up before --epochs, not into them", needs=(WARMED_UP,)),
    flag(
        "--cooldown-epochs",
        COUNT,
        10,
        "epochs at --min-lr after the schedule; none below 30 --epochs",
        needs=(COOLED_DOWN,),
    ),
    flag("--min-lr", AMOUNT, 1e-5, "learning rate at the end", metavar="LR", needs=(CYCLIC,)),
    flag(
        "--start-epoch",
        COUNT,
        None,
        "first epoch (the checkpoint's, or 0); what --resume auto finds beyond it goes on from there",
    ),
    flag("--decay-epochs", ABOVE_ZERO, 30.0, "epochs between decays (step)", needs=(STEPPED,)),
    flag(
        "--decay-rate --dr", AMOUNT, 0.1, "decay per step (step) or cycle (cosine); exponent (poly)", needs=(DECAYING,)
    ),
    flag(
        "--patience-epochs",
        COUNT,
        10,
        "of the plateau schedule, which is refused",
        refused="belongs to --sched plateau, which is not supported: remove the flag",
    ),
    flag("--lr-cycle-mul", ABOVE_ZERO, 1.0, "length of a cycle over the one before", needs=(SEVERAL_CYCLES,)),
    flag("--lr-k-decay", ABOVE_ZERO, 1.0, "exponent of the time in the curve (arXiv:2004.05909)", needs=(K_DECAYING,)),
    flag("--lr-cycle-limit", POSITIVE, 1, "number of cycles", needs=(CYCLIC,)),
    flag("--lr-noise", AMOUNT, None, "noise from (to) this part of the epochs", nargs="+"),
    flag("--lr-noise-pct", AMOUNT, 0.67, "largest relative noise", needs=(NOISY,)),
    flag("--lr-noise-std", AMOUNT, 1.0, "relative standard deviation of the noise", needs=(NOISY,)),
)
