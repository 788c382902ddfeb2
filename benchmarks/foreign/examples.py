"""Lightning's examples under `examples/fabric`: how each is run shortly, and what it needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

FOLDER = Path("examples") / "fabric"


@dataclass(frozen=True)
class Example:
    """A script of Lightning, and the stand-ins for what it downloads."""

    name: str
    stand_ins: tuple[str, ...]
    needs: tuple[str, ...] = ()
    """Packages that the script imports."""
    forward_methods: tuple[str, ...] = ()
    """Methods that the script calls without marking them, which Fabric refuses with its own `ddp` too."""
    note: str = ""
    """What was put in, for the table."""
    also: tuple[str, ...] = ()
    """Strategies of ours to run with ranks besides the others."""
    refused: str = ""
    """Part of the error that the script ends with on shards, after training."""
    why_refused: str = ""
    ranks: tuple[int, ...] = (1, 2)
    needs_group: bool = False
    """Whether the script calls torch.distributed itself, so that one process is started by torchrun too."""


def _loaded(checkout: Path, script: str) -> ModuleType:
    from foreign.injected import load

    return load(checkout / FOLDER / script)


def dcgan(checkout: Path) -> None:
    module = _loaded(checkout, "dcgan/train_fabric.py")
    vars(module).update(batch_size=4, num_epochs=2, workers=0, ngf=8, ndf=8)
    module.main()


def image_classifier(checkout: Path) -> None:
    _as_command(
        _loaded_main(checkout, "image_classifier/train_fabric.py"),
        "--epochs=2",
        "--batch-size=16",
        "--lr=0.1",
        "--save-model",
    )


def kfold(checkout: Path) -> None:
    _as_command(
        _loaded_main(checkout, "kfold_cv/train_fabric.py"),
        "--epochs=2",
        "--folds=3",
        "--batch-size=16",
        "--lr=0.1",
        "--log-interval=4",
        "--save-model",
    )


def language_model(checkout: Path) -> None:
    module = _loaded(checkout, "language_model/train.py")
    module.train.__defaults__ = (3,)
    module.main()


def meta_learning(checkout: Path) -> None:
    module = _loaded(checkout, "meta_learning/train_fabric.py")
    module.main(meta_batch_size=4, num_iterations=3)


def reinforcement_learning(checkout: Path) -> None:
    module = _loaded(checkout, "reinforcement_learning/train_fabric.py")
    sys.argv = ["train_fabric.py", "--total-timesteps=512", "--num-steps=32", "--update-epochs=2"]
    module.main(module.parse_args())


def reinforcement_learning_decoupled(checkout: Path) -> None:
    module = _loaded(checkout, "reinforcement_learning/train_fabric_decoupled.py")
    sys.argv = [
        "train_fabric_decoupled.py",
        "--total-timesteps=512",
        "--num-steps=32",
        "--update-epochs=2",
    ]
    module.main(module.parse_args())


def build_your_own_trainer(checkout: Path) -> None:
    module = _loaded(checkout, "build_your_own_trainer/run.py")

    class Module(module.MNISTModule):  # type: ignore[misc, name-defined]
        def configure_optimizers(self) -> Any:
            """Return a pair: the example's trainer takes no dictionary with an optimizer in it."""
            config = super().configure_optimizers()
            return config.pop("optimizer"), config

    vars(sys.modules["trainer"])["_unwrap_objects"] = lambda model: model.module  # `ddp` fails here
    torch.manual_seed(1)
    module.train(Module())


def _loaded_main(checkout: Path, script: str) -> Path:
    return checkout / FOLDER / script


def _as_command(script: Path, *arguments: str) -> None:
    import runpy

    sys.argv = [script.name, *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


def litgpt(checkout: Path) -> None:
    from foreign.litgpt_lora import finetune

    finetune(checkout)


RUNS: dict[str, Callable[[Path], Any]] = {
    "litgpt": litgpt,
    "dcgan": dcgan,
    "image_classifier": image_classifier,
    "kfold_cv": kfold,
    "language_model": language_model,
    "meta_learning": meta_learning,
    "reinforcement_learning": reinforcement_learning,
    "reinforcement_learning_decoupled": reinforcement_learning_decoupled,
    "build_your_own_trainer": build_your_own_trainer,
}

_PPO = ("get_action_and_value", "estimate_returns_and_advantages")
_NO_DROPOUT = "no dropout: captured code draws other masks"
EXAMPLES = (
    Example("dcgan", ("celeba",), ("torchvision",), note="24 images of noise, 8 channels."),
    Example(
        "image_classifier",
        ("mnist", "without_dropout"),
        ("torchvision",),
        note=f"MNIST's files with 448 images of noise; {_NO_DROPOUT}.",
    ),
    Example(
        "kfold_cv",
        ("mnist", "without_dropout"),
        ("torchvision", "sklearn"),
        note=f"The same data; {_NO_DROPOUT}.",
    ),
    Example(
        "language_model",
        ("wikitext", "without_dropout"),
        note=f"Random tokens; {_NO_DROPOUT}. It runs in pieces: `nn.Transformer` branches on its mask.",
    ),
    Example(
        "meta_learning",
        ("omniglot",),
        ("learn2learn", "cherry"),
        needs_group=True,
        note="Random tasks. The script sets no model up with Fabric: MAML's second derivatives are eager.",
    ),
    Example(
        "reinforcement_learning",
        (),
        ("gymnasium",),
        _PPO,
        also=("thunder_memsave:none",),
        refused="linear() was asked to use 'actor.0.weight'",
        why_refused="After training only rank 0 tries the agent out, which reads weights that the ranks share.",
        note="The two methods that it calls are marked, which `ddp` needs too; sampling makes it run in pieces.",
    ),
    Example(
        "build_your_own_trainer",
        ("mnist", "older_packages"),
        ("torchvision",),
        note="What lightning 2.6 and torch 2.13 no longer have is put in, for `ddp` too.",
    ),
)
LITGPT = Example(
    "litgpt",
    (),
    ("jsonargparse", "tokenizers"),
    note="`finetune/lora.py` on a random Llama of 2 layers, LoRA without dropout: loaded, trained, evaluated, saved, "
    "merged and converted to transformers' names.",
)
NOT_RUN = {
    "reinforcement_learning/train_fabric_decoupled.py": "trains in a group of its own of all ranks but the player's, "
    "given to `DDPStrategy(process_group=...)`; our strategy shards over all ranks",
    "tensor_parallel": "tensor parallelism, out of scope",
    "fp8_distributed_transformer": "needs torchao's float8 linears under `ModelParallelStrategy`, and H100s; ours is "
    "the setting `fp8`",
}
