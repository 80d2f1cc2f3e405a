"""The state of a training in torch, as a tree that a snapshot keeps: model, optimizer, random states.

    with snapshots.save(step) as out:
        out["training"] = state_of(model, optimizer)
    ...
    restore(saved["training"], model, optimizer)

Each rank keeps the parts that lie on it, and nothing is gathered: this works for plain modules, DDP and FSDP (a part of
a DTensor is its local tensor) and needs no communication. `restore` puts the parts back where they were, so the world
must have as many ranks as the one that saved; state that all ranks share (DDP) can be saved with `replicated=True`.

Only programs import this module: no other part of holdfast imports a framework.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_LOCAL = "__local__"  # Instead of a DTensor: a dict with its local tensor.


def state_of(model: torch.nn.Module | None = None, optimizer: Any = None, *, rng: bool = True) -> dict[str, Any]:
    """Tensors are not copied here; `save` does that at the end of its block."""
    state: dict[str, Any] = {}
    if model is not None:
        state["model"] = {name: _local(tensor) for name, tensor in _tensors(model)}
        state["extra"] = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    if optimizer is not None:
        state["optimizer"] = _localized(optimizer.state_dict())
    if rng:
        state["rng"] = rng_state()
    return state


def restore(
    state: Mapping[str, Any], model: torch.nn.Module | None = None, optimizer: Any = None, *, rng: bool = True
) -> None:
    """Raises ValueError if the state is of another model."""
    if model is not None:
        _restore_model(state["model"], state["extra"], model)
    if optimizer is not None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        saved = state["optimizer"]
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        of_each = {number: _distributed(_owned(saved["state"][number]), param)
                   for number, param in zip(numbers, params, strict=True) if number in saved["state"]}  # fmt: skip
        optimizer.load_state_dict({**saved, "state": {**saved["state"], **of_each}})
    if rng:
        set_rng_state(state["rng"])


def _restore_model(saved: Mapping[str, Any], extra: Mapping[str, Any], model: torch.nn.Module) -> None:
    live = dict(_tensors(model))
    if live.keys() != saved.keys():
        odd = sorted(live.keys() ^ saved.keys())
        raise ValueError(f"the snapshot is of another model: {len(odd)} names differ, such as {odd[0]!r}")
    with torch.no_grad():
        for name, tensor in live.items():
            target = _local(tensor)
            if target.shape != saved[name].shape:
                raise ValueError(f"{name} has the shape {tuple(target.shape)}, not {tuple(saved[name].shape)}")
            target.copy_(saved[name])
    for name, module in _with_extra_state(model):
        module.set_extra_state(_owned(extra[name]))


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, tensor in model.named_buffers():
        yield f"buffer {name}", tensor


def _with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield name, module


def _local(tensor: Any) -> torch.Tensor:
    """Its own memory: subclasses such as FSDP's flat parameters are looked through."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.Tensor.detach(local).as_subclass(torch.Tensor)


def _localized(value: Any) -> Any:
    if hasattr(value, "to_local"):
        return {_LOCAL: _local(value)}
    if isinstance(value, dict):
        return {key: _localized(each) for key, each in value.items()}
    return [_localized(each) for each in value] if isinstance(value, list) else value


def _owned(value: Any) -> Any:
    """With tensors in memory of their own: an optimizer keeps those that it is given, and what `load(copy=False)` has
    returned changes with the next saves. Torch cannot resize memory that is not its own."""
    if isinstance(value, torch.Tensor):
        return value if value.untyped_storage().resizable() else value.clone()
    if isinstance(value, dict):
        return {key: _owned(each) for key, each in value.items()}
    return type(value)(map(_owned, value)) if type(value) in (list, tuple) else value


def _distributed(value: Any, like: Any) -> Any:
    """The state of one parameter, where its local tensors are parts of tensors like that parameter."""
    if isinstance(value, dict) and value.keys() == {_LOCAL}:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            value[_LOCAL].to(like.device), like.device_mesh, like.placements, run_check=False, shape=like.shape,
            stride=like.stride(),
        )  # fmt: skip
    return {key: _distributed(each, like) for key, each in value.items()} if isinstance(value, dict) else value


def rng_state() -> dict[str, Any]:
    """Of torch, its accelerators that are in use, Python, and numpy if it is loaded."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
