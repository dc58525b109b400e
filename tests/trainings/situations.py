"""The trainings: scripts in the style of pytorch/examples, tiny and deterministic, none of which knows gradwatch.

Each prints its losses and, last, a hash of its weights and how many optimizer steps (or windows of a loop that has no
optimizer) all its processes took. A step that a GradScaler rejects counts: it is a step asked for.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Training:
    """One script and how it is started; `ranks` > 1 = by torchrun, every rank takes all the steps.

    `steps_a_record`: optimizers that step inside one backward are judged together, at its end.
    """

    script: str
    argv: tuple[str, ...] = ()
    ranks: int = 1
    status: int = 0
    steps_a_record: int = 1
    module: bool = False
    quick: bool = False

    @property
    def name(self) -> str:
        """What it is called in a table."""
        return "-".join((self.script, *self.argv)).replace("---", "-")

    def command(self, python: str, scripts: str) -> list[str]:
        """The command line, from any folder; a module is found by PYTHONPATH."""
        target = ["-m", self.script] if self.module else [f"{scripts}/{self.script}.py"]
        if self.ranks > 1:
            target = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={self.ranks}",
                *target,
            ]
        return [python, *target, *self.argv]


TRAININGS = (
    Training("mnist_cnn"),
    Training("accumulation", quick=True),
    Training("amp_scaler", quick=True),
    Training("amp_bf16"),
    Training("time_sequence_lbfgs"),
    Training("dcgan"),
    Training("wgan_gp"),
    Training("reinforce"),
    Training("actor_critic"),
    Training("dqn"),
    Training("hogwild", ("fork",), quick=True),
    Training("hogwild", ("spawn",)),
    Training("odenet_adjoint"),
    Training("compiled_model"),
    Training("compiled_step"),
    Training("ddp", ranks=2),
    Training("fsdp2", ranks=2),
    Training("fsdp2", ("again",), ranks=2),
    Training("ema"),
    Training("swa"),
    Training("tied_transformer"),
    Training("word_lm", quick=True),
    Training("vae"),
    Training("siamese"),
    Training("gcn"),
    Training("super_resolution"),
    Training("maml"),
    Training("reptile"),
    Training("pcgrad", quick=True),
    Training("optimizer_in_backward", steps_a_record=4),
    Training("finetune"),
    Training("resume"),
    Training("loader_workers"),
    Training("loaded_script", quick=True),
    Training("trainer", ("--lr", "0.05"), module=True),
    Training("odd_steps", quick=True),
    Training("optimizer_copies"),
    Training("swapped_parameters"),
    Training("hand_made_gradients"),
    Training("user_modes"),
    Training("caught_errors", quick=True),
    Training("finalizers"),
    Training("ending", ("exception",), status=1),
    Training("ending", ("exit",), status=3),
    Training("ending", ("interrupt",), status=-2),
)
