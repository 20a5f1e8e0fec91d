"""The command lines: published flags, recipes under flags, contradictions, help."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from timm.optim import optimizer_kwargs
from timm.scheduler import scheduler_kwargs

from tests.config.test_docs import names_of
from tlt.errors import UserError
from volo.cli import COMMANDS
from volo.config.fields import flags_of, sections_of
from volo.config.flags_elsewhere import ELSEWHERE
from volo.config.settings_train import TrainSettings
from volo.config.train import TRAIN
from volo.config.value_types import Place

ROOT = Path(__file__).parents[2]
LABELS = "--token-label --token-label-data l"

# PROGRAM | its words | a part of the one line that refuses them. /data stands before the words, unless PROGRAM ends in
# "!"; LABELS stands for the flags above.
REFUSED = """
train | --epocs 3 | unknown flag --epocs, did you mean --epochs
train | --ema-decay 0.9 | unknown flag --ema-decay, did you mean --model-ema-decay?
train | --imgsz 64 --lr0 0.1 | unknown flag --imgsz, did you mean --img-size?; unknown flag --lr0, did you mean --lr?
train | --per_device_train_batch_size 4 --Learning_Rate 1 | unknown flag --Learning_Rate, did you mean --lr?
train | --lr-warmup-epochs 3 --label-smoothing 0 | did you mean --warmup-epochs?; unknown flag --label-smoothing, did
train | --cos_lr --batchsize 3 | did you mean --sched cosine?; unknown flag --batchsize, did you mean --batch-size?
train | --exist_ok True | unknown flag --exist_ok, did you mean --resume auto?
train | --devices 2 | did you mean volo launch N?
train | --data x --weights y | did you mean DATA_DIR, without a flag?; unknown flag --weights, did you mean --finetune?
predict! | --source x --weights y | did you mean PATHS, without a flag?; unknown flag --weights, did you mean --check
train! | data=d model=volo_d0 imgsz=64 amp=True cos_lr=1 | write d --model volo_d0 --img-size 64 --amp --sched cosine
predict! | source=d model=volo_d0 | source=d model=volo_d0: write d --model volo_d0
validate | amp=false workers=0 | write no --amp --workers 0
train | --pretrained True | True: a switch takes no value
train | --pretrained=True | --pretrained: a switch takes no value
train | --sched Cosine | invalid choice: 'Cosine', did you mean cosine?
train | --amp --amp-dtype bf16 | invalid choice: 'bf16', did you mean bfloat16?
train | --device 0,1 | '0,1' names several
train | --model yolo11n-cls.pt | names no architecture: weights are given as --finetune yolo11n-cls.pt
predict | --model m/best.pth | names no architecture: weights are given as --checkpoint m/best.pth
train | -c finetune-small.yaml | nor a recipe of this name; did you mean finetune_small?
train | second_dir | one argument too many: second_dir
train | --epochs 1.5 | --epochs: invalid int value: '1.5'
train | --epochs 0 | --epochs: 0 is out of range: at least 1
train | --lr nan | --lr: nan is not a finite number
train | --mixup-mode bogus | --mixup-mode: invalid choice: 'bogus'
train | --model-kwargs depth | 'depth' is not KEY=VALUE
train | --experiment ../../x | '../../x' leads out of the folder that it is to be in
train | --output o --experiment /x | --experiment: '/x' leads out
train | --data-dir /b | DATA_DIR is given twice: /data and --data-dir /b
train | --scale 1.0 0.08 | the smaller first
train | --mean 0.5 0.5 | --mean and --std take one number, or three
train | --lr-noise 0.9 0.1 | --lr-noise
train | --drop-block 0.1 | no VOLO or LV-ViT has DropBlock
train | --jsd | --jsd: AugMix
train | --data-backend synthetic | data_dir /data has no effect without image files (--data-backend synthetic
train | --lr-noise 0.4 1.5 | --lr-noise: 1.5 is out of range: 0 to 1
train | --val-fraction 1 | leaves nothing to train on
train | --input-size 1 28 28 | RGB
train | --freeze --grad-checkpointing | remove --grad-checkpointing
train | --resume / | --resume / is a folder: name the file, such as last.pth.tar in it
train | --finetune a --resume b | no effect with --resume b
train | --finetune a --branch b --resume auto | no effect with --branch b
train | --branch / --resume auto | --branch / is a folder: name the file, such as last.pth.tar in it
train | --branch b --resume r | --branch and --resume r both say where to begin: give --resume auto
train | --finetune a --initial-checkpoint b | --finetune a and --initial-checkpoint b set the same: keep one
train | --lr 1e-3 --lr-base 1e-3 | --lr 0.001 and --lr-base 0.001 set the same: keep one of them
train | --token-label --token-label-data l --token-label-teacher t | set the same: keep one of them
train | --compat label-corp | --compat label-corp: unknown row, did you mean label-crop
train | --token-label --compat upstream | --compat upstream has no effect without --token-label-data
train | LABELS --smoothing 0 --compat target-sum | --compat target-sum has no effect without --smoothing
train | LABELS --uncovered ignore --compat uncovered | --uncovered ignore contradicts --compat uncovered
train | LABELS --cls-weight 0 --dense-weight 0 | --cls-weight 0 leaves nothing to train
train | --amp --model-dtype bfloat16 | --amp and --model-dtype bfloat16 both set the precision: keep one of them
train | --drop-path-mode subset --drop-path 0.1 -b 4 | drops nothing at --drop-path 0.1 with --batch-size 4
train | --drop-path-mode subset --drop-path 0.1 --train-img-sizes 64 96 --train-batch-sizes 16 2 | sizes 2
train | --torchcompile --torchcompile-mode reduce-overhead --torchcompile-scope blocks | --torchcompile-scope model
train | --shard 2 --channels-last | --shard 2 and --channels-last: torch divides contiguous weights alone
train | --shard 2 --clip-grad 1 --clip-mode agc | --shard 2 and --clip-mode agc
validate | | --model is missing
validate | --checkpoint c --tf-preprocessing | TensorFlow
validate | --checkpoint c --pretrained | --checkpoint c and --pretrained set the same: keep one of them
validate | --model m --use-ema | --use-ema has no effect without --checkpoint
validate | --checkpoint c --use-ema --no-use-ema | --use-ema and --no-use-ema contradict
validate | --checkpoint c --dataset hfids/x | hfds/x reads the same
label | out | --model is missing
validate | --checkpoint c --test-pool --no-test-pool | --no-test-pool and --test-pool set the same
validate | --checkpoint c --knn t --valid-labels v | --valid-labels v has no effect without the heads' outputs
validate | --checkpoint c --knn t --real-labels r | --real-labels r has no effect without the heads' outputs
validate | --checkpoint c --knn t --torchcompile eager | --torchcompile eager has no effect without the heads' outputs
validate | --checkpoint c --knn t --log-freq 9 | --log-freq 9 has no effect without the heads' outputs
validate | --checkpoint c --knn t --test-pool | --test-pool has no effect without the heads' outputs
predict | --checkpoint c --output p.txt | end the name in .csv, .json or .parquet
attention | --checkpoint c | -o FILE is missing
push | | --from DIR is missing
validate! | | DATA is missing
train! | | DATA_DIR is missing
export! | -o m.onnx --checkpoint c --to-hf d | --to-hf writes the weights as they are
export! | -o m.onnx --format torch-export --checkpoint c | contradicts -o m.onnx
export! | -o m --checkpoint c | which format?
export! | -o m.pt2 --checkpoint c --opset 20 | --opset 20 has no effect without --format onnx
export! | -o m.onnx --checkpoint c --model-dtype bfloat16 | no ONNX runtime has a bfloat16 convolution
export! | -o m.onnx --checkpoint c --licence mit | --licence mit has no effect without --to-hf
preflight! | --free-gb 3 | --free-gb 3.0 has no effect without --output
"""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_refused_in_one_line(row):
    program, line, message = (cell.strip() for cell in row.split("|", 2))
    with pytest.raises(UserError) as caught:
        words = ["/data"] * (not program.endswith("!")) + line.replace("LABELS", LABELS).split()
        COMMANDS[program.rstrip("!")].program.parse(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_names_of_other_programs_stand_for_what_is_here():
    parsers = [command.program.parser() for command in COMMANDS.values()]
    rows = [row for parser in parsers for row in parser.flags.values()]
    values = {value for row in rows if isinstance(row.type, tuple) for value in row.type}
    for meant, names in ELSEWHERE.items():
        first = re.split("[ ,]", meant)[0]
        with_it = [parser for parser in parsers if first in {*parser.flags} | names_of(parser.flags.values())]
        assert with_it or first in values or first in COMMANDS or first == "volo", meant
        others = [row for parser in with_it for row in parser.flags.values() if first not in row.names]
        here = {name.lstrip("-") for name in names_of(others)}
        assert not here & {*names.split()}, "what is here now stands for itself"
    assert len([name for names in ELSEWHERE.values() for name in names.split()]) > 80
    # The same in a recipe, with the values of flags, and of devices.
    with pytest.raises(UserError, match="recipes are finetune_small, .*, volo_d5_512"):
        TRAIN.parse(["/data", "-c", "nosuch"])
    for text, device in {"0": "cuda:0", "cuda1": "cuda:1", "GPU": "cuda", "cuda:2": "cuda:2", "cpu": "cpu"}.items():
        assert TRAIN.parse(["/data", "--device", text]).run.device == device


# What some flags of train.py need | what lacks it | these flags.
NEEDED = """
| --data-backend pil | --full-decode
| -j 0 | --use-multi-epochs-loader
| --data-backend dali-cpu | --use-multi-epochs-loader
| --data-backend synthetic | --dataset torch/cifar10; --train-split t; --val-split v; --class-map c
| --data-backend synthetic | --max-bad-images 3; --max-pixels 1000
LABELS | LABELS --data-backend synthetic | --token-label-area full; --bad-label skip
| --val-fraction 0.1 | --val-split v
--token-label | | --token-label-size 14; --cls-weight 2; --no-mix-token; --token-label-data l; --token-label-teacher t
--token-label --token-label-teacher t | | --token-label-teacher-checkpoint c; --token-label-teacher-top-k 3
--token-label --token-label-size 2 | --token-label | --dense-weight 1
LABELS | --token-label | --dense-weight 1; --ground-truth; --token-label-area full
LABELS | --token-label | --uncovered uniform; --bad-label skip; --label-tail exact
LABELS | --token-label | --val-label-data v
--token-label --token-label-teacher t | --token-label-teacher t --token-label --dense-weight 0 | --val-label-data v
--token-label --token-label-teacher t | --token-label | --label-tail exact; --dense-weight 1; --ground-truth
LABELS --ground-truth | LABELS | --gt-weight-agree 0.3; --gt-weight-disagree 0.3
--kd-model-name k | | --kd-distill-type token; --kd-loss-weight 2; --kd-size 48; --kd-only
--kd-model-name k | --kd-model-name k --kd-distill-type token | --kd-temperature 2
--kd-model-name k l | --kd-model-name k | --kd-drop 0.5
--kd-model-name k --kd-distill-type token | --kd-model-name k | --kd-dense-loss gram; --kd-view whole
--kd-model-name k | --kd-model-name k --kd-only | --smoothing 0; --val-split v; --validation-batch-size 4
--kd-model-name k | --kd-model-name k --kd-only | --validation-batch-size-multiplier 2; --eval-metric loss
--kd-model-name k | --kd-model-name k --kd-only | --patience 3; --val-interval 2
--train-img-sizes 64 96 | | --train-batch-sizes auto; --train-size-probs 1 2; --train-size-schedule progressive
--train-img-sizes 64 96 | | --variable-batch-loss-scale sqrt
--train-img-sizes 64 96 --train-size-schedule progressive | --train-img-sizes 64 96 | --train-size-random-mix 0.2
--train-img-sizes 64 96 --train-size-schedule progressive | --train-img-sizes 64 96 | --train-size-schedule-spread 1
--kd-model-name k | --kd-model-name k --kd-only | --val-img-size 96
--clip-grad 1 | | --clip-mode agc
| --warmup-epochs 0 | --warmup-lr 0; --warmup-prefix
--sched multistep | --sched step | --decay-milestones 9
--sched rsqrt | --sched wsd | --lr-stable-timescale 3
--sched wsd | --sched constant | --lr-decay-fn linear; --decay-epochs 0.5; --cooldown-epochs 1; --min-lr 1e-6
--epochs 4 --warmup-epochs 1 | --epochs 4 | --warmup-lr 0; --warmup-prefix
| --sched step | --cooldown-epochs 5; --min-lr 1e-6; --lr-cycle-limit 2; --lr-k-decay 2
--sched poly | --sched constant | --cooldown-epochs 5; --min-lr 1e-6; --lr-cycle-limit 2; --lr-k-decay 2
--sched poly | --sched constant | --decay-rate 0.5
--sched tanh | --sched constant | --cooldown-epochs 5; --min-lr 1e-6; --lr-cycle-limit 2
--sched step | --sched tanh | --decay-epochs 3; --decay-rate 0.5
--lr-cycle-limit 2 | | --lr-cycle-mul 2; --decay-rate 0.5
--lr-noise 0.4 | | --lr-noise-pct 0.5; --lr-noise-std 0.5
| --no-aug | --scale 0.2 1; --ratio 1 1; --hflip 0; --vflip 0.5; --aa rand; --reprob 0.1
--aa none | --no-aug | --color-jitter 0.3
| --reprob 0 | --remode const; --recount 2
| --token-label | --bce-loss
--bce-loss | | --bce-target-thresh 0.2; --bce-sum; --bce-pos-weight 2
--drop-path 0.1 | --drop-path 0 | --drop-path-mode subset; --outlooker-drop-path
--mixup 0.2 | | --mixup-prob 0.5; --mixup-mode elem; --mixup-off-epoch 9
--cutmix 1 | | --mixup-prob 0.5; --mixup-mode elem; --mixup-off-epoch 9
--cutmix-minmax 0.2 0.8 | | --mixup-prob 0.5; --mixup-mode elem; --mixup-off-epoch 9
--mixup 0.2 --cutmix 1 | --mixup 0.2 | --mixup-switch-prob 0.3
--mixup 0.2 --cutmix-minmax 0.2 0.8 | --cutmix-minmax 0.2 0.8 | --mixup-switch-prob 0.3
| --freeze-bn | --sync-bn; --dist-bn reduce; --bn-momentum 0.2
| --freeze | --sync-bn; --dist-bn reduce; --bn-momentum 0.2
--model-ema | | --model-ema-decay 0.9; --model-ema-warmup; --model-ema-force-cpu
--amp | | --amp-dtype bfloat16
--torchcompile | --torchcompile eager | --torchcompile-mode max-autotune; --activation-memory-budget 0.5
--torchcompile eager | | --torchcompile-scope model
--resume r | | --no-resume-opt; --allow-changed-data
--branch b | | --no-resume-opt; --allow-changed-data
"""


def test_a_flag_has_what_it_needs_or_is_refused():
    named = set[str]()
    for line in NEEDED.strip().splitlines():
        enough, lacking, flags = (cell.strip().replace("LABELS", LABELS) for cell in line.split("|"))
        for flag in flags.split("; "):
            named.add(flag.split()[0])
            folder = ["/data"] * ("synthetic" not in lacking)
            TRAIN.parse(["/data", *enough.split(), *flag.split()])
            with pytest.raises(UserError, match=f"^{flag.split()[0]}.* has no effect without "):
                TRAIN.parse([*folder, *lacking.split(), *flag.split()])
    rows = {row.label: row for row in TRAIN.parser().flags.values() if row.needs}
    assert rows.keys() - named == {"--tracker-project", "--wandb-tags", "data_dir"}  # of a tracker that is installed


def test_every_switch_of_a_recipe_can_be_turned_off(tmp_path):
    switches = [row for row in TRAIN.parser().flags.values() if row.switch and not row.refused]
    for row in switches:
        for name in row.names:
            opposite = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else f"--no-{name[2:]}"
            (tmp_path / "recipe.yaml").write_text(f"{row.dest}: true\n")
            args = TRAIN.parse(["-c", str(tmp_path / "recipe.yaml"), "/data", opposite])
            assert args[row.dest] is False, opposite


def test_run_directory_is_its_best_checkpoint_in_every_program(tmp_path):
    lines = {"train": "/data --token-label --token-label-teacher t", "predict": "i.jpg", "attention": "i.jpg -o a.png",
             "export": "-o m.onnx", "label": "/data out", "validate": "/data"}  # fmt: skip
    run, foreign, checked = tmp_path / "run", tmp_path / "foreign", list[str]()
    for folder, names in ((run, ("checkpoint-3", "last", "model_best")), (foreign, ("a", "b"))):
        folder.mkdir()
        for name in names:
            (folder / f"{name}.pth.tar").touch()
    for name, line in lines.items():
        program = COMMANDS[name].program
        for row in program.parser().flags.values():
            about_weights = re.search("checkpoint|weights|finetune|teacher", f"{row.label} {row.help}")
            named = isinstance(row.type, Place) and row.type.metavar in ("PATH", "NAME")
            if not about_weights or not named or row.dest in ("model", "token_label_teacher", "resume", "branch"):
                continue
            (run / "model_best.pth.tar").touch()
            args, checked = program.parse([*line.split(), row.label, str(run)]), [*checked, row.label]
            listed = list if row.nargs == "+" else lambda each: each[0]
            assert args[row.dest] == listed([str(run / "model_best.pth.tar")]), (name, row.label)
            assert f"{row.label} {run}: model_best.pth.tar" in args.notes
            (run / "model_best.pth.tar").unlink()
            args = program.parse([*line.split(), row.label, str(run)])
            assert args[row.dest] == listed([str(run / "last.pth.tar")])
            if name != "validate":
                with pytest.raises(UserError, match="foreign holds 2 checkpoints: name one of them, such as b.pth.tar"):
                    program.parse([*line.split(), row.label, str(foreign)])
    assert len(checked) == 9
    validate = COMMANDS["validate"].program
    for flags, every in (([foreign], True), ([run, "--all"], True), ([run], False)):
        assert validate.parse(["/data", "--checkpoint", *map(str, flags)])["all"] is every
    with pytest.raises(UserError, match="--all has no effect without a folder"):
        validate.parse(["/data", "--checkpoint", str(run / "last.pth.tar"), "--all"])


def test_every_flag_is_read_by_name_outside_of_the_parser():
    files = [file for folder in ("volo", "tlt") for file in (ROOT / folder).rglob("*.py")]
    ours = [file.read_text() for file in files if not file.name.startswith(("flags_", "settings_"))]
    code = "\n".join([*ours, *map(inspect.getsource, (scheduler_kwargs, optimizer_kwargs))])  # which timm reads
    unread = flags_of(TrainSettings).keys() - set(re.findall(r"\w+", code))
    refused = {"drop_block", "aug_splits", "jsd", "resplit", "split_bn", "torchscript", "tta"}
    assert unread == refused | {name for name in unread if name[:4] == "log_"}  # read by parts of their names


def test_compat_is_resolved_to_the_rows_that_change_something():
    args = TRAIN.parse(["/data", *LABELS.split(), "--smoothing", "0", "--compat", "upstream"])
    assert args.labels.compat == ["label-crop", "label-scale", "label-area", "uncovered"]
    assert args.labels.maps.uncovered == "uniform" and TRAIN.parse(["/data"]).labels.compat is None


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("--token-label", "trains class targets alone"),
        ("--token-label --token-label-size 14", "trains every token on its image's class"),
        ("--color-jitter 0.3", "--color-jitter 0.3 is not used beside --aa"),
        ("--lr 8e-6", "--lr 8e-06 is below --min-lr 1e-05"),
    ],
)
def test_what_is_honoured_but_may_surprise_is_noted(line, note):
    assert TRAIN.parse(["/data"]).notes == ()
    notes = TRAIN.parse(["/data", *line.split()]).notes
    assert len(notes) == 1 and note in notes[0]


def test_help_is_grouped_and_imports_nothing_heavy():
    code = (
        "import sys; __file__ = 'volo'\n"
        "from volo.cli import COMMANDS\n"
        "for command in COMMANDS.values(): print(command.program.parser().format_help())\n"
        "print('HEAVY', sorted({'torch', 'timm', 'numpy', 'torchvision'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    assert all(len(line) <= 120 for line in done.stdout.splitlines())
    titles = [section.title for section in sections_of(TrainSettings)]
    assert re.findall(r"^(\w[\w ]*):$", TRAIN.parser().format_help(), re.MULTILINE) == ["options", *titles]
    assert "[rand-m9-mstd0.5-inc1]" in done.stdout and "{torchvision,pil,dali-cpu,dali-gpu,synthetic}" in done.stdout
    assert all(len(row.help) > 3 for command in COMMANDS.values() for row in command.program.parser().flags.values())


@pytest.mark.parametrize("name", ["wandb", "tensorboard", "mlflow", "trackio"])
def test_missing_tracker_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / name).mkdir()  # such as the ./wandb that W&B writes: no package
    message = re.escape(f"--log-{name} needs {name}: pip install '.[{name}]' in a checkout of volo-tlt")
    with pytest.raises(UserError, match=f"^{message}$"):
        TRAIN.parse(["/d", f"--log-{name}"])
    (tmp_path / name / "__init__.py").touch()
    importlib.invalidate_caches()
    assert TRAIN.parse(["/d", f"--log-{name}"])[f"log_{name}"] is True
    assert re.search(rf'^{name} = \["{name}>', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
