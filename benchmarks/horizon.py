"""Time and peak memory of a hypergradient against the length of the run, up to 10⁵ steps.

    python benchmarks/horizon.py --device cuda                       LeNet, batch 128: 8 minutes on an H200
    python benchmarks/horizon.py --device cuda --model wrn16 --batch 256 --lengths 100,1000,10000
    python benchmarks/horizon.py --lengths 100,1000                  the same on two cores (memory: memory.py)

Learns 7 learning rates, momentum and weight decay. One random batch, which stays on the device, is used for every step:
what is measured is the engines. The compiled step of the first length serves all others, so its compilation is left
out. A length that would take longer than `--limit` seconds, judged by the length before it, is not run, and says so.

Results: benchmarks/results/horizon_MODEL_DEVICE.json, written after every length.
"""

import argparse
import json
import time
from typing import Any

import step_cost as base
import torch
from environment import RESULTS, environment, folder

import longhorizon as lh
from longhorizon.engines.entry import compute
from longhorizon.problem import environment as around
from longhorizon.problem import make_problem

HYPERS = {
    "lr": lh.Hyper(1e-4, windows=7),  # calm, so that every length stays finite
    "momentum": lh.Hyper(0.5),
    "weight_decay": lh.Hyper(1e-4),
}
ENGINES = {"forward": lh.Forward(compile=True), "adjoint": lh.Adjoint(compile=True)}


def make_task(args: argparse.Namespace) -> lh.Task:
    channels, side = base.MODELS[args.model]
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.batch, channels, side, side, generator=generator).to(args.device)
    batch = images, torch.randint(10, (args.batch,), generator=generator).to(args.device)
    model = lambda: base.make_model(args.model).to(args.device)  # noqa: E731
    return lh.Task(model, base.loss, lambda seed: base.Stream(batch), lambda seed: [batch])


def measure(problem: Any, name: str, device: str) -> dict[str, Any]:
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = compute(problem, ENGINES[name])
    seconds = time.perf_counter() - began
    row = {"engine": found.engine, "steps": problem.steps, "seconds": round(seconds, 2), "status": str(found.status)}
    row["ms_per_step"] = round(seconds / problem.steps * 1e3, 3)
    if device == "cuda":
        row["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=base.MODELS, default="lenet")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lengths", default="100,1000,10000,100000")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run")
    parser.add_argument("--to", type=folder, default=RESULTS, help="folder of the result")
    args = parser.parse_args()
    lengths = [int(n) for n in args.lengths.split(",")]
    content: dict[str, Any] = {"environment": environment(args.device), "rows": []}
    content["settings"] = {"model": args.model, "batch": args.batch, "device": args.device, "values": 9}
    task, rows = make_task(args), content["rows"]
    with around():
        for name, engine in ENGINES.items():
            traces = lh.Traces()
            compute(make_problem(task, lh.sgd(), HYPERS, len(HYPERS) + 4, 0, traces=traces), engine)  # compiles
            pace = 0.0
            for length in lengths:
                expected = pace * length
                if expected > args.limit:
                    rows.append({"engine": name, "steps": length, "skipped": f"would take {expected:.0f} s"})
                else:
                    problem = make_problem(task, lh.sgd(), HYPERS, length, 0, traces=traces)
                    rows.append(measure(problem, name, args.device))
                    pace = rows[-1]["seconds"] / length
                print(rows[-1], flush=True)
                text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
                (args.to / f"horizon_{args.model}_{args.device}.json").write_text(text)


if __name__ == "__main__":
    main()
