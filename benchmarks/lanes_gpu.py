"""What training runs side by side gain on a GPU, in float32 and bfloat16: WRN-16-1, batch 256, images like CIFAR-10's.

    python benchmarks/lanes_gpu.py        two minutes on an H200, most of it compiling
    python benchmarks/lanes_gpu.py --profile 25        where the time of a step of 25 lanes in bfloat16 goes; no result

Milliseconds for one step of one run, making batches included: alone (compiled), and as one of several lanes. `error` is
what a step of lanes does to the parameters, against a plain one in float64, relative to how far they move; that of
torch's own mixed precision stands beside it. Result: benchmarks/results/lanes_wrn16_cuda.json.
"""

import argparse
import json
import time
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, environment, folder

import longhorizon as lh
from longhorizon import data, models
from longhorizon.lanes import Lanes
from longhorizon.problem import Problem, make_problem
from longhorizon.problem import environment as around

HYPERS = {"lr": lh.Hyper(0.1, windows=7), "momentum": lh.Hyper(0.9), "weight_decay": lh.Hyper(5e-4)}
COUNT = 5000  # images


def make_task(device: str, batch: int, dtype: torch.dtype = torch.float32) -> lh.Task:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (COUNT, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(10, (COUNT,), generator=generator)
    images = data.to_device(pixels, labels, (0.5,) * 3, (0.25,) * 3, 4, device, dtype)
    return lh.Task(
        model=lambda: models.make("wrn-16-1", classes=10, channels=3, size=32).to(device, dtype),
        loss=lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        train=lambda seed: data.Stream(images, batch, seed, augment=data.Augment(pad=4, flip=True)),
        val=lambda seed: [images.batch(torch.arange(100, device=images.labels.device))],
    )


def done(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(task: lh.Task, device: str, precision: Any, lanes: int, steps: int) -> dict[str, Any]:
    """Alone if there is one lane."""
    with around(precision):
        traces = lh.Traces()
        problems = [make_problem(task, lh.sgd(), HYPERS, 10_000, seed, traces=traces) for seed in range(lanes)]
        began = done(device)
        row, state, step = Lanes(problems), problems[0].start, problems[0].stepper(10_000)
        for t in range(steps):
            if t == 5:
                first, began = done(device) - began, done(device)
            if lanes > 1:
                row.step(t)
            else:
                state, _ = step(state, t)
        taken = (done(device) - began) / (steps - 5) * 1e3
    found = {"precision": precision, "lanes": lanes, "step_ms": round(taken, 3), "run_ms": round(taken / lanes, 3)}
    return found | {"first_steps_s": round(first, 1)}


def profile(task: lh.Task, device: str, lanes: int, steps: int = 20) -> None:
    """Seconds on the clock and on the device, and the kernels that take most."""
    with around("bf16"):
        traces = lh.Traces()
        problems = [make_problem(task, lh.sgd(), HYPERS, 10_000, seed, traces=traces) for seed in range(lanes)]
        row = Lanes(problems)
        for t in range(5):
            row.step(t)
        began = done(device)
        for t in range(5, 5 + steps):
            row.step(t)
        queued = time.perf_counter() - began
        taken = done(device) - began
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as seen:
            for t in range(5, 5 + steps):
                row.step(t)
            done(device)
    rows = [e for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    busy = sum(e.self_device_time_total for e in rows) / 1e3 / steps
    print(f"{1e3 * taken / steps:.2f} ms a step, {1e3 * queued / steps:.2f} until it is queued, {busy:.2f} of kernels")
    for e in sorted(rows, key=lambda e: -e.self_device_time_total)[:30]:
        print(f"{e.self_device_time_total / 1e3 / steps:8.3f} ms {e.count / steps:6.1f} times  {e.key[:90]}")


def moved(problem: Problem, params: dict[str, torch.Tensor]) -> torch.Tensor:
    start = problem.start.params
    return torch.cat([(p - start[name]).double().cpu().flatten() for name, p in params.items()])


def errors(device: str, batch: int, kinds: list[str]) -> dict[str, float]:
    """Of one step from the same weights on the same batch."""
    with around():
        exact = make_problem(make_task(device, batch, torch.float64), lh.sgd(), HYPERS, 10_000, 0)
        plain = make_problem(make_task(device, batch), lh.sgd(), HYPERS, 10_000, 0)
        right = moved(exact, exact.train_step(exact.start, 0)[0].params)
        found = {"plain float32": moved(plain, plain.train_step(plain.start, 0)[0].params)}
        with torch.autocast(device.partition(":")[0], torch.bfloat16):
            found["torch.autocast"] = moved(plain, plain.train_step(plain.start, 0)[0].params)
    for kind in kinds:
        with around(kind):  # type: ignore[arg-type]
            row = Lanes([make_problem(make_task(device, batch), lh.sgd(), HYPERS, 10_000, 0)], count=8)
            row.step(0)
            found[f"lanes, {kind}"] = moved(row.problems[0], row.lane(0).params)
    return {name: float(f"{float((x - right).norm() / right.norm()):.2g}") for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=folder, default=RESULTS, help="folder of the result")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=105, help="that are taken; the first five are not timed")
    parser.add_argument("--lanes", default="1,8,16,24", help="with commas between them")
    parser.add_argument("--profile", type=int, metavar="LANES", help="only look where the time goes")
    args = parser.parse_args()
    if args.profile:
        profile(make_task(args.device, args.batch), args.device, args.profile)
        return
    if args.steps <= 5:
        raise SystemExit(f"--steps {args.steps}: the first five are not timed; give more.")
    task, rows = make_task(args.device, args.batch), []
    for precision in ("float32", "bf16"):
        for lanes in map(int, args.lanes.split(",")):
            if (precision, lanes) == ("bf16", 1):  # alone there are no kernels for it
                continue
            rows.append(measure(task, args.device, precision, lanes, args.steps))
            print(rows[-1], flush=True)
    wrong = errors(args.device, args.batch, ["float32", "bf16"])
    print(wrong)
    content = {"environment": environment(args.device.partition(":")[0])}
    content |= {"settings": {"model": "wrn-16-1", "batch": args.batch, "steps": args.steps}}
    text = json.dumps(content | {"rows": rows, "error": wrong}, indent=1, ensure_ascii=False) + "\n"
    (args.to / "lanes_wrn16_cuda.json").write_text(text)


if __name__ == "__main__":
    main()
