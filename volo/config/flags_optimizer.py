"""The flags of `train.py` that say how weights are stepped: optimizer, learning rate and its schedule."""

from __future__ import annotations

from volo.config.flag_table import ABOVE_ZERO, AMOUNT, COUNT, FLOAT, POSITIVE, SHARE, Group, Need, flag, switch

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
    (
        flag("--opt", default="adamw", metavar="NAME", help="any of timm's; fused... from apex where it is installed"),
        flag("--opt-eps", default=None, type=AMOUNT, metavar="E", help="epsilon (the optimizer's own)"),
        flag("--opt-betas", default=None, type=FLOAT, nargs="+", metavar="B", help="betas (the optimizer's own)"),
        flag("--momentum", default=0.9, type=SHARE, metavar="M", help="momentum, where the optimizer has one"),
        flag("--weight-decay", default=0.05, type=AMOUNT, metavar="W", help="weight decay"),
        flag("--layer-decay", default=None, type=SHARE, metavar="R", help="learning rate factor from layer to layer"),
        flag("--clip-grad", default=None, type=ABOVE_ZERO, metavar="N", help="gradient clipping threshold (none)"),
        flag(
            "--clip-mode",
            default="norm",
            choices=("norm", "value", "agc"),
            help="what is clipped; agc: not the heads",
            needs=(CLIPPED,),
        ),
        flag("--opt-kwargs", default={}, nargs="*", key_values=True, metavar="K=V", help="more arguments for it"),
        flag("--grad-accum-steps", default=1, type=POSITIVE, help="batches per update"),
    ),
)

SCHEDULE = Group(
    "Schedule",
    (
        flag(
            "--lr",
            default=None,
            type=AMOUNT,
            metavar="LR",
            help="learning rate, absolute (else from --lr-base)",
            excludes=("lr_base", "lr_base_size", "lr_base_scale"),
        ),
        flag("--lr-base", default=1.6e-3, type=AMOUNT, metavar="LR", help="learning rate at --lr-base-size images"),
        flag("--lr-base-size", default=1024, type=POSITIVE, help="global batch that --lr-base is meant for"),
        flag(
            "--lr-base-scale", default="linear", choices=("linear", "sqrt"), help="how it grows with the global batch"
        ),
        flag("--sched", default="cosine", metavar="NAME", help=f"schedule: {', '.join(SCHEDULES)}"),
        switch("--sched-on-updates", help="change the learning rate at every update, not every epoch"),
        flag("--epochs", default=300, type=POSITIVE, help="epochs without the cool-down"),
        flag("--warmup-epochs", default=20, type=COUNT, help="epochs of linear warm-up; at most a fifth of --epochs"),
        flag(
            "--warmup-lr",
            default=1e-6,
            type=AMOUNT,
            metavar="LR",
            help="learning rate at the start of the warm-up",
            needs=(WARMED_UP,),
        ),
        switch("--warmup-prefix", help="put the warm-up before --epochs, not into them", needs=(WARMED_UP,)),
        flag(
            "--cooldown-epochs",
            default=10,
            type=COUNT,
            help="epochs at --min-lr after the schedule; none below 30 --epochs",
            needs=(COOLED_DOWN,),
        ),
        flag("--min-lr", default=1e-5, type=AMOUNT, metavar="LR", help="learning rate at the end", needs=(CYCLIC,)),
        flag(
            "--start-epoch",
            default=None,
            type=COUNT,
            help="first epoch (the checkpoint's, or 0); what --resume auto finds beyond it goes on from there",
        ),
        flag(
            "--decay-epochs",
            default=30.0,
            type=AMOUNT,
            metavar="N",
            help="epochs between decays (step)",
            needs=(STEPPED,),
        ),
        flag(
            "--decay-rate",
            "--dr",
            default=0.1,
            type=AMOUNT,
            metavar="R",
            help="decay per step (step) or cycle (cosine); exponent (poly)",
            needs=(DECAYING,),
        ),
        flag(
            "--patience-epochs",
            default=10,
            type=COUNT,
            help="of the plateau schedule, which is refused",
            refused="belongs to --sched plateau, which is not supported: remove the flag",
        ),
        flag(
            "--lr-cycle-mul",
            default=1.0,
            type=AMOUNT,
            metavar="R",
            help="length of a cycle over the one before",
            needs=(SEVERAL_CYCLES,),
        ),
        flag(
            "--lr-k-decay",
            default=1.0,
            type=ABOVE_ZERO,
            metavar="K",
            help="exponent of the time in the curve (arXiv:2004.05909)",
            needs=(K_DECAYING,),
        ),
        flag("--lr-cycle-limit", default=1, type=POSITIVE, help="number of cycles", needs=(CYCLIC,)),
        flag(
            "--lr-noise",
            default=None,
            type=AMOUNT,
            nargs="+",
            metavar="R",
            help="noise from (to) this part of the epochs",
        ),
        flag("--lr-noise-pct", default=0.67, type=AMOUNT, metavar="R", help="largest relative noise", needs=(NOISY,)),
        flag(
            "--lr-noise-std",
            default=1.0,
            type=AMOUNT,
            metavar="R",
            help="relative standard deviation of the noise",
            needs=(NOISY,),
        ),
    ),
)
