"""Kernels of the .cu files on the processor of this machine, so that they are tested where there is no GPU.

The text that a GPU would build is built by g++: inline instructions become calls of functions by their names, which
cuda_on_cpu.h has. That shows what a kernel computes, and that it waits where it must; it says nothing of its speed.
"""

import ctypes
import hashlib
import importlib.resources
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longhorizon.kernels import Plan

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
there = shutil.which("g++") is not None

_INSTRUCTION = re.compile(r"asm\s*(?:volatile)?\s*\(\s*((?:\"[^\"]*\"\s*)+)(.*?)\);", re.S)
_OPERAND = re.compile(r'"[=+]?[rlfdn]"\s*(\()')


class KernelError(Exception):
    """A kernel did what a GPU would not stand: the message has what."""


class Fenced:
    """A tensor's numbers for a kernel, with NaN before and after them: what reads too far has it in its result.

    It is a NaN that no arithmetic gives back, so that a result from beyond the fence does not look like the fence.
    """

    WIDTH = 4096  # bytes on each side
    FENCE = torch.tensor([0xBF, 0xFF], dtype=torch.uint8).repeat(WIDTH // 2)  # of bfloat16, and of float32

    def __init__(self, x: Tensor):
        self.x, size = x, x.numel() * x.element_size()
        self.all = torch.cat([self.FENCE, x.detach().reshape(-1).view(torch.uint8), self.FENCE])
        self.inner = self.all[self.WIDTH : self.WIDTH + size]
        self.pointer = self.inner.data_ptr()

    def back(self) -> bool:
        """Take over what the kernel has written; whether the fence still stands."""
        self.x.detach().reshape(-1).view(torch.uint8).copy_(self.inner)
        return torch.equal(self.all[: self.WIDTH], self.FENCE) and torch.equal(self.all[-self.WIDTH :], self.FENCE)


class OnCPU:
    """In place of `kernels.run`: starts a kernel here.

    Args:
        backwards: let the last warp of a program begin, and copies be made at once. What comes out must be the same.
    """

    def __init__(self, backwards: bool = False):
        self.backwards, self.started = backwards, list[str]()

    def __call__(self, plan: Plan, tensors: Iterable[Tensor | None], others: list[Any]) -> None:
        given = list(tensors)
        first = next(x for x in given if x is not None)
        given = [first if x is None else x.contiguous() for x in given]
        fenced = {id(x): Fenced(x) for x in [*given, *others] if isinstance(x, Tensor)}
        values: list[Any] = []
        for x in [*given, *others]:
            values.append(ctypes.c_void_p(fenced[id(x)].pointer) if isinstance(x, Tensor) else ctypes.c_int(x))
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        grid = (ctypes.c_int * 3)(*plan.grid)
        launch = _built(plan.source, plan.name, plan.macros)
        failed = launch(pointers, grid, plan.threads, plan.floats * 4, int(self.backwards))
        if failed:
            raise KernelError(f"{plan}: {failed.decode()}")
        if not all([there.back() for there in fenced.values()]):
            raise KernelError(f"{plan}: a write beyond a tensor")
        self.started.append(plan.name)


@cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="kernels-on-cpu-")


@cache
def _folder() -> Path:
    """A place for what is built, with the header, which is read once for all kernels."""
    folder = Path(_temporary().name)
    shutil.copy(HEADER, folder)
    _build("-x", "c++-header", folder / HEADER.name)
    return folder


def _build(*what: Any) -> None:
    # Unique symbols would be those of the kernel that was loaded first, whose shared memory may be smaller.
    command = ["g++", "-O1", "-std=c++17", "-w", "-fPIC", "-fpermissive", "-fno-gnu-unique", *map(str, what)]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[:4000]


@cache
def _built(source: str, name: str, macros: tuple[tuple[str, int], ...]) -> Any:
    """The function that starts a kernel."""
    text = translated(importlib.resources.files("longhorizon").joinpath(source).read_text("utf-8"))
    defined = "".join(f"#define {macro} {value}\n" for macro, value in (*macros, (name.upper(), 1)))
    start = (
        'extern "C" const char *launch(void **given, const int *grid, int threads, int bytes, int backwards) '
        f"{{ return on_cpu::launch({name}, given, grid, threads, bytes, backwards); }}\n"
    )
    whole = f'#include "{HEADER.name}"\n{defined}{text}\n{start}'
    path = _folder() / f"{hashlib.sha256(whole.encode()).hexdigest()}.so"
    if not path.exists():  # one that is in use must not be written over
        path.with_suffix(".cpp").write_text(whole)
        _build(f"-I{_folder()}", "-shared", "-o", path, path.with_suffix(".cpp"))
    launch = ctypes.CDLL(str(path)).launch
    launch.restype = ctypes.c_char_p
    return launch


def translated(text: str) -> str:
    """Source that g++ takes."""
    text = re.sub(r"extern __shared__ (\w+) (\w+)\[\];", r"\1 *\2 = (\1 *)on_cpu::dynamic();", text)
    text = re.sub(r"#pragma unroll.*", "", text)
    return _INSTRUCTION.sub(_as_call, text)


def _as_call(found: re.Match[str]) -> str:
    """An inline instruction as a call: of its name, with its operands in their order, results once."""
    template = "".join(re.findall(r'"([^"]*)"', found[1]))
    if "cvta" in template:
        name = "cvta_to_shared_u64"
    else:
        name = template.split()[0].rstrip(";").replace(".", "_")
    return f"{name}({', '.join(_operands(found[2]))});"


def _operands(text: str) -> list[str]:
    made = []
    for operand in _OPERAND.finditer(text):
        depth, end = 1, operand.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        made.append(text[operand.end() : end - 1])
    return made
