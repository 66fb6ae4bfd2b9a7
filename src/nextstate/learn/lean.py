"""What a forward pass keeps for the way back, and what it computes again: matrix products are kept, the rest is not.

Autograd keeps every tensor that some step's gradient asks for. With an adapter on frozen weights, much of that is cheap
to make anew: what a norm gives, what the gate of an MLP lets through. So an adapted layer keeps how its input was made
instead of the input, and makes it again when its gradient is computed:

    residual --norm--> x --q, k, v--> attention --o--> + residual        kept: residual, q, k, v, attention's output
    residual --norm--> x --gate, up--> act(gate) * up --down--> +        kept: residual, gate, up

In bfloat16, products are multiplied in bfloat16; what is trained, its optimiser, the residual stream and the norms stay
in float32. Frozen weights that are multiplied are then held in bfloat16 only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

_GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
"""The parts of an MLP that computes down(act(gate) * up)."""


def make_lean(model: nn.Module, *, bfloat16: bool) -> None:
    """Change how a model with adapters is computed, in place; not what it computes, bfloat16 apart."""
    for module in model.modules():
        if type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
            module.register_forward_hook(_after_norm)
        elif isinstance(module, LoraLinear):
            if bfloat16:
                module.base_layer.to(torch.bfloat16)
            module.forward = partial(_adapted, module)
        elif all(hasattr(module, name) for name in _GATED):
            module.forward = partial(_gated_mlp, module)


class _Recipe:
    """How to make a tensor again. It is made once for all who have asked for it, and forgotten after the last."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make, self._uses = make, 0
        self._made: Tensor | None = None

    def promise(self) -> _Recipe:
        self._uses += 1
        return self

    def make(self) -> Tensor:
        made = self._made if self._made is not None else self._make()
        self._uses -= 1
        self._made = made if self._uses else None
        return made


def _with_recipe(tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
    if torch.is_grad_enabled():
        tensor.recipe = _Recipe(make)  # type: ignore[attr-defined]
    return tensor


def _after_norm(norm: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
    kept = args[0].detach()
    return _with_recipe(output, lambda: norm.forward(kept))


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    act = mlp.act_fn
    kept_gate, kept_up = gate.detach(), up.detach()
    product: Tensor = _Gated.apply(gate, up, act)  # type: ignore[no-untyped-call]
    down: Tensor = mlp.down_proj(_with_recipe(product, lambda: act(kept_gate).mul_(kept_up)))
    return down


class _Gated(torch.autograd.Function):
    """act(gate) * up, which keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            let_through = ctx.act(gate)
        (of_gate,) = torch.autograd.grad(let_through, gate, gradients[0] * up)
        return of_gate, gradients[0] * let_through.detach(), None


def _adapted(layer: Any, x: Tensor) -> Tensor:
    """A linear layer and its adapter, if that is on: what PEFT computes."""
    base = layer.base_layer
    recipe = getattr(x, "recipe", None)
    x = x.to(base.weight.dtype)
    if layer.disable_adapters:
        return F.linear(x, base.weight, base.bias)
    (name,) = layer.active_adapters
    a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
    y: Tensor = _Adapted.apply(x, base.weight, base.bias, a, b, layer.scaling[name], recipe)  # type: ignore[no-untyped-call]
    return y


class _Adapted(torch.autograd.Function):
    """y = x W^T + bias + s (x A^T) B^T with W and bias frozen, multiplied in W's dtype.

    With g the gradient of y and h = x A^T: of B it is s g^T h, of A s (g B)^T x, of x g W + s (g B) A.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float, recipe: _Recipe | None
    ) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        h = flat @ a.to(x.dtype).T
        y = F.linear(flat, w, bias).addmm_(h, b.to(x.dtype).T, alpha=scale)
        ctx.recipe = recipe.promise() if recipe is not None else None
        ctx.save_for_backward(None if recipe is not None else flat, w, a, b, h)
        ctx.scale = scale
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat, w, a, b, h = ctx.saved_tensors
        shape = gradients[0].shape
        if ctx.recipe is not None:
            with torch.no_grad():
                flat = ctx.recipe.make().to(w.dtype).reshape(len(h), -1)
        g = gradients[0].reshape(len(h), -1)
        of_h = g @ b.to(g.dtype)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (g @ w).addmm_(of_h, a.to(g.dtype), alpha=ctx.scale).view(*shape[:-1], -1)
        of_a = (of_h.T @ flat).to(a.dtype).mul_(ctx.scale)
        of_b = (g.T @ h).to(b.dtype).mul_(ctx.scale)
        return of_x, None, None, of_a, of_b, None, None
