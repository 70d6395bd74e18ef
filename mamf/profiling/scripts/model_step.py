"""Training steps of a model, for ``mamf profile``.

    python model_step.py BACKEND DEVICE SIZE LAYERS BATCH CONTEXT ATTENTION STEPS [DTYPE]

An ordinary training script: each step is forward, backward and AdamW, and ends when the optimizer has stepped.
"""

from __future__ import annotations

import sys

from mamf.errors import MamfError
from mamf.operations.model.shapes import SIZES, ModelShape
from mamf.plugins.discovery import kernel_of, open_backend, operation


def main(
    backend_name: str,
    device: int,
    size: str,
    layers: int,
    shape: ModelShape,
    attention: str,
    steps: int,
    dtype: str | None = None,
) -> None:
    backend, of = open_backend(backend_name, device), operation("model")
    problem = of.problem_for(backend, {**SIZES[size], "layers": layers, "phase": "step", "dtype": dtype})
    kernel = kernel_of(of, f"torch[{attention}]")
    with kernel.settings(backend, problem):
        prepared = kernel.prepare(backend, problem, shape, backend.operand_pool(problem.data, problem.seed))
        for number in range(steps):
            prepared.launches[number % len(prepared.launches)]()
            backend.submit()
        backend.synchronize()


if __name__ == "__main__":
    name, device, size, layers, batch, context, attention, steps, *dtype = sys.argv[1:]
    try:
        main(name, int(device), size, int(layers), ModelShape(int(batch), int(context)), attention, int(steps), *dtype)
    except MamfError as error:
        sys.exit(f"mamf: {error}")
