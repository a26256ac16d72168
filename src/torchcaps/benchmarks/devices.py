"""Benchmark of strong scaling: the time of the same training step in one process and in two processes."""

import multiprocessing
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from torchcaps.benchmarks import compare
from torchcaps.errors import BadInput
from torchcaps.losses import margin_loss
from torchcaps.models import create_model


def bench_devices(repeats: int = 10, processes: Sequence[int] = (1, 2), batch: int = 100) -> list[dict[str, Any]]:
    """Time a training step of CapsNet on MNIST-sized images in several processes with one thread each.

    The batch is divided among the processes, which average their gradients (DistributedDataParallel with gloo).

    Arguments:
        repeats: number of timed steps for each number of processes.
        processes: numbers of processes to compare.
        batch: images per step, in all processes together.

    Raises:
        BadInput: a process ended early, for example because there is not enough memory.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        ways = {
            f"{count} process{'es' if count > 1 else ''}": stack.enter_context(
                _Group(count, batch, folder / f"{count}")
            )
            for count in processes
        }
        return compare(f"CapsNet, batch {batch}", ways, images=batch, repeats=repeats)


class _Group:
    """Processes that wait until they are told to run a step. Calling the group runs one step in all processes."""

    def __init__(self, count: int, batch: int, meeting: Path) -> None:
        start = multiprocessing.get_context("spawn")
        ends = [start.Pipe() for _ in range(count)]
        self.pipes = [here for here, _ in ends]
        self.workers = [
            start.Process(target=_work, args=(there, rank, count, batch // count, f"file://{meeting}"), daemon=True)
            for rank, (_, there) in enumerate(ends)
        ]
        for worker in self.workers:
            worker.start()
        for _, there in ends:
            there.close()

    def __call__(self) -> None:
        try:
            for pipe in self.pipes:
                pipe.send(True)
            for pipe in self.pipes:
                pipe.recv()
        except (EOFError, OSError) as error:
            raise BadInput(
                "a process of the benchmark ended early: read the error above; if memory ran out, close other programs"
            ) from error

    def __enter__(self) -> "_Group":
        return self

    def __exit__(self, *_: Any) -> None:
        for pipe in self.pipes:
            pipe.close()
        for worker in self.workers:
            worker.join()


def _work(pipe: Any, rank: int, count: int, batch: int, meeting: str) -> None:
    """Run a training step for each message until the pipe is closed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    model = DistributedDataParallel(create_model("capsnet", decoder=False))
    images, labels = torch.rand(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    optimizer = torch.optim.Adam(model.parameters())
    try:
        while pipe.recv():
            optimizer.zero_grad()
            margin_loss(model(images).scores, labels).backward()
            optimizer.step()
            pipe.send(True)
    except EOFError:
        distributed.destroy_process_group()
