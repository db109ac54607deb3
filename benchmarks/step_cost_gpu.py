"""What an inner step costs on a GPU, in compiled plain gradients: both engines, the published way, and JAX.

    python benchmarks/step_cost_gpu.py                         WRN-16-1, batch 256: 10 minutes on an H200
    python benchmarks/step_cost_gpu.py --device cpu --model lenet --batch 16 --counts 1,9        the same in small

Settings and methods are those of step_cost.py (one state, the same tangents, one process, repeats round robin). Rows:

    gradient                            loss and torch.autograd.grad, eager
    gradient, compiled                  traced and compiled by inductor
    gradient, CUDA graph                the same, recorded: the unit of `compiled_gradients`
    double-backward loop                one graph with create_graph, one autograd.grad through it per column, as the
                                        published FDS code does it
    forward                             Forward(): compiled and recorded; columns in chunks of ten if there are more
    training step, adjoint              Adjoint(store="all"): the step forth, and forth and back
    JAX                                 jit(vmap(jvp(grad))), where JAX is installed (WRN-16-1 alone)

Results: benchmarks/results/step_cost_MODEL_DEVICE_PRECISION.json (.part.json before the adjoint is compiled); `profile`
has the kernels that take most of the time.
"""

import argparse
import gc
import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import step_cost as base
import torch
from environment import RESULTS, environment, folder
from step_cost import Method, Setting, make_setting, timed
from torch.fx.experimental.proxy_tensor import make_fx

import longhorizon as lh
from longhorizon import cuda, tree
from longhorizon.problem import environment as around

IN_A_ROW = 10  # calls between two looks at the clock: a training run does not wait for the device after every step
LOOP_UP_TO = 9  # columns; thirty take three seconds a step


def compiled_gradient(s: Setting, device: str) -> dict[str, Method]:
    functional, hypers = s.problem.inner.functional, s.problem.hypers_at(s.step)
    names, tensors = list(s.state.params), [*s.state.params.values(), *s.batch]

    def gradient(*flat: torch.Tensor) -> list[torch.Tensor]:
        params, batch = dict(zip(names, flat, strict=False)), flat[len(names) :]
        grads = torch.func.grad(lambda p: functional.loss(p, s.state.buffers, batch, hypers)[0])(params)
        return list(grads.values())

    graph = make_fx(torch.func.functionalize(gradient))(*tensors)
    if device != "cuda":
        return {"gradient, traced": _method(graph, tensors)}
    with torch.no_grad():
        fast = cuda._inductor(graph, tensors)
        return {
            "gradient, compiled": _method(fast, tensors),
            "gradient, CUDA graph": _method(cuda.Recorded(fast, tensors), tensors),
        }


def _method(fn: Callable[..., Any], tensors: list[torch.Tensor]) -> Method:
    def repeat() -> Any:
        with torch.no_grad():
            return fn(*tensors)

    return repeat, lambda: base._flat(repeat())


def adjoint(s: Setting) -> dict[str, Method]:
    run = lh.Adjoint(store="all", compile=True).begin(s.problem)
    generator = torch.Generator().manual_seed(1)
    real, rebuild = tree.split(s.state)
    cotangent = rebuild([torch.randn(x.shape, generator=generator).to(x) for x in real])

    def forth() -> Any:
        return run._step(s.state, s.step)[0]

    def both() -> Any:
        forth()
        return run._step_back(s.state, s.step, cotangent, None)[0]

    return {
        "training step": (forth, lambda: base._flat(forth().memory[0].velocity.values())),
        "adjoint": (both, lambda: base._flat(both().params.values()) - base._flat(cotangent.params.values())),
    }


def jax_peer(s: Setting, precision: str) -> Method:
    from jax_peer import hessian_products

    names = list(s.state.params)
    arrays = {name: p.cpu().numpy() for name, p in s.state.params.items()}
    tangents = {name: z.cpu().numpy() for name, z in zip(names, s.tangents, strict=False)}
    images, labels = (x.cpu().numpy() for x in s.batch)
    repeat, products = hessian_products(arrays, images, labels, tangents, precision)

    def judged() -> torch.Tensor:
        """What `forward` is judged by: C = H·Z + ξ·Z, and θ itself in the column of the weight decay."""
        found = {name: product + base.VALUES["weight_decay"] * tangents[name] for name, product in products().items()}
        if "weight_decay" in s.keys:
            for name in names:
                found[name][-1] += arrays[name]
        return base._flat(torch.from_numpy(found[name]) for name in names)

    return repeat, judged


def kernels(repeat: Callable[[], Any], top: int = 12) -> dict[str, Any]:
    """Milliseconds on the device by kind of kernel, and the longest kernels."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        repeat()
        torch.cuda.synchronize()
    events = sorted(seen.key_averages(), key=lambda e: -e.self_device_time_total)
    kinds: dict[str, float] = {}
    words = {
        "tonhwc": "layout",
        "tonchw": "layout",
        "triton": "elementwise and sums (Triton)",
        "wgrad": "weight gradient",
    }
    own = {"convolve": "column convolution", "spread": "column input gradient", "weigh": "column weight gradient"}
    words |= {"dgrad": "input gradient", "fprop": "convolution", "implicit": "convolution", "copy": "copies"}
    for e in events:
        kind = own.get(e.key) or next((kind for word, kind in words.items() if word in e.key.lower()), "other")
        kinds[kind] = kinds.get(kind, 0) + e.self_device_time_total / 1e3
    longest = [(round(e.self_device_time_total / 1e3, 3), e.count, e.key[:120]) for e in events[:top]]
    return {
        "kernels": sum(e.count for e in events),
        "ms": {kind: round(ms, 2) for kind, ms in sorted(kinds.items(), key=lambda item: -item[1])},
        "longest": [{"ms": ms, "calls": calls, "kernel": kernel} for ms, calls, kernel in longest],
    }


def _often(repeat: Callable[[], Any]) -> None:
    for _ in range(IN_A_ROW):
        repeat()


class Table:
    """Rows as they are made, and how to repeat each."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.rows, self.calls = args, [], []

    def add(
        self, name: str, n: int | None, precision: str, make: Callable[[], Method], reference: torch.Tensor
    ) -> None:
        before = self._reserved()
        repeat, judged = make()
        first = timed(repeat, self.args.device)
        error = float((judged() - reference).norm() / reference.norm())
        row = {
            "method": name,
            "n": n,
            "precision": precision,
            "error": float(f"{error:.2g}"),
            "first_s": round(first, 1),
        }
        if self.args.device == "cuda":
            self._reserved()
            torch.cuda.reset_peak_memory_stats()
            timed(repeat, self.args.device)
            row["gb"] = round((torch.cuda.max_memory_reserved() - before) / 1e9, 2)
        self.rows.append(row)
        self.calls.append(repeat)
        print(f"{precision:8} {name:22} N={n}: first {first:.1f} s, error {error:.1e}, {row.get('gb')} GB", flush=True)

    def _reserved(self) -> int:
        if self.args.device != "cuda":
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def time(self, precision: str, repeats: int) -> None:
        """Round robin over the rows of one precision."""
        chosen = [
            (row, repeat) for row, repeat in zip(self.rows, self.calls, strict=True) if row["precision"] == precision
        ]
        seen: list[list[float]] = [[] for _ in chosen]
        for _ in range(repeats):
            for times, (_, repeat) in zip(seen, chosen, strict=True):
                times.append(timed(partial(_often, repeat), self.args.device) / IN_A_ROW)
        for (row, _), times in zip(chosen, seen, strict=True):
            row["ms"] = round(statistics.median(times) * 1e3, 2)
            row["ms_min_max"] = [round(min(times) * 1e3, 2), round(max(times) * 1e3, 2)]
        found = {(row["method"], row["n"]): row["ms"] for row, _ in chosen}
        unit = found["gradient, CUDA graph" if self.args.device == "cuda" else "gradient, traced", None]
        for row, _ in chosen:
            row["compiled_gradients"] = round(row["ms"] / unit, 2)
            if ("double-backward loop", row["n"]) in found:
                row["faster_than_loop"] = round(found["double-backward loop", row["n"]] / row["ms"], 2)


def exact_results(args: argparse.Namespace) -> dict[Any, torch.Tensor]:
    """What every row is judged by, in float64."""
    exact = {}
    with around():
        for n in args.counts:
            double = make_setting(args.model, n, args.batch, args.device, torch.float64)
            exact[n] = base.forward(double, compile=False, chunk=5)[1]()
        exact["gradient"] = base.plain_gradient(double, args.model)[1]()
        exact["training step"] = base.plain_step(double)[1]()
        exact["adjoint"] = base.adjoint(double)[1]()
    return exact


def measure(
    args: argparse.Namespace, table: Table, precision: str, exact: dict[Any, torch.Tensor]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Fill the table with the rows of one precision; gives where the engines' time goes, and repeats.

    A first time when only the adjoint and JAX are missing, which may take minutes to compile, timed once.
    """
    profiles = {}
    settings: dict[int, Setting] = {}
    traces = lh.Traces()  # chunks of ten are compiled once
    for n in args.counts if precision == args.precisions[0] else args.counts[:1]:
        settings[n] = make_setting(args.model, n, args.batch, args.device, torch.float32, traces)
    main = args.counts[0]
    s = settings[main]
    table.add("gradient", None, precision, partial(base.plain_gradient, s, args.model), exact["gradient"])
    for name, method in compiled_gradient(s, args.device).items():
        table.add(name, None, precision, partial(lambda method: method, method), exact["gradient"])
    for n, s in settings.items():
        if n <= LOOP_UP_TO:
            table.add("double-backward loop", n, precision, partial(base.double_backward_loop, s, args.model), exact[n])
        table.add("forward", n, precision, partial(base.forward, s, compile=True), exact[n])
        if n == main and args.device == "cuda":
            profiles[f"forward, {precision}"] = kernels(table.calls[-1])
    table.time(precision, 1)
    yield profiles, 1
    s = settings[main]
    for name, method in adjoint(s).items() if "adjoint" not in args.skip else ():
        table.add(name, main, precision, partial(lambda method: method, method), exact[name])
    if args.device == "cuda" and "adjoint" not in args.skip:
        profiles[f"adjoint, {precision}"] = kernels(table.calls[-1])
    if args.model == "wrn16" and "jax" not in args.skip and importlib.util.find_spec("jax"):
        table.add("JAX", main, precision, partial(jax_peer, s, precision), exact[main])
    table.time(precision, args.repeats)
    yield profiles, args.repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=base.MODELS, default="wrn16")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--counts", default="9,1,30,100", help="values; the adjoint, JAX and TF32 for the first alone")
    parser.add_argument("--precisions", default="float32,tf32")
    parser.add_argument("--skip", default="", help="adjoint, jax")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--to", type=folder, default=RESULTS, help="folder of the result")
    args = parser.parse_args()
    args.counts = [int(n) for n in args.counts.split(",")]
    if bad := [n for n in args.counts if n < 1 or n == 2]:
        parser.error(f"--counts {bad[0]}: expected 1, or 3 and more (learning rates, momentum and weight decay).")
    args.precisions = args.precisions.split(",") if args.device == "cuda" else ["float32"]
    record = environment(args.device)
    settings = {key: getattr(args, key) for key in ("model", "batch", "device", "repeats")}
    exact, table = exact_results(args), Table(args)
    for precision in args.precisions:
        target = args.to / f"step_cost_{args.model}_{args.device}_{precision}.json"
        with around(precision):
            for profile, repeats in measure(args, table, precision, exact):  # once without the adjoint, then with it
                rows = [row for row in table.rows if row["precision"] == precision]
                known = settings | {"precision": precision, "repeats": repeats}
                content = {"environment": record, "settings": known, "rows": rows, "profile": profile}
                part = target.with_suffix(".part.json")
                part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        part.replace(target)
    for row in table.rows:
        n = "" if row["n"] is None else f"N={row['n']}"
        loop = f"{row['faster_than_loop']:6.2f} × loop" if "faster_than_loop" in row else ""
        units = f"{row['compiled_gradients']:7.2f} gradients"
        print(f"{row['precision']:8} {row['method']:22} {n:6}{row['ms']:9.2f} ms {units} {loop}")


if __name__ == "__main__":
    main()
