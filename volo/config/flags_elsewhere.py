"""What other programs call the flags and values of this project: Ultralytics, lightly-train, torchvision's references,
Hugging Face's Trainer, Lightning. Names that are only longer or shorter need no row (`nearest` of `parser`).

A row begins with what is asked for here: a flag, with its value or a remark where that is needed, a word that a flag
takes, or a command. Programs suggest the first row whose first word they know.
"""

from __future__ import annotations

ELSEWHERE = {
    "data_dir": "data data-path data-root root source train-dir imagefolder",
    "data": "data-path data-root root source",
    "paths": "data source image images input",
    "--output": "project out out-dir save-dir work-dir log-dir logging-dir default-root-dir",
    "--experiment": "name run-name exp-name",
    "--resume auto": "exist-ok overwrite overwrite-output-dir",
    "--checkpoint": "weights ckpt model-path resume",
    "--finetune": "weights ckpt checkpoint",
    "--model": "arch a backbone net",
    "--num-classes": "nc num-labels",
    "--img-size": "imgsz size resolution crop-size train-crop-size",
    "--grad-accum-steps": "accumulate gradient-accumulation-steps accumulate-grad-batches accum-iter",
    "--lr": "learning-rate",
    "--min-lr, a rate (lrf is its share of lr0)": "lrf",
    "--warmup-epochs, in epochs": "warmup-steps warmup-ratio lr-warmup-steps",
    "--sched": "lr-scheduler lr-scheduler-type scheduler",
    "--sched cosine": "cos-lr",
    "--decay-epochs": "lr-step-size step-size",
    "--decay-rate": "lr-gamma gamma",
    "--opt": "optimizer optim",
    "--weight-decay": "wd",
    "--clip-grad": "max-grad-norm gradient-clip-val",
    "--drop": "dropout",
    "--aa": "auto-augment autoaugment ra-magnitude transform-args",
    "--reprob": "random-erase random-erasing erasing",
    "--hflip": "fliplr",
    "--vflip": "flipud",
    "--amp": "precision fp16 half",
    "--amp --amp-dtype bfloat16": "bf16",
    "--torchcompile": "compile",
    "--val-interval": "val eval-freq check-val-every-n-epoch",
    "--save-epochs": "save-period save-freq",
    "--log-interval": "print-freq logging-steps log-every-n-steps",
    "--device": "gpu accelerator",
    "volo launch N": "devices gpus n-gpus num-gpus nproc-per-node nnodes num-nodes world-size dist-url",
    "volo validate": "test-only evaluate",
    # Values, and commands.
    "bfloat16": "bf16",
    "float16": "fp16 half",
    "train": "fit classify",
    "validate": "eval test",
    "predict": "infer inference",
}
