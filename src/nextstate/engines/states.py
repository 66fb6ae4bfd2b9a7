"""Hidden states on the way through a model, for judges that read more than the next token."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn


@contextmanager
def recorded(model: nn.Module, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Within the block, what each forward pass puts out behind these layers: [N, H] over the rows of the batch.

    Args:
        layers: counted from 1; layer n is the n-th block of the decoder, and nothing is recorded of any other.
    """
    found: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for layer in layers:
            block = model.get_decoder().layers[layer - 1]  # type: ignore[operator]
            hooks.callback(block.register_forward_hook(partial(_keep, found, layer)).remove)
        yield found


def _keep(found: dict[int, Tensor], layer: int, _module: nn.Module, _inputs: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    found[layer] = hidden[0]
