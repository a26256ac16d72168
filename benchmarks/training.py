"""Images a second of one CapsNet training step: bf16 against float32, and the heap kept warm against left alone.

Each setting is a process of its own, for the heap's settings cannot be taken back; the processes take turns, so that a
machine that slows down slows them all. Medians over all timed steps, with the 10th and 90th percentile.

    python benchmarks/training.py --steps 5 --rounds 2 --out results/benchmark-training.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from torchcaps.cli import keep_heap_warm
from torchcaps.losses import margin_loss, reconstruction_loss
from torchcaps.models import create_model
from torchcaps.run_folder import environment

SETTINGS = {f"{precision}-{heap}": (precision, heap) for precision in ("float32", "bf16") for heap in ("warm", "plain")}


def seconds_per_step(precision: str, heap: str, steps: int, batch_size: int) -> list[float]:
    if heap == "warm":
        keep_heap_warm()
    torch.manual_seed(0)
    model = create_model("capsnet")
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.rand(batch_size, 1, 28, 28).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch_size,))
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            prediction = model(images, labels)
            loss = margin_loss(prediction.scores, labels)
            loss = loss + 0.0005 * reconstruction_loss(prediction.reconstruction, images)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", choices=SETTINGS, help="time this setting alone and print its seconds")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(seconds_per_step(*SETTINGS[given.one], given.steps, given.batch_size)))
        return
    times: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for round_number in range(given.rounds):
        for name in SETTINGS:
            print(f"round {round_number + 1}/{given.rounds}: {name}", file=sys.stderr, flush=True)
            words = [sys.executable, __file__, "--one", name, "--steps", str(given.steps)]
            words += ["--batch-size", str(given.batch_size)]
            times[name] += json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    rows = []
    base = statistics.median(times["float32-plain"])
    for name, seconds in times.items():
        low, *_, high = statistics.quantiles(seconds, n=10) if len(seconds) > 1 else seconds * 2
        median = statistics.median(seconds)
        rows.append(
            {
                "setting": name,
                "images_per_second": round(given.batch_size / median, 1),
                "images_per_second_p10_p90": [round(given.batch_size / high, 1), round(given.batch_size / low, 1)],
                "ratio_to_float32_plain": round(base / median, 2),
                "steps": len(seconds),
            }
        )
        print(rows[-1])
    if given.out:
        command = f"python benchmarks/training.py --steps {given.steps} --rounds {given.rounds}"
        content = {"command": command, "batch_size": given.batch_size, "rows": rows, "environment": environment()}
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
