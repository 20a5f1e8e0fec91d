"""Images/s of a training step: ours against timm's VOLO, and against ourselves with other settings.

    python benchmark.py step --model volo_d1 -b 8 --torchcompile --peer timm timm-compile eager
    python benchmark.py step --device cuda --model volo_d1 volo_d3 volo_d5 --peer timm timm-compile

A step is what train.py does between two batches, on two synthetic batches in turn: token-label targets, forward pass,
loss, backward pass, guarded AdamW; on a GPU ours is one CUDA graph. All arms start from the same weights. What is
timed, compiled or in bfloat16, is checked before: logits, loss and norm of the gradient of one update, without
stochastic depth, which each arm draws in its own way, against those of our model in float32 without any of that.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, cycle, islice
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import arms
from benchmarks.arms import Arm
from benchmarks.rounds import BenchmarkSettings, Rows, synchronize
from tlt import Batch, StepKey
from tlt.errors import UserError
from tlt.loss import LossTerms
from tlt.targets import Targets
from volo.checkpoint.replicas import Replicas
from volo.cluster.distributed import World, choose_device
from volo.cluster.watchdog import Watchdog
from volo.config import value_types as t
from volo.config.fields import Group, flag, group, taken
from volo.config.settings_train import Optimizer, Regularisation
from volo.config.settings_train import Precision as PrecisionSettings
from volo.train.architecture import requested_by
from volo.train.compilation import compile_errors_told
from volo.train.criterion import Criterion, Drawn, TokenLabelCriterion, make_criterion
from volo.train.data import open_folders, open_labels, train_loader
from volo.train.distillation import Distillation
from volo.train.model import TimmModel, compiler_of, data_config_of
from volo.train.optimizer import create_optimizer, set_lr
from volo.train.precision import Clipping, Precision, WorkingCopy, compute_dtype
from volo.train.step_graph import WARM_UP, StepGraph, step_of, use_own_stream

DROP_PATH = {"volo_d1": 0.1, "volo_d2": 0.2, "volo_d3": 0.5, "volo_d4": 0.5, "volo_d5": 0.75}  # of the recipes


class Models(Group):
    """Model

    Without --drop-path stochastic depth is that of the model's recipe.
    """

    model: list[t.Name] = arms.MODEL()
    img_size: t.Positive | None = arms.IMG_SIZE()
    batch_size: t.Positive | None = flag(None, "images (8; on a GPU 96)", also="-b")
    drop_path: t.Share | None = taken(Regularisation, "drop_path")
    drop_path_mode: str = taken(Regularisation, "drop_path_mode")
    grad_checkpointing: bool = taken(PrecisionSettings, "grad_checkpointing")
    clip_grad: t.AboveZero | None = taken(Optimizer, "clip_grad")
    opt: t.Name = taken(Optimizer, "opt")


class Peers(Group):
    """Peers

    timm: its VOLO with both heads, in eager mode and otherwise in our precision; -compile: compiled; -amp: with
    bfloat16 autocast. Ours: eager: not compiled; reference: that, without fused kernels; mask, subset:
    --drop-path-mode; amp: with bfloat16 autocast; graph, launched: with and without a CUDA graph.
    """

    peer: list[str] = arms.peers(*(name for name in arms.ARMS if name != "unfolded"))


class Flags(BenchmarkSettings):
    """The settings of `benchmark.py step`."""

    models: Models = group(Models)
    speed: PrecisionSettings = arms.speed()
    peers: Peers = group(Peers)
    measuring: arms.Measuring = group(arms.Measuring)


def run(settings: Flags) -> None:
    """Measure one model after the other."""
    models = settings.models
    measuring = settings.measuring
    peers = settings.peers.peer
    device = choose_device(measuring.device, 0)
    use_own_stream(device)
    rows = Rows(settings, arms.COLUMNS)
    if device.type != "cuda" and {"graph", "launched"} & {*peers}:
        raise UserError("--peer graph and --peer launched differ on a GPU alone: leave them out")
    for model in models.model:
        batch_size = models.batch_size or (96 if device.type == "cuda" else 8)
        drop_path = DROP_PATH.get(model) if models.drop_path is None else models.drop_path
        ours = arms.train_settings(settings, model, batch_size=batch_size, drop_path=drop_path)
        all_arms = arms.arms_of(ours, peers)
        arms.time_arms(measuring, rows, all_arms, batch_size, _Case(all_arms[0], device).step)


class _Case:
    """What all arms of a model share: weights, batches, and the criterion."""

    def __init__(self, ours: Arm, device: torch.device) -> None:
        self.ours = ours
        self.device = device
        self.first: TimmModel = arms.build_first(ours)
        settings = ours.settings
        images = data_config_of(requested_by(ours.settings), self.first)
        self.criterion = make_criterion(settings, self.first, images["input_size"][1:])
        folder = open_folders(settings, 1).train
        path, maps = settings.labels.token_label_data, settings.labels.maps
        labels, _ = open_labels(path, maps, folder, self.first.num_classes, synthetic=True)
        loader = train_loader(settings, folder, labels, images, World(0, 0, 1, device))
        self.batches: list[Batch] = list(islice(loader.epoch(0), 2))
        synchronize(device)  # arms use them on other streams

    def step(self, arm: Arm) -> "TrainStep":
        """Return the arm's step. Raises DifferentResult: it computes something else than ours in float32."""
        still = Arm(arm.name, arm.settings.decide("other flags", drop_path=0.0))
        with arms.exact_float32(), compile_errors_told(arm.settings.precision.compilation.torchcompile):
            found = self._build(still)()
            exact = self._exact
            synchronize(self.device)
            arms.check_same(arm.name, found, exact, arms.TOLERANCE[arm.dtype(self.device)])
        return self._build(arm)

    def _build(self, arm: Arm) -> "TrainStep":
        if not arm.settings.precision.compilation.no_cuda_graph:
            use_own_stream(self.device)  # a graph that can't be captured makes others of its stream unusable
        return TrainStep(arm, arms.build(arm, self.first, self.device), self.criterion, self.batches, self.device)

    @cached_property
    def _exact(self) -> dict[str, Tensor]:
        return self._build(arms.exact(self.ours))()


@dataclass(frozen=True)
class _KeptLogits(TokenLabelCriterion):
    """Keeps the logits of the newest batch that was launched."""

    logits: dict[str, Tensor] = field(default_factory=dict)

    def losses(self, outputs: Any, targets: Targets, drawn: Drawn) -> LossTerms:
        self.logits.update(zip(("class logits", "token logits"), map(Tensor.detach, outputs), strict=True))
        return super().losses(outputs, targets, drawn)


class TrainStep:
    """A training step of one arm, as train.py does it; `bare` has the parameters that are trained."""

    def __init__(
        self,
        arm: Arm,
        bare: TimmModel,
        criterion: Criterion,
        batches: list[Batch],
        device: torch.device,
        distillation: Distillation | None = None,
    ) -> None:
        self.batches = cycle(batches)
        self.updates = count()
        bare.train()
        settings, mixed = arm.settings, arm.settings.precision.mixed
        copy = WorkingCopy(bare) if mixed.model_dtype == "bfloat16" else None
        computing = bare if copy is None else copy.module
        dtype = compute_dtype(mixed, device)
        clip = settings.optim.clip_grad
        precision = Precision(device, dtype, Clipping(clip) if clip else None, working_copy=copy)
        if not arm.is_timm:
            precision.begin(computing)
        optimizer = create_optimizer(bare, settings.optim, settings.distributed, device=device)
        set_lr(optimizer, 1e-5)
        state: Any = SimpleNamespace(model=bare, optimizer=optimizer, ema=None, unproven=None)
        alone = World(0, 0, 1, device)
        training: Any = SimpleNamespace(state=state, precision=precision, distillation=distillation)
        training.replicas = Replicas(state, settings.distributed, alone)
        training.forward_model = compiler_of(settings).model(computing)
        training.criterion = self._criterion = _KeptLogits(**vars(criterion))
        run: Any = SimpleNamespace(settings=settings, world=alone)
        self._told: list[str] = []
        self._launched = settings.precision.compilation.no_cuda_graph
        run.logger = SimpleNamespace(line=lambda *texts: self._told.extend(texts))
        run.guard = SimpleNamespace(watchdog=Watchdog(0, 0, 0, lambda **_: None))  # never started
        self._stream = torch.cuda.current_stream() if device.type == "cuda" else None
        self.step = step_of(run, training)
        self.launched_first = WARM_UP + 1 if isinstance(self.step, StepGraph) else 0

    @property
    def note(self) -> str:
        """Why a GPU launches this step although its flags ask for a graph, or ""."""
        newest = "" if self._launched else "".join(self._told[-1:])
        return "" if newest.startswith("a step is one CUDA graph") else newest

    def __call__(self) -> dict[str, Tensor]:
        """Do one step; return both heads' logits, the loss, and the norm of the gradient before clipping."""
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        result = self.step(next(self.batches), StepKey(arms.SEED, next(self.updates)))
        assert result.norm is not None
        return {**self._criterion.logits, "loss": result.terms.total, "gradient": result.norm}
